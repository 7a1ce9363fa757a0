"""A picture of a serving benchmark: TTFT and TPOT against the rate, a row for each length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvflow.bench.report_figures import Row

_COLUMNS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
_DPI = 120


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Writes the picture: medians as lines, the 90th percentiles as dots above them."""
    # Imported here: matplotlib is an extra. Without pyplot no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = sorted({row.length for row in rows})
    figure = Figure(figsize=(11, 1.2 + 3.2 * len(lengths)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lengths), len(_COLUMNS), squeeze=False, sharex=True)
    labels = list(dict.fromkeys(_label(row) for row in rows))
    for across, length in zip(axes, lengths, strict=True):
        for panel, (heading, figure_name) in zip(across, _COLUMNS, strict=True):
            for number, label in enumerate(labels):
                there = [row for row in rows if row.length == length and _label(row) == label]
                _line(panel, there, figure_name, label, f"C{number}")
            panel.set_title(f"{heading}, {length:,} prompt tokens", fontsize=10)
            panel.set_ylabel("ms")
            panel.set_ylim(bottom=0)
            panel.grid(visible=True, alpha=0.3)
    for panel in axes[-1]:
        panel.set_xlabel("requests per second")
        panel.set_xticks(sorted({row.rate for row in rows}))
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, format="png")


def _line(panel: Any, rows: Sequence[Row], figure_name: str, label: str, color: str) -> None:
    known = sorted(
        (row.rate, p50, row.figures[f"{figure_name}_p90"])
        for row in rows
        if (p50 := row.figures[f"{figure_name}_p50"]) is not None
    )
    rates = [rate for rate, _, _ in known]
    panel.plot(rates, [p50 for _, p50, _ in known], "-o", label=label, color=color, markersize=4)
    panel.plot(rates, [p90 for _, _, p90 in known], ".", color=color, alpha=0.5)


def _label(row: Row) -> str:
    return f"{row.name}, {row.dispatch}"
