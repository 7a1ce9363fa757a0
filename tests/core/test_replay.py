"""Traces through the tables: good ones pass, each kind of wrong one is named by file and line."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.core.effects import Moved
from kvflow.ids import AgentName
from kvflow.observe.trace import TraceWriter
from kvflow.testing.operations import END, PHASE, Operation, Setting, next_operation
from kvflow.testing.replay import Report, replay
from kvflow.testing.scenes import acquainted, both_legs
from kvflow.testing.simulate import Run
from kvflow.testing.world import World
from kvflow.tracing.lines import UnreadableTraceError

PREFILL = [
    ("prefill_started", "unknown", "allocated"),
    ("registered", "allocated", "registered"),
    ("prefill_finished", "registered", "transferring"),
    ("write_done", "transferring", "sent"),
]
DECODE = [
    ("blocks_allocated", "new", "allocated"),
    ("peer_met", "allocated", "registering"),
    ("accepted", "registering", "registered"),
    ("done", "registered", "received"),
]
Lines = list[dict[str, Any]]


def lines_of(
    machine: str,
    steps: list[tuple[str, str, str]],
    *,
    engine: str,
    rank: str = "pp0.tp0",
    attempt: int = 16,
    request: str = "r",
    of: str = "t",
    peer: str = "",
) -> Lines:
    head = {"v": 1, "t": 1.5, "engine": engine, "rank": rank, "machine": machine, "id": of}
    return [
        head
        | {"attempt": attempt, "request": request, "trigger": trigger, "from": source, "to": dest}
        | ({"peer": peer} if peer else {})
        for trigger, source, dest in steps
    ]


def prefill(**more: Any) -> Lines:
    return lines_of("producer", PREFILL, **{"engine": "p", "peer": "c/pp0.tp0/1f"} | more)


def decode(**more: Any) -> Lines:
    return lines_of("consumer", DECODE, **{"engine": "c", "peer": "host:5600"} | more)


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    def write(lines: Lines, name: str = "trace.ndjson") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def first(report: Report) -> str:
    assert report.first is not None
    return str(report.first)


Trace = Callable[..., Path]

KEPT = [
    *PREFILL[:-1],
    ("write_done", "transferring", "kept"),
    ("registered_anew", "kept", "transferring"),
    ("write_done", "transferring", "kept"),
    ("cancel_asked", "kept", "sent"),
]
DECODE_TWICE = [
    *DECODE,
    ("allocated_again", "received", "allocated"),
    *DECODE[1:],
    ("request_ended", "received", "releasing"),
    ("rank_failed", "releasing", "released"),
]


def kept(attempts: list[int]) -> Lines:
    lines = lines_of("producer", KEPT, engine="p", peer="c/pp0.tp0/1f")
    return [line | {"attempt": a} for line, a in zip(lines, attempts, strict=True)]


def decode_twice() -> Lines:
    lines = lines_of("consumer", DECODE_TWICE, engine="c", peer="host:5600")
    attempts = [16] * 4 + [32] * 6
    return [line | {"attempt": a} for line, a in zip(lines, attempts, strict=True)]


# -- each record by itself -------------------------------------------------------------------------


def test_a_good_trace_passes_and_is_counted(trace: Trace) -> None:
    report = replay([trace(prefill() + decode())])
    assert report.first is None
    assert (report.lines, report.records, report.matched, report.unmatched) == (8, 2, 1, 0)
    assert report.outcomes == {("producer", "sent", ""): 1, ("consumer", "received", ""): 1}
    assert report.live == []
    assert {machine for machine, _, _ in report.rows} == {"producer", "consumer"}
    assert len(report.rows) == 8 < report.rows_of_all


def test_a_line_that_is_no_row_is_named_with_the_rows_that_there_are(trace: Trace) -> None:
    lines = prefill()
    lines[2]["to"] = "sent"
    path = trace(lines)
    said = first(replay([path]))
    assert said.startswith(f"{path}:3: p pp0.tp0 producer t attempt 16: registered")
    assert "no row leads from registered to sent on prefill_finished" in said
    assert "registered --prefill_finished [prefill_is_to_be_written]--> transferring" in said
    assert "registered --prefill_finished [prefill_does_not_fit]--> failed" in said


def test_an_impossible_pair_is_named_with_its_reason(trace: Trace) -> None:
    lines = [*decode()[:2], *lines_of("consumer", [("peer_met", "registering", "registered")],
                                      engine="c")]  # fmt: skip
    said = first(replay([trace(lines)]))
    assert "peer_met in registering is impossible: only a load that waits" in said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("trigger", "sneezed", "no trigger sneezed"), ("from", "asleep", "no state asleep")],
)
def test_unknown_words_are_named(trace: Trace, key: str, value: str, said: str) -> None:
    lines = prefill()[:1]
    lines[0][key] = value
    assert said in first(replay([trace(lines)]))


def test_a_line_must_start_where_the_one_before_ended(trace: Trace) -> None:
    lines = prefill()
    del lines[1]
    path = trace(lines)
    said = first(replay([path]))
    assert f"{path}:2:" in said
    assert f"{path}:1 left it in allocated, not in registered" in said


def test_a_record_starts_in_the_initial_state(trace: Trace) -> None:
    path = trace(prefill()[1:])
    assert "starts in unknown, not in allocated" in first(replay([path]))


def test_after_forgotten_a_record_starts_anew(trace: Trace) -> None:
    forgotten = lines_of("producer", [("expired", "sent", "forgotten")], engine="p")
    path = trace([*prefill(), *forgotten, *prefill(attempt=32)])
    report = replay([path])
    assert report.first is None
    assert report.records == 2
    assert "left it" in first(replay([trace([*prefill(), *prefill(attempt=32)])]))


def test_only_the_first_line_after_a_gap_is_named(trace: Trace) -> None:
    lines = prefill()
    del lines[1]
    assert len(replay([trace(lines)]).broken) == 1


def test_records_are_kept_apart(trace: Trace) -> None:
    """By engine, rank and machine; consumers by request, producers by id; files by themselves."""
    ranks = [each for rank in ("pp0.tp0", "pp0.tp1") for each in prefill(rank=rank)]
    interleaved = [each for pair in zip(ranks[:4], ranks[4:], strict=True) for each in pair]
    requests = [each for name in ("r1", "r2") for each in decode(request=name, of=f"t{name}")]
    restarted = trace(prefill(of="u"), "again.ndjson")
    report = replay([trace(interleaved + requests), restarted])
    assert report.first is None
    assert report.records == 5


def test_a_request_that_loads_again_under_another_id_is_one_record(trace: Trace) -> None:
    again = decode(attempt=32, of="u")
    again[0]["from"] = "received"
    report = replay([trace(decode() + again)])
    assert report.first is None
    assert report.records == 1


def test_what_is_not_over_is_still_live_and_no_error(trace: Trace) -> None:
    path = trace(prefill()[:3])
    report = replay([path])
    assert report.first is None
    assert [(line.place, line.dest) for line in report.live] == [(f"{path}:3", "transferring")]


def test_a_path_that_is_given_twice_counts_once(trace: Trace) -> None:
    path = trace(prefill())
    assert replay([path, str(path)]).lines == 4


# -- both sides together ---------------------------------------------------------------------------


def test_what_was_received_was_sent_by_every_rank_f5(trace: Trace) -> None:
    """A rank whose part was taken for another's."""
    other = lines_of(
        "producer", PREFILL[:3], engine="p", rank="pp0.tp1", peer="c/pp0.tp0/1f"
    )  # never sent
    producer, consumer = trace(prefill() + other, "p"), trace(decode(), "c")
    assert replay([producer]).first is None
    assert replay([consumer]).first is None
    said = first(replay([producer, consumer]))
    assert said.startswith(f"{consumer}:4:")
    assert "received, but p pp0.tp1 never sent attempt 16 of t" in said


