"""The port: what the driver needs of a transfer library, and nothing more.

`kvflow.io.nixl_port.NixlPort` is the real one; `kvflow.testing.port` has an in-memory one. Every
method is called from the loop thread only, returns without waiting for the network, and raises
`TransportError` where the library refuses.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from kvflow.ids import AgentName
from kvflow.layout import Region, Runs


class PostState(enum.Enum):
    """Where a posted WRITE or READ stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Port(Protocol):
    """One transfer agent."""

    @property
    def name(self) -> AgentName:
        """This agent's name, as peers will see it in `receive`."""

    def register(self, regions: Sequence[Region]) -> None:
        """Make the memory of `regions` known to the library."""

    def deregister(self) -> None:
        """Undo `register`; no-op when nothing is registered."""

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent; changes with `register` and `deregister`."""

    def add_peer(self, metadata: bytes) -> AgentName:
        """Make a remote agent known; returns its name."""

    def remove_peer(self, name: AgentName) -> None:
        """Forget a remote agent: nothing can be posted to it any more. No-op if unknown."""

    def send(self, name: AgentName, payload: bytes) -> None:
        """Send a notification."""

    def receive(self) -> list[tuple[AgentName, bytes]]:
        """Notifications that have arrived, with their sender, oldest first per sender."""

    def post(self, name: AgentName, runs: Runs, *, reads: bool = False) -> int:
        """Start one WRITE to a peer or READ from it; returns a handle for `poll` and `release`.

        The sources of a WRITE are ours and its destinations the peer's; of a READ, the other way
        round.
        """

    def poll(self, handle: int) -> PostState:
        """Where the post stands. A failed one can touch no memory any more."""

    def release(self, handle: int) -> None:
        """Give a finished handle back."""

    def close(self) -> None:
        """Deregister and shut the agent down. Idempotent."""
