"""An in-memory `kvflow.io.port.Port`: real bytes, real addresses, no transfer library.

Rules: everything stays inside one process; a post copies real memory, and only between ranges that
both sides have registered, so a wrong address is a `TransportError` here as well, never a crash.
Thread-safe, so that ports of several loop threads may share one `MemoryNetwork`.

The idea: `Faults` says what goes wrong, and may be changed at any time. The bytes of a post land at
the very poll that says DONE, which is the latest moment that the port's contract allows: whoever
tells the consumer too early is seen to, and so is whoever lets go too early of what is read.

What it imitates of NIXL: sending to an unknown peer raises; sending to one that is gone raises (or
is lost, as `MemoryNetwork.dead_are_silent` says); a write to a removed peer stays pending until it
ends; a write to a frozen peer stays pending until that peer is thawed or closed.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvflow.errors import TransportError
from kvflow.ids import AgentName
from kvflow.io.port import PostState
from kvflow.layout import Region, Runs

_MAGIC = b"kvflow-memory-port:"


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong with one port. Counts go down by one each time that they have struck.

    pending_polls         what is posted says PENDING for so many polls first.
    posts_refused         so many posts raise.
    writes_failing        so many posts say FAILED when they would say DONE, and copy nothing.
    polls_raising         so many polls raise, and tell nothing.
    sends_refused         so many sends raise.
    sends_lost            so many sends are lost without a word.
    receives_raising      so many receives raise.
    metadata_unreadable   what `metadata` returns cannot be read by anybody.
    frozen                as if its process were stopped: it neither sends nor receives, what is
                          sent to it waits, and writes to it stay pending.
    """

    pending_polls: int = 0
    posts_refused: int = 0
    writes_failing: int = 0
    polls_raising: int = 0
    sends_refused: int = 0
    sends_lost: int = 0
    receives_raising: int = 0
    metadata_unreadable: bool = False
    frozen: bool = False

    def strikes(self, fault: str) -> bool:
        """Whether this counted fault strikes now."""
        count: int = getattr(self, fault)
        if count > 0:
            setattr(self, fault, count - 1)
        return count > 0


@dataclass(slots=True, kw_only=True)
class Post:
    """A write or read that was posted and not released."""

    peer: AgentName
    runs: Runs
    reads: bool
    pending_polls: int
    state: PostState = PostState.PENDING


@dataclass(slots=True, kw_only=True)
class Counts:
    """What a port was asked for, and what moved."""

    sent: int = 0
    receives: int = 0
    posts: int = 0
    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(slots=True, kw_only=True)
class MemoryNetwork:
    """The ports of one process, by name. `dead_are_silent`: what is sent to a closed one is lost
    without a word."""

    dead_are_silent: bool = False
    ports: dict[AgentName, "MemoryPort"] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


