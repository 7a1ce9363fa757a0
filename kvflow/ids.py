"""Identifiers, their types and their limits.

transfer id   minted once per dispatch by the router; up to `TRANSFER_ID_CHARS_MAX` printable
              ASCII characters; carried verbatim, never cut or rewritten.
request id    vLLM's own name of a request inside one engine; never leaves that engine.
attempt       counts the registrations of one consumer engine (not of one transfer), so that two
              registrations of the same transfer id by one engine never share a number.
incarnation   a fresh random id per process start; a restarted engine is another peer.
rank          the worker's place in its engine: pipeline stage and tensor-parallel rank.
"""

import re
import secrets
from typing import NamedTuple, NewType

TransferId = NewType("TransferId", str)
RequestId = NewType("RequestId", str)
AgentName = NewType("AgentName", str)
Incarnation = NewType("Incarnation", str)

TRANSFER_ID_CHARS_MAX = 256
_TRANSFER_ID = re.compile(rf"[!-~]{{1,{TRANSFER_ID_CHARS_MAX}}}")


class Rank(NamedTuple):
    """A worker's place in its engine."""

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp}.tp{self.tp}"


class Address(NamedTuple):
    """Where a producer engine's side channel listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


ATTEMPT_STRIDE = 16
"""A consumer engine numbers its loads in steps of this; the numbers between are for retries."""


def is_transfer_id(text: object) -> bool:
    """Whether `text` is a transfer id: printable ASCII without spaces, not empty, not too long."""
    return isinstance(text, str) and _TRANSFER_ID.fullmatch(text) is not None


def new_incarnation() -> Incarnation:
    """128 random bits in hexadecimal."""
    return Incarnation(secrets.token_hex(16))
