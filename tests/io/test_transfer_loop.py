"""`TransferLoop` with its thread and a real side channel, over in-memory ports."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from kvflow.core import Reason
from kvflow.core.effects import Moved
from kvflow.errors import TransportError
from kvflow.ids import Address
from kvflow.io.driver import Driver
from kvflow.settings import Settings
from kvflow.testing.port import MemoryNetwork

from .loops import FAST, HERE, Tarpit, Worker, fast, open_sockets, wait_until

PAIRS = [(3, 6), (4, 7), (5, 8), (9, 2), (1, 31), (20, 12)]
SOURCE = [source for source, _ in PAIRS]
DESTINATION = [to for _, to in PAIRS]
UNUSED_PORT = Address(HERE, 1)
NS_PER_US = 1000


@pytest.fixture
def producer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("producer", network, seed=1) as worker:
        yield worker


@pytest.fixture
def consumer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("consumer", network, seed=2) as worker:
        yield worker


# -- transfers -----------------------------------------------------------------------------------


def test_blocks_move_between_two_loops_prefill_first(producer: Worker, consumer: Worker) -> None:
    producer.transferred("t", consumer, PAIRS)
    assert not producer.notes.failures
    assert not consumer.notes.failures


def test_blocks_move_once_more_after_a_preemption_and_come_back_with_the_request_f9(
    producer: Worker, consumer: Worker
) -> None:
    producer.finish_prefill("t", SOURCE)
    consumer.load("t", producer.address, DESTINATION, keep=True)
    assert consumer.outcome("t") is None
    consumer.received.clear()
    others = [to + 10 for to in DESTINATION if to < 20]
    expected = consumer.memory.with_blocks(producer.memory, list(zip(SOURCE, others, strict=False)))
    consumer.load("t", producer.address, others, keep=True, again=True)
    assert consumer.outcome("t") is None
    assert (consumer.memory.array == expected).all()
    producer.collect()
    assert not producer.sent
    consumer.end_request("t")
    assert producer.is_sent("t")
    consumer.comes_to("consumer", "t", "released")
    assert not producer.notes.failures
    assert not consumer.notes.failures


def test_blocks_move_between_two_loops_registration_first(
    producer: Worker, consumer: Worker
) -> None:
    expected = consumer.memory.with_blocks(producer.memory, PAIRS)
    producer.faults.pending_polls = 2
    consumer.load("t", producer.address, DESTINATION)
    consumer.comes_to("consumer", "t", "registered")
    producer.start_prefill("t")
    producer.comes_to("producer", "t", "registered")
    producer.finish_prefill("t", SOURCE)
    assert consumer.outcome("t") is None
    assert producer.is_sent("t")
    assert (consumer.memory.array == expected).all()


def test_many_transfers_both_ways_at_once(producer: Worker, consumer: Worker) -> None:
    for number in range(1, 16):
        for one, other in ((producer, consumer), (consumer, producer)):
            name = f"{one.name}-{number}"
            one.finish_prefill(name, [number])
            other.load(name, one.address, [16 + number])
    for number in range(1, 16):
        for one, other in ((producer, consumer), (consumer, producer)):
            assert other.outcome(f"{one.name}-{number}") is None
            assert one.is_sent(f"{one.name}-{number}")
    for one, other in ((producer, consumer), (consumer, producer)):
        assert len(other.received) == len(set(other.received)) == 15
        for number in range(1, 16):
            assert (other.memory.block(16 + number) == one.memory.block(number)).all()


# -- meetings ------------------------------------------------------------------------------------


def test_a_load_from_nobody_fails_and_others_do_not(producer: Worker, consumer: Worker) -> None:
    consumer.load("lost", UNUSED_PORT, [30])
    producer.transferred("t", consumer, PAIRS)
    assert consumer.outcome("lost") is Reason.UNREACHABLE
    ended = consumer.notes.ended
    wait_until(lambda: "lost" in [moved.key for moved in ended("consumer")])
    (moved,) = [m for m in ended("consumer") if m.key == "lost"]
    assert str(UNUSED_PORT) in moved.peer


@pytest.mark.parametrize("data", [b"", b"\x00\x00"])
def test_a_producer_that_does_not_answer_delays_nobody_else(
    producer: Worker, consumer: Worker, data: bytes
) -> None:
    with Tarpit(data) as tarpit:
        consumer.load("slow", tarpit.address, [30])
        wait_until(lambda: tarpit.connections)
        producer.transferred("t", consumer, PAIRS)
        assert [request for request, _ in consumer.received] == ["load-t"]
        assert consumer.outcome("slow") is Reason.UNREACHABLE
        assert tarpit.were_closed()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["a..b", "x" * 64, "no-such-host.invalid"])
def test_a_host_that_cannot_be_one_fails_its_load_only(
    producer: Worker, consumer: Worker, host: str
) -> None:
    consumer.load("lost", Address(host, 5600), [30])
    assert consumer.outcome("lost") is Reason.UNREACHABLE
    assert not consumer.notes.failures
    producer.transferred("t", consumer, PAIRS)


def test_a_side_channel_that_comes_late_is_met_at_a_later_try(
    producer: Worker, consumer: Worker
) -> None:
    producer.side_channel.close()
    producer.finish_prefill("t", SOURCE)
    consumer.load("t", producer.address, DESTINATION)
    wait_until(lambda: any(m.dest == "backing_off" for m in consumer.notes.moves))
    producer.side_channel.listen(producer.address)
    assert consumer.outcome("t") is None


# -- meetings cancelled --------------------------------------------------------------------------

Answers = list[str]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """How each meeting was answered, in order."""
    heard: Answers = []
    for name in ("met", "not_met"):
        original = getattr(Driver, name)

        def noted(
            driver: Driver,
            address: Address,
            what: object,
            name: str = name,
            original: Callable[..., None] = original,
        ) -> None:
            heard.append(f"{name}: {what}" if name == "not_met" else name)
            original(driver, address, what)

        monkeypatch.setattr(Driver, name, noted)
    return heard


def cancel_meetings(worker: Worker) -> None:
    async def cancel() -> None:
        for meeting in list(worker.loop._meetings):
            meeting.cancel()

    worker.loop._thread.run(cancel(), 10.0)


def tasks_of(worker: Worker) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return worker.loop._thread.run(count(), 10.0)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["start", "connect", "drain", "read_length", "read_body"])
def test_a_meeting_cancelled_anywhere_is_answered_once_and_tried_again(
    producer: Worker,
    consumer: Worker,
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    reached: list[object] = []

    async def wait(*_: object) -> None:
        reached.append(place)
        await asyncio.Event().wait()

    with Tarpit(b"\0\0\1\0" if place == "read_body" else b"") as tarpit:
        address = tarpit.address
        with monkeypatch.context() as patch:
            if place == "connect":
                patch.setattr(asyncio, "open_connection", wait)
            elif place == "drain":
                patch.setattr(asyncio.StreamWriter, "drain", wait)
            elif place == "start":
                start = consumer.loop._start_meeting

                def start_and_cancel(where: Address) -> None:
                    start(where)
                    for meeting in consumer.loop._meetings:
                        meeting.cancel()
                    reached.append(place)

                patch.setattr(consumer.loop._driver, "_start_meeting", start_and_cancel)
            consumer.load("t", address, [1])
            wait_until(lambda: reached or (place.startswith("read") and tarpit.connections))
            if place != "start":
                assert tasks_of(consumer) == 1
                assert answers == []
                cancel_meetings(consumer)
            wait_until(lambda: answers)
        assert answers[0] == "not_met: cancelled"
        assert consumer.outcome("t") is Reason.UNREACHABLE
        wait_until(lambda: tasks_of(consumer) == 0)
        assert len(answers) == len(meetings_begun(consumer))
        assert tarpit.were_closed()
    assert not consumer.notes.failures
    producer.transferred("after", consumer, PAIRS)


def meetings_begun(worker: Worker) -> list[Moved]:
    return [m for m in worker.notes.moves if m.machine == "peer" and m.dest == "meeting"]


# -- the thread ----------------------------------------------------------------------------------


def test_nothing_is_left_of_a_loop_that_was_closed(network: MemoryNetwork) -> None:
    before = open_sockets()
    with (
        Worker("producer", network, seed=1) as producer,
        Worker("consumer", network, seed=2) as consumer,
    ):
        producer.transferred("t", consumer, PAIRS)
    assert not producer.loop._thread.is_alive
    assert not consumer.loop._thread.is_alive
    assert producer.port.is_closed
    assert consumer.port.is_closed
    assert not network.ports
    wait_until(lambda: open_sockets() <= before, "descriptors closed")


def test_a_closed_loop_takes_whatever_is_asked_of_it(consumer: Worker) -> None:
    consumer.loop.close()
    consumer.load("late", UNUSED_PORT, [1])
    consumer.loop.submit([])
    consumer.loop.suspend()
    consumer.loop.close()
    with pytest.raises(TransportError, match="ended"):
        consumer.open()
    assert not consumer.notes.failures


def test_a_loop_opens_once(consumer: Worker) -> None:
    with pytest.raises(TransportError, match="open already"):
        consumer.open()


def test_a_loop_whose_port_cannot_be_made_can_be_opened_later(
    consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.loop.suspend()
    consumer.loop.suspend()
    consumer.faults.metadata_unreadable = False

    def refuse(*_: object) -> None:
        raise TransportError("memory cannot be registered")

    with monkeypatch.context() as patch:
        patch.setattr("kvflow.testing.port.MemoryPort.register", refuse)
        with pytest.raises(TransportError, match="memory cannot be registered"):
            consumer.open()
    assert consumer.port.is_closed
    consumer.open()


def test_a_look_that_raises_does_not_stop_the_looking(
    producer: Worker, consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while slices are being posted, when no timer is armed."""
    look = Driver.look
    raised: list[bool] = []

    def look_or_raise(driver: Driver) -> bool:
        if driver.can_post and len(raised) < 2:
            raised.append(True)
            raise ZeroDivisionError("a bug")
        return look(driver)

    monkeypatch.setattr(Driver, "look", look_or_raise)
    monkeypatch.setattr(
        "asyncio.log.logger.error", lambda *_, **__: None
    )  # what asyncio says of it
    producer.transferred("t", consumer, PAIRS)
    assert raised == [True, True]


