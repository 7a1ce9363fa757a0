"""What a record waits for, and what happens if it does not come: for people and for scripts.

Rules: a question only, nothing here changes a record; every state of every table has an answer
(a test walks them all); what a deadline leads to is read from the table's own rows.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvflow.core import consumer, consumer_table, peer, producer, producer_table
from kvflow.core.consumer import ConsumerRecord, Outcome
from kvflow.core.peer import PeerRecord
from kvflow.core.producer import ProducerRecord
from kvflow.core.table import Row, Table
from kvflow.ids import AgentName, Rank

NAMED_MAX = 4
"""So many workers are named in one sentence; of further ones only the number is told."""
_OVER = "nothing: it is over"


class Whom(enum.StrEnum):
    """Who has to do something next."""

    VLLM = "vllm"
    PRODUCER = "producer"
    CONSUMER = "consumer"
    SIDE_CHANNEL = "side_channel"
    POSTS = "posts"
    TIME = "time"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRank:
    """One remote rank of a load.

    awaits  what is to come from it; "" when nothing is.
    misses  renewals in a row that it has not answered.
    """

    rank: Rank
    agent: AgentName
    awaits: str
    outcome: Outcome | None
    misses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What is waited for, as a sentence's end: "waits for ..."."""

    whom: Whom
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """What a deadline leads to: the state, "" for the same one, and the row's reason."""

    dest: str
    why: str


def of_producer(record: ProducerRecord, now: float) -> Wait:
    """What a producer's part waits for."""
    return _PRODUCER[record.state](record, now)


def of_consumer(record: ConsumerRecord, engine: PeerRecord | None) -> Wait:
    """What a load waits for; `engine` is its producer's record, if there is one."""
    return _CONSUMER[record.state](record, engine)


def of_peer(record: PeerRecord) -> Wait:
    """What a peer's record waits for."""
    return _PEER[record.state](record)


def ranks(record: ConsumerRecord, engine: PeerRecord | None) -> list[OfRank]:
    """The producer ranks of a load, and what is to come from each."""
    misses = engine.misses if engine is not None else {}
    return [
        OfRank(
            rank=rank,
            agent=agent,
            awaits=_awaits(record, rank),
            outcome=record.outcomes.get(rank),
            misses=misses.get(rank, 0),
        )
        for rank, agent in sorted(record.agents.items())
    ]


def expiry(table: Table, record: object, state: str, trigger: str = "expired") -> Expiry | None:
    """What a table does in `state` when the deadline has passed; None: nothing, or it depends."""
    rows = [row for row in table.rows if row.trigger == trigger and state in row.sources]
    row = rows[0] if len(rows) == 1 else next((r for r in rows if _holds(r, record)), None)
    if row is None:
        return None
    return Expiry(dest="" if row.dest in (None, state) else str(row.dest), why=row.why)


def _holds(row: Row, record: object) -> bool:
    """Guards on a transfer's deadlines ask its record alone."""
    return row.guard is not None and row.guard(record, None, None)


# -- words -----------------------------------------------------------------------------------------


def _named(agents: Iterable[str]) -> str:
    names = sorted(agents)
    more = len(names) - NAMED_MAX
    told = ", ".join(names[:NAMED_MAX])
    return f"{told} and {more} more" if more > 0 else told or "nobody"


def _of(record: ConsumerRecord, these: Iterable[Rank]) -> str:
    return _named(record.agents.get(rank, AgentName(str(rank))) for rank in these)


def _awaits(record: ConsumerRecord, rank: Rank) -> str:
    """What is to come from one rank, in the protocol's words."""
    if rank not in record.unsettled:
        return ""
    match record.state:
        case "registering":
            return "DONE" if rank in record.answered else "ACCEPTED"
        case "registered" | "transferring":
            return "DONE"
        case "expecting" | "reading":
            return _awaits_of_read(record, rank)
        case "draining":
            return "FAILED, or DONE, in answer to CANCEL"
        case "releasing":
            return "FAILED in answer to CANCEL"
        case _:
            return ""


def _awaits_of_read(record: ConsumerRecord, rank: Rank) -> str:
    reads = record.reads
    assert reads is not None
    if rank in reads.open:
        return "the end of our own READ"
    if rank in reads.fetched:
        return "DONE in answer to FETCHED"
    return "READABLE"


# -- producer --------------------------------------------------------------------------------------

_OfProducer = Callable[[ProducerRecord, float], Wait]


def _consumer_of(record: ProducerRecord) -> str:
    return record.registration.peer if record.registration is not None else "its consumer"


def _vllm(what: str) -> _OfProducer:
    return lambda record, now: Wait(whom=Whom.VLLM, what=what)


def _consumer(what: str) -> _OfProducer:
    return lambda record, now: Wait(
        whom=Whom.CONSUMER, what=what.format(consumer=_consumer_of(record))
    )


def _registered(record: ProducerRecord, now: float) -> Wait:
    return Wait(
        whom=Whom.VLLM,
        what=f"vLLM to compute the prompt ({record.tokens} tokens of it are complete)",
    )


def _writing(record: ProducerRecord, now: float) -> Wait:
    """The posts, or, where those pause, a word of the consumer's."""
    peer = _consumer_of(record)
    if now >= min(record.lease_until, record.write_until):
        return Wait(whom=Whom.CONSUMER, what=f"RENEW from {peer}: without it no more is posted")
    return Wait(whom=Whom.POSTS, what=f"the end of its own WRITE to {peer}")


