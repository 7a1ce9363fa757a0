"""Workers with a loop thread, a real side channel on loopback and an in-memory port."""

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvflow.core import Reason, Timings
from kvflow.core import events as ev
from kvflow.errors import TransportError
from kvflow.ids import ATTEMPT_STRIDE, Address, Rank, RequestId, TransferId
from kvflow.io.coordinates import Identity
from kvflow.io.seal import Seal
from kvflow.io.side_channel import SideChannel
from kvflow.io.transfer_loop import TransferLoop
from kvflow.io.window import Inspection
from kvflow.observe.history import History
from kvflow.settings import Settings
from kvflow.testing.port import Faults, MemoryNetwork, MemoryPort

from .sides import BLOCK_TOKENS, Memory, Notes, agent_of, allocated, identity, load_of, prefill_of

HERE = "127.0.0.1"
WAIT_S = 60.0
"""How long a test waits for what must come; a test that passes waits for much less."""
FAST = Settings(
    timings=Timings(
        lease_s=5.0,
        write_lease_s=0.3,
        slice_max_s=0.1,
        load_deadline_s=20.0,
        meet_deadline_s=1.0,
        register_resend_s=0.05,
        cancel_resend_s=0.05,
        cancel_deadline_s=1.5,
        stop_deadline_s=2.0,
        fence_s=1.0,
        fence_silent_s=1.0,
        renew_interval_s=0.05,
        renew_misses_max=20,
        backoff_first_s=0.02,
        backoff_max_s=0.1,
        drain_s=1.0,
        write_drain_s=1.5,
        tombstone_s=2.0,
        peer_idle_s=5.0,
        keep_sent_s=60.0,
    ),
    post_bytes_max=4096,
    post_runs_max=2,
    posts_in_flight_max=2,
)


def fast(**timings: Any) -> Settings:
    """`FAST`, with other timings."""
    return replace(FAST, timings=replace(FAST.timings, **timings))


