"""The real NIXL agent, between this process and others that the tests start (and end)."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvflow.errors import TransportError
from kvflow.ids import AgentName, new_incarnation
from kvflow.io.nixl_port import NixlPort
from kvflow.io.port import PostState
from kvflow.layout import Int64s, Region, Runs, plan, slices

MEMORY_BYTES = 1 << 20
BLOCK_BYTES = 4096
LAYERS = 3
BLOCKS = 64
STRIDE_BYTES = BLOCK_BYTES + 512
WAIT_S = 15.0
PAUSE_S = 0.0002

pytestmark = pytest.mark.nixl


class Peer:
    """A running `peer_process.py`."""

    def __init__(self, name: AgentName, memory_bytes: int) -> None:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("peer_process.py")),
                name,
                str(memory_bytes),
                str(command_read),
                str(answer_write),
            ],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._commands = os.fdopen(command_write, "w")
        self._answers = os.fdopen(answer_read)
        self.name = name
        hello = self._answer()
        self.metadata = bytes.fromhex(hello["metadata"])
        self.base: int = hello["base"]

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        self._commands.write(json.dumps({"do": do, **fields}) + "\n")
        self._commands.flush()
        return self._answer()

    def read(self) -> np.ndarray:
        return np.frombuffer(bytes.fromhex(self.ask("read")["bytes"]), dtype=np.uint8)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.kill()
        self._commands.close()
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait(WAIT_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


StartPeer = Callable[..., Peer]


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    peers: list[Peer] = []

    def start(name: str | None = None, memory_bytes: int = MEMORY_BYTES) -> Peer:
        peers.append(Peer(AgentName(name or f"peer-{new_incarnation()}"), memory_bytes))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture(scope="module")
def shared_peer() -> Iterator[Peer]:
    """For the tests that leave their peer alive (a process takes two seconds to start)."""
    peer = Peer(AgentName(f"peer-{new_incarnation()}"), MEMORY_BYTES)
    yield peer
    peer.close()


@pytest.fixture
def peer(shared_peer: Peer) -> Peer:
    shared_peer.ask("fill", value=0)
    return shared_peer


@pytest.fixture
def memory() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)


@pytest.fixture
def port(memory: np.ndarray) -> Iterator[NixlPort]:
    port = NixlPort(AgentName(f"test-{new_incarnation()}"))
    port.register(regions(memory.ctypes.data))
    yield port
    port.close()


def regions(base: int, layers: int = LAYERS) -> list[Region]:
    """Layers one after the other; each block is followed by bytes that belong to none."""
    return [
        Region.pages(
            layer=f"layer.{layer}",
            group=0,
            base=base + layer * BLOCKS * STRIDE_BYTES,
            block_bytes=BLOCK_BYTES,
            stride_bytes=STRIDE_BYTES,
            blocks=BLOCKS,
            memory="DRAM",
            device=0,
        )
        for layer in range(layers)
    ]


def whole(memory: np.ndarray) -> Region:
    """The buffer as one region of one block."""
    return Region.pages(
        layer="all",
        group=0,
        base=memory.ctypes.data,
        block_bytes=memory.nbytes,
        stride_bytes=memory.nbytes,
        blocks=1,
        memory="DRAM",
        device=0,
    )


def ids(*numbers: int) -> Int64s:
    return np.array(numbers, dtype=np.int64)


def run_of(source: int, destination: int, length: int) -> Runs:
    return Runs(
        source=ids(source),
        destination=ids(destination),
        length=ids(length),
        source_memory="DRAM",
        source_device=0,
        destination_memory="DRAM",
        destination_device=0,
    )


def finish(port: NixlPort, handle: int) -> PostState:
    """Poll until the write has ended, within a bound; releases it."""
    deadline = time.monotonic() + WAIT_S
    while (state := port.poll(handle)) is PostState.PENDING:
        assert time.monotonic() < deadline, "the write never ended"
        time.sleep(PAUSE_S)
    port.release(handle)
    return state


def receive_some(port: NixlPort, count: int) -> list[tuple[AgentName, bytes]]:
    deadline = time.monotonic() + WAIT_S
    arrived: list[tuple[AgentName, bytes]] = []
    while len(arrived) < count:
        assert time.monotonic() < deadline, f"{len(arrived)} of {count} notifications came"
        arrived += port.receive()
        time.sleep(PAUSE_S)
    return arrived


def meet(port: NixlPort, peer: Peer) -> None:
    assert port.add_peer(peer.metadata) == peer.name
    assert peer.ask("add_peer", metadata=port.metadata().hex()) == {"name": port.name}


@pytest.mark.parametrize("bytes_max", [MEMORY_BYTES, 3000])
@pytest.mark.parametrize(
    ("source_ids", "destination_ids"),
    [
        pytest.param(ids(*range(1, 21)), ids(*range(30, 50)), id="contiguous"),
        pytest.param(ids(5, 1, 63, 9, 2), ids(9, 2, 4, 62, 7), id="fragmented"),
        pytest.param(ids(9), ids(63), id="one"),
    ],
)
def test_planned_runs_arrive_exactly_and_touch_nothing_else(
    peer: Peer,
    port: NixlPort,
    memory: np.ndarray,
    source_ids: Int64s,
    destination_ids: Int64s,
    bytes_max: int,
) -> None:
    meet(port, peer)
    source, destination = regions(memory.ctypes.data), regions(peer.base)
    for runs in plan(source, destination, [(source_ids, destination_ids)]):
        for piece in slices(runs, bytes_max, runs_max=4):
            assert finish(port, port.post(peer.name, piece)) is PostState.DONE

    expected = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    for layer in range(LAYERS):
        for ours, theirs in zip(source_ids, destination_ids, strict=True):
            from_byte = (layer * BLOCKS + int(ours)) * STRIDE_BYTES
            to_byte = (layer * BLOCKS + int(theirs)) * STRIDE_BYTES
            block = memory[from_byte : from_byte + BLOCK_BYTES]
            expected[to_byte : to_byte + BLOCK_BYTES] = block
    assert np.array_equal(peer.read(), expected)


def test_the_bytes_are_there_when_a_notification_sent_after_done_arrives(
    peer: Peer, port: NixlPort, memory: np.ndarray
) -> None:
    meet(port, peer)
    block_ids = ids(*range(2, BLOCKS, 2))
    source, destination = regions(memory.ctypes.data), regions(peer.base)
    (runs,) = plan(source, destination, [(block_ids, block_ids)])
    expected = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    for value in range(1, 30):
        memory[:] = value
        assert finish(port, port.post(peer.name, runs)) is PostState.DONE
        port.send(peer.name, b"digest")
        for start, length in zip(runs.destination, runs.length, strict=True):
            first = int(start) - peer.base
            expected[first : first + int(length)] = value
        want = hashlib.sha256(expected.tobytes()).digest()
        assert receive_some(port, 1) == [(peer.name, want)]


def test_notifications_of_any_size_go_both_ways_in_order(peer: Peer, port: NixlPort) -> None:
    meet(port, peer)
    payloads = [bytes([size % 251]) * size for size in (0, 1, 1024, 65536, 1 << 20)]
    payloads += [str(number).encode() for number in range(200)]
    for payload in payloads:
        port.send(peer.name, b"echo:" + payload)
    assert receive_some(port, len(payloads)) == [(peer.name, payload) for payload in payloads]


def test_a_notification_arrives_from_an_agent_that_was_never_added(
    peer: Peer, port: NixlPort
) -> None:
    peer.ask("add_peer", metadata=port.metadata().hex())
    peer.ask("send", name=port.name, payload=b"register".hex())
    assert receive_some(port, 1) == [(peer.name, b"register")]
    with pytest.raises(TransportError, match="not a known peer"):
        port.send(peer.name, b"answer")
    meet(port, peer)
    port.send(peer.name, b"echo:answer")
    assert receive_some(port, 1) == [(peer.name, b"answer")]


@pytest.mark.parametrize("met_before", [False, True])
@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_a_write_to_a_killed_peer_ends(
    start_peer: StartPeer,
    memory: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    transports: str,
    met_before: bool,
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    port = NixlPort(AgentName(f"test-{new_incarnation()}"))
    port.register(regions(memory.ctypes.data))
    peer = start_peer()
    meet(port, peer)
    runs = run_of(memory.ctypes.data, peer.base, 65536)
    if met_before:
        assert finish(port, port.post(peer.name, runs)) is PostState.DONE
    peer.kill()
    for _ in range(3):
        try:
            assert finish(port, port.post(peer.name, runs)) is PostState.FAILED
            port.send(peer.name, b"anybody there?")
        except TransportError:
            pass
        assert port.receive() == []
    port.remove_peer(peer.name)
    port.close()


def test_a_pending_write_outlives_the_removal_of_its_peer_and_fails_with_the_process(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    big = np.ones(64 << 20, dtype=np.uint8)
    port = NixlPort(AgentName(f"test-{new_incarnation()}"))
    port.register(regions(big.ctypes.data, layers=1))
    port.register([whole(big)])
    peer = start_peer(memory_bytes=big.nbytes)
    meet(port, peer)
    runs = run_of(big.ctypes.data, peer.base, big.nbytes)
    assert finish(port, port.post(peer.name, runs)) is PostState.DONE

    peer.process.send_signal(signal.SIGSTOP)
    handle = port.post(peer.name, runs)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert port.poll(handle) is PostState.PENDING
    with pytest.raises(TransportError, match="pending"):
        port.release(handle)
    port.remove_peer(peer.name)
    with pytest.raises(TransportError, match="not a known peer"):
        port.post(peer.name, runs)
    assert port.poll(handle) is PostState.PENDING

    peer.kill()
    assert finish(port, handle) is PostState.FAILED
    port.close()


@pytest.mark.parametrize("same_name", [False, True])
def test_a_peer_is_removed_and_added_again_at_a_new_incarnation(
    start_peer: StartPeer, port: NixlPort, memory: np.ndarray, same_name: bool
) -> None:
    old = start_peer()
    meet(port, old)
    runs = run_of(memory.ctypes.data, old.base, 64)
    assert finish(port, port.post(old.name, runs)) is PostState.DONE
    new = start_peer(old.name if same_name else None)
    if same_name:
        with pytest.raises(TransportError):
            port.add_peer(new.metadata)
    old.kill()
    port.remove_peer(old.name)
    port.remove_peer(old.name)
    with pytest.raises(TransportError, match="not a known peer"):
        port.post(old.name, runs)

    meet(port, new)
    runs = run_of(memory.ctypes.data, new.base, 64)
    assert finish(port, port.post(new.name, runs)) is PostState.DONE
    assert np.array_equal(new.read()[:64], memory[:64])
    port.send(new.name, b"echo:hello")
    assert receive_some(port, 1) == [(new.name, b"hello")]


def test_memory_registered_later_is_reached_through_new_metadata(memory: np.ndarray) -> None:
    one, two = NixlPort(AgentName("one")), NixlPort(AgentName("two"))
    other = np.zeros(8192, dtype=np.uint8)
    one.register(regions(memory.ctypes.data))
    before = two.metadata()
    one.add_peer(before)
    runs = run_of(memory.ctypes.data, other.ctypes.data, 8192)
    with pytest.raises(TransportError):
        one.post(two.name, runs)
    two.register([whole(other)])
    assert two.metadata() != before
    one.add_peer(two.metadata())
    handle = one.post(two.name, runs)
    deadline = time.monotonic() + WAIT_S
    while one.poll(handle) is PostState.PENDING and time.monotonic() < deadline:
        two.receive()  # nothing moves on its own
    assert one.poll(handle) is PostState.DONE
    one.release(handle)
    assert np.array_equal(other, memory[:8192])
    two.deregister()
    two.deregister()
    assert two.metadata() == before
    one.close()
    two.close()


def test_what_nixl_refuses_is_a_transport_error(
    peer: Peer, port: NixlPort, memory: np.ndarray
) -> None:
    meet(port, peer)
    base = memory.ctypes.data
    for wrong in (b"", b"rubbish", b"nixlSerDes|rubbish"):
        with pytest.raises(TransportError):
            port.add_peer(wrong)
    with pytest.raises(TransportError, match="not a known peer"):
        port.send(AgentName("nobody"), b"hello")
    with pytest.raises(TransportError):
        port.post(peer.name, run_of(base - 64, peer.base, 64))
    with pytest.raises(TransportError):
        port.post(peer.name, run_of(base, peer.base + MEMORY_BYTES - 32, 64))
    with pytest.raises(ValueError, match="at least one run"):
        port.post(peer.name, run_of(base, peer.base, 64).part(0, 0))
    assert finish(port, port.post(peer.name, run_of(base, peer.base, 64))) is PostState.DONE


def test_a_closed_port_refuses_everything_and_closes_again(memory: np.ndarray) -> None:
    port = NixlPort(AgentName("closing"))
    port.register(regions(memory.ctypes.data))
    port.close()
    port.close()
    port.remove_peer(AgentName("nobody"))
    port.deregister()
    for refused in (port.metadata, port.receive, lambda: port.register(regions(1))):
        with pytest.raises(TransportError, match="closed"):
            refused()


def test_a_backend_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match="CARRIER_PIGEON"):
        NixlPort(AgentName("odd"), backends=["UCX", "CARRIER_PIGEON"])
