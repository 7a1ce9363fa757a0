"""Small steps that the producer's actions are made of (`kvflow.core.producer_actions`)."""

import math

from kvflow.core.effects import PostWrite, ReportSent, StopWrite
from kvflow.core.events import PrefillAdvanced, PrefillFinished, PrefillStarted, WriteDone
from kvflow.core.notices import Accepted, Done, Failed, Readable
from kvflow.core.producer import NAME, ProducerRecord, RegisteredBy, Registration
from kvflow.core.reasons import Reason, Standing
from kvflow.core.turn import Turn
from kvflow.ids import AgentName, PartId, RequestId

P = ProducerRecord


def deadline_key(record: P) -> tuple[str, PartId]:
    return (NAME, record.part)


def name(record: P, event: PrefillStarted | PrefillAdvanced | PrefillFinished) -> None:
    """From now on this record is about this prefill."""
    record.request_id = event.request_id
    record.prompt = event.prompt


def accept(record: P, turn: Turn, standing: Standing) -> None:
    assert record.registration is not None
    accepted = Accepted(
        transfer_id=record.transfer_id,
        attempt=record.attempt,
        standing=standing,
        clock_s=turn.now,
    )
    turn.send(record.registration.peer, accepted)


def settle(record: P, peer: AgentName, attempt: int) -> None:
    """What a consumer was told to be over must stay over, whatever arrives late."""
    record.settled[peer] = max(record.settled.get(peer, 0), attempt)


def settle_registration(record: P) -> None:
    if record.registration is not None:
        settle(record, record.registration.peer, record.attempt)


def refuse(record: P, turn: Turn, peer: AgentName, attempt: int, reason: Reason) -> None:
    settle(record, peer, attempt)
    turn.send(peer, Failed(transfer_id=record.transfer_id, attempt=attempt, reason=reason))


def note(record: P, event: RegisteredBy, turn: Turn) -> None:
    """Put a registration on record, and start its lease. The one before is over."""
    settle_registration(record)
    register = event.register
    record.registration = Registration(
        peer=event.peer,
        attempt=register.attempt,
        blocks=register.blocks,
        starts=register.starts,
        tokens=register.tokens,
        lease_s=register.lease_s,
        since=turn.now,
        keep=register.keep,
        reads=register.reads,
    )
    record.write_until = -math.inf
    record.ends_by = math.inf
    forget_written(record)
    extend(record, turn)
    grant(record, register.write_until_s, turn)


def extend(record: P, turn: Turn) -> None:
    """The lease runs anew; while no prefill is known, only up to `hold_max_s` in all."""
    assert record.registration is not None
    lease_s = min(record.registration.lease_s, turn.timings.lease_s)
    if record.request_id is None:
        lease_s = min(lease_s, record.registration.since + turn.timings.hold_max_s - turn.now)
    lease_s = min(lease_s, record.ends_by - turn.now)
    record.lease_until = turn.now + max(lease_s, 0.0)
    turn.arm(deadline_key(record), max(lease_s, 0.0))


def grant(record: P, write_until_s: float | None, turn: Turn) -> None:
    """Slices may be posted for a while longer; a delayed duplicate grants nothing new."""
    if write_until_s is not None:
        until = min(write_until_s, turn.now + turn.timings.write_lease_s)
        record.write_until = max(record.write_until, until)


def release(record: P, request_id: RequestId | None, turn: Turn) -> None:
    """This part needs a prefill's blocks no more; with the last part they are vLLM's again."""
    assert request_id is not None
    if turn.ledger.unpin(request_id, record.part):
        turn.effects.append(ReportSent(request_id=request_id))
    forget_prefill(record)


def forget_prefill(record: P) -> None:
    record.blocks = ()
    record.tokens = 0
    record.is_finished = False


def forget_written(record: P) -> None:
    """Whatever has been, or is being, written to the registered consumer does not count."""
    record.posted = 0
    record.written = 0
    record.bytes = 0
    record.runs = 0


def end(record: P, turn: Turn, reason: Reason | None) -> None:
    """Become a tombstone."""
    record.reason = reason
    turn.arm(deadline_key(record), turn.timings.tombstone_s)


def tell(record: P, turn: Turn, reason: Reason) -> None:
    """Tell the registered consumer, if there is one, that it will get nothing."""
    if record.registration is not None:
        refuse(record, turn, record.registration.peer, record.attempt, reason)


def tell_done(record: P, turn: Turn, kept_s: float) -> None:
    assert record.registration is not None and record.request_id is not None
    done = Done(
        transfer_id=record.transfer_id,
        attempt=record.attempt,
        prefill=record.prefill,
        prompt=record.prompt,
        kept_s=kept_s,
    )
    turn.send(record.registration.peer, done)


def begin_anew(record: P) -> None:
    record.reason = None
    record.detail = ""
    record.failures = 0
    record.retry_of = None
    record.kept_until = None
    record.spent_ms.clear()
    forget_prefill(record)
    forget_written(record)


def write(record: P, turn: Turn) -> None:
    """Write what is complete, owed and not written."""
    wanted = record.registration
    assert wanted is not None and record.request_id is not None
    record.posted = min(record.tokens, wanted.tokens)
    turn.ledger.open_write(record.part, wanted.attempt, record.request_id)
    turn.effects.append(
        PostWrite(
            part=record.part,
            attempt=wanted.attempt,
            agent=wanted.peer,
            source=record.blocks,
            destination=wanted.blocks,
            starts=wanted.starts,
            tokens=record.posted,
            moved=record.written,
        )
    )


def count(record: P, event: WriteDone, turn: Turn) -> None:
    """A write is done. It counts, unless its blocks were taken away amid it."""
    turn.ledger.close_write(record.part)
    if record.posted:
        record.written = record.posted
        record.bytes += event.bytes
        record.runs += event.runs


def lend(record: P, turn: Turn) -> None:
    """The rendezvous with a consumer that reads: it is told what there is."""
    assert record.registration is not None
    readable = Readable(
        transfer_id=record.transfer_id,
        attempt=record.attempt,
        blocks=record.blocks,
        tokens=record.tokens,
        prefill=record.prefill,
    )
    turn.send(record.registration.peer, readable)


def stop(record: P, turn: Turn, reason: Reason) -> None:
    record.reason = reason
    stop = StopWrite(part=record.part, attempt=record.attempt)
    turn.effects.append(stop)
    turn.arm(deadline_key(record), turn.timings.write_drain_s)


def close(record: P, turn: Turn) -> None:
    """The last handle has ended."""
    turn.ledger.close_write(record.part)
    give_back(record, turn)


def give_back(record: P, turn: Turn) -> None:
    """vLLM gets the blocks back, if they are not a running request's."""
    if record.is_finished:
        release(record, record.request_id, turn)