def wait_until(holds: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"did not come: {what}"
        time.sleep(0.001)


def open_sockets() -> set[str]:
    """The sockets and event descriptors of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "anon_inode:", "pipe:")):
            found.add(target)
    return found


class Worker:
    """One engine with one worker: as a producer it listens, as a consumer it loads."""

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        *,
        seed: int,
        settings: Settings = FAST,
        seal: Seal | None = None,
        role: str = "kv_producer",
    ) -> None:
        self.name = name
        self.memory = Memory(seed=seed)
        history = History() if settings.inspect else None
        self.notes = Notes(history=history)
        self.faults = Faults()
        self.ports: list[MemoryPort] = []
        self.sent: list[RequestId] = []
        self.received: list[tuple[RequestId, Reason | None]] = []
        self._network = network
        self._attempt = 0
        self.loop = TransferLoop(
            settings=settings,
            make_port=self._make_port,
            observer=self.notes,
            seal=seal,
            name=name,
            inspection=Inspection(host=HERE, history=history) if history is not None else None,
        )
        self.side_channel = SideChannel(
            engine_id=name,
            refused=lambda kind, detail: self.notes.refused(kind, detail),
            connections_max=16,
            seal=seal or Seal(),
            role=role,
            inspect=settings.inspect,
        )
        self.open()
        if self.loop.window is not None:
            self.side_channel.show({Rank(0, 0): self.loop.window})
        self.address = self.side_channel.listen(Address(HERE, 0))

    def _make_port(self, who: Identity) -> MemoryPort:
        self.ports.append(MemoryPort(agent_of(who), self._network, self.faults))
        return self.ports[-1]

    @property
    def port(self) -> MemoryPort:
        return self.ports[-1]

    def open(self) -> None:
        self.side_channel.introduce({Rank(0, 0): self.loop.open(identity(self.memory, self.name))})

    def close(self) -> None:
        self.loop.close()
        self.side_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.faults.pending_polls = 0
        self.faults.frozen = False
        self.close()

    # -- what vLLM does ----------------------------------------------------------------------------

    def collect(self) -> None:
        """Take what was reported."""
        sent, received = self.loop.outbox.take()
        self.sent += sent
        self.received += received

    def outcome(self, transfer: str) -> Reason | None:
        """Wait for the report of a load."""
        wait_until(lambda: self.collect() or load_of(transfer) in dict(self.received), transfer)
        return dict(self.received)[load_of(transfer)]

    def is_sent(self, transfer: str) -> bool:
        """Wait until the blocks of a prefill come back."""
        wait_until(lambda: self.collect() or prefill_of(transfer) in self.sent, transfer)
        return True

    def start_prefill(self, transfer: str) -> None:
        self.loop.submit(
            [ev.PrefillStarted(transfer_id=TransferId(transfer), request_id=prefill_of(transfer))]
        )

    def advanced(self, transfer: str, blocks: list[int]) -> ev.PrefillAdvanced:
        """So many blocks of the prompt are complete."""
        return ev.PrefillAdvanced(
            transfer_id=TransferId(transfer),
            request_id=prefill_of(transfer),
            blocks=(tuple(blocks),),
            tokens=len(blocks) * BLOCK_TOKENS,
        )

    def advance_prefill(self, transfer: str, blocks: list[int]) -> None:
        self.loop.submit([self.advanced(transfer, blocks)])

    def preempt_prefill(self, transfer: str) -> None:
        """Returns when nothing reads its blocks."""
        event = ev.PrefillPreempted(
            transfer_id=TransferId(transfer), request_id=prefill_of(transfer)
        )
        self.loop.withdraw([event])

    def finish_prefill(self, transfer: str, blocks: list[int]) -> None:
        event = ev.PrefillFinished(
            transfer_id=TransferId(transfer),
            request_id=prefill_of(transfer),
            blocks=(tuple(blocks),),
            tokens=len(blocks) * BLOCK_TOKENS,
        )
        self.loop.submit([event])

    def load(
        self,
        transfer: str,
        producer: Address,
        blocks: list[int],
        *,
        keep: bool = False,
        again: bool = False,
    ) -> None:
        self._attempt += ATTEMPT_STRIDE
        event = allocated(transfer, producer, blocks, attempt=self._attempt)
        self.loop.submit([replace(event, keep=keep, again=again)])

    def end_request(self, transfer: str) -> None:
        self.loop.submit([ev.RequestEnded(request_id=load_of(transfer))])

    def abort_load(self, transfer: str) -> None:
        self.loop.submit([ev.LoadAborted(request_id=load_of(transfer))])

    def release(self, transfer: str, producer: Address) -> None:
        self._attempt += ATTEMPT_STRIDE
        event = ev.ReleaseWanted(
            transfer_id=TransferId(transfer),
            request_id=load_of(transfer),
            attempt=self._attempt,
            address=producer,
            engine_id=None,
        )
        self.loop.submit([event])

    def end_posts_after(self, polls: int) -> None:
        """What is posted, now and later, ends after so many polls more."""
        with self._network.lock:
            self.faults.pending_polls = polls
            for post in list(self.port.posts.values()):
                post.pending_polls = polls

    # -- what a test looks at ----------------------------------------------------------------------

    def state(self, machine: str, transfer: str) -> str:
        driver = self.loop._driver
        if driver is None:
            return "closed"
        if machine == "producer":
            producing = driver.engine.records.producers.get(TransferId(transfer))
            return producing.state if producing else "none"
        consuming = driver.engine.records.consumers.get(load_of(transfer))
        return consuming.state if consuming else "none"

    def comes_to(self, machine: str, transfer: str, state: str) -> None:
        wait_until(lambda: self.state(machine, transfer) == state, f"{transfer} {state}")

    def transferred(self, transfer: str, consumer: "Worker", pairs: list[tuple[int, int]]) -> None:
        """Move blocks to `consumer`, prefill first; checks every byte."""
        expected = consumer.memory.with_blocks(self.memory, pairs)
        self.finish_prefill(transfer, [source for source, _ in pairs])
        consumer.load(transfer, self.address, [to for _, to in pairs])
        assert consumer.outcome(transfer) is None
        assert self.is_sent(transfer)
        assert np.array_equal(consumer.memory.array, expected)


class Tarpit:
    """A TCP server that accepts, says `data`, and then nothing until it is closed."""

    def __init__(self, data: bytes = b"") -> None:
        self._socket = socket.create_server((HERE, 0))
        self._data = data
        self.connections: list[socket.socket] = []
        self.address = Address(HERE, self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections.append(connection)
            connection.sendall(self._data)

    def were_closed(self) -> bool:
        """Wait until the other side has closed every connection."""
        for connection in self.connections:
            connection.settimeout(WAIT_S)
            try:
                while connection.recv(4096):
                    pass
            except ConnectionError:
                pass
        return True

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(WAIT_S)
        for connection in self.connections:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def closes(worker: Worker) -> None:
    """Close its loop on a thread, so that a close that hangs fails the test."""
    thread = threading.Thread(target=worker.loop.close, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "close does not return"


def raised_by(call: Callable[[], object]) -> TransportError | None:
    try:
        call()
    except TransportError as error:
        return error
    return None
