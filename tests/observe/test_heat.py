"""Heat: what traces say of how often edges are taken, and of the time in states."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.core import TABLES
from kvflow.diagrams.graph import edges_of
from kvflow.diagrams.heat import heat_of
from kvflow.diagrams.svg import as_svg, duration
from kvflow.tracing.lines import UnreadableTraceError

SVG = "{http://www.w3.org/2000/svg}"
LINE = {
    "v": 1, "t": 100.0, "engine": "P0", "rank": "pp0.tp0", "machine": "producer", "id": "t0",
    "attempt": 0, "request": "p0", "trigger": "prefill_started", "from": "unknown",
    "to": "allocated",
}  # fmt: skip
FINISHED = {"trigger": "prefill_finished", "from": "allocated", "to": "prefilled"}
LOADED = {
    "machine": "consumer", "trigger": "blocks_allocated", "from": "new", "to": "allocated",
}  # fmt: skip


def states(*options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["states", *options])
    return result.exit_code, result.stdout, result.stderr


def written(path: Path, *changes: dict[str, object]) -> Path:
    """A trace of lines that differ from `LINE` so."""
    path.write_text("".join(json.dumps(LINE | change) + "\n" for change in changes))
    return path


def drawn(text: str) -> dict[tuple[str, str], ET.Element]:
    """Every edge's group."""
    return {
        (group.get("data-from") or "", group.get("data-to") or ""): group
        for group in ET.fromstring(text).iter(f"{SVG}g")
        if group.get("class") == "edge"
    }


def look(group: ET.Element) -> tuple[str, float]:
    """Colour and width of an edge."""
    path = group.find(f"{SVG}path")
    assert path is not None
    return path.get("stroke") or "", float(path.get("stroke-width") or 0)


def test_counts_are_those_of_the_traces(tmp_path: Path) -> None:
    one = written(
        tmp_path / "one.ndjson", {}, {"id": "t1"}, {"id": "t2"}, {**FINISHED, "t": 100.25}
    )
    unseen = {**FINISHED, "id": "t9", "from": "unknown"}
    other = written(tmp_path / "other.ndjson", {}, FINISHED, unseen)
    code, text, _ = states(
        "--format", "svg", "--machine", "producer", "--heat", str(one), str(other)
    )
    assert code == 0
    counts = {pair: int(group.get("data-count") or -1) for pair, group in drawn(text).items()}
    assert {pair: count for pair, count in counts.items() if count} == {
        ("unknown", "allocated"): 4,
        ("allocated", "prefilled"): 2,
        ("unknown", "prefilled"): 1,
    }
    assert len(counts) == len(edges_of(TABLES[0]))
    assert ": 4x</text>" in text
    assert "prefill_started&#160;4x" in text
    assert "7 changes of state in 2 traces; 3 of " in text


def test_a_trace_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.ndjson", {})
    (_, twice, _) = states("--format", "svg", "--heat", str(trace), "--heat", str(trace))
    assert twice == states("--format", "svg", "--heat", str(trace))[1]
    assert "1 change of state in 1 trace; 1 of " in twice


def test_what_is_taken_more_is_wider_and_what_is_never_taken_is_grey(tmp_path: Path) -> None:
    starts = [{"id": f"t{number}"} for number in range(100)]
    ends = [{"id": f"t{number}", **FINISHED} for number in range(9)]
    heat = heat_of([written(tmp_path / "trace.ndjson", *starts, *ends)])
    edges = drawn(as_svg(TABLES[:1], heat))
    (hot, wide), (warm, narrow) = (
        look(edges["unknown", "allocated"]),
        look(edges["allocated", "prefilled"]),
    )
    assert wide > narrow > 1.0
    assert hot != warm
    cold = {look(group) for group in edges.values() if group.get("data-count") == "0"}
    assert cold == {("#c3cad3", 1.0)}
    # By the logarithm: 9 of 100 are half of the way, not a tenth.
    assert (narrow - 1.5) / (wide - 1.5) == pytest.approx(0.5, abs=0.02)


