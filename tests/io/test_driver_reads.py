"""The driver of a consumer that reads, and of its producer, against in-memory ports."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvflow.core import Reason
from kvflow.core import events as ev
from kvflow.core.notices import Offer
from kvflow.core.timings import Timings
from kvflow.io.port import PostState

from .sides import (
    DESTINATION,
    PAIRS,
    SOURCE,
    Pair,
    load_of,
    offer_of,
    prefill_first,
    prefill_of,
    registration_first,
)


@pytest.fixture
def pull(pair: Pair) -> Pair:
    pair.reads = True
    return pair


def with_offer(pair: Pair, transfer: str) -> None:
    """The router tells of the finished prefill; its producer hears of the load afterwards."""
    pair.finish_prefill(transfer, SOURCE)
    pair.turn_times(3)
    pair.load(transfer, DESTINATION, offer=offer_of(transfer))


def reading(pair: Pair, transfer: str = "t") -> None:
    """Bring a transfer to where its first slices are in flight, and stay there."""
    pair.consumer.port.faults.pending_polls = 10**9
    with_offer(pair, transfer)
    for _ in range(20):
        pair.turn()
        if pair.consumer.port.pending and pair.producer.state("producer", transfer) == "lent":
            return
    raise AssertionError("nothing was posted")


def let_land(pair: Pair) -> None:
    pair.consumer.port.faults.pending_polls = 0
    for post in pair.consumer.port.posts.values():
        post.pending_polls = 0


# -- whole transfers -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [prefill_first, registration_first, with_offer])
@pytest.mark.parametrize("pending_polls", [0, 3])
def test_a_transfer_moves_exactly_its_blocks(
    pull: Pair, order: Callable[[Pair, str], None], pending_polls: int
) -> None:
    expected = pull.consumer.memory.with_blocks(pull.producer.memory, PAIRS)
    untouched = pull.producer.memory.array.copy()
    pull.consumer.port.faults.pending_polls = pending_polls
    order(pull, "t")
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), None)]
    assert pull.producer.reports.sent_ids == [prefill_of("t")]
    assert np.array_equal(pull.consumer.memory.array, expected)
    assert np.array_equal(pull.producer.memory.array, untouched)
    assert pull.is_clean()
    assert pull.producer.port.counts.posts == 0
    assert pull.consumer.notes.ended("consumer")[0].bytes == pull.consumer.port.counts.bytes_read


def test_blocks_that_the_consumer_has_are_not_read(pull: Pair) -> None:
    expected = pull.consumer.memory.with_blocks(pull.producer.memory, PAIRS[2:])
    pull.finish_prefill("t", SOURCE)
    pull.load("t", DESTINATION[2:], skip=2, offer=offer_of("t"))
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), None)]
    assert np.array_equal(pull.consumer.memory.array, expected)


def test_pushed_and_pulled_transfers_interleave_without_mixing(pair: Pair) -> None:
    pairs = [(block, 1 + block * 7 % 31) for block in range(1, 32)]
    expected = pair.consumer.memory.with_blocks(pair.producer.memory, pairs)
    pair.producer.port.faults.pending_polls = pair.consumer.port.faults.pending_polls = 1
    for block, to in pairs:
        name = f"t{block}"
        pair.reads = block % 3 != 0
        offer = offer_of(name, [block]) if block % 3 == 1 else None
        if block % 2:
            pair.load(name, [to], attempt=16 * (block + 1), offer=offer)
            pair.finish_prefill(name, [block])
        else:
            pair.finish_prefill(name, [block])
            pair.load(name, [to], attempt=16 * (block + 1), offer=offer)
    pair.turn_until_quiet()
    assert {reason for _, reason in pair.consumer.reports.received_ids} == {None}
    assert len(pair.producer.reports.sent_ids) == 31
    assert np.array_equal(pair.consumer.memory.array, expected)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("order", [prefill_first, registration_first, with_offer])
def test_lost_notices_are_sent_again(
    pull: Pair, order: Callable[[Pair, str], None], count: int
) -> None:
    pull.consumer.port.faults.sends_lost = count
    pull.producer.port.faults.sends_lost = count
    order(pull, "t")
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), None)]
    assert pull.producer.reports.sent_ids == [prefill_of("t")]


# -- what a router tells of, and what is true ------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        offer_of("another"),
        replace(offer_of("t"), blocks=((9, 9, 9, 9, 9, 9),)),
        replace(offer_of("t"), blocks=((10**6,) * 6,)),
        replace(offer_of("t"), blocks=((1,),)),
        replace(offer_of("t"), tokens=10**6),
    ],
    ids=["another prefill", "other blocks", "no such blocks", "too few blocks", "more tokens"],
)
def test_s8_what_the_producer_says_counts_and_not_what_the_router_told(
    pull: Pair, told: Offer
) -> None:
    expected = pull.consumer.memory.with_blocks(pull.producer.memory, PAIRS)
    pull.load("t", DESTINATION, offer=told)
    pull.turn_times(20)
    pull.finish_prefill("t", SOURCE)
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), None)]
    assert np.array_equal(pull.consumer.memory.array, expected)
    assert pull.is_clean()


def test_s8_what_was_let_go_while_it_was_read_does_not_count_though_nobody_said_so(
    pull: Pair,
) -> None:
    """Every word of the producer's is lost until the read has ended."""
    reading(pull)
    pull.producer.port.faults.sends_lost = 10**6
    pull.producer.driver.take(ev.ReleaseAsked(transfer_id="t"))
    assert pull.producer.reports.sent_ids == [prefill_of("t")]
    pull.producer.memory.array[:] = 0
    let_land(pull)
    pull.turn_times(20)
    assert pull.consumer.reports.received_ids == []
    pull.producer.port.faults.sends_lost = 0
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), Reason.CANCELLED)]
    assert pull.is_clean()


