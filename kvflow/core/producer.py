"""The producer's machine: one record per part of a transfer in each worker that computes KV.

Rules: a WRITE starts only in the row that enters `transferring`; blocks are reported to vLLM only
when no handle can read them any more; whoever asks about a registration gets an answer from the
record's state, also after the end, for as long as the tombstone lives.

The idea: two things must come together, the finished prefill and the consumer's registration. The
second of the two, whichever it is, takes the record to `transferring`, or to `lent` if the consumer
reads. Everything else is about one of them being late, doubled, withdrawn or lost.

Where both are here before the prompt is computed to its end, what is complete is written stretch by
stretch while vLLM goes on (`streaming`), each as a write of its own; what is left at the end is the
last one. A stretch counts when its write is done, and only as long as the prefill is not preempted.

Where one rank here writes to several ranks of a consumer (it has fewer ranks, or other ones), each
of those has a record of its own, a *part*; all parts see the same prefill, and vLLM gets its blocks
back with the last.

Known limit: a transfer id that two prefills or two consumers claim at once is refused for all of
them; there is no way to tell who is right.
"""

import hashlib
import math
from dataclasses import dataclass, field

from kvflow.core.events import PrefillAdvanced, PrefillFinished, WriteDone, WriteFailed
from kvflow.core.notices import Blocks, Cancel, Fetched, Register
from kvflow.core.reasons import Reason
from kvflow.core.turn import Record, Turn
from kvflow.ids import NO_DIGEST, AgentName, PartId, PromptDigest, RequestId, TransferId

NAME = "producer"