def test_a_rank_that_knows_the_consumer_but_never_heard_of_the_load_is_missed_f5(
    trace: Trace,
) -> None:
    earlier = prefill(of="s", attempt=0, rank="pp0.tp1")
    said = first(replay([trace(prefill() + earlier + decode())]))
    assert "pp0.tp1 never sent" in said


def test_a_retry_concerns_one_rank_only(trace: Trace) -> None:
    """Rank 0 sent attempt 16; rank 1 failed, and sent attempt 17 of the same load."""
    other = prefill(rank="pp0.tp1", attempt=17)
    received = decode()
    received[-1]["attempt"] = 17
    report = replay([trace(prefill() + other + received)])
    assert report.first is None
    assert report.matched == 1


def test_ranks_of_a_consumer_that_registers_with_its_own_rank_only(trace: Trace) -> None:
    lines: Lines = []
    for rank in ("pp0.tp0", "pp0.tp1"):
        lines += prefill(rank=rank, peer=f"c/{rank}/1f") + decode(rank=rank)
    del lines[-1]  # the second consumer rank has not received it
    report = replay([trace(lines)])
    assert report.first is None
    assert (report.matched, len(report.live)) == (1, 1)


def test_received_without_any_producer_in_the_traces_is_counted(trace: Trace) -> None:
    assert replay([trace(decode())]).unmatched == 1
    assert replay([trace(decode() + prefill(peer="other/pp0.tp0/2a"))]).unmatched == 1


def test_an_attempt_is_sent_once(trace: Trace) -> None:
    forgotten = lines_of("producer", [("expired", "sent", "forgotten")], engine="p")
    path = trace([*prefill(), *forgotten, *prefill()])
    said = first(replay([path]))
    assert said.startswith(f"{path}:9:")
    assert f"sent twice: attempt 16 was sent at {path}:4 already" in said


def test_what_was_kept_and_written_once_more_matches_both_loads(trace: Trace) -> None:
    report = replay([trace(kept([16, 16, 16, 16, 32, 32, 32]) + decode_twice())])
    assert report.first is None
    assert (report.matched, report.unmatched) == (2, 0)
    assert report.outcomes["producer", "sent", ""] == 1
    assert report.live == []


