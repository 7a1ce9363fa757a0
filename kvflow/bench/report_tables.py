"""The tables of a serving benchmark, for a terminal or a file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvflow.bench.peers import MEANINGS
from kvflow.bench.report_data import Point, Result, SetUp
from kvflow.bench.report_figures import Ratio, Row

_WIDTH = 170
_PROBLEMS_SHOWN_MAX = 10

_FIGURE_COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("TTFT ms\np50/p90/p99", ("ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99"), lambda v: f"{v:.0f}"),
    ("TPOT ms\np50/p99", ("tpot_ms_p50", "tpot_ms_p99"), lambda v: f"{v:.1f}"),
    ("hand-over\nms p50", ("handover_ms_p50",), lambda v: f"{v:.0f}"),
    (
        "CPU s/request\nproducer/consumer",
        ("producer_cpu_s", "consumer_cpu_s"),
        lambda v: f"{v:.2f}",
    ),
    ("MB per\ntransfer", ("kv_bytes",), lambda v: f"{v / 1e6:.1f}"),
    ("descriptors\nper transfer", ("kv_descriptors",), lambda v: f"{v:,.0f}"),
    ("others'\ncores", ("others_cores",), lambda v: f"{v:.1f}"),
)

_RATIO_COLUMNS: Mapping[str, str] = {
    "TTFT\np50": "ttft_ms_p50",
    "TTFT\np90": "ttft_ms_p90",
    "TPOT\np50": "tpot_ms_p50",
    "hand-over\np50": "handover_ms_p50",
    "CPU, both\nengines": "cpu_s",
}


def print_all(
    console: Console, result: Result, rows: Sequence[Row], ratios: Sequence[Ratio]
) -> None:
    """How the engines were set up, the figures, the ratios, and everything that went wrong."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)  # a file does not wrap
    for line in set_up_lines(result.set_ups):
        console.print(line, markup=False, soft_wrap=True)
    for sentence in result.left_out:
        console.print(sentence, markup=False, soft_wrap=True)
    if rows:
        console.print(figures_table(rows))
    if ratios:
        console.print("kvflow over upstream, below 1 is less; medians over the repeats")
        console.print(ratios_table(ratios))
    for line in problem_lines(result):
        console.print(Text(line, style="red"), soft_wrap=True)
    console.print(last_line(result), markup=False)


def figures_table(rows: Sequence[Row]) -> Table:
    """One row per connector and dispatch order; a section per length and rate."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("prompt\ntokens", "requests\nper s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("connector", "dispatch"):
        table.add_column(heading, no_wrap=True)
    for heading, _, _ in _FIGURE_COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("right\ntokens", justify="right", no_wrap=True)
    for _, section in groupby(rows, key=lambda row: (row.length, row.rate)):
        for row in section:
            table.add_row(
                f"{row.length:,}",
                f"{row.rate:g}",
                row.name,
                row.dispatch,
                *(_figures(row.figures, names, show) for _, names, show in _FIGURE_COLUMNS),
                _right(row),
            )
        table.add_section()
    return table


def ratios_table(ratios: Sequence[Ratio]) -> Table:
    """One row per pair that is compared."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("prompt\ntokens", "requests\nper s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("connector", "over"):
        table.add_column(heading, no_wrap=True)
    for heading in _RATIO_COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for _, section in groupby(ratios, key=lambda ratio: (ratio.length, ratio.rate)):
        for ratio in section:
            table.add_row(
                f"{ratio.length:,}",
                f"{ratio.rate:g}",
                f"{ratio.name}, {ratio.dispatch}",
                f"{ratio.against}, {ratio.against_dispatch}",
                *(
                    _figures(ratio.figures, (name,), lambda v: f"{v:.2f}")
                    for name in _RATIO_COLUMNS.values()
                ),
            )
        table.add_section()
    return table


def set_up_lines(set_ups: Iterable[SetUp]) -> list[str]:
    """How each connector's engines were started; once, if the rounds do not differ."""
    lines: list[str] = []
    for set_up in set_ups:
        config = {
            key: value
            for key, value in set_up.transfer_config.items()
            if key in ("kv_connector", "kv_connector_extra_config") and value
        }
        shown = " ".join(f"{key}={value}" for key, value in config.items())
        in_force = [s for s in set_up.asked if all(s in found for found in set_up.steps.values())]
        changed = "; ".join(MEANINGS[step] for step in in_force) or "nothing changed at start"
        for step in (step for step in set_up.asked if step not in in_force):
            changed += f"; ASKED FOR, AND NOT IN FORCE: {step}"
        if set_up.arguments:
            changed += "; " + " ".join(set_up.arguments)
        lines.append(f"{set_up.name}: {shown}; {changed}")
    return list(dict.fromkeys(lines))


def problem_lines(result: Result) -> list[str]:
    """Every problem of the run, and the first wrong requests of each point."""
    lines = list(result.problems)
    for point in result.points:
        wrong = [request for request in point.requests if not request.is_right]
        lines += [
            f"{_where(point)}, request {request.number}: {request.error or request.mismatch}"
            for request in wrong[:_PROBLEMS_SHOWN_MAX]
        ]
        if len(wrong) > _PROBLEMS_SHOWN_MAX:
            lines.append(f"{_where(point)}: {len(wrong) - _PROBLEMS_SHOWN_MAX} more such requests")
    return lines


def last_line(result: Result) -> str:
    """How many requests were right, and in what time all was measured."""
    requests = [request for point in result.points for request in point.requests]
    right = sum(request.is_right for request in requests)
    failed = sum(request.error is not None for request in requests)
    return (
        f"bench serve: {right}/{len(requests)} requests token-identical, {failed} failed, "
        f"{len(requests) - right - failed} with other tokens; {result.wall_s / 60:.1f} minutes"
    )


def _where(point: Point) -> str:
    return f"{point.label}, {point.length} tokens at {point.rate:g}/s, round {point.round}"


def _figures(
    figures: Mapping[str, float | None], names: Sequence[str], show: Callable[[float], str]
) -> str:
    values = [figures[name] for name in names]
    return " / ".join("-" if value is None else show(value) for value in values)


def _right(row: Row) -> Text:
    style = "green" if row.right == row.total else "red"
    return Text(f"{row.right}/{row.total}", style=style)
