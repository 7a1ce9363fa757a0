"""The consumer's machine: one record per request in each worker that waits for KV.

Rules: the expected producer ranks are a set, and a rank is settled by name, never counted; blocks
are given back to vLLM only when every rank has said that nothing can land any more, or was torn
down and the fence time has passed; every waiting state has a deadline.

The idea: register, be told, done. What makes it long is giving up: a consumer that wants out
cannot just leave, since somebody may still write into its blocks. One that reads the KV itself can
(`kvflow.core.consumer_reads`): it waits for nobody but its own READs.

Known limit: after a peer was torn down, the fence time is the only proof that it stopped writing.
"""

import enum
import math
from dataclasses import dataclass, field

from kvflow.core.notices import Blocks, Offer
from kvflow.core.reasons import Reason, Standing
from kvflow.core.turn import PeerMet, Record, Turn
from kvflow.ids import (
    NO_DIGEST,
    Address,
    AgentName,
    PromptDigest,
    Rank,
    RequestId,
    TransferId,
)

NAME = "consumer"
RESEND = "resend"

STATES = {
    "new": "nothing is known of this request",
    "allocated": "vLLM reserved blocks; the producer is being met",
    "registering": "the registration was sent; not every producer rank has answered",
    "registered": "every producer rank has the registration on record",
    "transferring": "at least one producer rank is writing, or has written its part",
    "expecting": "registered as one that reads; no producer rank has said yet that its KV is there",
    "reading": "the KV is being read from at least one producer rank, or has been",
    "draining": "given up; blocks stay reserved until every rank says that nothing can land",
    "fencing": "a rank that might write was torn down; blocks stay reserved for the fence time",
    "stopping": "given up; blocks stay reserved until our own READs have ended",
    "releasing": "nothing (more) is wanted; the producer is being told so",
    "received": "the KV of every expected rank is here, and vLLM knows",
    "failed": "over without the KV, and vLLM knows",
    "released": "the producer was told, or could not be",
    "forgotten": "the record is deleted",
}
WAITING_FOR_PEER = frozenset({"allocated", "releasing"})
RENEWING = frozenset("registering registered transferring expecting reading".split())
ASKING = RENEWING | {"draining", "releasing"}
LIVE = ASKING | {"allocated", "fencing", "stopping"}


