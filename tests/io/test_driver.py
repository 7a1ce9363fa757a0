"""The driver against in-memory ports and a clock that is set by hand."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvflow.core import Engine, Reason
from kvflow.core import events as ev
from kvflow.core.effects import DropPeer, Effect
from kvflow.core.timings import Timings
from kvflow.errors import TransportError
from kvflow.io.driver import Driver
from kvflow.io.port import PostState
from kvflow.settings import Settings
from kvflow.wire import messages as m

from .sides import (
    DESTINATION,
    PAIRS,
    SOURCE,
    Pair,
    Side,
    allocated,
    load_of,
    prefill_first,
    prefill_of,
    registration_first,
)

MakeSide = Callable[..., Side]


def writing(pair: Pair, transfer: str = "t") -> None:
    """Bring a transfer to where its first slices are in flight, and stay there."""
    pair.producer.port.faults.pending_polls = 10**9
    prefill_first(pair, transfer)
    for _ in range(20):
        pair.turn()
        if pair.producer.port.pending:
            return
    raise AssertionError("nothing was posted")


def let_land(pair: Pair) -> None:
    pair.producer.port.faults.pending_polls = 0
    for post in pair.producer.port.posts.values():
        post.pending_polls = 0


# -- whole transfers -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [prefill_first, registration_first])
@pytest.mark.parametrize("pending_polls", [0, 3])
def test_a_transfer_moves_exactly_its_blocks(
    pair: Pair, order: Callable[[Pair, str], None], pending_polls: int
) -> None:
    expected = pair.consumer.memory.with_blocks(pair.producer.memory, PAIRS)
    untouched = pair.producer.memory.array.copy()
    pair.producer.port.faults.pending_polls = pending_polls
    order(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert np.array_equal(pair.consumer.memory.array, expected)
    assert np.array_equal(pair.producer.memory.array, untouched)
    assert pair.is_clean()
    assert pair.producer.notes.ended("producer")[0].bytes == pair.producer.port.counts.bytes_written


def test_blocks_that_the_consumer_has_are_skipped_on_the_producer_too(pair: Pair) -> None:
    expected = pair.consumer.memory.with_blocks(pair.producer.memory, PAIRS[2:])
    pair.finish_prefill("t", SOURCE)
    pair.load("t", DESTINATION[2:], skip=2)
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]
    assert np.array_equal(pair.consumer.memory.array, expected)


def test_many_transfers_interleave_without_mixing(pair: Pair) -> None:
    pairs = [(block, 1 + block * 7 % 31) for block in range(1, 32)]
    expected = pair.consumer.memory.with_blocks(pair.producer.memory, pairs)
    pair.producer.port.faults.pending_polls = 1
    for block, to in pairs:
        name = f"t{block}"
        if block % 2:
            pair.load(name, [to], attempt=16 * (block + 1))
            pair.finish_prefill(name, [block])
        else:
            pair.finish_prefill(name, [block])
            pair.load(name, [to], attempt=16 * (block + 1))
    pair.turn_until_quiet()
    assert sorted(pair.consumer.reports.received_ids) == sorted(
        (load_of(f"t{block}"), None) for block in range(1, 32)
    )
    assert np.array_equal(pair.consumer.memory.array, expected)


def test_more_notices_than_a_frame_may_hold_leave_in_several(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "NOTICES_PER_FRAME_MAX", 3)
    for block in range(1, 11):
        pair.load(f"t{block}", [block], attempt=16 * (block + 1))
    sent_before = pair.consumer.port.counts.sent
    pair.turn()
    assert pair.consumer.port.counts.sent - sent_before >= 4
    for block in range(1, 11):
        pair.finish_prefill(f"t{block}", [block])
    pair.turn_until_quiet()
    assert {reason for _, reason in pair.consumer.reports.received_ids} == {None}
    assert len(pair.consumer.reports.received_ids) == 10


# -- S2: slices are posted only while they may be ------------------------------------------------


def test_s2_nothing_is_posted_before_the_consumer_has_said_until_when(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[bool] = []
    may_write = Engine.may_write

    def asked(engine: Engine, *args: object) -> bool:
        allowed.append(may_write(engine, *args))
        return allowed[-1]

    posts: list[bool] = []
    post = pair.producer.port.post

    def posted(*args: object, **how: bool) -> int:
        posts.append(allowed[-1])
        return post(*args, **how)

    monkeypatch.setattr(Engine, "may_write", asked)
    monkeypatch.setattr(pair.producer.port, "post", posted)
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert len(posts) > 3
    assert all(posts)
    assert not all(allowed)


def test_s2_a_cancelled_write_posts_nothing_more_and_is_answered_when_it_has_ended(
    pair: Pair,
) -> None:
    writing(pair)
    posts = pair.producer.port.counts.posts
    assert posts < len(PAIRS)
    pair.consumer.driver.take(ev.LoadAborted(request_id=load_of("t")))
    pair.turn_times(10)
    assert pair.producer.state("producer", "t") == "draining"
    assert pair.producer.port.counts.posts == posts
    assert pair.producer.reports.sent_ids == []
    assert pair.consumer.reports.received_ids == []
    let_land(pair)
    pair.turn_until_quiet()
    assert pair.producer.port.counts.posts == posts
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.ABORTED)]
    assert pair.is_clean()


def test_s2_a_write_pauses_while_the_consumer_is_silent_and_does_not_spin(pair: Pair) -> None:
    pair.producer.port.faults.pending_polls = 2
    prefill_first(pair, "t")
    while not pair.producer.port.pending:
        pair.turn()
    pair.consumer.port.faults.frozen = True
    pair.turn_times(50, seconds=0.05)
    posts = pair.producer.port.counts.posts
    pair.turn_times(50, seconds=0.05)
    assert pair.producer.port.counts.posts == posts
    assert not pair.producer.driver.can_post
    assert pair.producer.state("producer", "t") == "transferring"
    pair.consumer.port.faults.frozen = False
    pair.turn_until_quiet()
    assert pair.producer.reports.sent_ids == [prefill_of("t")]


# -- faults of the port --------------------------------------------------------------------------


def test_s3_a_failing_write_is_answered_only_when_its_other_slices_have_ended(pair: Pair) -> None:
    writing(pair)
    pair.turn()
    assert pair.producer.port.pending == 2
    first = min(pair.producer.port.posts)
    pair.producer.port.posts[first].state = PostState.FAILED
    pair.turn_times(5)
    assert pair.producer.reports.sent_ids == []
    assert pair.producer.state("producer", "t") == "transferring"
    assert pair.producer.driver.engine.records.producers["t"].attempt == 16
    let_land(pair)
    pair.turn_until_quiet()
    assert pair.attempts_written() == [16, 17]
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]


def test_a_peer_that_cannot_be_sent_to_is_lost_and_met_again(pair: Pair) -> None:
    pair.consumer.port.faults.sends_refused = 1
    pair.load("t", DESTINATION)
    pair.turn()
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.PEER_LOST)]
    pair.finish_prefill("again", SOURCE)
    pair.load("again", DESTINATION, attempt=32)
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids[1:] == [(load_of("again"), None)]


@pytest.mark.parametrize("count", [1, 4])
def test_lost_notices_are_sent_again(pair: Pair, count: int) -> None:
    pair.consumer.port.faults.sends_lost = count
    pair.producer.port.faults.sends_lost = count
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]


def test_a_receive_that_raises_is_reported_and_the_next_one_works(pair: Pair) -> None:
    pair.producer.port.faults.receives_raising = 2
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]
    assert [what for what, _ in pair.producer.notes.failures] == ["receive", "receive"]


def test_s3_a_dropped_peer_is_answered_for_only_when_its_slices_have_ended(pair: Pair) -> None:
    writing(pair)
    pair.producer.driver._perform(DropPeer(agent=pair.consumer.agent))
    assert pair.consumer.agent not in pair.producer.port.peers
    posts = pair.producer.port.counts.posts
    pair.turn_times(5)
    assert pair.producer.port.counts.posts == posts
    assert pair.attempts_written() == [16]
    let_land(pair)
    pair.turn_until_quiet()
    assert pair.attempts_written() == [16, 17]
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert pair.is_clean()


def test_s3_a_consumer_that_dies_while_written_to_costs_one_transfer(pair: Pair) -> None:
    writing(pair)
    pair.consumer.port.close()
    pair.turn_until_quiet_of_producer()
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert not pair.producer.port.posts


def test_a_consumer_that_dies_while_its_write_is_paused_costs_no_lease_f1(pair: Pair) -> None:
    """Nothing is posted to it any more, and it asks for nothing: only a probe can tell."""
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    pair.consumer.port.faults.frozen = True
    pair.clock.now += Timings().write_lease_s
    pair.finish_prefill("t", SOURCE)
    pair.turn_times(3)
    assert pair.producer.state("producer", "t") == "transferring"
    assert not pair.producer.port.counts.posts
    pair.consumer.port.close()
    died = pair.clock.now
    pair.turn_until_quiet_of_producer()
    assert pair.clock.now - died < 3 * Timings().probe_silent_s
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert [moved.reason for moved in pair.producer.notes.ended("producer")] == [Reason.PEER_LOST]


# -- bugs of ours --------------------------------------------------------------------------------


def fail_once(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, kind: type, error: Exception
) -> None:
    receive = engine.receive
    failed: list[object] = []

    def receive_or_fail(event: ev.Event, now: float) -> list[Effect]:
        if isinstance(event, kind) and not failed:
            failed.append(event)
            raise error
        return receive(event, now)

    monkeypatch.setattr(engine, "receive", receive_or_fail)


def test_an_exception_in_the_engine_is_reported_and_costs_one_load(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = ZeroDivisionError("a bug")
    fail_once(monkeypatch, pair.consumer.driver.engine, ev.BlocksAllocated, bug)
    prefill_first(pair, "t")
    assert pair.consumer.notes.failures[0][1] is bug
    assert "BlocksAllocated" in pair.consumer.notes.failures[0][0]
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.ABORTED)]
    prefill_first(pair, "next")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids[1:] == [(load_of("next"), None)]


def test_an_exception_in_the_engine_gives_the_blocks_of_a_prefill_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, pair.producer.driver.engine, ev.PrefillFinished, KeyError("a bug"))
    pair.finish_prefill("t", SOURCE)
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert len(pair.producer.notes.failures) == 1


@pytest.mark.parametrize("told", ["moved", "carried"])
def test_an_observer_that_fails_loses_nothing_else(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    def fails(what: object) -> None:
        raise OSError("no space left for the trace")

    monkeypatch.setattr(pair.producer.notes, told, fails)
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert pair.producer.notes.failures


def test_a_bug_in_a_write_fails_that_write(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(*_: object, **how: bool) -> int:
        raise OverflowError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(pair.producer.port, "post", post)
        prefill_first(pair, "t")
        pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.WRITE_FAILED)]
    pair.moves_another()


# -- ends ----------------------------------------------------------------------------------------


def test_a_lost_peer_ends_every_transfer_that_depends_on_it_once(pair: Pair) -> None:
    prefill_first(pair, "t")
    pair.finish_prefill("other", [1])
    pair.load("other", [1], attempt=32)
    pair.consumer.driver.met(pair.producer.address, pair.producer.reply())
    pair.consumer.meetings.clear()
    assert pair.consumer.state("consumer", "load-other") == "registering"
    pair.consumer.loses(pair.producer)
    assert not pair.consumer.port.peers
    pair.turn_times(100, seconds=0.5)
    pair.turn_until_quiet()
    assert sorted(pair.consumer.reports.received_ids) == [
        (load_of("other"), Reason.PEER_LOST),
        (load_of("t"), Reason.PEER_LOST),
    ]


def test_what_vllm_waits_for_is_reported_when_the_driver_is_abandoned(pair: Pair) -> None:
    pair.producer.driver.engine.timings = Timings(keep_sent_s=10.0)
    pair.finish_prefill("kept", [20])
    event = allocated("kept", pair.producer.address, [20], attempt=1)
    pair.consumer.driver.take(replace(event, keep=True))
    pair.turn_times(10)
    assert pair.producer.state("producer", "kept") == "kept"
    writing(pair)
    pair.load("waiting", [1], attempt=32)
    pair.consumer.reports.received_ids.clear()
    for side in pair.sides:
        side.port.close()
        side.driver.abandon()
    assert sorted(pair.producer.reports.sent_ids) == [prefill_of("kept"), prefill_of("t")]
    assert sorted(pair.consumer.reports.received_ids) == [
        (load_of("t"), Reason.SHUTDOWN),
        (load_of("waiting"), Reason.SHUTDOWN),
    ]


@pytest.mark.parametrize("transfers", [1, 5])
def test_after_all_is_over_and_forgotten_nothing_is_left(pair: Pair, transfers: int) -> None:
    for number in range(transfers):
        pair.finish_prefill(f"t{number}", [number])
        pair.load(f"t{number}", [number], attempt=16 * (number + 1))
    pair.turn_until_quiet()
    pair.clock.now += Timings().tombstone_s + 1
    pair.turn_times(3)
    for _ in range(4):
        pair.clock.now += Timings().peer_idle_s
        pair.turn_times(2)
    for side in pair.sides:
        records = side.driver.engine.records
        for table in (records.producers, records.consumers, records.engines, records.workers):
            assert not table
        assert not side.port.peers
        assert not side.driver._remotes
        assert not side.driver._answered


def test_a_port_that_refuses_its_metadata_refuses_the_driver(pair: Pair) -> None:
    pair.producer.port.close()
    with pytest.raises(TransportError, match="closed"):
        Driver(
            identity=pair.producer.driver.identity,
            port=pair.producer.port,
            settings=Settings(),
            clock=pair.clock,
            start_meeting=lambda _: None,
            results=pair.producer.reports,
            observer=pair.producer.notes,
        )
