"""Streamed push through `TransferLoop`: stretches, blocks that are taken away, devices."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvflow.core import events as ev
from kvflow.ids import RequestId, TransferId
from kvflow.io.gates import Gates
from kvflow.testing.port import MemoryNetwork

from .loops import Worker, fast, wait_until

PAIRS = [(3, 6), (4, 7), (5, 8), (9, 2), (1, 31), (20, 12)]
SOURCE = [source for source, _ in PAIRS]
DESTINATION = [to for _, to in PAIRS]
NEVER = 2**30
HASTY = fast(slice_max_s=0.5, write_drain_s=10.0)
"""Waits little for a write whose blocks are taken away, and long for its end."""
PATIENT = fast(slice_max_s=5.0, fence_s=6.0, fence_silent_s=6.0, tombstone_s=12.0)


@pytest.fixture
def producer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("producer", network, seed=1, settings=HASTY) as worker:
        yield worker


@pytest.fixture
def patient(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("producer", network, seed=1, settings=PATIENT) as worker:
        yield worker


@pytest.fixture
def consumer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("consumer", network, seed=2) as worker:
        yield worker


def registered(producer: Worker, consumer: Worker) -> None:
    """vLLM computes the prompt `t`, and the consumer has registered."""
    producer.start_prefill("t")
    consumer.load("t", producer.address, DESTINATION)
    producer.comes_to("producer", "t", "registered")
    consumer.comes_to("consumer", "t", "registered")


def test_stretches_make_up_the_whole_and_no_block_is_written_twice(
    producer: Worker, consumer: Worker
) -> None:
    expected = consumer.memory.with_blocks(producer.memory, PAIRS)
    registered(producer, consumer)
    for stop in (2, 3, 5):
        producer.advance_prefill("t", SOURCE[:stop])
        part = consumer.memory.with_blocks(producer.memory, PAIRS[:stop])
        wait_until(lambda part=part: (consumer.memory.array == part).all(), f"{stop} blocks")
    producer.finish_prefill("t", SOURCE)
    assert consumer.outcome("t") is None
    assert producer.is_sent("t")
    assert (consumer.memory.array == expected).all()
    assert producer.port.counts.bytes_written == len(PAIRS) * producer.memory.block(0).size


def test_the_consumer_has_all_before_vllm_ends_the_request(
    producer: Worker, consumer: Worker
) -> None:
    expected = consumer.memory.with_blocks(producer.memory, PAIRS)
    registered(producer, consumer)
    producer.advance_prefill("t", SOURCE)
    assert consumer.outcome("t") is None
    assert (consumer.memory.array == expected).all()
    producer.collect()
    assert not producer.sent
    producer.finish_prefill("t", SOURCE)
    assert producer.is_sent("t")


def test_whoever_takes_blocks_away_waits_until_nothing_reads_them_s3(
    patient: Worker, consumer: Worker
) -> None:
    registered(patient, consumer)
    patient.end_posts_after(NEVER)
    patient.advance_prefill("t", SOURCE[:3])
    wait_until(lambda: patient.port.posts, "something is posted")
    patient.end_posts_after(20)
    patient.preempt_prefill("t")
    assert not patient.port.posts
    assert patient.state("producer", "t") == "held"
    patient.end_posts_after(0)
    patient.memory.array[:, SOURCE[:3]] = 0  # another request's by now
    others = [block + 1 for block in SOURCE]
    expected = consumer.memory.with_blocks(
        patient.memory, list(zip(others, DESTINATION, strict=True))
    )
    patient.start_prefill("t")
    patient.finish_prefill("t", others)
    assert consumer.outcome("t") is None
    assert (consumer.memory.array == expected).all()


def test_the_wait_for_a_write_that_hangs_is_bounded_and_its_end_does_not_count(
    producer: Worker, consumer: Worker
) -> None:
    registered(producer, consumer)
    producer.end_posts_after(NEVER)
    producer.advance_prefill("t", SOURCE[:3])
    wait_until(lambda: producer.port.posts, "something is posted")
    began = time.monotonic()
    producer.preempt_prefill("t")
    assert time.monotonic() - began >= HASTY.timings.slice_max_s
    assert producer.state("producer", "t") == "recalled"
    assert "still read" in str(producer.notes.failures[-1])
    producer.start_prefill("t")
    producer.finish_prefill("t", SOURCE)
    expected = consumer.memory.with_blocks(producer.memory, PAIRS)
    producer.end_posts_after(0)
    assert consumer.outcome("t") is None
    assert (consumer.memory.array == expected).all()


def test_taking_blocks_away_from_a_closed_loop_is_no_error(network: MemoryNetwork) -> None:
    worker = Worker("closed", network, seed=3)
    worker.loop.suspend()
    worker.preempt_prefill("t")
    worker.close()
    worker.preempt_prefill("t")
    assert "has ended" in str(worker.notes.failures[-1])


# -- devices ---------------------------------------------------------------------------------------


def test_a_step_counts_when_the_device_says_so(producer: Worker, consumer: Worker) -> None:
    registered(producer, consumer)
    computed = threading.Event()
    producer.loop.submit_when(computed.is_set, [producer.advanced("t", SOURCE)])
    time.sleep(0.05)
    assert producer.state("producer", "t") == "registered"
    computed.set()
    assert consumer.outcome("t") is None


def test_the_end_of_a_prompt_overtakes_a_step_that_the_device_has_not_confirmed(
    producer: Worker, consumer: Worker
) -> None:
    registered(producer, consumer)
    producer.loop.submit_when(lambda: False, [producer.advanced("t", SOURCE[:2])])
    producer.finish_prefill("t", SOURCE)
    assert consumer.outcome("t") is None
    assert producer.is_sent("t")
    assert not producer.notes.failures


def test_what_was_taken_away_is_not_written_when_the_device_confirms_it_late_s3(
    producer: Worker, consumer: Worker
) -> None:
    registered(producer, consumer)
    computed = threading.Event()
    producer.loop.submit_when(computed.is_set, [producer.advanced("t", SOURCE)])
    producer.preempt_prefill("t")
    computed.set()
    wait_until(lambda: not producer.loop._gates, "the gate is open")
    assert producer.state("producer", "t") == "held"
    assert not producer.port.counts.posts


def test_gates_open_in_order_and_overtaken_events_are_dropped() -> None:
    def event(request: str) -> ev.PrefillAdvanced:
        return ev.PrefillAdvanced(
            transfer_id=TransferId("t"), request_id=RequestId(request), blocks=((1,),), tokens=1
        )

    ready = [False, True]
    gates = Gates()
    gates.add(lambda: ready[0], [event("a"), event("b")])
    gates.add(lambda: ready[1], [event("c")])
    assert list(gates.opened()) == []
    gates.overtake(RequestId("b"))
    ready[0] = True
    assert [each.request_id for each in gates.opened()] == ["a", "c"]
    assert not gates