class Outcome(enum.Enum):
    """How one producer rank ended."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRank:
    """Something that one producer rank said, or that happened to it."""

    rank: Rank
    standing: Standing | None = None
    reason: Reason | None = None
    prefill: str = ""
    prompt: PromptDigest = NO_DIGEST
    kept_s: float = 0.0
    is_dead: bool = False
    offer: Offer | None = None


@dataclass(slots=True, kw_only=True)
class Reads:
    """How far a load that reads has come, by producer rank.

    offer    what the router said of a finished prefill; None if it said nothing.
    said     what each rank has said can be read.
    sources  what is being read from each, or was read last.
    open     ranks whose READ has not ended.
    complete ranks whose last READ has read everything.
    fetched  ranks that were told so, after they had said that it could be read: what a `Done` of
             theirs confirms.
    """

    offer: Offer | None
    said: dict[Rank, Offer] = field(default_factory=dict)
    sources: dict[Rank, Offer] = field(default_factory=dict)
    open: set[Rank] = field(default_factory=set)
    complete: set[Rank] = field(default_factory=set)
    fetched: set[Rank] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class ConsumerRecord(Record):
    """One load.

    fence_s   how long blocks are kept after the last rank was lost; longer if one may still live.
    agents    the expected producer ranks, by name; empty until the producer was met.
    answered  ranks that have said anything of this attempt.
    blind     ranks whose registration could not name a time until which they may write, since
              their clock had not been heard; they get it again when it has.
    writing   ranks that have said that they are writing.
    outcomes  how each settled rank ended; a load is received when all of them are DONE.
    prefills  which prefill's KV each rank has written.
    keep      whether the producer is asked to keep its blocks for a while after the WRITE.
    kept      who does so: worker -> until when.
    prefill   the prefill whose KV is wanted once more; "" for a first time.
    gave_up_at
              when it was given up, while it is being given up.
    reads     how far its READs have come; None for a load that is written by the producer.
    bytes, runs
              read here.
    """

    request_id: RequestId
    transfer_id: TransferId
    attempt: int = 0
    address: Address = Address("", 0)
    engine_id: str | None = None
    blocks: Blocks = ()
    starts: tuple[int, ...] = ()
    tokens: int = 0
    prompt: PromptDigest = NO_DIGEST
    born: float = 0.0
    retries: int = 0
    fence_s: float = 0.0
    agents: dict[Rank, AgentName] = field(default_factory=dict)
    answered: set[Rank] = field(default_factory=set)
    blind: set[Rank] = field(default_factory=set)
    prefills: dict[Rank, str] = field(default_factory=dict)
    keep: bool = False
    kept: dict[AgentName, float] = field(default_factory=dict)
    prefill: str = ""
    gave_up_at: float = 0.0
    writing: set[Rank] = field(default_factory=set)
    outcomes: dict[Rank, Outcome] = field(default_factory=dict)
    reads: Reads | None = None
    bytes: int = 0
    runs: int = 0

    @property
    def unsettled(self) -> frozenset[Rank]:
        """Ranks that are not done, and may still write if they are to write."""
        return frozenset(self.agents) - self.outcomes.keys()

    @property
    def lost(self) -> frozenset[Rank]:
        """Ranks that were torn down without a word."""
        return frozenset(rank for rank, how in self.outcomes.items() if how is Outcome.LOST)


C = ConsumerRecord

# -- guards --------------------------------------------------------------------------------------


def is_kept(record: C, event: object, turn: Turn) -> bool:
    """Every rank would write its part once more, as far as is known here."""
    until = [record.kept.get(agent, -math.inf) for agent in record.agents.values()]
    return bool(until) and min(until) > turn.now


def is_not_kept(record: C, event: object, turn: Turn) -> bool:
    return not is_kept(record, event, turn)


def some_keep(record: C, event: object, turn: Turn) -> bool:
    return any(until > turn.now for until in record.kept.values())


def none_keeps(record: C, event: object, turn: Turn) -> bool:
    return not some_keep(record, event, turn)


def are_to_be_told(record: C, event: PeerMet, turn: Turn) -> bool:
    """Of a release after a load only the workers that keep something are told, if they live."""
    return not record.kept or not record.kept.keys().isdisjoint(event.agents.values())


def are_gone(record: C, event: PeerMet, turn: Turn) -> bool:
    return not are_to_be_told(record, event, turn)


def settled_already(record: C, event: FromRank, turn: Turn) -> bool:
    return event.rank in record.outcomes


def is_done_already(record: C, event: FromRank, turn: Turn) -> bool:
    return record.outcomes.get(event.rank) is Outcome.DONE


def fails_the_last(record: C, event: FromRank, turn: Turn) -> bool:
    failed = not is_done_already(record, event, turn) and is_last(record, event, turn)
    return failed and not may_retry(record, event, turn)


def may_retry(record: C, event: FromRank, turn: Turn) -> bool:
    """The producer still holds the KV, and no other rank may write under the old attempt.

    Where the KV is wanted once more it does not: that WRITE is not tried again.
    """
    return (
        event.reason is Reason.WRITE_FAILED
        and not record.prefill
        and record.retries < turn.timings.retries_max
        and not is_done_already(record, event, turn)
        and is_last(record, event, turn)
    )


def fails_before_others(record: C, event: FromRank, turn: Turn) -> bool:
    return not is_done_already(record, event, turn) and others_remain(record, event, turn)


def is_lost_before_others(record: C, event: FromRank, turn: Turn) -> bool:
    return not settled_already(record, event, turn) and others_remain(record, event, turn)


def is_lost_last(record: C, event: FromRank, turn: Turn) -> bool:
    return not settled_already(record, event, turn) and last_of_all(record, event, turn)


def is_last(record: C, event: FromRank, turn: Turn) -> bool:
    """No other rank may still write, and none was lost."""
    return not (record.unsettled - {event.rank}) and not record.lost


def others_remain(record: C, event: FromRank, turn: Turn) -> bool:
    return bool(record.unsettled - {event.rank})


def last_of_all(record: C, event: FromRank, turn: Turn) -> bool:
    return not others_remain(record, event, turn)


def completes_not(record: C, event: FromRank, turn: Turn) -> bool:
    """Some other expected rank is not done."""
    others = record.agents.keys() - {event.rank}
    return any(record.outcomes.get(rank) is not Outcome.DONE for rank in others)


def completes(record: C, event: FromRank, turn: Turn) -> bool:
    """Every other expected rank is done, all with the same prefill's KV, and that of our prompt."""
    same = set(record.prefills.values()) <= {event.prefill}
    return not completes_not(record, event, turn) and same and is_of_our_prompt(record, event)


def is_of_our_prompt(record: C, event: FromRank) -> bool:
    """Whether the KV that has come is the one that is wanted. The transfer id should say so, but
    two requests may have come to use one.
    """
    return event.prompt == record.prompt


def completes_wrongly(record: C, event: FromRank, turn: Turn) -> bool:
    """Every other expected rank is done, but not with one prefill's KV, or not our prompt's."""
    return not completes_not(record, event, turn) and not completes(record, event, turn)


def some_silent(record: C, event: FromRank, turn: Turn) -> bool:
    """Another rank has not answered the registration."""
    return bool(record.agents.keys() - record.answered - {event.rank})


def incomplete_some_silent(record: C, event: FromRank, turn: Turn) -> bool:
    return completes_not(record, event, turn) and some_silent(record, event, turn)


def incomplete_none_silent(record: C, event: FromRank, turn: Turn) -> bool:
    return completes_not(record, event, turn) and not some_silent(record, event, turn)


def is_writing(record: C, event: FromRank, turn: Turn) -> bool:
    return event.standing is Standing.TRANSFERRING or bool(record.writing or record.outcomes)


def none_silent_some_writing(record: C, event: FromRank, turn: Turn) -> bool:
    return not some_silent(record, event, turn) and is_writing(record, event, turn)


def none_silent_none_writing(record: C, event: FromRank, turn: Turn) -> bool:
    return not some_silent(record, event, turn) and not is_writing(record, event, turn)


def is_not_writing(record: C, event: FromRank, turn: Turn) -> bool:
    return not is_writing(record, event, turn)