def test_a_load_once_more_needs_a_second_write(trace: Trace) -> None:
    lines = kept([16, 16, 16, 16, 32, 32, 32])
    without = [*lines[:4], lines[-1]]
    said = first(replay([trace(without + decode_twice())]))
    assert "received, but p pp0.tp0 never sent attempt 32 of t" in said


def test_a_first_line_that_is_the_last_one_passes(trace: Trace) -> None:
    """A refusal leaves no record."""
    late = lines_of("producer", [("registered_late", "unknown", "forgotten")], engine="p")
    assert replay([trace(late + late)]).first is None


# -- what is not a trace ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line | {"v": 3}, "schema version 3; this kvflow reads versions 1 and 2"),
        (lambda line: {k: v for k, v in line.items() if k != "trigger"}, "field `trigger`"),
        (lambda line: line | {"machine": "router"}, "machine 'router' is not one of producer"),
        (lambda line: [line], "not a JSON object"),
    ],
)
def test_a_line_of_another_schema_is_named(
    trace: Trace, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    lines = prefill()
    path = trace([*lines[:1], change(lines[1])])
    with pytest.raises(UnreadableTraceError, match=r"trace\.ndjson:2: ") as caught:
        replay([path])
    assert said in str(caught.value)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(json.dumps(prefill()[0]) + "\n\nINFO started\n")
    with pytest.raises(UnreadableTraceError, match=r"log\.txt:3: not JSON"):
        replay([path])


def test_a_last_line_that_is_being_written_is_left_out(trace: Trace) -> None:
    path = trace(prefill())
    path.write_text(path.read_text() + '{"v": 1, "t')
    assert replay([path]).lines == 4


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="missing: cannot be read"):
        replay([tmp_path / "missing"])


# -- traces of modelled worlds, written by the real writer -----------------------------------------


def write_traces(world: World, directory: Path) -> list[Path]:
    """One file per worker process, as `KVFLOW_TRACE` makes them."""
    writers: dict[AgentName, TraceWriter] = {}
    for _, agent, effect in world.log:
        if isinstance(effect, Moved):
            if agent not in writers:
                path = str(directory / f"{agent}.ndjson")
                writers[agent] = TraceWriter(path, engine_id=agent, rank=world.ranks[agent])
            writers[agent].moved(effect)
    for writer in writers.values():
        writer.close()
    return sorted(directory.iterdir())


def test_a_real_trace_of_a_good_day_passes_and_matches(tmp_path: Path) -> None:
    world, producer, consumer = acquainted(ranks=2)
    done, _ = both_legs(producer, consumer)
    producer.finish(done)
    world.advance(1.0)
    report = replay(write_traces(world, tmp_path))
    assert report.first is None
    assert (report.matched, report.unmatched) == (2, 0)
    world.everything_ends()
    (tmp_path / "all").mkdir()
    report = replay(write_traces(world, tmp_path / "all"))
    assert report.live == []


@pytest.mark.parametrize("seed", range(6))
def test_real_traces_of_worlds_in_which_everything_goes_wrong_pass(
    seed: int, tmp_path: Path
) -> None:
    run = Run(Setting(seed=seed, ranks=2, producers=2, consumers=2, blocks=24, swarm=True))
    rng = Random(seed)
    for _ in range(2):
        assert run.do(Operation(name=PHASE, seed=seed))
        for _ in range(120):
            assert run.do(next_operation(run.chaos, rng)), run.error
        assert run.do(Operation(name=END, seed=0)), run.error
    report = replay(write_traces(run.world, tmp_path))
    assert report.first is None, str(report.first)
    assert report.matched > 0
    assert report.unmatched == 0


# -- the command -----------------------------------------------------------------------------------


def test_the_command_ends_with_0_1_or_2(trace: Trace, tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["replay", str(trace(prefill())), str(trace(decode(), "c"))])
    assert good.exit_code == 0
    assert "8 lines of 2 records" in good.stdout
    assert "every line is a row of its table" in good.stdout
    bad = CliRunner().invoke(app, ["replay", str(trace(prefill()[1:], "bad"))])
    assert bad.exit_code == 1
    assert f"{tmp_path / 'bad'}:1:" in bad.stdout
    broken = tmp_path / "broken"
    broken.write_text("{\n")
    unreadable = CliRunner().invoke(app, ["replay", str(broken)])
    assert unreadable.exit_code == 2
    assert f"{broken}:1: not JSON" in unreadable.stderr


def test_the_command_speaks_json(trace: Trace) -> None:
    ran = CliRunner().invoke(app, ["replay", str(trace(prefill()[:2])), "--json"])
    told = json.loads(ran.stdout)
    assert (told["lines"], told["broken"]) == (2, [])
    assert told["live"][0]["state"] == "registered"
    ran = CliRunner().invoke(app, ["replay", str(trace(prefill()[1:])), "--json"])
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["broken"][0]["place"].endswith(":1")
