"""Offsets between engines' clocks, from the messages in their traces."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.testing.scenes import T, acquainted, both_legs, prefilled
from kvflow.testing.traces import Tape, write_world
from kvflow.tracing.clocks import Clocks, Offset, estimate
from kvflow.tracing.lines import read_all


def exchange(
    tape: Tape, asked: float, recorded: float, answered: float, producer: str = "P"
) -> None:
    """A registration, and its answer, at these milliseconds."""
    tape.load(asked, "peer_met", "allocated", "registering")
    tape.prefill(recorded, "registered", "allocated", "registered", engine=producer)
    tape.load(answered, "accepted", "registering", "registered")


def difference(clocks: Clocks, one: str, other: str) -> int:
    return clocks.offsets[one].ahead_us - clocks.offsets[other].ahead_us


def uncertainty(clocks: Clocks) -> int:
    return max(offset.uncertainty_us for offset in clocks.offsets.values())


@pytest.mark.parametrize("ahead_s", [3.2, -3.2, 0.02, 86_400.0])
def test_an_offset_is_recovered_within_the_uncertainty(ahead_s: float) -> None:
    tape = Tape(ahead_s={"P": ahead_s})
    exchange(tape, 10.0, 12.5, 14.0)
    clocks = estimate(tape.parsed())
    assert abs(difference(clocks, "P", "C") - ahead_s * 1e6) <= uncertainty(clocks)
    assert uncertainty(clocks) == pytest.approx(2000, abs=2)
    assert difference(clocks, "P", "C") == pytest.approx(ahead_s * 1e6 + 500, abs=2)


def test_the_exchange_of_the_least_round_trip_decides() -> None:
    tape = Tape(ahead_s={"P": 3.2})
    for number, (sent, there, back) in enumerate(
        [(0, 80, 90), (100, 100.2, 100.5), (200, 240, 300)]
    ):
        tape.of, tape.attempt = f"t{number}", 16 * number
        exchange(tape, sent, there, back)
    clocks = estimate(tape.parsed())
    assert uncertainty(clocks) <= 251
    assert clocks.offsets["C"].exchanges + clocks.offsets["P"].exchanges == 3


def test_a_done_bounds_the_offset_too() -> None:
    tape = Tape(ahead_s={"P": -5.0})
    exchange(tape, 10.0, 10.1, 30.0)
    wide = estimate(tape.parsed())
    tape.prefill(100.0, "write_done", "transferring", "sent")
    tape.load(100.3, "done", "registered", "received")
    clocks = estimate(tape.parsed())
    assert uncertainty(wide) > 9000
    assert uncertainty(clocks) <= 201
    assert abs(difference(clocks, "P", "C") + 5e6) <= uncertainty(clocks)


def test_a_word_that_it_can_be_read_bounds_the_offset() -> None:
    tape = Tape(ahead_s={"P": 7.0})
    tape.load(10.0, "peer_met", "allocated", "expecting")
    tape.prefill(11.0, "registered", "allocated", "registered")
    tape.prefill(50.0, "prefill_finished", "registered", "lent")
    tape.load(50.5, "readable", "expecting", "reading")
    clocks = estimate(tape.parsed())
    assert abs(difference(clocks, "P", "C") - 7e6) <= uncertainty(clocks) <= 751


def test_clocks_that_may_show_the_same_time_are_left_alone() -> None:
    tape = Tape()
    exchange(tape, 0.0, 52.0, 60.0)  # a first meeting, slow on the way there
    clocks = estimate(tape.parsed())
    assert difference(clocks, "P", "C") == 0
    assert uncertainty(clocks) == 52_001


def test_offsets_go_over_engines_that_never_spoke_with_each_other() -> None:
    tape = Tape(ahead_s={"P": 1.0, "P2": -2.0})
    exchange(tape, 10.0, 10.4, 11.0)
    tape.of, tape.attempt = "u", 32
    exchange(tape, 20.0, 20.5, 22.0, producer="P2")
    clocks = estimate(tape.parsed())
    assert clocks.reference == "C"
    assert abs(difference(clocks, "P", "P2") - 3e6) <= 1503
    assert all(clocks.is_known(engine) for engine in ("C", "P", "P2"))


def test_an_engine_that_no_message_links_has_no_offset_and_is_said_to_be_unknown() -> None:
    tape = Tape(ahead_s={"P": 1.0})
    exchange(tape, 10.0, 10.4, 11.0)
    tape.prefill(30.0, "prefill_started", "unknown", "allocated", engine="P9")
    clocks = estimate(tape.parsed())
    assert not clocks.is_known("P9")
    assert clocks.offsets["P9"] == Offset(engine="P9", reference="P9", ahead_us=0, uncertainty_us=0)


def test_two_groups_of_engines_have_a_reference_each() -> None:
    tape = Tape(ahead_s={"P": 1.0, "P8": 4.0})
    exchange(tape, 10.0, 10.4, 11.0)
    tape.of = "u"
    tape.load(20.0, "peer_met", "allocated", "registering", engine="C8", attempt=1)
    tape.prefill(
        20.1, "registered", "allocated", "registered", engine="P8", attempt=1, peer="C8/pp0.tp0/1"
    )
    tape.load(20.4, "accepted", "registering", "registered", engine="C8", attempt=1)
    clocks = estimate(tape.parsed())
    assert clocks.is_known("P") != clocks.is_known("P8")
    assert clocks.offsets["P8"].reference == clocks.offsets["C8"].reference
    assert abs(difference(clocks, "P8", "C8") - 4e6) <= uncertainty(clocks)


def test_messages_of_another_consumer_or_attempt_say_nothing() -> None:
    tape = Tape(ahead_s={"P": 1.0})
    tape.load(10.0, "peer_met", "allocated", "registering")
    tape.prefill(10.2, "registered", "allocated", "registered", attempt=32)
    tape.prefill(10.2, "registered", "allocated", "registered", peer="C2/pp0.tp0/1")
    tape.load(11.0, "accepted", "registering", "registered")
    assert not all(map(estimate(tape.parsed()).is_known, ("P", "C")))


def test_clocks_that_drift_are_said_to_contradict_each_other() -> None:
    tape = Tape(ahead_s={"P": 1.0})
    exchange(tape, 10.0, 10.2, 10.4)
    tape.of, tape.ahead_s["P"] = "u", 1.5
    exchange(tape, 20.0, 20.3, 20.6)
    clocks = estimate(tape.parsed())
    other = next(o for o in clocks.offsets.values() if o.engine != clocks.reference)
    assert other.contradicts_us == pytest.approx(499_500, abs=2)
    assert abs(difference(clocks, "P", "C") - 1e6) <= other.uncertainty_us
    assert other.uncertainty_us >= other.contradicts_us


def test_nothing_is_known_of_no_engines() -> None:
    assert estimate([]) == Clocks(reference="", offsets={})


@given(
    ahead_s=st.floats(-1e5, 1e5),
    trips=st.lists(
        st.tuples(st.floats(0, 500), st.floats(0, 500), st.booleans()), min_size=1, max_size=8
    ),
)
def test_the_truth_is_always_within_the_uncertainty(
    ahead_s: float, trips: list[tuple[float, float, bool]]
) -> None:
    tape = Tape(ahead_s={"P": ahead_s})
    for number, (there, back, done) in enumerate(trips):
        tape.of, tape.attempt = f"t{number}", 16 * number + 16
        at = 1000.0 * number
        exchange(tape, at, at + there, at + there + back)
        if done:
            tape.prefill(at + 1000, "write_done", "transferring", "sent")
            tape.load(at + 1000 + back, "done", "registered", "received")
    clocks = estimate(tape.parsed())
    assert abs(difference(clocks, "P", "C") - ahead_s * 1e6) <= uncertainty(clocks) + 3


@pytest.mark.parametrize("reads", [False, True])
def test_worlds_with_clocks_apart_are_put_together_again(tmp_path: Path, reads: bool) -> None:
    world, producer, consumer = acquainted(ranks=2)
    if reads:
        prefilled(producer)
        world.advance(0.1)
        consumer.allocate(T, producer, reads=True)
    else:
        done, _ = both_legs(producer, consumer)
        producer.finish(done)
    world.advance(1.0)
    traces = read_all(write_world(world, tmp_path, {"P-1": 3.2, "C-1": -0.5}))
    clocks = estimate(traces)
    assert abs(difference(clocks, "P-1", "C-1") - 3.7e6) <= uncertainty(clocks) <= 1500
    assert json.loads((tmp_path / "C-1.ndjson").read_text().splitlines()[0])["engine"] == "C-1"
