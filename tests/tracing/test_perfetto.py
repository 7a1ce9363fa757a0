"""Chrome trace events against the format, checked key by key, and against the traces."""

import json
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.testing.operations import PHASE, Operation, Setting, next_operation
from kvflow.testing.scenes import acquainted, both_legs
from kvflow.testing.simulate import Run
from kvflow.testing.traces import Tape, write_world
from kvflow.tracing.figures import analyse
from kvflow.tracing.perfetto import as_chrome_trace

Events = list[dict[str, Any]]
KEYS = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "pid", "ts", "args"},
}
OPTIONAL = {"M": {"tid"}, "X": {"args"}, "s": set[str](), "f": set[str](), "C": set[str]()}


def exported(paths: list[Path]) -> Events:
    document = json.loads(as_chrome_trace(analyse(paths)))
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: Events = document["traceEvents"]
    check(events)
    return events


def check(events: Events) -> None:
    """What the format asks for, and what viewers make of it silently if it is not so."""
    for event in events:
        phase = event["ph"]
        present = set(event) - {"ph"}
        assert KEYS[phase] <= present <= KEYS[phase] | OPTIONAL[phase], event
        for key in ("ts", "dur"):
            if key in event:
                assert type(event[key]) is int, event
                assert event[key] >= 0, event
        for key in ("pid", "tid", "id"):
            assert type(event.get(key, 1)) is int, event
        assert isinstance(event["name"], str)
        assert event["name"]
    named_processes(events)
    slices_nest(events)
    arrows_bind(events)
    for event in (e for e in events if e["ph"] == "C"):
        assert all(type(value) is int and value >= 0 for value in event["args"].values())


def named_processes(events: Events) -> None:
    """Each process and thread that is used has one name."""
    named = [(e["pid"], e.get("tid", 0)) for e in events if e["name"].endswith("s_name")]
    threads = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert len(named) == len(set(named))
    assert len(threads) == len(set(threads))
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"}
    assert used <= set(threads)
    assert {e["pid"] for e in events} <= {pid for pid, _ in named}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(names) == len(set(names))


def slices_nest(events: Events) -> None:
    """Two slices of a thread are beside or inside each other."""
    for spans in by_thread(events).values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def by_thread(events: Events) -> dict[tuple[int, int], list[tuple[int, int]]]:
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return spans


def arrows_bind(events: Events) -> None:
    """Each arrow has one start and one end, in this order, each inside a slice of its thread."""
    spans = by_thread(events)
    arrows: dict[int, Events] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
            where = spans[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in where), event
    for pair in arrows.values():
        start, end = pair
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])


def of(events: Events, phase: str, name: str) -> Events:
    return [event for event in events if (event["ph"], event["name"]) == (phase, name)]


def threads(events: Events) -> dict[str, tuple[int, int]]:
    named = (event for event in events if event["name"] == "thread_name")
    return {event["args"]["name"]: (event["pid"], event["tid"]) for event in named}


@pytest.fixture
def one(tmp_path: Path) -> Events:
    tape = Tape(ahead_s={"P": 3.0})
    tape.vllm(0, "consumer", "arrived", tokens=100)
    tape.prefill(2, "prefill_started", "unknown", "allocated")
    tape.load(2, "blocks_allocated", "new", "allocated")
    tape.load(2, "peer_met", "allocated", "registering")
    tape.prefill(3, "registered", "allocated", "registered")
    tape.load(4, "accepted", "registering", "registered")
    tape.prefill(10, "prefill_advanced", "registered", "streaming")
    tape.prefill(14, "prefill_finished", "streaming", "transferring")
    tape.order(10, 15, "write", ms={"plan": 0.5, "post": 1})
    tape.order(14.5, 18, "write")
    tape.prefill(18, "write_done", "transferring", "sent", bytes=4096)
    tape.load(19, "done", "registered", "received")
    tape.vllm(20, "consumer", "scheduled")
    tape.vllm(25, "consumer", "first_token")
    tape.vllm(50, "consumer", "finished", reason="stop")
    return exported(tape.write(tmp_path))


def test_each_engine_is_a_process_and_each_record_a_thread(one: Events) -> None:
    names = {event["args"]["name"] for event in one if event["name"] == "process_name"}
    assert names == {"engine P", "engine C"}
    assert set(threads(one)) == {
        "t producer pp0.tp0",
        "t c1 consumer pp0.tp0",
        "t writes pp0.tp0",
        "t writes pp0.tp0 (2)",
        "t c1 vLLM",
        "t c1 parts",
    }


