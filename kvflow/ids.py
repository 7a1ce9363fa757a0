"""Identifiers, their types and their limits.

transfer id   minted once per dispatch by the router; up to `TRANSFER_ID_CHARS_MAX` printable
              ASCII characters; carried verbatim, never cut or rewritten.
request id    vLLM's own name of a request inside one engine; never leaves that engine.
attempt       counts the registrations of one consumer engine (not of one transfer), so that two
              registrations of the same transfer id by one engine never share a number.
incarnation   a fresh random id per process start; a restarted engine is another peer.
rank          the worker's place in its engine: pipeline stage and tensor-parallel rank.
prompt digest what two engines compare a prompt by: equal if they compute the same KV for it.
part          what one producer rank owes one consumer rank of a transfer; most have only one.
"""

import re
import secrets
from typing import NamedTuple, NewType

TransferId = NewType("TransferId", str)
RequestId = NewType("RequestId", str)
PartId = NewType("PartId", TransferId)
"""How one worker names a part: see `part_id`."""
AgentName = NewType("AgentName", str)
Incarnation = NewType("Incarnation", str)
PromptDigest = NewType("PromptDigest", bytes)
NO_DIGEST = PromptDigest(b"")
"""Of a prompt that has none: equal to any other that has none."""

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


def part_id(transfer_id: TransferId, part: int) -> PartId:
    """The transfer id itself for part 0; others have a number after a space, as no id has one."""
    return PartId(transfer_id if part == 0 else TransferId(f"{transfer_id} {part}"))


def transfer_of(part: PartId) -> TransferId:
    """The transfer that a part is of."""
    return TransferId(part.partition(" ")[0])


def is_transfer_id(text: object) -> bool:
    """Whether `text` is a transfer id: printable ASCII without spaces, not empty, not too long."""
    return isinstance(text, str) and _TRANSFER_ID.fullmatch(text) is not None


def new_incarnation() -> Incarnation:
    """128 random bits in hexadecimal."""
    return Incarnation(secrets.token_hex(16))