def receives_per_s(worker: Worker, seconds: float = 0.3) -> float:
    before, start = worker.port.counts.receives, time.monotonic()
    time.sleep(seconds)
    return (worker.port.counts.receives - before) / (time.monotonic() - start)


def interval_us(worker: Worker) -> float:
    """How often the loop is to look; how often it does is up to the machine as well."""
    timer = worker.loop._timer
    assert timer is not None
    return timer._interval_ns / NS_PER_US


def test_a_loop_looks_often_only_while_something_is_awaited(network: MemoryNetwork) -> None:
    paced = Settings(
        timings=FAST.timings, poll_awaiting_us=500, poll_expectant_us=5_000, poll_idle_us=50_000
    )
    with (
        Worker("producer", network, seed=1, settings=paced) as producer,
        Worker("consumer", network, seed=2, settings=paced) as consumer,
    ):
        assert receives_per_s(consumer) <= 1 / 0.050 + 10
        producer.start_prefill("t")
        producer.comes_to("producer", "t", "allocated")
        wait_until(lambda: interval_us(producer) == 5_000)
        assert receives_per_s(producer) <= 1 / 0.005 + 50
        consumer.load("t", producer.address, DESTINATION)
        consumer.comes_to("consumer", "t", "registered")
        wait_until(lambda: interval_us(consumer) == 500)
        producer.finish_prefill("t", SOURCE)
        assert consumer.outcome("t") is None
        wait_until(lambda: interval_us(consumer) == 50_000)


