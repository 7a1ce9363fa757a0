"""The parts of a request's time add up, whatever happened to it and whatever its lines say."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core import TABLES
from kvflow.testing.operations import PHASE, Operation, Setting, next_operation
from kvflow.testing.scenes import T, acquainted, again, both_legs, prefilled
from kvflow.testing.simulate import Run
from kvflow.testing.traces import Tape, adds_up, followed, write_world
from kvflow.tracing.figures import analyse
from kvflow.tracing.lines import Line
from kvflow.tracing.waterfall import Outcome

STEPS = [
    (table.name, row.trigger, source, row.dest or source)
    for table in TABLES
    if table.name != "peer"
    for row in table.rows
    for source in row.sources
]
AT = st.integers(-(10**9), 10**9).map(lambda us: us / 1e6)


@st.composite
def any_line(draw: st.DrawFn) -> Line:
    """A line of any kind at any time: of no run that could have been."""
    kind = draw(st.sampled_from(["step", "step", "step", "request", "write", "read"]))
    machine, trigger, source, dest = draw(st.sampled_from(STEPS))
    role = ""
    if kind == "request":
        machine, source = "request", ""
        trigger = dest = draw(st.sampled_from(["arrived", "scheduled", "first_token", "finished"]))
        role = draw(st.sampled_from(["producer", "consumer"]))
    elif kind != "step":
        machine, trigger, source, dest = kind, "done", "posted", "done"
    is_producers = machine in ("producer", "write") or role == "producer"
    at = draw(AT)
    return Line(
        version=2,
        t=at,
        engine="P" if is_producers else "C",
        rank=draw(st.sampled_from(["pp0.tp0", "pp0.tp1"])),
        machine=machine,
        id=draw(st.sampled_from(["t", "t 1"])) if is_producers else "t",
        attempt=draw(st.sampled_from([0, 16, 17])),
        request="p1" if is_producers else "c1",
        trigger=trigger,
        source=source,
        dest=dest,
        peer=draw(st.sampled_from(["", "C/pp0.tp0/1", "P/pp0.tp0/1"])),
        role=role,
        arrival=draw(st.none() | AT),
        began=draw(st.none() | AT),
        ms={"plan": draw(st.floats(-1e6, 1e6)), "post": draw(st.floats(-1e6, 1e6))},
    )


@given(st.lists(any_line(), min_size=1, max_size=30))
def test_the_parts_add_up_whatever_the_lines_say(lines: list[Line]) -> None:
    assert followed(lines)


GAPS = st.lists(st.integers(0, 50_000), min_size=12, max_size=12)


@given(GAPS, GAPS, st.integers(0, 200_000))
def test_the_parts_add_up_and_the_later_side_is_the_path(
    producer_gaps: list[int], consumer_gaps: list[int], dispatched: int
) -> None:
    """A run that could have been, with any times: the legs meet when both are ready."""
    p = [sum(producer_gaps[:n]) / 1000 for n in range(12)]
    c = [(dispatched + sum(consumer_gaps[:n])) / 1000 for n in range(12)]
    tape = Tape()
    tape.vllm(p[0], "producer", "arrived")
    tape.vllm(p[1], "producer", "scheduled")
    tape.prefill(p[1], "prefill_started", "unknown", "allocated")
    tape.vllm(c[0], "consumer", "arrived")
    tape.load(c[1], "blocks_allocated", "new", "allocated")
    tape.load(c[2], "peer_met", "allocated", "registering")
    complete, recorded = p[2], c[3]
    if recorded < complete:
        tape.prefill(recorded, "registered", "allocated", "registered")
        tape.prefill(complete, "prefill_finished", "registered", "transferring")
    else:
        tape.prefill(complete, "prefill_finished", "allocated", "prefilled")
        tape.prefill(recorded, "registered", "prefilled", "transferring")
    sent = max(complete, recorded) + p[3] - p[2]
    tape.prefill(sent, "write_done", "transferring", "sent")
    received = sent + c[4] - c[3]
    tape.load(received, "done", "registering", "received")
    token = received + c[5] - c[4]
    tape.vllm(token, "consumer", "first_token")
    [fall] = followed(tape.parsed())
    assert abs(fall.span_us - (token - min(p[0], c[0])) * 1000) <= 2
    shown = {segment.part.value for segment in fall.segments}
    if recorded < complete:
        assert "registration" not in shown
    elif c[0] < complete:
        assert "prefill" not in shown


@pytest.mark.parametrize("reads", [False, True])
def test_a_world_is_told_as_it_happened(tmp_path: Path, reads: bool) -> None:
    world, producer, consumer = acquainted(ranks=2)
    prefilled(producer)
    world.advance(0.1)
    consumer.allocate(T, producer, reads=reads)
    world.advance(1.0)
    [_, fall] = analyse(write_world(world, tmp_path)).waterfalls
    adds_up(fall)
    assert fall.outcome is Outcome.RECEIVED
    assert (
        fall.segments[0].part == "match"
    )  # a prefill that takes no time, then a tenth of a second
    assert fall.segments[0].us == 100_000
    named = {segment.part.value for segment in fall.segments}
    assert {"wire", "notice"} <= named <= {"match", "registration", "wire", "notice"}


def test_a_world_with_a_preemption_adds_up(tmp_path: Path) -> None:
    world, producer, consumer = acquainted(registers=True)
    done, load = both_legs(producer, consumer)
    producer.finish(done)
    world.advance(0.5)
    again(consumer, producer, load)
    world.advance(1.0)
    falls = analyse(write_world(world, tmp_path, {"P-1": -3.2})).waterfalls
    assert [fall.outcome for fall in falls] == [Outcome.RECEIVED] * 2
    for fall in falls:
        adds_up(fall)
    # Nothing tells when the first token was: the first load is taken to have led to it.
    assert falls[-1].span_us == pytest.approx(13_500, abs=1501)


@pytest.mark.parametrize("seed", range(4))
def test_worlds_in_which_everything_goes_wrong_add_up(seed: int, tmp_path: Path) -> None:
    run = Run(Setting(seed=seed, ranks=2, producers=2, consumers=2, blocks=24, swarm=True))
    rng = Random(seed)
    assert run.do(Operation(name=PHASE, seed=seed))
    for _ in range(150):
        assert run.do(next_operation(run.chaos, rng)), run.error
    analysis = analyse(write_world(run.world, tmp_path))
    assert len(analysis.waterfalls) > 5
    for fall in analysis.waterfalls:
        adds_up(fall)
