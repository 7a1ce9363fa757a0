"""Figures, ratios, tables, JSON and the picture, from a result that was made up."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvflow.bench import report_data, report_figures, report_png, report_tables

from .results import POINTS, point, request, result


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([7.0], 99, 7.0),
        ([4.0, 1.0, 3.0, 2.0], 0, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        ([float(n) for n in range(101)], 90, 90.0),
        ([10.0, 20.0], 99, 19.9),
    ],
)
def test_percentiles_lie_between_the_nearest_ranks(
    values: list[float], percent: float, expected: float | None
) -> None:
    assert report_figures.percentile(values, percent) == pytest.approx(expected)


def test_a_row_is_the_median_of_its_rounds_figures() -> None:
    rows = {(row.connector, row.dispatch): row for row in report_figures.summary(POINTS)}
    assert len(rows) == 4
    row = rows["kvflow-push", "concurrent"]
    assert (row.rounds, row.right, row.total) == (2, 8, 8)
    assert row.figures["ttft_ms_p50"] == pytest.approx((30 + 100) / 2)
    assert row.figures["ttft_ms_p90"] == pytest.approx((46 + 100) / 2)
    assert row.figures["ttft_ms_mean"] == pytest.approx((30 + 100) / 2)
    assert row.figures["tpot_ms_p50"] == pytest.approx(6.5)
    assert row.figures["handover_ms_p50"] == pytest.approx(32.5)
    assert row.figures["producer_cpu_s"] == pytest.approx(0.1)
    assert row.figures["cpu_s"] == pytest.approx(0.2)
    assert row.figures["others_cores"] == pytest.approx(0.5)
    assert row.figures["kv_descriptors"] == 64


def test_rows_are_ordered_by_length_and_then_by_rate() -> None:
    points = [
        point("kvflow-push", "concurrent", [1], rate=rate, length=length)
        for rate, length in ((3.0, 2048), (1.0, 2048), (10.0, 512), (2.0, 512))
    ]
    rows = report_figures.summary(points)
    assert [(row.length, row.rate) for row in rows] == [
        (512, 2.0),
        (512, 10.0),
        (2048, 1.0),
        (2048, 3.0),
    ]


def test_ratios_are_taken_within_rounds_against_pull_and_the_better_push() -> None:
    pull, push = report_figures.ratios(POINTS)
    assert (pull.against, pull.rounds) == ("upstream pull", 2)
    assert pull.figures["ttft_ms_p50"] == pytest.approx((30 / 120 + 100 / 200) / 2)
    # Sequential: its medians 40 and 50 are below 60 and 500.
    assert (push.against, push.against_dispatch) == ("upstream push", "sequential")
    assert push.figures["ttft_ms_p50"] == pytest.approx((30 / 40 + 100 / 50) / 2)
    assert push.figures["cpu_s"] == pytest.approx(1.0)


def test_a_round_that_only_one_side_has_is_in_no_ratio() -> None:
    points = [each for each in POINTS if each.round == 1 or each.origin == "kvflow"]
    pull, _ = report_figures.ratios(points)
    assert pull.rounds == 1
    assert pull.figures["ttft_ms_p50"] == pytest.approx(30 / 120)


def test_there_is_no_ratio_to_a_time_that_is_unknown_or_not_above_zero() -> None:
    early = [request(1, 10.0, handover_ms=-2.0)]
    points = [
        point("kvflow-push", "concurrent", [], requests=early),
        point("upstream-pull", "sequential", [], requests=[request(1, None, error="HTTP 500")]),
    ]
    (ratio,) = report_figures.ratios(points)
    assert ratio.figures["ttft_ms_p50"] is None
    assert ratio.figures["handover_ms_p50"] is None
    assert ratio.figures["cpu_s"] == pytest.approx(1.0)


def test_failed_and_wrong_requests_are_counted_and_named() -> None:
    requests = [
        request(1, 10.0),
        request(2, 30.0, mismatch="token 3 of 16 is 7, and 8 in the monolithic run"),
        request(3, 900.0, error="decode leg: HTTP 500"),
    ]
    bad = result([point("kvflow-push", "concurrent", [], requests=requests)])
    (row,) = report_figures.summary(bad.points)
    assert (row.right, row.mismatched, row.failed, row.total) == (1, 1, 1, 3)
    assert row.figures["ttft_ms_p50"] == pytest.approx(20)  # a failed request has no time
    assert not bad.is_good
    assert report_tables.problem_lines(bad) == [
        "kvflow push, concurrent, 512 tokens at 2/s, round 1, request 2: "
        "token 3 of 16 is 7, and 8 in the monolithic run",
        "kvflow push, concurrent, 512 tokens at 2/s, round 1, request 3: decode leg: HTTP 500",
    ]
    assert report_tables.last_line(bad) == (
        "bench serve: 1/3 requests token-identical, 1 failed, 1 with other tokens; 1.5 minutes"
    )


def test_a_run_is_good_only_if_all_was_measured_and_right() -> None:
    assert result().is_good
    assert not result(problems=["upstream pull, round 2: did not start"]).is_good
    assert not result(points=[]).is_good


def printed(made: report_data.Result) -> str:
    out = io.StringIO()
    rows, ratios = report_figures.summary(made.points), report_figures.ratios(made.points)
    report_tables.print_all(Console(file=out, highlight=False), made, rows, ratios)
    return out.getvalue()


def test_the_tables_show_figures_ratios_set_ups_and_what_was_left_out() -> None:
    text = printed(result(problems=["upstream pull, round 2: an engine died"]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(
        line.startswith("512 2 kvflow push concurrent 65 / 73 / 75 6.5 / 7.5 32 0.10 / 0.10 8.4 64")
        and line.endswith("8/8")
        for line in lines
    ), text
    assert "512 2 kvflow push, concurrent upstream pull, sequential 0.38 0.44 0.38 0.38 1.00" in (
        lines
    ), text
    assert lines[0] == (
        "upstream pull: kv_connector=NixlConnector; the worker's main thread is not pinned to the "
        "last core; ASKED FOR, AND NOT IN FORCE: no-progress-thread; --max-num-batched-tokens 512"
    )
    assert "kvflow pull: this version has no setting `mode`; left out" in lines
    assert "upstream pull, round 2: an engine died" in lines


def test_a_figure_that_nobody_knows_is_a_dash() -> None:
    failed = [request(1, None, error="no answer")]
    lines = printed(result([point("kvflow-push", "concurrent", [], requests=failed)]))
    assert "- / - / -" in lines


def test_the_json_has_everything_and_is_written_whole(tmp_path: Path) -> None:
    made = result()
    rows = [row.json() for row in report_figures.summary(made.points)]
    ratios = [ratio.json() for ratio in report_figures.ratios(made.points)]
    path = tmp_path / "new" / "result.json"
    report_data.write(path, report_data.as_json(made, rows, ratios))
    read = json.loads(path.read_text(encoding="utf-8"))
    assert list(path.parent.iterdir()) == [path]
    assert (read["version"], read["kind"], read["ok"]) == (1, "serve", True)
    assert read["points"][0]["requests"][4]["ttft_ms"] == 50
    assert read["set_ups"][0]["steps"]["consumer"] == ["no-pinning"]
    assert read["summary"][0]["figures"]["ttft_ms_p50"] == pytest.approx(65)
    assert read["ratios"][0]["figures"]["ttft_ms_p50"] == pytest.approx(0.375)


def test_the_picture_has_a_row_for_each_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heights = []
    for lengths in ((512,), (512, 2048)):
        points = [
            point("kvflow-push", "concurrent", [10, 20], rate=rate, length=length)
            for rate in (1.0, 2.0)
            for length in lengths
        ]
        path = tmp_path / f"{len(lengths)}.png"
        report_png.draw(report_figures.summary(points), path, title="made up")
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        heights.append(int.from_bytes(data[20:24], "big"))
    assert heights[1] > heights[0]