def test_s8_a_consumer_that_was_stopped_longer_than_its_lease_does_not_count_what_it_read(
    pull: Pair,
) -> None:
    reading(pull)
    for _ in range(70):  # only the producer runs
        pull.clock.now += 0.5
        pull.producer.driver.look()
    assert pull.producer.reports.sent_ids == [prefill_of("t")]
    pull.producer.memory.array[:] = 0
    let_land(pull)
    pull.turn_until_quiet()
    ((_, reason),) = pull.consumer.reports.received_ids
    assert reason is not None
    assert pull.is_clean()


# -- giving up -------------------------------------------------------------------------------------


def test_s2_an_aborted_load_keeps_its_blocks_until_its_own_reads_have_ended(pull: Pair) -> None:
    reading(pull)
    posts = pull.consumer.port.counts.posts
    assert posts < len(PAIRS)
    pull.consumer.driver.take(ev.LoadAborted(request_id=load_of("t")))
    pull.turn_times(10)
    assert pull.consumer.state("consumer", load_of("t")) == "stopping"
    assert pull.consumer.port.counts.posts == posts
    assert pull.consumer.reports.received_ids == []
    # The producer need not wait: it does not mind what is read.
    assert pull.producer.reports.sent_ids == [prefill_of("t")]
    let_land(pull)
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), Reason.ABORTED)]
    assert pull.is_clean()


def test_an_aborted_load_that_reads_nothing_yet_ends_at_once(pull: Pair) -> None:
    pull.load("t", DESTINATION)
    pull.turn_times(3)
    pull.consumer.driver.take(ev.LoadAborted(request_id=load_of("t")))
    assert pull.consumer.reports.received_ids == [(load_of("t"), Reason.ABORTED)]
    pull.turn()
    assert pull.producer.state("producer", "t") == "failed"


@pytest.mark.parametrize("failing", [1, 2])
def test_a_read_that_fails_is_posted_once_more(pull: Pair, failing: int) -> None:
    """A second failure is one too many; the producer's blocks need no lease to come back."""
    pull.consumer.port.faults.writes_failing = failing
    prefill_first(pull, "t")
    began = pull.clock.now
    pull.turn_until_quiet()
    wanted = None if failing == 1 else Reason.READ_FAILED
    assert pull.consumer.reports.received_ids == [(load_of("t"), wanted)]
    assert pull.producer.reports.sent_ids == [prefill_of("t")]
    assert pull.clock.now - began < 1
    pull.moves_another()
    assert pull.is_clean()


