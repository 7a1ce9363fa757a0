"""The real port: one NIXL agent, used by one thread.

Rules: the only module that imports nixl, and not before a `NixlPort` is made. NIXL's progress
thread is off (it spins), so nothing moves unless somebody calls `receive` or `poll`. Whatever NIXL
raises leaves as `TransportError`.

What NIXL (1.5.1, UCX) does that one would not guess:

- A write inside one machine is copied in `transfer()` as a rule, which then says "DONE"; the first
  one to a peer usually takes a few polls, for the connection is made on the way.
- `send_notif` tells nothing: it succeeds for a peer that is dead already, as long as UCX has not
  seen that yet; afterwards it raises at once. A queued notification is lost without a word.
- A write to a process that was killed raises in `transfer()`, after 1 ms here; one that was pending
  at that moment fails in a poll. The agent then forgets the peer's memory by itself. Nothing is
  seen until something is sent: a silent peer's death shows nowhere.
- A pending write to a peer that `remove_remote_agent` took away reports "not found" although its
  bytes may still be moving, and releasing a pending handle cancels it as best UCX can, which for a
  remote write promises nothing. Both would break `Port.poll`'s word that a failed write touches no
  memory. So here a removed peer stays known to NIXL until its last write has ended, and a pending
  handle cannot be released.
- A peer's name is bound to its connection: other metadata under a known name are refused, and after
  a removal accepted. The same metadata again, or the same agent's after it registered more memory,
  are fine.
- *Malformed* metadata (a cut-off copy, say) that carry a known name make NIXL forget that peer's
  memory but keep its connection, and the name cannot be used again in this process. Hence names are
  made anew at each start and metadata travel whole.
- Notifications have no size limit of their own (8 MiB arrives), but are sent in one go: 64 KiB cost
  0.3 ms of the caller's time, 1 MiB 8 ms. An empty one arrives as an empty one.
- Notifications arrive from agents that were never added here; the sender's name is what the sender
  wrote into the message.
- Metadata grow by about 120 bytes per registered range and change with each registration. A run
  must lie inside one registered range on both sides, else posting raises "not found".
- NIXL's Python logger prints to stdout, its C++ half to stderr.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PeerDeadError, TransportError
from kvflow.ids import AgentName
from kvflow.io.port import PostState
from kvflow.layout import Int64s, Region, Runs

# Names of NIXL's memory kinds in which two neighbouring allocations may be registered as one. Two
# neighbouring CUDA allocations may not.
_JOINABLE = frozenset({"DRAM"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRange:
    """Bytes `start` (included) to `stop` (excluded) of one device's memory."""

    memory: str
    device: int
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class _Post:
    """What was posted and not released. `transfer` is `None` once NIXL let go of it."""

    peer: AgentName
    transfer: Any
    state: PostState