@pytest.mark.slow
def test_a_paused_write_does_not_spin(network: MemoryNetwork) -> None:
    paced = Settings(
        timings=fast(lease_s=60.0).timings,
        poll_quick_us=2_000,
        post_bytes_max=4096,
        post_runs_max=1,
        posts_in_flight_max=1,
    )
    with (
        Worker("producer", network, seed=1, settings=paced) as producer,
        Worker("consumer", network, seed=2, settings=paced) as consumer,
    ):
        producer.faults.pending_polls = 60
        producer.finish_prefill("t", SOURCE)
        consumer.load("t", producer.address, DESTINATION)
        wait_until(lambda: producer.port.counts.posts)
        consumer.faults.sends_lost = 10**9
        wait_until(lambda: has_paused(producer), "the write pauses")
        assert receives_per_s(producer) <= 1 / 0.002 + 50
        assert producer.state("producer", "t") == "transferring"
        assert consumer.outcome("t") is Reason.PEER_LOST


def has_paused(worker: Worker) -> bool:
    driver = worker.loop._driver
    assert driver is not None
    (write,) = driver._transfers
    return write.can_post(1) and not driver.can_post


def test_while_the_model_runs_the_loop_looks_more_seldom(network: MemoryNetwork) -> None:
    paced = Settings(timings=FAST.timings, poll_awaiting_us=500, poll_computing_us=3_000)
    with (
        Worker("producer", network, seed=1, settings=paced) as producer,
        Worker("consumer", network, seed=2, settings=paced) as consumer,
    ):
        consumer.load("t", producer.address, DESTINATION)
        consumer.comes_to("consumer", "t", "registered")
        consumer.loop.model_runs = True
        wait_until(lambda: interval_us(consumer) == 3_000)
        consumer.loop.model_runs = False
        wait_until(lambda: interval_us(consumer) == 500)
        producer.finish_prefill("t", SOURCE)
        assert consumer.outcome("t") is None