STATES = {
    "unknown": "nothing is known of this transfer id",
    "allocated": "vLLM has the prompt and computes it; no consumer has registered",
    "held": "a consumer has registered; no prefill with this id is known here yet",
    "registered": "a consumer has registered, and vLLM computes the prompt",
    "streaming": "vLLM computes the prompt, and what is complete of it is being written",
    "recalled": "vLLM took the blocks away amid a write, whose end is awaited; a consumer waits",
    "preempted": "vLLM took the blocks away and will compute the prompt again; no registration",
    "prefilled": "the KV is complete and pinned; no consumer has registered",
    "transferring": "the KV is being written into the consumer's blocks",
    "lent": "a consumer reads the KV; the blocks stay pinned until it says that it has it, or its "
    "lease ends",
    "draining": "the write must stop; blocks stay pinned until the last handle has ended",
    "kept": "every byte was moved; the blocks stay pinned for a while, in case the consumer is "
    "preempted",
    "sent": "every byte was moved, and the blocks are vLLM's again",
    "failed": "over without a complete transfer; nothing of it can land any more",
    "forgotten": "the record is deleted",
}
AWAITED = frozenset({"held", "registered", "streaming", "recalled"})
"""A consumer waits for the prefill."""
COMPUTING = frozenset({"allocated", "registered", "streaming"})
"""vLLM computes the prompt."""
WRITING = frozenset({"streaming", "transferring"})
"""Slices may be posted."""
LIVE = AWAITED | frozenset("allocated preempted prefilled transferring lent draining kept".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A consumer's request to be written to, or (`reads`) to be told when it can read."""

    peer: AgentName
    attempt: int
    blocks: Blocks
    starts: tuple[int, ...]
    tokens: int
    lease_s: float
    since: float
    keep: bool = False
    reads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBy:
    """A `Register` with its sender: what registration rows get as their event."""

    peer: AgentName
    register: Register


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledBy:
    """A `Cancel` with its sender."""

    peer: AgentName
    cancel: Cancel


@dataclass(slots=True, kw_only=True)
class ProducerRecord(Record):
    """One transfer on the producing side.

    lease_until  the registration is good until then.
    write_until  slices may be posted only before this time, which the consumer names.
    ends_by      a shutdown lets the write go on until then, however often it is renewed.
    failures     WRITEs of this prefill that have failed.
    retry_of     consumer and attempt whose WRITE failed last; the same load may try once more.
    part         what this record is of: the transfer's KV for one of the consumer's workers.
    is_finished  vLLM keeps the blocks until they are released here; else they are a running
                 request's, as far as `tokens`.
    posted       the open write, if there is one, is complete up to this token.
    written      what lies before this token has been written to the registered consumer.
    is_counted   the fate of the registration is in the tally.
    kept_until   once it was written, its blocks are kept until then, however often it is written.
    settled      peer -> highest attempt of which it was told, or could be told, that nothing can
                 land any more; a later-arriving registration of such an attempt is stale.
    """

    transfer_id: TransferId
    part: PartId
    request_id: RequestId | None = None
    prompt: PromptDigest = NO_DIGEST
    blocks: Blocks = ()
    tokens: int = 0
    is_exact: bool = False
    is_finished: bool = False
    posted: int = 0
    written: int = 0
    registration: Registration | None = None
    lease_until: float = -math.inf
    write_until: float = -math.inf
    ends_by: float = math.inf
    settled: dict[AgentName, int] = field(default_factory=dict)
    bytes: int = 0
    runs: int = 0
    failures: int = 0
    retry_of: tuple[AgentName, int] | None = None
    kept_until: float | None = None
    is_counted: bool = False

    @property
    def prefill(self) -> str:
        """How consumers name this prefill: the same at every rank. Nothing while none is known."""
        return prefill_name(self.request_id) if self.request_id is not None else ""

    @property
    def attempt(self) -> int:
        return self.registration.attempt if self.registration else 0


def prefill_name(request_id: RequestId) -> str:
    """How a prefill is named to consumers, who are not told vLLM's request id."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]


P = ProducerRecord

# -- guards --------------------------------------------------------------------------------------


def _covers_some(
    progress: P | PrefillAdvanced, wanted: Register | Registration, written: int
) -> bool:
    """Whether there is something to write beyond what is `written`; never for one that reads."""
    if wanted.reads or not len(wanted.blocks) == len(progress.blocks) == len(wanted.starts):
        return False
    return min(progress.tokens, wanted.tokens) > max(written, min(wanted.starts))


def _covers(prefill: P | PrefillFinished, wanted: Register | Registration) -> bool:
    """Whether a prefill has the KV that a registration asks for.

    The block sizes of the two may differ, so only tokens are compared here; the plan of the write
    looks at each block.
    """
    return (
        wanted.tokens <= prefill.tokens
        and (wanted.tokens == prefill.tokens or not prefill.is_exact)
        and len(wanted.blocks) == len(prefill.blocks) == len(wanted.starts)
    )


def registration_fits(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return _covers(record, event.register)


def is_to_be_written(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return registration_fits(record, event, turn) and not event.register.reads


def is_to_be_read(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return registration_fits(record, event, turn) and event.register.reads


def registration_does_not_fit(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return not registration_fits(record, event, turn)


def is_too_long(record: P, event: RegisteredBy, turn: Turn) -> bool:
    """No prefill of this prompt will ever be known here: vLLM's API server refuses it."""
    most = turn.prompt_tokens_max
    return most is not None and event.register.tokens > most


def is_not_too_long(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return not is_too_long(record, event, turn)


def may_be_retried(record: P, event: WriteFailed, turn: Turn) -> bool:
    """Not at a shutdown: there will be no other attempt then. Nor if it was written before."""
    wanted = not event.final and record.ends_by == math.inf and record.kept_until is None
    return wanted and record.failures < turn.timings.retries_max


def may_not_be_retried(record: P, event: WriteFailed, turn: Turn) -> bool:
    return not may_be_retried(record, event, turn)


def keep_until(record: P, turn: Turn) -> float:
    if record.kept_until is not None:
        return record.kept_until
    return turn.now + turn.timings.keep_sent_s


def _wants_it_kept(record: P, turn: Turn) -> bool:
    """Not at a shutdown, and only for a consumer that will say when it is enough."""
    asked = record.registration is not None and record.registration.keep
    return asked and record.ends_by == math.inf and turn.now < keep_until(record, turn)


def lacks_the_rest(record: P, event: WriteDone, turn: Turn) -> bool:
    """What is being written is not all that is owed."""
    assert record.registration is not None
    return record.posted < record.registration.tokens


def is_to_be_kept(record: P, event: WriteDone, turn: Turn) -> bool:
    return not lacks_the_rest(record, event, turn) and _wants_it_kept(record, turn)


def is_not_to_be_kept(record: P, event: WriteDone, turn: Turn) -> bool:
    return not lacks_the_rest(record, event, turn) and not _wants_it_kept(record, turn)


def is_to_be_kept_once_read(record: P, event: Fetched, turn: Turn) -> bool:
    return _wants_it_kept(record, turn)


def is_not_to_be_kept_once_read(record: P, event: Fetched, turn: Turn) -> bool:
    return not _wants_it_kept(record, turn)


def has_all_written(record: P, event: WriteDone, turn: Turn) -> bool:
    """While vLLM still runs the request. What is to be kept must have been given to us first."""
    return is_not_to_be_kept(record, event, turn)


def has_more_to_write(record: P, event: WriteDone, turn: Turn) -> bool:
    assert record.registration is not None
    return not has_all_written(record, event, turn) and _covers_some(
        record, record.registration, record.posted
    )


def waits_for_more(record: P, event: WriteDone, turn: Turn) -> bool:
    return not has_all_written(record, event, turn) and not has_more_to_write(record, event, turn)


def brings_more(record: P, event: PrefillAdvanced, turn: Turn) -> bool:
    assert record.registration is not None
    return _covers_some(event, record.registration, record.written)


def brings_nothing(record: P, event: PrefillAdvanced, turn: Turn) -> bool:
    return not brings_more(record, event, turn)


def finds_some(record: P, event: RegisteredBy, turn: Turn) -> bool:
    """Of the prompt that is being computed, something that the consumer lacks is complete."""
    return _covers_some(record, event.register, 0)


def finds_nothing(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return not finds_some(record, event, turn)


def wants_what_is_kept(record: P, event: RegisteredBy, turn: Turn) -> bool:
    """The id alone does not say so: it may be another request's, of another prompt."""
    return event.register.prefill == record.prefill and registration_fits(record, event, turn)


def wants_to_be_written_what_is_kept(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return wants_what_is_kept(record, event, turn) and not event.register.reads


def wants_to_read_what_is_kept(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return wants_what_is_kept(record, event, turn) and event.register.reads


def wants_something_else(record: P, event: RegisteredBy, turn: Turn) -> bool:
    return not wants_what_is_kept(record, event, turn)


def prefill_fits(record: P, event: PrefillFinished, turn: Turn) -> bool:
    assert record.registration is not None
    return _covers(event, record.registration)


def prefill_is_to_be_written(record: P, event: PrefillFinished, turn: Turn) -> bool:
    assert record.registration is not None
    return prefill_fits(record, event, turn) and not record.registration.reads


def prefill_is_to_be_read(record: P, event: PrefillFinished, turn: Turn) -> bool:
    assert record.registration is not None
    return prefill_fits(record, event, turn) and record.registration.reads


def is_ambiguous(record: P, event: object, turn: Turn) -> bool:
    return record.reason is Reason.AMBIGUOUS


def is_not_ambiguous(record: P, event: object, turn: Turn) -> bool:
    return not is_ambiguous(record, event, turn)


def prefill_does_not_fit(record: P, event: PrefillFinished, turn: Turn) -> bool:
    return not prefill_fits(record, event, turn)