def test_the_time_in_a_state_is_what_lies_between_two_lines_of_a_record(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "trace.ndjson",
        {"id": "a", "t": 100.0},
        {"id": "b", "t": 100.5},
        {"id": "a", "t": 101.0, "rank": "pp0.tp1"},
        {"id": "a", "t": 102.0, **FINISHED},
        {"id": "b", "t": 104.5, **FINISHED},
        {"id": "a", "t": 110.0, "rank": "pp0.tp1", **FINISHED},
    )
    heat = heat_of([trace])["producer"]
    assert heat.median_s == {"allocated": 4.0}  # Of 2, 4 and 9 seconds.
    assert "median time in it: 4 s" in as_svg(TABLES[:1], heat_of([trace]))


def test_a_consumer_s_record_is_a_request(tmp_path: Path) -> None:
    met = {**LOADED, "trigger": "peer_met", "from": "allocated", "to": "registering"}
    trace = written(
        tmp_path / "trace.ndjson",
        {**LOADED, "request": "a", "t": 100.0},
        {**LOADED, "request": "b", "t": 100.5},
        {**met, "request": "a", "t": 103.0},
    )
    assert heat_of([trace])["consumer"].median_s == {"allocated": 3.0}


@pytest.mark.parametrize("machine", ["request", "write", "read", "trace"])
def test_lines_that_tell_of_no_table_are_skipped(tmp_path: Path, machine: str) -> None:
    told = {"v": 2, "machine": machine, "from": ""}
    heat = heat_of([written(tmp_path / "trace.ndjson", {"v": 2}, told)])
    assert sum(sum(each.taken.values()) for each in heat.values()) == 1


def test_a_row_that_stays_in_its_state_is_no_edge(tmp_path: Path) -> None:
    stays = {"trigger": "write_done", "from": "transferring", "to": "transferring"}
    assert heat_of([written(tmp_path / "trace.ndjson", stays)])["producer"].taken == {}


def test_a_last_line_that_is_not_finished_is_left_out(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.ndjson", {})
    trace.write_text(trace.read_text() + '{"v":1,"eng')
    assert heat_of([trace])["producer"].taken == {("unknown", "allocated"): 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"to": "kept"}, "no row of the producer leads from unknown to kept on prefill_started"),
        ({"from": "nowhere"}, "no row of the producer leads from nowhere to allocated"),
        ({"to": "unknown"}, "no row of the producer leads from unknown to unknown"),
        ({"trigger": "closing"}, "leads from unknown to allocated on closing"),
        ({"machine": "router"}, "machine 'router' is not one of producer, consumer, peer"),
        ({"v": 3}, "schema version 3; this kvflow reads versions 1 and 2"),
        ({"t": "noon"}, "Expected `float`, got `str` - at `$.t`"),
    ],
)
def test_a_line_that_cannot_be_is_named(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    trace = written(tmp_path / "trace.ndjson", {}, change)
    code, text, error = states("--format", "svg", "--heat", str(trace))
    assert (code, text) == (2, "")
    assert f"{trace}:2" in error
    assert said in error
    assert error.count("\n") == 1
    with pytest.raises(UnreadableTraceError):
        heat_of([trace])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\x89PNG\xff\n", ":1: 'utf-8' codec can't decode"),
        (b"# The state machines\n", ":1: not JSON: "),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_a_sentence(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    code, text, error = states("--format", "svg", "--heat", str(path))
    assert (code, text) == (2, "")
    assert f"{path}" in error
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--heat", "a.ndjson"), "--heat is for --format svg"),
        (("--format", "svg", "a.ndjson"), "a.ndjson: traces are for --heat"),
        (("--write", "specs", "--format", "svg", "--heat", "a.ndjson"), "without --write"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: tuple[str, ...], said: str) -> None:
    code, text, error = states(*options)
    assert (code, text) == (2, "")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 us"),
        (0.000_25, "250 us"),
        (0.012_345, "12.3 ms"),
        (0.000_999_8, "1 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (1234.0, "1,234 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, said: str) -> None:
    assert duration(seconds) == said
