"""A loop that is closed or suspended in every state that a transfer can be in.

For each: the call returns, the thread and the port end, whatever vLLM waits for is reported exactly
once, and the other side is told or finds out.
"""

from collections.abc import Callable, Iterator

import pytest

from kvflow.core import Reason
from kvflow.core import events as ev
from kvflow.core.producer import LIVE as PRODUCER_LIVE
from kvflow.ids import Address
from kvflow.io.driver import Driver
from kvflow.testing.port import MemoryNetwork

from .loops import Tarpit, Worker, closes, wait_until
from .sides import load_of, prefill_of

pytestmark = pytest.mark.slow

NEVER = 10**9
PAIRS = [(3, 6), (4, 7), (9, 2), (1, 31)]
SOURCE = [source for source, _ in PAIRS]
DESTINATION = [to for _, to in PAIRS]


@pytest.fixture
def tarpit() -> Iterator[Tarpit]:
    with Tarpit() as tarpit:
        yield tarpit


@pytest.fixture
def producer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("producer", network, seed=1) as worker:
        yield worker


@pytest.fixture
def consumer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("consumer", network, seed=2) as worker:
        yield worker


def transferring(producer: Worker, consumer: Worker) -> None:
    producer.faults.pending_polls = NEVER
    producer.finish_prefill("t", SOURCE)
    consumer.load("t", producer.address, DESTINATION)
    consumer.comes_to("consumer", "t", "transferring")
    wait_until(lambda: producer.port.pending)