class NixlPort:
    """`kvflow.io.port.Port` over a `nixl_agent`.

    backends  NIXL's names of the transports to use; each must be there.
    """

    def __init__(self, name: AgentName, *, backends: Sequence[str] = ("UCX",)) -> None:
        api, self._errors = _nixl()
        self._name = name
        self._agent: Any = None
        self._registrations: list[Any] = []
        self._peers: set[AgentName] = set()
        self._leaving: set[AgentName] = set()
        self._posts: dict[int, _Post] = {}
        self._pending: dict[AgentName, int] = {}
        self._posted_count = 0
        with self._mapped(f"agent {name}"):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=list(backends))
            self._agent = api.nixl_agent(name, config)
        missing = sorted(set(backends) - set(self._agent.backends))
        if missing:
            raise TransportError(f"NIXL has no backend {', '.join(missing)} here")

    @property
    def name(self) -> AgentName:
        """This agent's name, as peers will see it in `receive`."""
        return self._name

    @property
    def plugins(self) -> tuple[str, ...]:
        """NIXL's names of the transports that this installation brings, in use or not."""
        return tuple(self._open_agent().get_plugin_list())

    def register(self, regions: Sequence[Region]) -> None:
        """Make the memory of `regions` known, in as few ranges as possible.

        Called again, it adds to what is registered. All or nothing.
        """
        agent = self._open_agent()
        added: list[Any] = []
        try:
            for memory, rows in _rows_by_memory(registered_ranges(regions)):
                with self._mapped(f"registering {len(rows)} ranges of {memory}"):
                    added.append(agent.register_memory(rows, memory))
        except TransportError:
            self._deregister(added)
            raise
        self._registrations += added

    def deregister(self) -> None:
        """Undo every `register`; no-op when nothing is registered."""
        registrations, self._registrations = self._registrations, []
        self._deregister(registrations)

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent; changes with `register` and `deregister`."""
        with self._mapped("metadata"):
            return bytes(self._open_agent().get_agent_metadata())

    def add_peer(self, metadata: bytes) -> AgentName:
        """Make a remote agent known, or learn its newly registered memory; returns its name."""
        with self._mapped("adding a peer"):
            loaded = self._open_agent().add_remote_agent(metadata)
            name = AgentName(loaded.decode() if isinstance(loaded, bytes) else loaded)
        self._leaving.discard(name)
        self._peers.add(name)
        return name

    def remove_peer(self, name: AgentName) -> None:
        """Forget a remote agent: nothing can be posted to it any more. No-op if unknown.

        Writes to it that are pending stay pending until they end.
        """
        if name not in self._peers:
            return
        self._peers.discard(name)
        if self._pending.get(name):
            self._leaving.add(name)
        else:
            self._invalidate(name)

    def send(self, name: AgentName, payload: bytes) -> None:
        """Send a notification. No exception does not mean that it will arrive."""
        agent = self._agent_for(name)
        with self._mapped(f"notifying {name}"):
            agent.send_notif(name, payload)

    def receive(self) -> list[tuple[AgentName, bytes]]:
        """Notifications that have arrived, with their sender, oldest first per sender."""
        agent = self._open_agent()
        try:
            arrived = agent.get_new_notifs()
        except self._errors as error:
            raise _transport_error("receiving", error) from error
        return [
            (AgentName(sender), payload)
            for sender, payloads in arrived.items()
            for payload in payloads
        ]

    def post(self, name: AgentName, runs: Runs, *, reads: bool = False) -> int:
        """Start one WRITE to a peer or READ from it; returns a handle for `poll` and `release`.

        Raises `ValueError` for no runs at all. After `TransportError` some of the bytes may have
        been moved.
        """
        if not len(runs):
            raise ValueError("a post needs at least one run")
        agent = self._agent_for(name)
        transfer = None
        try:
            source = agent.get_xfer_descs(
                _rows(runs.source, runs.length, runs.source_device), runs.source_memory
            )
            destination = agent.get_xfer_descs(
                _rows(runs.destination, runs.length, runs.destination_device),
                runs.destination_memory,
            )
            what, ours, theirs = (
                ("READ", destination, source) if reads else ("WRITE", source, destination)
            )
            transfer = agent.initialize_xfer(what, ours, theirs, name)
            said = self._start(transfer)
        except self._errors as error:
            if transfer is not None:
                transfer.release()
            doing = "reading from" if reads else "writing to"
            raise _transport_error(f"{doing} {name}", error) from error
        self._posted_count += 1
        post = _Post(peer=name, transfer=transfer, state=PostState.PENDING)
        self._posts[self._posted_count] = post
        self._pending[name] = self._pending.get(name, 0) + 1
        self._advance(post, said)
        return self._posted_count

    def poll(self, handle: int) -> PostState:
        """Where the post stands. A failed one can touch no memory any more."""
        post = self._posts[handle]
        if post.state is PostState.PENDING:
            try:
                said = self._open_agent().check_xfer_state(post.transfer)
            except self._errors:
                said = "ERR"
            self._advance(post, said)
        return post.state

    def release(self, handle: int) -> None:
        """Give a finished handle back. Raises `TransportError` if it is still pending."""
        if self._posts[handle].state is PostState.PENDING:
            raise TransportError(f"post {handle} is still pending")
        del self._posts[handle]

    def close(self) -> None:
        """Deregister and shut the agent down. Idempotent. Ends pending writes as best it can."""
        if self._agent is None:
            return
        for post in self._posts.values():
            self._let_go(post)
        self._posts.clear()
        self._pending.clear()
        for name in self._peers | self._leaving:
            self._invalidate(name)
        self._peers.clear()
        try:
            self.deregister()
        finally:
            self._agent = None

    def _start(self, transfer: Any) -> str:
        """Start a request; inside one machine, NIXL copies the bytes in here."""
        said: str = self._open_agent().transfer(transfer)
        return said

    def _advance(self, post: _Post, said: str) -> None:
        """Move a pending write on by what NIXL said of it: DONE, PROC or ERR."""
        if said == "PROC" or not self._let_go(post):
            return
        post.state = PostState.DONE if said == "DONE" else PostState.FAILED
        self._pending[post.peer] -= 1
        if not self._pending[post.peer]:
            del self._pending[post.peer]
            if post.peer in self._leaving:
                self._invalidate(post.peer)

    def _let_go(self, post: _Post) -> bool:
        """Free NIXL's side of a write; false if NIXL cannot yet."""
        if post.transfer is None:
            return True
        try:
            post.transfer.release()
        except self._errors:
            return False
        post.transfer = None
        return True

    def _invalidate(self, name: AgentName) -> None:
        self._leaving.discard(name)
        try:
            self._open_agent().remove_remote_agent(name)
        except self._errors:
            # NIXL forgets a peer by itself when a write finds it dead.
            return

    def _deregister(self, registrations: Sequence[Any]) -> None:
        for registration in registrations:
            with self._mapped("deregistering"):
                self._open_agent().deregister_memory(registration)

    def _agent_for(self, name: AgentName) -> Any:
        if name not in self._peers:
            raise TransportError(f"{name} is not a known peer")
        return self._open_agent()

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise TransportError(f"port {self._name} is closed")
        return self._agent

    @contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise _transport_error(doing, error) from error


