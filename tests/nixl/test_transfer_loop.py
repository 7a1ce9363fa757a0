"""Two `TransferLoop`s with real NIXL agents and real side channels, in two processes."""

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvflow.core import Reason, Timings
from kvflow.core.effects import Moved

from .conftest import SEED, producers_memory
from .led_process import LedEngine
from .loop_process import BLOCK_BYTES, BLOCKS, Engine, digest

pytestmark = pytest.mark.nixl

TRANSFERS = 20


def test_twenty_transfers_of_mixed_sizes_in_both_orders_move_exactly_their_blocks(
    shared_producer: LedEngine, consumer: Engine
) -> None:
    """The destinations are disjoint, so in the end all memory is known, byte by byte."""
    rng = random.Random(3)
    source_memory = producers_memory()
    expected = consumer.memory.copy()
    free = rng.sample(range(1, BLOCKS), BLOCKS - 1)
    sizes = [1, 1, 2, 3, 40, 60] + [rng.randint(1, 9) for _ in range(TRANSFERS - 6)]
    rng.shuffle(sizes)
    for number, size in enumerate(sizes):
        destination, free = free[:size], free[size:]
        if number % 3 == 0:
            destination = sorted(destination)
        start = rng.randrange(1, BLOCKS - size)
        source = list(range(start, start + size))
        for ours, theirs in zip(destination, source, strict=True):
            expected[:, ours, :BLOCK_BYTES] = source_memory[:, theirs, :BLOCK_BYTES]
        name = f"mixed-{number}"
        if number % 2:
            consumer.load(name, shared_producer.address, destination)
            shared_producer.ask("start_prefill", transfer=name)
            shared_producer.ask("finish_prefill", transfer=name, blocks=source)
        else:
            shared_producer.ask("finish_prefill", transfer=name, blocks=source)
            consumer.load(name, shared_producer.address, destination)
    for number in range(TRANSFERS):
        assert consumer.outcome(f"mixed-{number}") is None
    assert np.array_equal(consumer.memory, expected)
    assert shared_producer.ask("digest")["digest"] == digest(source_memory)
    wanted = {f"prefill-mixed-{number}" for number in range(TRANSFERS)}
    for _ in range(100):
        sent = shared_producer.ask("sent")["sent"]
        if wanted <= {*sent}:
            break
    assert wanted <= {*sent}
    assert len(sent) == len({*sent})
    assert shared_producer.ask("faults")["faults"] == consumer.notes.faults == []


def test_bytes_are_here_when_the_load_is_reported(
    shared_producer: LedEngine, consumer: Engine
) -> None:
    source_memory = producers_memory()
    for number in range(1, 21):
        name = f"again-{number}"
        consumer.memory[:] = 0
        consumer.load(name, shared_producer.address, [7])
        shared_producer.ask("finish_prefill", transfer=name, blocks=[number])
        assert consumer.outcome(name) is None
        assert np.array_equal(
            consumer.memory[:, 7, :BLOCK_BYTES], source_memory[:, number, :BLOCK_BYTES]
        )


def test_a_load_from_a_killed_producer_fails_and_another_producer_serves(
    own_producer: LedEngine, shared_producer: LedEngine, consumer: Engine
) -> None:
    own_producer.ask("finish_prefill", transfer="first", blocks=[1])
    consumer.load("first", own_producer.address, [1])
    assert consumer.outcome("first") is None
    consumer.load("orphan", own_producer.address, [2])
    own_producer.kill()
    shared_producer.ask("finish_prefill", transfer="other", blocks=[3])
    consumer.load("other", shared_producer.address, [3])
    assert consumer.outcome("other") is None
    assert consumer.outcome("orphan") in (Reason.PEER_LOST, Reason.UNREACHABLE)
    assert consumer.notes.faults == []


def test_a_producer_that_closes_tells_its_consumer(
    own_producer: LedEngine, consumer: Engine
) -> None:
    """The notice leaves right before the agent is shut down, and still arrives."""
    consumer.load("waiting", own_producer.address, [1])
    own_producer.ask("start_prefill", transfer="waiting")
    own_producer.ask("finish_prefill", transfer="first", blocks=[1])
    consumer.load("first", own_producer.address, [2])
    assert consumer.outcome("first") is None
    told = own_producer.ask("close")
    assert told["received"] == {}
    assert consumer.outcome("waiting") is Reason.SHUTDOWN


