"""What producer and consumer workers say to each other, as the core sees it.

The wire has a twin of each (`kvflow.wire.messages`), with limits. Every notice is idempotent by
(transfer id, attempt, rank), so each may be lost, doubled, delayed or overtaken.
"""

from dataclasses import dataclass

from kvflow.core.reasons import Reason, Standing
from kvflow.ids import NO_DIGEST, PromptDigest, TransferId

Blocks = tuple[tuple[int, ...], ...]
"""Block ids per cache group, in token order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A finished prefill whose KV can be read.

    blocks   its block ids per cache group from the first token on, as in `PrefillFinished`.
    tokens   prompt tokens whose KV is in them.
    prefill  which prefill it is, as in `Done`.
    """

    blocks: Blocks
    tokens: int
    prefill: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Consumer -> producer rank: write this transfer's KV into these blocks.

    blocks   destination block ids per cache group in the consumer's block size, in token order; the
             first of a group is the one that holds the token `starts[group]`.
    starts   per group, the first token whose KV the consumer lacks.
    tokens   prompt tokens that the consumer wants to have after the transfer (incl. those before
             `starts`).
    lease_s  how long the registration is good without a renewal, in seconds.
    write_until_s
             no slice may be posted once the *producer's* clock shows this; None while the consumer
             has not heard that clock, and then none may be posted at all yet.
    keep     after the WRITE the producer may keep its blocks for a while: the consumer will say
             when it has no use for them any more.
    prefill  the KV is wanted once more, of the prefill that `Done.prefill` named, and of no other;
             "" for a first time.
    reads    the consumer reads the KV itself: nothing is written, and the producer says when it is
             there.
    """

    transfer_id: TransferId
    attempt: int
    blocks: Blocks
    starts: tuple[int, ...]
    tokens: int
    lease_s: float
    write_until_s: float | None
    keep: bool = False
    prefill: str = ""
    reads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Producer rank -> consumer: the registration is on record, and stands so.

    clock_s  the producer's clock when this was written.
    """

    transfer_id: TransferId
    attempt: int
    standing: Standing
    clock_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Readable:
    """Producer rank -> consumer that reads: the KV is there, and stays until `Fetched` is said.

    blocks, tokens, prefill  as in `Offer`.
    """

    transfer_id: TransferId
    attempt: int
    blocks: Blocks
    tokens: int
    prefill: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Consumer -> producer rank: our READ of what was said to be readable has ended, complete.

    Answered by `Done` if the producer has held it until now: only then it counts.
    """

    transfer_id: TransferId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Producer rank -> consumer: every byte that this rank owed has been written, or was held until
    the consumer had read it.

    prefill  which prefill's KV it was: the same text from each rank of one engine, unless it is the
             KV of two prefills that used one transfer id.
    prompt   whose KV that is: it counts only for a consumer that wants this prompt's.
    kept_s   the producer keeps its blocks for so long from now, in seconds, and would give them
             once more.
    """

    transfer_id: TransferId
    attempt: int
    prefill: str = ""
    prompt: PromptDigest = NO_DIGEST
    kept_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Producer rank -> consumer: nothing of this attempt can land any more from this rank."""

    transfer_id: TransferId
    attempt: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Consumer -> producer rank: give the transfer up; answer when nothing can land any more."""

    transfer_id: TransferId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Consumer -> producer rank: these registrations are still wanted.

    write_until_s  as in `Register`, for each of them.
    """

    wanted: tuple[tuple[TransferId, int], ...]
    write_until_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Producer rank -> consumer: the answer to `Renew`, one standing per registration.

    clock_s  the producer's clock when this was written.
    """

    standings: tuple[tuple[TransferId, int, Standing, Reason | None], ...]
    clock_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Producer rank -> silent consumer: nothing is said, and nothing is to be answered.

    A transfer library notices that a process is gone when something is sent to it. It is no
    answer, so a producer that can only be heard is lost to the consumer as if it were silent.
    """


Notice = Register | Accepted | Readable | Fetched | Done | Failed | Cancel | Renew | Alive | Probe

FROM_CONSUMER = (Register, Fetched, Cancel, Renew)
"""What a consumer says to a producer; the others are answers."""