def test_states_are_slices_inside_the_whole(one: Events) -> None:
    pid, tid = threads(one)["t producer pp0.tp0"]
    slices = [e for e in one if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
    assert [e["name"] for e in slices] == [
        "t",
        "allocated",
        "registered",
        "streaming",
        "transferring",
        "sent",
    ]
    whole, *states = slices
    assert sum(state["dur"] for state in states) == whole["dur"]
    assert states[-1]["args"]["bytes"] == 4096
    assert states[1]["dur"] == 7000
    assert states[1]["args"]["peer"] == "C/pp0.tp0/1"


def test_writes_that_overlap_have_threads_of_their_own(one: Events) -> None:
    first, second = of(one, "X", "WRITE")
    assert (first["dur"], second["dur"]) == (5000, 3500)
    assert first["tid"] != second["tid"]
    assert first["args"] == {
        "ended": "done",
        "attempt": 16,
        "peer": "C/pp0.tp0/1",
        "bytes": 4096,
        "runs": 2,
        "posts": 1,
        "plan_ms": 0.5,
        "post_ms": 1,
    }


def test_vllms_side_and_the_parts_have_a_thread_each(one: Events) -> None:
    assert [(e["name"], e["dur"]) for e in one if e.get("cat") == "vLLM"] == [
        ("waiting", 20_000),
        ("prompt", 5000),
        ("tokens", 25_000),
    ]
    assert sum(e["dur"] for e in one if e.get("cat") == "part") == 25_000


def test_register_and_done_are_arrows_between_the_two(one: Events) -> None:
    producer, consumer = threads(one)["t producer pp0.tp0"], threads(one)["t c1 consumer pp0.tp0"]
    for name, source, target in (("REGISTER", consumer, producer), ("DONE", producer, consumer)):
        [start], [end] = of(one, "s", name), of(one, "f", name)
        assert (start["pid"], start["tid"]) == source
        assert (end["pid"], end["tid"]) == target
    assert of(one, "s", "DONE")[0]["ts"] >= 17_000


def test_counters_go_up_and_down_with_the_states(one: Events) -> None:
    counted = of(one, "C", "live producer records")
    assert [max(e["args"], key=lambda state: e["args"][state]) for e in counted[:-1]] == [
        "allocated",
        "registered",
        "streaming",
        "transferring",
    ]
    assert all(sum(e["args"].values()) == 1 for e in counted[:-1])
    assert sum(counted[-1]["args"].values()) == 0


def test_of_a_world_each_transfer_has_its_arrows(tmp_path: Path) -> None:
    world, producer, consumer = acquainted(ranks=2)
    done, _ = both_legs(producer, consumer)
    producer.finish(done)
    world.advance(1.0)
    events = exported(write_world(world, tmp_path, {"P-1": 3.2}))
    assert len(of(events, "s", "REGISTER")) == 4
    assert len(of(events, "s", "DONE")) == 2


def test_an_unfinished_state_lasts_until_the_traces_end(tmp_path: Path) -> None:
    tape = Tape()
    tape.load(0, "blocks_allocated", "new", "allocated")
    tape.load(500, "blocks_allocated", "new", "allocated", id="u", request="c2")
    events = exported(tape.write(tmp_path))
    assert [event["dur"] for event in of(events, "X", "allocated")] == [500_000, 1]


@pytest.mark.parametrize("seed", range(4))
def test_worlds_in_which_everything_goes_wrong_keep_to_the_format(
    seed: int, tmp_path: Path
) -> None:
    run = Run(Setting(seed=seed, ranks=2, producers=2, consumers=2, blocks=24, swarm=True))
    rng = Random(seed)
    assert run.do(Operation(name=PHASE, seed=seed))
    for _ in range(150):
        assert run.do(next_operation(run.chaos, rng)), run.error
    assert len(exported(write_world(run.world, tmp_path))) > 100


def test_an_empty_trace_is_an_empty_document(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_text("")
    assert exported([path]) == []


def test_the_command_writes_a_file_or_standard_output(tmp_path: Path) -> None:
    tape = Tape()
    tape.load(0, "blocks_allocated", "new", "allocated")
    [path] = tape.write(tmp_path)
    out = tmp_path / "out.json"
    assert CliRunner().invoke(app, ["trace", "perfetto", str(path), "-o", str(out)]).exit_code == 0
    check(json.loads(out.read_text())["traceEvents"])
    printed = CliRunner().invoke(app, ["trace", "perfetto", str(path)])
    assert json.loads(printed.stdout) == json.loads(out.read_text())
    nowhere = str(tmp_path / "none" / "out.json")
    refused = CliRunner().invoke(app, ["trace", "perfetto", str(path), "-o", nowhere])
    assert refused.exit_code == 2
    assert (
        refused.stderr == f"kvflow trace: {nowhere}: cannot be written: No such file or directory\n"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": 0},
        {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": -1, "dur": 1},
        {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": 5, "dur": 10},
        {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 2, "ts": 0, "dur": 1},
        {"ph": "s", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": 5, "id": 1},
        {"ph": "B", "name": "a", "pid": 1, "tid": 1, "ts": 0},
        {"ph": "C", "name": "a", "pid": 1, "ts": 0, "args": {"x": -1}},
    ],
)
def test_the_checks_bite(wrong: dict[str, Any]) -> None:
    good: Events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "p"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}},
        {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": 0, "dur": 10},
    ]
    check(good)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check([*good, wrong])