def test_a_consumer_that_closes_tells_its_producer(own_producer: LedEngine) -> None:
    consumer = Engine("leaving", seed=6)
    consumer.load("waiting", own_producer.address, [1])
    own_producer.ask("finish_prefill", transfer="first", blocks=[1])
    consumer.load("first", own_producer.address, [2])
    assert consumer.outcome("first") is None
    consumer.close()
    assert consumer.outcome("waiting") is Reason.SHUTDOWN
    own_producer.ask("finish_prefill", transfer="waiting", blocks=[1])
    for _ in range(100):
        sent = own_producer.ask("sent")["sent"]
        if "prefill-waiting" in sent:
            break
    assert "prefill-waiting" in sent


# -- consumers that die --------------------------------------------------------------------------

NOT_A_LEASE_S = Timings().lease_s / 2
"""What ends by its lease ends later than this."""


@pytest.fixture
def producer() -> Iterator[Engine]:
    """In this process, so that its records can be watched."""
    with Engine("producer", seed=8) as producer:
        yield producer


@pytest.fixture
def led_consumer(producer: Engine) -> Iterator[LedEngine]:
    """One that has had a transfer."""
    led = LedEngine("consumer", SEED)
    led.ask("load", transfer="first", address=producer.address, blocks=[1])
    producer.finish_prefill("first", [1])
    assert led.ask("outcome", transfer="first")["reason"] is None
    yield led
    led.close()


def until(engine: Engine, transfer: str, *states: str) -> Moved:
    """The move with which a producer's record came to one of the states, without a lease's help."""
    deadline = time.monotonic() + NOT_A_LEASE_S
    while True:
        moved = engine.notes.latest.get(("producer", transfer))
        if moved is not None and moved.dest in states:
            return moved
        assert time.monotonic() < deadline, moved
        time.sleep(0.01)


def test_a_consumer_that_is_killed_while_it_waits_for_its_prefill_is_found_f1(
    producer: Engine, led_consumer: LedEngine
) -> None:
    producer.start_prefill("t")
    led_consumer.ask("load", transfer="t", address=producer.address, blocks=[2])
    until(producer, "t", "registered")
    led_consumer.kill()
    assert until(producer, "t", "failed").reason is Reason.PEER_LOST
    producer.finish_prefill("t", [1])
    producer.collect_sent("t", NOT_A_LEASE_S)
    assert producer.notes.faults == []


def test_a_consumer_that_is_killed_while_its_write_is_paused_gives_the_blocks_back_f1(
    producer: Engine, led_consumer: LedEngine
) -> None:
    """It was stopped before, so its permission to write has run out; then it is killed."""
    led_consumer.ask("load", transfer="t", address=producer.address, blocks=[2])
    until(producer, "t", "held")
    led_consumer.stop()
    time.sleep(Timings().write_lease_s + 2 * Timings().renew_interval_s)
    producer.finish_prefill("t", [1])
    until(producer, "t", "transferring")
    led_consumer.kill()
    ended = until(producer, "t", "sent", "failed")
    assert (ended.dest, ended.reason) == ("failed", Reason.PEER_LOST)
    producer.collect_sent("t", NOT_A_LEASE_S)
    assert producer.sent == ["prefill-first", "prefill-t"]
    assert producer.notes.faults == []


def test_a_producer_that_is_stopped_for_a_while_costs_at_most_its_own_loads(
    own_producer: LedEngine, consumer: Engine
) -> None:
    own_producer.ask("finish_prefill", transfer="first", blocks=[1])
    consumer.load("first", own_producer.address, [1])
    assert consumer.outcome("first") is None
    own_producer.stop()
    consumer.load("late", own_producer.address, [2])
    assert consumer.outcome("late") is Reason.PEER_LOST
    own_producer.go_on()
    before = consumer.memory.copy()
    own_producer.ask("finish_prefill", transfer="late", blocks=[9])
    for number in range(20):
        name = f"next-{number}"
        own_producer.ask("finish_prefill", transfer=name, blocks=[5])
        consumer.load(name, own_producer.address, [4])
        if consumer.outcome(name) is None:
            break
    assert consumer.outcome(name) is None
    before[:, 4, :BLOCK_BYTES] = producers_memory()[:, 5, :BLOCK_BYTES]
    assert np.array_equal(consumer.memory, before)
