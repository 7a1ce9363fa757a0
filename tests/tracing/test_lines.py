"""Reading traces: both versions, unknown keys, torn and wrong lines, and how fast."""

import json
import time
from pathlib import Path

import pytest

from kvflow.tracing.lines import UnreadableTraceError, read_all

GOOD: dict[str, object] = {
    "v": 1,
    "t": 1.5,
    "engine": "C",
    "rank": "pp0.tp0",
    "machine": "consumer",
    "id": "t",
    "attempt": 16,
    "request": None,
    "trigger": "blocks_allocated",
    "from": "new",
    "to": "allocated",
}


def written(directory: Path, *lines: str, end: str = "\n") -> Path:
    path = directory / "trace.ndjson"
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def line(**changes: object) -> str:
    """A change to None leaves the key out."""
    kept = {k: v for k, v in GOOD.items() if k not in changes}
    return json.dumps(kept | {k: v for k, v in changes.items() if v is not None})


def refusal(path: Path) -> str:
    with pytest.raises(UnreadableTraceError) as caught:
        read_all([path])
    return str(caught.value)


def test_lines_of_both_versions_are_read_in_their_order(tmp_path: Path) -> None:
    order = line(v=2, machine="write", trigger="done", to="done", began=1.25, ms={"plan": 0.5})
    [file] = read_all([written(tmp_path, line(), order)]).files
    assert [each.version for each in file.lines] == [1, 2]
    assert file.lines[0].source == "new"
    assert file.lines[0].request is None
    assert (file.lines[1].began, file.lines[1].ms) == (1.25, {"plan": 0.5})
    assert not file.torn
    assert not file.truncated


def test_keys_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    [read] = read_all([written(tmp_path, line(colour="red", nested={"a": [1, {}]}))])
    assert read == read_all([written(tmp_path, line())]).files[0].lines[0]


def test_empty_lines_and_an_empty_file_are_nothing(tmp_path: Path) -> None:
    assert len(list(read_all([written(tmp_path, "", line(), "  ", "")]))) == 1
    assert list(read_all([written(tmp_path, end="")])) == []


def test_a_file_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    path = written(tmp_path, line())
    assert len(list(read_all([path, path]))) == 1


@pytest.mark.parametrize("whole", [line(), line(detail="a } in the text")])
def test_a_last_line_that_is_not_finished_is_left_out_and_told(tmp_path: Path, whole: str) -> None:
    for cut in range(1, len(whole)):
        traces = read_all([written(tmp_path, line(), whole[:cut], end="")])
        assert len(list(traces)) == 1
        assert traces.files[0].torn
        assert "is not finished" in traces.notes()[0]


def test_a_whole_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    traces = read_all([written(tmp_path, line(), line(), end="")])
    assert len(list(traces)) == 2
    assert traces.notes() == []


def test_a_broken_line_before_the_last_one_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, line(), line()[:-5], line())
    assert refusal(path).startswith(f"{path}:2: not JSON: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ("nonsense", "not JSON: "),
        ("{}", "the key 'v' is missing"),
        ('{"v": 3, "of": "another kind"}', "schema version 3; this kvflow reads versions 1 and 2"),
        (line(v=3), "schema version 3"),
        (line(v="1"), "schema version '1'"),
        (line(v=True), "schema version True"),
        (line(t=None), "`t`"),
        (line(t="now"), "$.t"),
        (line(t=float("nan")), "not JSON: "),
        (line(t=1e300), "$.t"),
        (line(began=-1e300), "$.began"),
        (line(engine=7), "$.engine"),
        (line(machine=None), "`machine`"),
        (line(machine=["trace"]), "$.machine"),
        (line(rank=None), "`rank`"),
        (line(attempt="one"), "$.attempt"),
        (line(request=None), "`request`"),
        (line(to=None), "`to`"),
        (line(**{"from": ""}), "lacks from or to"),
        (line(machine="router"), "machine 'router' is not one of producer, consumer, peer, "),
        (line(ms={"plan": "long"}), "$.ms"),
        (line(ms={"plan": 1e300}), "$.ms"),
        ('{"v": 1, "t": 1e999}', "out of range"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "not JSON: "),
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, line(), text)
    refused = refusal(path)
    assert refused.startswith(f"{path}:2: ")
    assert said in refused


def test_what_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, line())
    path.write_bytes(
        path.read_bytes() + line(colour="red").encode().replace(b"red", b"\xff") + b"\n"
    )
    assert refusal(path).startswith(f"{path}:2: 'utf-8' codec can't decode byte 0xff")


def test_half_of_a_surrogate_pair_in_a_text_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, line().replace("pp0.tp0", "\\ud800"))
    assert refusal(path).startswith(f"{path}:1: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert refusal(none) == f"{none}: cannot be read: No such file or directory"
    assert "cannot be read" in refusal(tmp_path)


def test_a_trace_that_a_size_bound_stopped_says_so_and_has_no_line_more(tmp_path: Path) -> None:
    last = line(v=2, machine="trace", trigger="truncated")
    traces = read_all([written(tmp_path, line(), last)])
    assert len(list(traces)) == 1
    assert traces.files[0].truncated
    assert "size bound" in traces.notes()[0]


def test_what_a_line_is_about_is_its_transfer_not_the_part_of_one(tmp_path: Path) -> None:
    lines = (line(machine="producer", id="abc 2"), "", line())
    read, consumer = read_all([path := written(tmp_path, *lines)])
    assert read.transfer == "abc"
    assert read.record == ("C", "pp0.tp0", "producer", "abc 2")
    assert consumer.record == ("C", "pp0.tp0", "consumer", "")
    assert (read.place, consumer.place) == (f"{path}:1", f"{path}:3")


def test_a_hundred_thousand_lines_take_a_few_seconds(tmp_path: Path) -> None:
    path = written(tmp_path, *[line(id=f"t{number}") for number in range(100_000)])
    began = time.perf_counter()
    assert len(list(read_all([path]))) == 100_000
    assert time.perf_counter() - began < 10
