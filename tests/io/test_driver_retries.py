"""The driver when a WRITE fails: both sides over in-memory ports whose faults strike some posts."""

from collections.abc import Callable

import numpy as np
import pytest

from kvflow.core import Reason
from kvflow.core import events as ev
from kvflow.core.timings import Timings
from kvflow.settings import Settings

from .sides import (
    PAIRS,
    SOURCE,
    Clock,
    Pair,
    Side,
    load_of,
    prefill_first,
    prefill_of,
    registration_first,
)

MakeSide = Callable[..., Side]


@pytest.mark.parametrize("order", [prefill_first, registration_first])
@pytest.mark.parametrize("fault", ["posts_refused", "writes_failing", "polls_raising"])
def test_a_write_that_fails_once_is_tried_once_more(
    pair: Pair, order: Callable[[Pair, str], None], fault: str
) -> None:
    expected = pair.consumer.memory.with_blocks(pair.producer.memory, PAIRS)
    setattr(pair.producer.port.faults, fault, 1)
    order(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert np.array_equal(pair.consumer.memory.array, expected)
    assert pair.is_clean()
    assert pair.attempts_written() == [16, 17]


@pytest.mark.parametrize("fault", ["posts_refused", "writes_failing"])
def test_a_write_that_fails_twice_is_told_to_both_sides(pair: Pair, fault: str) -> None:
    setattr(pair.producer.port.faults, fault, 10**9)
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.WRITE_FAILED)]
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert pair.attempts_written() == [16, 17]
    assert pair.is_clean()
    setattr(pair.producer.port.faults, fault, 0)
    pair.moves_another()


def test_a_write_that_fails_is_not_tried_again_if_retries_are_off(
    make_side: MakeSide, clock: Clock
) -> None:
    once = Settings(timings=Timings(retries_max=0))
    pair = Pair(make_side("producer", settings=once), make_side("consumer", settings=once), clock)
    pair.producer.port.faults.posts_refused = 1
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.WRITE_FAILED)]
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert pair.attempts_written() == [16]
    pair.moves_another()


def test_a_write_that_cannot_be_planned_is_not_kept_for_a_retry(pair: Pair) -> None:
    pair.finish_prefill("t", SOURCE[:2])
    pair.load("t", [31, 32])
    while not pair.producer.notes.failures:
        pair.turn()
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.WRITE_FAILED)]
    assert len(pair.producer.notes.failures) == 1
    assert pair.producer.port.counts.posts == 0
    pair.moves_another()


def test_the_blocks_of_a_failed_write_go_back_if_nobody_tries_again(pair: Pair) -> None:
    pair.moves_another()
    pair.producer.port.faults.posts_refused = 1
    prefill_first(pair, "t")
    pair.consumer.port.faults.sends_lost = 10**9
    pair.turn_times(2)
    assert pair.producer.state("producer", "t") == "prefilled"
    assert pair.producer.reports.sent_ids == [prefill_of("next")]
    pair.consumer.port.close()
    pair.turn_until_quiet_of_producer()
    assert pair.producer.reports.sent_ids == [prefill_of("next"), prefill_of("t")]


def test_a_write_that_fails_while_the_producer_closes_is_over(pair: Pair) -> None:
    pair.producer.port.faults.pending_polls = 3
    pair.producer.port.faults.writes_failing = 1
    prefill_first(pair, "t")
    while not pair.producer.port.pending:
        pair.turn()
    pair.producer.driver.take(ev.Closing())
    while not pair.producer.reports.sent_ids:
        pair.turn()
    assert pair.attempts_written() == [16]
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.WRITE_FAILED)]