def allocated(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    consumer.load("t", tarpit, DESTINATION)


def registering(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    producer.faults.frozen = True
    consumer.load("t", producer.address, DESTINATION)


def registered(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    consumer.load("t", producer.address, DESTINATION)


def transferring_state(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    transferring(producer, consumer)


def draining(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    transferring(producer, consumer)
    consumer.abort_load("t")


def fencing(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    consumer.load("t", producer.address, DESTINATION)
    consumer.comes_to("consumer", "t", "registered")
    producer.port.close()


def releasing(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    consumer.release("t", tarpit)


def received(producer: Worker, consumer: Worker, tarpit: Address) -> None:
    producer.finish_prefill("t", SOURCE)
    consumer.load("t", producer.address, DESTINATION)


CONSUMER = {
    "allocated": allocated,
    "registering": registering,
    "registered": registered,
    "transferring": transferring_state,
    "draining": draining,
    "fencing": fencing,
    "releasing": releasing,
    "received": received,
}
ENDS = {
    "allocated": {Reason.SHUTDOWN},
    "registering": {Reason.SHUTDOWN, Reason.PEER_LOST},
    "registered": {Reason.SHUTDOWN},
    "transferring": {Reason.SHUTDOWN},
    "draining": {Reason.ABORTED, Reason.SHUTDOWN},
    "fencing": {Reason.PEER_LOST},
    "received": {None},
}


@pytest.mark.parametrize("state", CONSUMER)
def test_a_consumer_closed_in_any_state_reports_its_load_once(
    producer: Worker, consumer: Worker, tarpit: Tarpit, state: str
) -> None:
    CONSUMER[state](producer, consumer, tarpit.address)
    consumer.comes_to("consumer", "t", state)
    closes(consumer)
    consumer.collect()
    if state == "releasing":
        assert consumer.received == []
    else:
        ((request, reason),) = consumer.received
        assert request == load_of("t")
        assert reason in ENDS[state]
    assert not consumer.loop._thread.is_alive
    assert consumer.port.is_closed
    assert not consumer.notes.failures


@pytest.mark.parametrize("state", ["registered", "transferring"])
def test_a_producer_is_told_by_a_consumer_that_closes(
    producer: Worker, consumer: Worker, tarpit: Tarpit, state: str
) -> None:
    CONSUMER[state](producer, consumer, tarpit.address)
    consumer.comes_to("consumer", "t", state)
    closes(consumer)
    wait_until(lambda: producer.notes.ended("producer"))
    (ended,) = producer.notes.ended("producer")
    assert ended.reason is Reason.CANCELLED
    assert ended.dest not in PRODUCER_LIVE
    if state == "transferring":
        assert producer.is_sent("t")


# -- producer ------------------------------------------------------------------------------------


def p_allocated(producer: Worker, consumer: Worker) -> None:
    producer.start_prefill("t")


def p_preempted(producer: Worker, consumer: Worker) -> None:
    producer.start_prefill("t")
    producer.preempt_prefill("t")


def p_held(producer: Worker, consumer: Worker) -> None:
    consumer.load("t", producer.address, DESTINATION)


def p_registered(producer: Worker, consumer: Worker) -> None:
    producer.start_prefill("t")
    consumer.load("t", producer.address, DESTINATION)


def p_prefilled(producer: Worker, consumer: Worker) -> None:
    producer.finish_prefill("t", SOURCE)


def p_kept(producer: Worker, consumer: Worker) -> None:
    producer.finish_prefill("t", SOURCE)
    consumer.load("t", producer.address, DESTINATION, keep=True)


def p_draining(producer: Worker, consumer: Worker) -> None:
    transferring(producer, consumer)
    consumer.abort_load("t")


PRODUCER: dict[str, Callable[[Worker, Worker], None]] = {
    "allocated": p_allocated,
    "preempted": p_preempted,
    "held": p_held,
    "registered": p_registered,
    "prefilled": p_prefilled,
    "transferring": transferring,
    "draining": p_draining,
    "kept": p_kept,
}


@pytest.mark.parametrize("state", PRODUCER)
def test_a_producer_closed_in_any_state_gives_its_blocks_back_once(
    producer: Worker, consumer: Worker, state: str
) -> None:
    PRODUCER[state](producer, consumer)
    producer.comes_to("producer", "t", state)
    closes(producer)
    producer.collect()
    pinned = state in ("prefilled", "transferring", "draining", "kept")
    assert producer.sent == ([prefill_of("t")] if pinned else [])
    assert not producer.loop._thread.is_alive
    assert producer.port.is_closed
    assert not producer.notes.failures
    if state in ("held", "registered"):
        assert consumer.outcome("t") is Reason.SHUTDOWN
    elif state in ("transferring", "draining"):
        assert consumer.outcome("t") in (Reason.PEER_LOST, Reason.ABORTED, Reason.SHUTDOWN)


def test_a_write_that_can_finish_in_time_does_so_before_the_producer_closes(
    producer: Worker, consumer: Worker
) -> None:
    expected = consumer.memory.with_blocks(producer.memory, PAIRS)
    transferring(producer, consumer)
    producer.end_posts_after(30)
    closes(producer)
    assert consumer.outcome("t") is None
    assert (consumer.memory.array == expected).all()
    producer.collect()
    assert producer.sent == [prefill_of("t")]


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_what_is_submitted_while_closing_is_reported_too(
    producer: Worker, consumer: Worker, tarpit: Tarpit, side: str
) -> None:
    transferring(producer, consumer)
    closing = producer if side == "producer" else consumer
    driver = closing.loop._driver
    assert driver is not None
    take = driver.take

    def take_and_more(event: ev.Event) -> None:
        take(event)
        if isinstance(event, ev.Closing):
            consumer.load("late", tarpit.address, [20])
            producer.finish_prefill("late", [20])

    driver.take = take_and_more
    closes(closing)
    closing.collect()
    reported = [request for request, _ in closing.received]
    assert reported.count(load_of("late")) == (side == "consumer")
    assert closing.sent.count(prefill_of("late")) == (side == "producer")


# -- suspend -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["producer", "consumer"])
def test_after_a_suspension_a_worker_is_a_new_incarnation_and_transfers_again(
    producer: Worker, consumer: Worker, which: str
) -> None:
    producer.transferred("before", consumer, PAIRS)
    worker = producer if which == "producer" else consumer
    first = worker.port
    worker.loop.suspend()
    assert first.is_closed
    worker.loop.suspend()
    worker.open()
    assert worker.port.name != first.name
    for attempt in range(3):
        # A peer that has not noticed yet may fail once.
        name = f"after-{attempt}"
        producer.finish_prefill(name, SOURCE)
        consumer.load(name, producer.address, DESTINATION)
        if consumer.outcome(name) is None:
            break
    expected = consumer.memory.with_blocks(producer.memory, PAIRS)
    assert consumer.outcome(name) is None
    assert (consumer.memory.array == expected).all()
    assert attempt <= 1


@pytest.mark.parametrize("silent", [False, True])
def test_a_suspension_in_the_middle_of_a_transfer_ends_it_for_both(
    network: MemoryNetwork, producer: Worker, consumer: Worker, silent: bool
) -> None:
    network.dead_are_silent = silent
    transferring(producer, consumer)
    producer.loop.suspend()
    producer.collect()
    assert producer.sent == [prefill_of("t")]
    assert consumer.outcome("t") is not None
    producer.faults.pending_polls = 0
    producer.open()
    wait_until(lambda: transfers(producer, consumer), "transfers again")
    assert len(producer.sent) == len(set(producer.sent))
    assert len(consumer.received) == len({request for request, _ in consumer.received})


def transfers(producer: Worker, consumer: Worker) -> bool:
    name = f"next-{len(consumer.received)}"
    producer.finish_prefill(name, SOURCE)
    consumer.load(name, producer.address, DESTINATION)
    return consumer.outcome(name) is None


def test_what_is_submitted_while_suspended_is_taken_when_open_again(
    producer: Worker, consumer: Worker
) -> None:
    producer.loop.suspend()
    producer.finish_prefill("t", SOURCE)
    producer.open()
    consumer.load("t", producer.address, DESTINATION)
    assert consumer.outcome("t") is None


def test_a_loop_that_hangs_does_not_hang_close(
    consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflow.io.transfer_loop._CLOSE_TIMEOUT_S", 0.1)
    stuck: list[bool] = [True]
    hangs: list[bool] = []

    def look(driver: Driver) -> None:
        hangs.append(True)
        wait_until(lambda: not stuck)

    stop = consumer.loop._thread.stop
    monkeypatch.setattr(consumer.loop._thread, "stop", lambda: stop(0.1))
    consumer.start_prefill("t")
    consumer.comes_to("producer", "t", "allocated")
    monkeypatch.setattr(Driver, "look", look)
    wait_until(lambda: bool(hangs))
    closes(consumer)
    assert [what for what, _ in consumer.notes.failures] == ["close", "close"]
    stuck.clear()
    wait_until(lambda: not consumer.loop._thread.is_alive)