def test_s2_a_failing_read_is_answered_only_when_its_other_slices_have_ended(pull: Pair) -> None:
    reading(pull)
    pull.turn()
    assert pull.consumer.port.pending == 2
    first = min(pull.consumer.port.posts)
    pull.consumer.port.posts[first].state = PostState.FAILED
    pull.turn_times(5)
    assert pull.consumer.state("consumer", load_of("t")) == "reading"
    assert pull.consumer.port.counts.posts == 2
    let_land(pull)
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), None)]


# -- peers that are lost ---------------------------------------------------------------------------


def test_a_producer_that_dies_while_it_is_read_from_fails_the_load_without_a_fence_f1(
    pull: Pair,
) -> None:
    reading(pull)
    pull.producer.port.close()
    died = pull.clock.now
    while not pull.consumer.reports.received_ids:
        pull.clock.now += 0.01
        pull.consumer.driver.look()
    assert pull.consumer.reports.received_ids[0][1] in (Reason.PEER_LOST, Reason.READ_FAILED)
    assert pull.clock.now - died < Timings().fence_s
    assert not pull.consumer.port.posts
    assert pull.consumer.driver.engine.ledger.empty


def test_s2_a_producer_that_falls_silent_while_it_is_read_from_is_waited_for(pull: Pair) -> None:
    """The load is lost with it; its blocks are not, while a slice may still land in them."""
    reading(pull)
    pull.producer.port.faults.frozen = True
    pull.turn_times(1200)
    assert pull.consumer.state("consumer", load_of("t")) == "stopping"
    assert pull.consumer.reports.received_ids == []
    pull.producer.port.faults.frozen = False
    let_land(pull)
    pull.turn_times(20)
    assert pull.consumer.reports.received_ids == [(load_of("t"), Reason.PEER_LOST)]


def test_a_producer_that_falls_silent_before_it_is_read_from_costs_no_fence_f1(
    pull: Pair,
) -> None:
    pull.load("t", DESTINATION)
    pull.turn_times(3)
    pull.producer.port.faults.frozen = True
    timings = Timings()
    silent_s = (timings.renew_misses_max + 2) * timings.renew_interval_s
    pull.turn_times(int(100 * silent_s))
    assert pull.consumer.reports.received_ids == [(load_of("t"), Reason.PEER_LOST)]


def test_a_consumer_that_dies_while_it_reads_costs_one_transfer_and_no_lease_f1(
    pull: Pair,
) -> None:
    reading(pull)
    pull.consumer.port.close()
    died = pull.clock.now
    pull.turn_until_quiet_of_producer()
    assert pull.producer.reports.sent_ids == [prefill_of("t")]
    assert pull.clock.now - died < 3 * Timings().probe_silent_s


# -- shutting down ---------------------------------------------------------------------------------


def test_a_consumer_that_closes_ends_its_reads_first_f21(pull: Pair) -> None:
    reading(pull)
    pull.consumer.driver.take(ev.Closing())
    pull.turn_times(3)
    assert pull.consumer.reports.received_ids == []
    let_land(pull)
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), Reason.SHUTDOWN)]
    assert pull.producer.reports.sent_ids == [prefill_of("t")]


def test_a_producer_that_closes_lets_a_read_finish_f21(pull: Pair) -> None:
    reading(pull)
    pull.producer.driver.take(ev.Closing())
    pull.turn_times(3)
    assert pull.producer.reports.sent_ids == []
    let_land(pull)
    pull.turn_until_quiet()
    assert pull.consumer.reports.received_ids == [(load_of("t"), None)]
    assert pull.producer.reports.sent_ids == [prefill_of("t")]


def test_blocks_that_are_lent_are_given_back_when_the_port_is_closed_f21(pull: Pair) -> None:
    reading(pull)
    pull.producer.port.close()
    pull.producer.driver.abandon()
    assert pull.producer.reports.sent_ids == [prefill_of("t")]