class MemoryPort:
    """`kvflow.io.port.Port` over a `MemoryNetwork`."""

    def __init__(
        self, name: AgentName, network: MemoryNetwork, faults: Faults | None = None
    ) -> None:
        self.faults = faults or Faults()
        self.counts = Counts()
        self.posts: dict[int, Post] = {}
        self._name = name
        self._network = network
        self._closed = False
        self._peers: set[AgentName] = set()
        self._ranges: list[tuple[int, int]] = []
        self._arrived: list[tuple[AgentName, bytes]] = []
        with network.lock:
            if name in network.ports:
                raise TransportError(f"there is an agent {name} already")
            network.ports[name] = self

    @property
    def name(self) -> AgentName:
        """This agent's name, as peers will see it in `receive`."""
        return self._name

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def peers(self) -> frozenset[AgentName]:
        """The agents that can be reached."""
        return frozenset(self._peers)

    @property
    def pending(self) -> int:
        """Posts that have not ended."""
        return sum(post.state is PostState.PENDING for post in self.posts.values())

    def register(self, regions: Sequence[Region]) -> None:
        """Make the memory of `regions` known."""
        self._check_open()
        self._ranges += [(region.base, region.base + region.span_bytes) for region in regions]

    def deregister(self) -> None:
        """Undo `register`; no-op when nothing is registered."""
        self._ranges.clear()

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent."""
        self._check_open()
        return b"scribble" if self.faults.metadata_unreadable else _MAGIC + self._name.encode()

    def add_peer(self, metadata: bytes) -> AgentName:
        """Make a remote agent known; returns its name."""
        self._check_open()
        if not metadata.startswith(_MAGIC):
            raise TransportError("the metadata cannot be read")
        name = AgentName(metadata.removeprefix(_MAGIC).decode())
        self._peers.add(name)
        return name

    def remove_peer(self, name: AgentName) -> None:
        """Forget a remote agent. No-op if unknown. What is being written to it goes on."""
        self._peers.discard(name)

    def send(self, name: AgentName, payload: bytes) -> None:
        """Send a notification."""
        with self._network.lock:
            self._check_peer(name)
            if self.faults.strikes("sends_refused"):
                raise TransportError(f"notifying {name}: fault")
            self.counts.sent += 1
            peer = self._network.ports.get(name)
            if peer is None and not self._network.dead_are_silent:
                raise TransportError(f"notifying {name}: it is gone")
            if peer is None or self.faults.frozen or self.faults.strikes("sends_lost"):
                return
            peer._arrived.append((self._name, payload))

    def receive(self) -> list[tuple[AgentName, bytes]]:
        """Notifications that have arrived, with their sender, oldest first per sender."""
        with self._network.lock:
            self._check_open()
            self.counts.receives += 1
            if self.faults.strikes("receives_raising"):
                raise TransportError("receiving: fault")
            if self.faults.frozen:
                return []
            arrived, self._arrived = self._arrived, []
            return arrived

    def deliver(self, sender: AgentName, payload: bytes) -> None:
        """Put a notification of any content in the mail, as if `sender` had sent it."""
        with self._network.lock:
            self._arrived.append((sender, payload))

    def post(self, name: AgentName, runs: Runs, *, reads: bool = False) -> int:
        """Start one WRITE to a peer or READ from it; returns a handle for `poll` and `release`."""
        if not len(runs):
            raise ValueError("a post needs at least one run")
        with self._network.lock:
            self._check_peer(name)
            peer = self._network.ports.get(name)
            if peer is None or self.faults.strikes("posts_refused"):
                raise TransportError(f"posting to {name}: {'fault' if peer else 'it is gone'}")
            source, destination = (peer, self) if reads else (self, peer)
            for start, length in zip(runs.source.tolist(), runs.length.tolist(), strict=True):
                source._check_range(start, length)
            for start, length in zip(runs.destination.tolist(), runs.length.tolist(), strict=True):
                destination._check_range(start, length)
            self.counts.posts += 1
            handle = self.counts.posts
            pending_polls = self.faults.pending_polls
            post = Post(peer=name, runs=runs, reads=reads, pending_polls=pending_polls)
            self.posts[handle] = post
            return handle

    def poll(self, handle: int) -> PostState:
        """Where the post stands. A failed one can touch no memory any more."""
        with self._network.lock:
            self._check_open()
            if self.faults.strikes("polls_raising"):
                raise TransportError(f"polling {handle}: fault")
            post = self.posts[handle]
            if post.state is PostState.PENDING:
                post.state = self._advance(post)
            return post.state

    def release(self, handle: int) -> None:
        """Give a finished handle back. Raises `TransportError` if it is still pending."""
        if self.posts[handle].state is PostState.PENDING:
            raise TransportError(f"post {handle} is still pending")
        del self.posts[handle]

    def close(self) -> None:
        """Deregister and leave the network. Idempotent. Pending posts are dropped."""
        with self._network.lock:
            if self._closed:
                return
            self._closed = True
            self.posts.clear()
            self._peers.clear()
            self._arrived.clear()
            self.deregister()
            del self._network.ports[self._name]

    def _advance(self, post: Post) -> PostState:
        peer = self._network.ports.get(post.peer)
        if peer is None:
            return PostState.FAILED
        if peer.faults.frozen:
            return PostState.PENDING
        if post.pending_polls > 0:
            post.pending_polls -= 1
            return PostState.PENDING
        if self.faults.strikes("writes_failing"):
            return PostState.FAILED
        runs = post.runs
        rows = (runs.source.tolist(), runs.destination.tolist(), runs.length.tolist())
        for source, destination, length in zip(*rows, strict=True):
            ctypes.memmove(destination, source, length)
        if post.reads:
            self.counts.bytes_read += runs.bytes
        else:
            self.counts.bytes_written += runs.bytes
        return PostState.DONE

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"port {self._name} is closed")

    def _check_peer(self, name: AgentName) -> None:
        self._check_open()
        if name not in self._peers:
            raise TransportError(f"{name} is not a known peer")

    def _check_range(self, start: int, length: int) -> None:
        if not any(low <= start and start + length <= high for low, high in self._ranges):
            raise TransportError(f"{length} bytes at {start:#x} of {self._name} are not registered")
