"""The deadlines of one record, and what else is on record of it, as a window tells them."""

import math
from collections.abc import Iterator

from kvflow.core import consumer, peer, producer, waiting
from kvflow.core.consumer import ConsumerRecord
from kvflow.core.deadlines import Deadlines
from kvflow.core.peer import PeerRecord
from kvflow.core.producer import ProducerRecord
from kvflow.wire import live

Transferring = ProducerRecord | ConsumerRecord
PEER_DUE = {
    "meeting": "the meeting is given up, and tried again after a while",
    "backing_off": "it is met again",
    "met": "RENEW goes out; a rank that has not answered too many of them is lost",
    "introduced": "it is sent something if it is silent; if its process is gone, it is lost",
}
"""What is done about the peer then."""
_LEASE = "what is posted pauses until the consumer sends RENEW"


def deadlines(
    record: Transferring, known: PeerRecord | None, armed: Deadlines, now: float
) -> tuple[live.Deadline, ...]:
    """What happens when, if nothing else does, soonest first. `known`: the peer's record."""
    found = [*_own(record, armed, now), *_of_peer(known, armed, now)]
    return tuple(sorted(found, key=lambda each: each.in_ms))


def _own(record: Transferring, armed: Deadlines, now: float) -> Iterator[live.Deadline]:
    if isinstance(record, ConsumerRecord):
        name, key = consumer.NAME, str(record.request_id)
        at = armed.at((consumer.RESEND, key))
        if at is not None:
            yield _deadline("resend", name, record, "resend_due", at - now)
    else:
        name, key = producer.NAME, str(record.part)
        until = record.write_until
        if record.state in producer.WRITING and math.isfinite(until):
            yield live.Deadline(what="write lease", in_ms=(until - now) * 1000, dest="", why=_LEASE)
    at = armed.at((name, key))
    if at is not None:
        yield _deadline("end", name, record, "expired", at - now)


def _of_peer(known: PeerRecord | None, armed: Deadlines, now: float) -> Iterator[live.Deadline]:
    if known is None:
        return
    at = armed.at((peer.NAME, known.key))
    if at is not None:
        why = PEER_DUE.get(known.state, "")
        yield live.Deadline(what="peer", in_ms=(at - now) * 1000, dest="", why=why)


def _deadline(
    what: str, machine: str, record: Transferring, trigger: str, in_s: float
) -> live.Deadline:
    led = waiting.expiry(waiting.TABLE_OF[machine], record, record.state, trigger)
    return live.Deadline(
        what=what,
        in_ms=in_s * 1000,
        dest=led.dest if led else "",
        why=led.why if led else "",
    )


def facts(record: Transferring) -> tuple[tuple[str, str], ...]:
    """What else is on record, by name; what is not set is left out."""
    told = _of_producer(record) if isinstance(record, ProducerRecord) else _of_consumer(record)
    return tuple((name, value) for name, value in told if value)


def _of_producer(record: ProducerRecord) -> Iterator[tuple[str, str]]:
    wanted = record.registration
    yield "prefill", record.prefill
    yield "tokens complete", _number(record.tokens)
    yield "blocks", _sizes(record.blocks)
    yield "tokens posted", _number(record.posted)
    yield "tokens written", _number(record.written)
    yield "failed writes", _number(record.failures)
    if wanted is not None:
        yield "consumer", str(wanted.peer)
        yield "tokens wanted", _number(wanted.tokens)
        yield "consumer's blocks", _sizes(wanted.blocks)
        yield "consumer reads", "yes" if wanted.reads else ""
        yield "keep asked", "yes" if wanted.keep else ""


def _of_consumer(record: ConsumerRecord) -> Iterator[tuple[str, str]]:
    yield "producer", str(record.address) if record.address.host else ""
    yield "producer's engine id asked for", record.engine_id or ""
    yield "tokens wanted", _number(record.tokens)
    yield "blocks", _sizes(record.blocks)
    yield "retries", _number(record.retries)
    yield "wants a kept prefill", record.prefill
    yield "reads", "yes" if record.reads is not None else ""
    yield "writing ranks", ", ".join(map(str, sorted(record.writing)))


def _number(count: int) -> str:
    return str(count) if count else ""


def _sizes(blocks: tuple[tuple[int, ...], ...]) -> str:
    """How many block ids per cache group."""
    return " + ".join(str(len(ids)) for ids in blocks) if any(blocks) else ""
