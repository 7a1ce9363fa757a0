"""READs of real NIXL agents: the port's own, and whole loads between two processes."""

import contextlib
import random

import numpy as np
import pytest

from kvflow.core import Reason
from kvflow.errors import TransportError
from kvflow.ids import AgentName, new_incarnation
from kvflow.io.nixl_port import NixlPort
from kvflow.io.port import PostState
from kvflow.layout import slices

from .conftest import producers_memory
from .led_process import LedEngine
from .loop_process import BLOCK_BYTES, BLOCKS, Engine, digest
from .test_nixl_port import (
    MEMORY_BYTES,
    StartPeer,
    finish,
    meet,
    regions,
    run_of,
    start_peer,
    whole,
)

__all__ = ["start_peer"]

pytestmark = pytest.mark.nixl

TRANSFERS = 20


# -- the port ------------------------------------------------------------------------------------


@pytest.fixture(params=["all", "tcp"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


def test_what_is_read_is_what_was_written_and_nothing_else_is_touched(
    transports: str, start_peer: StartPeer
) -> None:
    rng = np.random.default_rng(9)
    memory = rng.integers(0, 256, 2 * MEMORY_BYTES, dtype=np.uint8)
    before = memory.copy()
    port = NixlPort(AgentName(f"test-{new_incarnation()}"))
    port.register([whole(memory)])
    peer = start_peer()
    meet(port, peer)
    base = memory.ctypes.data
    assert finish(port, port.post(peer.name, run_of(base, peer.base, MEMORY_BYTES)))
    runs = run_of(peer.base, base + MEMORY_BYTES + 512, MEMORY_BYTES - 1024)
    for piece in slices(runs, 100_000, runs_max=4):
        assert finish(port, port.post(peer.name, piece, reads=True)) is PostState.DONE
    expected = before.copy()
    expected[MEMORY_BYTES + 512 : -512] = before[: MEMORY_BYTES - 1024]
    assert np.array_equal(memory, expected)
    assert bytes(peer.read()) == before[:MEMORY_BYTES].tobytes()
    port.close()


def test_a_read_from_a_killed_peer_ends(transports: str, start_peer: StartPeer) -> None:
    memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    port = NixlPort(AgentName(f"test-{new_incarnation()}"))
    port.register(regions(memory.ctypes.data))
    peer = start_peer()
    meet(port, peer)
    runs = run_of(peer.base, memory.ctypes.data, 65536)
    assert finish(port, port.post(peer.name, runs, reads=True)) is PostState.DONE
    peer.kill()
    for _ in range(3):
        with contextlib.suppress(TransportError):
            assert finish(port, port.post(peer.name, runs, reads=True)) is PostState.FAILED
        assert port.receive() == []
    port.remove_peer(peer.name)
    port.close()


# -- whole loads ---------------------------------------------------------------------------------


def test_twenty_loads_of_mixed_sizes_read_exactly_their_blocks_s6(
    shared_producer: LedEngine, consumer: Engine
) -> None:
    """Told of by a router, waited for, or pushed; all memory is known in the end."""
    rng = random.Random(3)
    source_memory = producers_memory()
    expected = consumer.memory.copy()
    free = rng.sample(range(1, BLOCKS), BLOCKS - 1)
    sizes = [1, 1, 2, 3, 40, 60] + [rng.randint(1, 9) for _ in range(TRANSFERS - 6)]
    rng.shuffle(sizes)
    for number, size in enumerate(sizes):
        destination, free = free[:size], free[size:]
        start = rng.randrange(1, BLOCKS - size)
        source = list(range(start, start + size))
        for ours, theirs in zip(destination, source, strict=True):
            expected[:, ours, :BLOCK_BYTES] = source_memory[:, theirs, :BLOCK_BYTES]
        name = f"read-{number}"
        if number % 3 == 0:
            consumer.load(name, shared_producer.address, destination, reads=True)
        shared_producer.ask("start_prefill", transfer=name)
        shared_producer.ask("finish_prefill", transfer=name, blocks=source)
        if number % 3:
            offer = source if number % 3 == 1 else None
            consumer.load(name, shared_producer.address, destination, number % 6 != 5, offer)
    for number in range(TRANSFERS):
        assert consumer.outcome(f"read-{number}") is None
    assert np.array_equal(consumer.memory, expected)
    assert shared_producer.ask("digest")["digest"] == digest(source_memory)
    wanted = {f"prefill-read-{number}" for number in range(TRANSFERS)}
    for _ in range(100):
        sent = shared_producer.ask("sent")["sent"]
        if wanted <= {*sent}:
            break
    assert wanted <= {*sent}
    assert len(sent) == len({*sent})
    assert shared_producer.ask("faults")["faults"] == consumer.notes.faults == []


def test_a_load_from_a_killed_producer_fails_f1(
    own_producer: LedEngine, shared_producer: LedEngine, consumer: Engine
) -> None:
    own_producer.ask("finish_prefill", transfer="first", blocks=[1])
    consumer.load("first", own_producer.address, [1], reads=True)
    assert consumer.outcome("first") is None
    consumer.load("waits", own_producer.address, [2], reads=True)
    own_producer.kill()
    consumer.load("told", own_producer.address, [4], reads=True, offer=[4])
    lost = (Reason.PEER_LOST, Reason.UNREACHABLE, Reason.READ_FAILED)
    assert consumer.outcome("waits") in lost
    assert consumer.outcome("told") in lost
    shared_producer.ask("finish_prefill", transfer="other", blocks=[3])
    consumer.load("other", shared_producer.address, [3], reads=True, offer=[3])
    assert consumer.outcome("other") is None
    assert consumer.notes.faults == []