_PRODUCER: Mapping[str, _OfProducer] = {
    "unknown": lambda record, now: Wait(whom=Whom.NOBODY, what="nothing: it was made just now"),
    "allocated": _vllm("vLLM to compute the prompt, and a consumer to register"),
    "held": _vllm("its prefill, which vLLM has not begun"),
    "registered": _registered,
    "streaming": _writing,
    "recalled": lambda record, now: Wait(
        whom=Whom.POSTS, what="the end of a WRITE that was stopped, then vLLM to compute again"
    ),
    "preempted": _vllm("vLLM to compute the prompt again"),
    "prefilled": lambda record, now: Wait(whom=Whom.CONSUMER, what="a consumer to register"),
    "transferring": _writing,
    "lent": _consumer("FETCHED from {consumer}"),
    "draining": lambda record, now: Wait(
        whom=Whom.POSTS, what=f"the end of the stopped WRITE to {_consumer_of(record)}"
    ),
    "kept": _consumer("{consumer} to say that it will not ask once more"),
    "sent": lambda record, now: Wait(whom=Whom.NOBODY, what=_OVER),
    "failed": lambda record, now: Wait(whom=Whom.NOBODY, what=_OVER),
    "forgotten": lambda record, now: Wait(whom=Whom.NOBODY, what=_OVER),
}

# -- consumer --------------------------------------------------------------------------------------

_OfConsumer = Callable[[ConsumerRecord, PeerRecord | None], Wait]


def _producer(record: ConsumerRecord, what: str) -> Wait:
    return Wait(whom=Whom.PRODUCER, what=what)


def _meeting(record: ConsumerRecord, engine: PeerRecord | None) -> Wait:
    asked = f"the answer of the side channel at {record.address}"
    if engine is not None and engine.state == "backing_off":
        why = f": {engine.detail}" if engine.detail else ""
        return Wait(whom=Whom.TIME, what=f"the next try to meet {record.address}{why}")
    return Wait(whom=Whom.SIDE_CHANNEL, what=asked)


def _registering(record: ConsumerRecord, engine: PeerRecord | None) -> Wait:
    silent = record.agents.keys() - record.answered
    return _producer(record, f"ACCEPTED from {_of(record, silent)}")


def _reading(record: ConsumerRecord, engine: PeerRecord | None) -> Wait:
    """Whatever comes first: our own READs, then what the producer says of them."""
    reads = record.reads
    assert reads is not None
    if reads.open:
        return Wait(whom=Whom.POSTS, what=f"its own READ from {_of(record, reads.open)} to end")
    unheard = [rank for rank in record.unsettled if rank not in reads.fetched]
    if unheard:
        return _producer(record, f"READABLE from {_of(record, unheard)}")
    return _producer(record, f"DONE in answer to FETCHED from {_of(record, record.unsettled)}")


def _releasing(record: ConsumerRecord, engine: PeerRecord | None) -> Wait:
    if not record.agents:
        return _meeting(record, engine)
    return _producer(record, f"the answer to CANCEL from {_of(record, record.unsettled)}")


def _nobody(what: str) -> _OfConsumer:
    return lambda record, engine: Wait(whom=Whom.NOBODY, what=what)


_CONSUMER: Mapping[str, _OfConsumer] = {
    "new": _nobody("nothing: it was made just now"),
    "allocated": _meeting,
    "registering": _registering,
    "registered": lambda record, engine: _producer(
        record, f"the producer's prefill, then DONE from {_of(record, record.unsettled)}"
    ),
    "transferring": lambda record, engine: _producer(
        record, f"DONE from {_of(record, record.unsettled)}"
    ),
    "expecting": lambda record, engine: _producer(
        record, f"the producer's prefill: READABLE from {_of(record, record.unsettled)}"
    ),
    "reading": _reading,
    "draining": lambda record, engine: _producer(
        record, f"the answer to CANCEL from {_of(record, record.unsettled)}"
    ),
    "fencing": lambda record, engine: Wait(
        whom=Whom.TIME, what=f"the fence time, since {_of(record, record.lost)} was lost"
    ),
    "stopping": lambda record, engine: Wait(
        whom=Whom.POSTS,
        what=f"its own READ from {_of(record, record.reads.open if record.reads else ())} to end",
    ),
    "releasing": _releasing,
    "received": _nobody(_OVER),
    "failed": _nobody(_OVER),
    "released": _nobody(_OVER),
    "forgotten": _nobody(_OVER),
}

# -- peer ------------------------------------------------------------------------------------------


def _idle_or(record: PeerRecord, what: str, whom: Whom) -> Wait:
    if not record.using:
        return Wait(whom=Whom.NOBODY, what="nothing: no live transfer depends on it")
    return Wait(whom=whom, what=what)


_PEER: Mapping[str, Callable[[PeerRecord], Wait]] = {
    "unmet": lambda record: Wait(whom=Whom.NOBODY, what="nothing: it was made just now"),
    "meeting": lambda record: Wait(
        whom=Whom.SIDE_CHANNEL, what=f"the answer of the side channel at {record.address}"
    ),
    "met": lambda record: _idle_or(record, "ALIVE from its ranks", Whom.PRODUCER),
    "introduced": lambda record: _idle_or(record, "RENEW from it", Whom.CONSUMER),
    "backing_off": lambda record: Wait(whom=Whom.TIME, what="the next try to meet it"),
    "forgotten": lambda record: Wait(whom=Whom.NOBODY, what=_OVER),
}

ANSWERED: Mapping[str, frozenset[str]] = {
    producer.NAME: frozenset(_PRODUCER),
    consumer.NAME: frozenset(_CONSUMER),
    peer.NAME: frozenset(_PEER),
}
"""The states for which there is an answer, by machine."""
TABLE_OF: Mapping[str, Table] = {
    producer.NAME: producer_table.TABLE,
    consumer.NAME: consumer_table.TABLE,
    peer.NAME: peer.TABLE,
}
