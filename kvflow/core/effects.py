"""What an engine wants done, in the imperative.

`Meet`, `PostWrite` and `PostRead` are answered by exactly one event each; the others are not
answered, except that a `SendNotice` which the transfer library rejects comes back as
`NoticeFailed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvflow.core.notices import Blocks, Notice
from kvflow.core.reasons import Reason
from kvflow.ids import Address, AgentName, PartId, Rank, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Ask a producer engine's side channel who its workers are."""

    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPeer:
    """Make a peer unreachable and settle what was posted to it."""

    agent: AgentName


@dataclass(frozen=True, slots=True, kw_only=True)
class SendNotice:
    """Send one notice to one worker."""

    agent: AgentName
    notice: Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class PostWrite:
    """Write blocks of this worker into blocks of the consumer's.

    source       block ids per cache group from the first token on, as in `PrefillFinished`.
    destination  as in `Register`: the first of a group holds the token `starts[group]`.
    tokens       the KV of the tokens from `starts[group]` to here is owed.
    moved        what lies before this token was written already, by an earlier order.

    Posted in slices, each only while `Engine.may_write` holds.
    """

    part: PartId
    attempt: int
    agent: AgentName
    source: Blocks
    destination: Blocks
    starts: tuple[int, ...]
    tokens: int
    moved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWrite:
    """Post nothing more of this write; answer when what is in flight has ended."""

    part: PartId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PostRead:
    """Read blocks of one producer rank into blocks of this worker.

    source, destination, starts, tokens  as in `PostWrite`.

    Posted in slices, without asking: what may not be read any more does not count (S8).
    """

    request_id: RequestId
    rank: Rank
    agent: AgentName
    source: Blocks
    destination: Blocks
    starts: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRead:
    """Post nothing more of this read; answer when what is in flight has ended."""

    request_id: RequestId
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSent:
    """Tell vLLM that it may free a prefill's blocks."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived:
    """Tell vLLM that a load ended: with its KV (`reason` None), or without."""

    request_id: RequestId
    reason: Reason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A record took a row: what logs, traces and metrics are made of.

    key       transfer id (of a producer: its part), or a peer's address or agent name.
    spent_ms  at the end of a transfer only: milliseconds spent in each state.
    """

    machine: str
    key: str
    attempt: int
    request_id: RequestId | None
    trigger: str
    source: str
    dest: str
    at: float
    reason: Reason | None = None
    detail: str = ""
    bytes: int = 0
    runs: int = 0
    peer: str = ""
    spent_ms: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """Something arrived that concerns nothing here: counted, never acted on."""

    kind: str
    key: str


Effect = (
    Meet
    | DropPeer
    | SendNotice
    | PostWrite
    | StopWrite
    | PostRead
    | StopRead
    | ReportSent
    | ReportReceived
    | Moved
    | Ignored
)
