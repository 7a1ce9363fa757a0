"""What happens to an engine, in the past tense: commands of vLLM, notices, answers of the driver.

Every effect of `kvflow.core.effects` that asks for an answer gets exactly one of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvflow.core.notices import Blocks, Notice, Offer
from kvflow.core.reasons import Reason
from kvflow.ids import (
    NO_DIGEST,
    Address,
    AgentName,
    Incarnation,
    PartId,
    PromptDigest,
    Rank,
    RequestId,
    TransferId,
)

# -- vLLM, producer side -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStarted:
    """vLLM has taken this prompt, or allocates blocks for it (anew); its end will be told."""

    transfer_id: TransferId
    request_id: RequestId
    prompt: PromptDigest = NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPreempted:
    """vLLM took the blocks away; the prompt will be computed again."""

    transfer_id: TransferId
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAdvanced:
    """The KV of the prompt's first tokens is complete, and may be written from already.

    blocks  source block ids as in `PrefillFinished`; the request may hold more of them.
    tokens  prompt tokens whose KV is in them.

    The blocks stay the running request's: `PrefillPreempted` and `PrefillAborted` take them away.
    """

    transfer_id: TransferId
    request_id: RequestId
    blocks: Blocks
    tokens: int
    prompt: PromptDigest = NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFinished:
    """The prompt's KV is complete; vLLM keeps the blocks until `ReportSent`.

    blocks    source block ids per cache group, in token order from the first token; 0 for a block
              that vLLM has freed (before a sliding window). Of a state, the one block that has it.
    tokens    prompt tokens whose KV is in them.
    is_exact  a state is among them, which is good after exactly so many tokens and no fewer.
    """

    transfer_id: TransferId
    request_id: RequestId
    blocks: Blocks
    tokens: int
    is_exact: bool = False
    prompt: PromptDigest = NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAborted:
    """The request ended without a complete KV; vLLM frees its blocks itself."""

    transfer_id: TransferId
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillsStalled:
    """vLLM's steps schedule nothing although prompts wait to be computed: no blocks are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillsResumed:
    """vLLM computes again, or no prompt waits any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked:
    """A router says through the side channel that nobody will fetch this transfer."""

    transfer_id: TransferId


# -- vLLM, consumer side -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksAllocated:
    """vLLM reserved blocks for KV of a producer.

    blocks     destination block ids per cache group, only those to be filled.
    starts     first token per group whose KV is not here; the group's first block holds it.
    engine_id  the producer's engine id if the router named it, else None.
    keep       should the request be preempted, its KV is wanted once more.
    again      it was preempted after its KV had landed: only a producer that keeps its blocks is
               asked, and a load of which there is none fails at once.
    reads      the KV is read from here, rather than written by the producer.
    prompt     only this prompt's KV counts, whatever was computed under the transfer id.
    offer      what the router says of a prefill that has finished, to be read without waiting for
               the producer's word; None if it says nothing of the kind.
    """

    transfer_id: TransferId
    request_id: RequestId
    attempt: int
    address: Address
    engine_id: str | None
    blocks: Blocks
    starts: tuple[int, ...]
    tokens: int
    keep: bool = False
    again: bool = False
    reads: bool = False
    offer: Offer | None = None
    prompt: PromptDigest = NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRefused:
    """vLLM waits for a load that cannot be tried, for example since its parameters are bad."""

    transfer_id: TransferId
    request_id: RequestId
    attempt: int
    detail: str
    reason: Reason = Reason.PARAMETERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWanted:
    """Nothing has to be moved (all is cached here, or the request is gone): tell the producer."""

    transfer_id: TransferId
    request_id: RequestId
    attempt: int
    address: Address
    engine_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAborted:
    """vLLM ended a request; if its load is under way, it keeps the blocks until it is reported."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """vLLM ended a request whose load was over: what its producer keeps for it may go."""

    request_id: RequestId


# -- network -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeReceived:
    """A notice arrived; `sender` is the name that the transfer library vouches for."""

    sender: AgentName
    notice: Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeFailed:
    """A notice could not be handed to the transfer library.

    is_dead  the library says that the peer's process is gone: nothing of it can write any more.
    """

    agent: AgentName
    detail: str
    is_dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIntroduced:
    """A consumer worker sent its coordinates along; the driver made it reachable.

    refusal      a sentence when the two cannot exchange KV, else None.
    part, parts  of the workers of its engine that this one writes to, in order of their ranks: the
                 place of this one, and how many there are.
    """

    agent: AgentName
    incarnation: Incarnation
    rank: Rank
    refusal: str | None = None
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingSucceeded:
    """Answer to `Meet`: the producer engine's worker ranks that write to this worker."""

    address: Address
    engine_id: str
    incarnation: Incarnation
    agents: Mapping[Rank, AgentName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingFailed:
    """Answer to `Meet`. `final` when trying again cannot help (the two are incompatible)."""

    address: Address
    final: bool
    detail: str


# -- writes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDone:
    """Answer to `PostWrite`: every run has reported done."""

    part: PartId
    attempt: int
    bytes: int
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """Answer to `PostWrite`: at least one run failed; no handle is outstanding any more.

    final  another attempt would fail in the same way.
    """

    part: PartId
    attempt: int
    detail: str
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStopped:
    """Answer to `PostWrite` after `StopWrite`: no handle is outstanding, not all was written."""

    part: PartId
    attempt: int


# -- reads ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDone:
    """Answer to `PostRead`: every run has reported done."""

    request_id: RequestId
    rank: Rank
    bytes: int
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailed:
    """Answer to `PostRead`: at least one run failed; no handle is outstanding any more.

    final  another READ would fail in the same way.
    """

    request_id: RequestId
    rank: Rank
    detail: str
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStopped:
    """Answer to `PostRead` after `StopRead`: no handle is outstanding, not all was read."""

    request_id: RequestId
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The worker is shutting down: finish or give up everything, and say so."""


Event = (
    PrefillStarted
    | PrefillPreempted
    | PrefillAdvanced
    | PrefillFinished
    | PrefillAborted
    | PrefillsStalled
    | PrefillsResumed
    | ReleaseAsked
    | BlocksAllocated
    | LoadRefused
    | ReleaseWanted
    | LoadAborted
    | RequestEnded
    | NoticeReceived
    | NoticeFailed
    | PeerIntroduced
    | MeetingSucceeded
    | MeetingFailed
    | WriteDone
    | WriteFailed
    | WriteStopped
    | ReadDone
    | ReadFailed
    | ReadStopped
    | Closing
)
