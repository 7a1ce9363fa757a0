"""The ways in which kvflow moves a transfer, so that a suite can run in each.

CI takes the default one; `KVFLOW_WAYS=streamed,push,pull` takes all.
"""

import os
from collections.abc import Mapping
from enum import StrEnum


class Way(StrEnum):
    """Who moves the KV, and when."""

    STREAMED = "streamed"
    """Written by the producer, each stretch as soon as it is computed."""
    PUSH = "push"
    """Written by the producer when all is computed."""
    PULL = "pull"
    """Read by the consumer."""

    @property
    def extra(self) -> Mapping[str, float | str]:
        """`kv_connector_extra_config` of all engines."""
        return EXTRA[self]

    @property
    def waiting(self) -> tuple[str, ...]:
        """The consumer's states, one of them, when the producer has its registration and computes.

        A stretch may be complete by then, and its write have begun.
        """
        return WAITING[self]

    @property
    def moving(self) -> tuple[str, ...]:
        """The producer's states while the KV moves."""
        return ("lent",) if self is Way.PULL else ("streaming", "transferring")

    @property
    def moved(self) -> str:
        """The producer's trigger that says that all of it has."""
        return "fetched" if self is Way.PULL else "write_done"


EXTRA: Mapping[Way, Mapping[str, float | str]] = {
    Way.STREAMED: {"stream": "on"},
    Way.PUSH: {"stream": "off"},
    Way.PULL: {"mode": "pull"},
}

WAITING: Mapping[Way, tuple[str, ...]] = {
    Way.STREAMED: ("registered", "transferring"),
    Way.PUSH: ("registered",),
    Way.PULL: ("expecting",),
}

CHOSEN = [Way(name) for name in os.environ.get("KVFLOW_WAYS", "streamed").split(",")]