def registered_ranges(regions: Sequence[Region]) -> list[MemoryRange]:
    """The memory of `regions` in as few ranges as possible, by memory, device and address.

    Regions that overlap become one range; in host memory, so do those that merely touch.
    """
    merged: list[MemoryRange] = []
    spans = [
        MemoryRange(
            memory=region.memory,
            device=region.device,
            start=region.base,
            stop=region.base + region.span_bytes,
        )
        for region in regions
    ]
    for span in sorted(spans, key=operator.attrgetter("memory", "device", "start", "stop")):
        last = merged[-1] if merged else span
        reach = last.stop if span.memory in _JOINABLE else last.stop - 1
        same_memory = (last.memory, last.device) == (span.memory, span.device)
        if merged and same_memory and span.start <= reach:
            merged[-1] = MemoryRange(
                memory=last.memory,
                device=last.device,
                start=last.start,
                stop=max(last.stop, span.stop),
            )
        else:
            merged.append(span)
    return merged


def _rows_by_memory(ranges: Sequence[MemoryRange]) -> list[tuple[str, NDArray[np.uint64]]]:
    """NIXL's (address, bytes, device) rows, one array per kind of memory."""
    rows: dict[str, list[tuple[int, int, int]]] = {}
    for each in ranges:
        row = (each.start, each.stop - each.start, each.device)
        rows.setdefault(each.memory, []).append(row)
    return [(memory, np.array(each, dtype=np.uint64)) for memory, each in rows.items()]


def _rows(address: Int64s, length: Int64s, device: int) -> Int64s:
    rows = np.empty((len(address), 3), dtype=np.int64)
    rows[:, 0] = address
    rows[:, 1] = length
    rows[:, 2] = device
    return rows


def _transport_error(doing: str, error: Exception) -> TransportError:
    gone = type(error).__name__ == "nixlRemoteDisconnectError"
    return (PeerDeadError if gone else TransportError)(f"{doing}: {error}")


def _nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's Python API, and everything that it raises (its own errors have no common base)."""
    try:
        from nixl import _api, _bindings
    except ImportError as error:
        raise TransportError(f"NIXL cannot be imported: {error}") from error
    own = [
        value
        for value in vars(_bindings).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    # The C++ half also throws std::runtime_error and std::invalid_argument; an unknown kind of
    # memory is a KeyError of the Python half.
    return _api, (*own, RuntimeError, ValueError, KeyError)
