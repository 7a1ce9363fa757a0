"""What the producer's rows do. The machine is described in `kvflow.core.producer`."""

import dataclasses
import math

from kvflow.core.effects import PostWrite, ReportSent, StopWrite
from kvflow.core.events import PrefillFinished, PrefillStarted, WriteDone, WriteFailed
from kvflow.core.notices import Accepted, Done, Failed, Renew
from kvflow.core.producer import (
    NAME,
    CancelledBy,
    ProducerRecord,
    RegisteredBy,
    Registration,
)
from kvflow.core.reasons import Reason, Standing
from kvflow.core.turn import PeerGone, Turn
from kvflow.ids import AgentName, RequestId, TransferId

P = ProducerRecord

# -- small steps, shared by actions --------------------------------------------------------------


def _deadline_key(record: P) -> tuple[str, TransferId]:
    return (NAME, record.transfer_id)


def _accept(record: P, turn: Turn, standing: Standing) -> None:
    assert record.registration is not None
    accepted = Accepted(
        transfer_id=record.transfer_id,
        attempt=record.attempt,
        standing=standing,
        clock_s=turn.now,
    )
    turn.send(record.registration.peer, accepted)


def _settle(record: P, peer: AgentName, attempt: int) -> None:
    """What a consumer was told to be over must stay over, whatever arrives late."""
    record.settled[peer] = max(record.settled.get(peer, 0), attempt)


def _settle_registration(record: P) -> None:
    if record.registration is not None:
        _settle(record, record.registration.peer, record.attempt)


def _refuse(record: P, turn: Turn, peer: AgentName, attempt: int, reason: Reason) -> None:
    _settle(record, peer, attempt)
    turn.send(peer, Failed(transfer_id=record.transfer_id, attempt=attempt, reason=reason))


def _note(record: P, event: RegisteredBy, turn: Turn) -> None:
    """Put a registration on record, and start its lease. The one before is over."""
    _settle_registration(record)
    register = event.register
    record.registration = Registration(
        peer=event.peer,
        attempt=register.attempt,
        blocks=register.blocks,
        skip=register.skip,
        tokens=register.tokens,
        lease_s=register.lease_s,
        since=turn.now,
    )
    record.write_until = -math.inf
    record.ends_by = math.inf
    _extend(record, turn)
    _grant(record, register.write_until_s, turn)


def _extend(record: P, turn: Turn) -> None:
    """The lease runs anew; while no prefill is known, only up to `hold_max_s` in all."""
    assert record.registration is not None
    lease_s = min(record.registration.lease_s, turn.timings.lease_s)
    if record.request_id is None:
        lease_s = min(lease_s, record.registration.since + turn.timings.hold_max_s - turn.now)
    lease_s = min(lease_s, record.ends_by - turn.now)
    record.lease_until = turn.now + max(lease_s, 0.0)
    turn.arm(_deadline_key(record), max(lease_s, 0.0))


def _grant(record: P, write_until_s: float | None, turn: Turn) -> None:
    """Slices may be posted for a while longer; a delayed duplicate grants nothing new."""
    if write_until_s is not None:
        until = min(write_until_s, turn.now + turn.timings.write_lease_s)
        record.write_until = max(record.write_until, until)


def _release(record: P, request_id: RequestId | None, turn: Turn) -> None:
    """Give a prefill's blocks back to vLLM."""
    assert request_id is not None
    turn.ledger.unpin(request_id)
    turn.effects.append(ReportSent(request_id=request_id))
    record.blocks = ()


def _end(record: P, turn: Turn, reason: Reason | None) -> None:
    """Become a tombstone."""
    record.reason = reason
    turn.arm(_deadline_key(record), turn.timings.tombstone_s)


def _tell(record: P, turn: Turn, reason: Reason) -> None:
    """Tell the registered consumer, if there is one, that it will get nothing."""
    if record.registration is not None:
        _refuse(record, turn, record.registration.peer, record.attempt, reason)


# -- actions: prefill ----------------------------------------------------------------------------


def note_prefill(record: P, event: PrefillStarted, turn: Turn) -> None:
    record.request_id = event.request_id
    turn.arm(_deadline_key(record), turn.timings.prefill_max_s)


def note_request(record: P, event: PrefillStarted, turn: Turn) -> None:
    record.request_id = event.request_id


def note_prefill_of_registration(record: P, event: PrefillStarted, turn: Turn) -> None:
    record.request_id = event.request_id
    _extend(record, turn)


def begin_again(record: P, event: PrefillStarted, turn: Turn) -> None:
    """The id is used for a new transfer: nothing of the old one counts, except what is settled."""
    _settle_registration(record)
    record.registration = None
    _renew_record(record)
    note_prefill(record, event, turn)


def _renew_record(record: P) -> None:
    record.reason = None
    record.detail = ""
    record.bytes = 0
    record.runs = 0
    record.spent_ms.clear()


def pin(record: P, event: PrefillFinished, turn: Turn) -> None:
    record.request_id = event.request_id
    record.blocks = event.blocks
    record.tokens = event.tokens
    turn.ledger.pin(event.request_id)
    turn.arm(_deadline_key(record), turn.timings.lease_s)


def pin_anew(record: P, event: PrefillFinished, turn: Turn) -> None:
    begin_again(
        record,
        PrefillStarted(transfer_id=event.transfer_id, request_id=event.request_id),
        turn,
    )
    pin(record, event, turn)


def pin_and_write(record: P, event: PrefillFinished, turn: Turn) -> None:
    pin(record, event, turn)
    _extend(record, turn)
    _write(record, turn)


def pin_and_refuse(record: P, event: PrefillFinished, turn: Turn) -> None:
    pin(record, event, turn)
    _release(record, event.request_id, turn)
    _tell(record, turn, Reason.MISMATCH)
    _end(record, turn, Reason.MISMATCH)


def give_back_at_once(record: P, event: PrefillFinished, turn: Turn) -> None:
    """vLLM keeps these blocks for a transfer that is over or refused: let it have them."""
    turn.ledger.pin(event.request_id)
    turn.ledger.unpin(event.request_id)
    turn.effects.append(ReportSent(request_id=event.request_id))


def fail_aborted(record: P, event: object, turn: Turn) -> None:
    _tell(record, turn, Reason.ABORTED)
    _end(record, turn, Reason.ABORTED)


def drop_prefill(record: P, event: object, turn: Turn) -> None:
    record.request_id = None
    turn.arm(_deadline_key(record), turn.timings.prefill_max_s)


def drop_prefill_keep_registration(record: P, event: object, turn: Turn) -> None:
    """The registration waits for a prefill anew, and its bounded time for that starts now."""
    assert record.registration is not None
    record.request_id = None
    record.registration = dataclasses.replace(record.registration, since=turn.now)
    _extend(record, turn)


def fail_ambiguous(record: P, event: object, turn: Turn) -> None:
    _tell(record, turn, Reason.AMBIGUOUS)
    _end(record, turn, Reason.AMBIGUOUS)


def release_ambiguous(record: P, event: object, turn: Turn) -> None:
    _release(record, record.request_id, turn)
    fail_ambiguous(record, event, turn)


def refuse_both(record: P, event: PrefillFinished, turn: Turn) -> None:
    give_back_at_once(record, event, turn)
    fail_ambiguous(record, event, turn)


def release_both(record: P, event: PrefillFinished, turn: Turn) -> None:
    give_back_at_once(record, event, turn)
    release_ambiguous(record, event, turn)


def stop_both(record: P, event: PrefillFinished, turn: Turn) -> None:
    give_back_at_once(record, event, turn)
    _stop(record, turn, Reason.AMBIGUOUS)


def stop_ambiguous(record: P, event: object, turn: Turn) -> None:
    _stop(record, turn, Reason.AMBIGUOUS)


# -- actions: registration -----------------------------------------------------------------------


def hold(record: P, event: RegisteredBy, turn: Turn) -> None:
    _note(record, event, turn)
    _accept(record, turn, Standing.WAITING)


def hold_anew(record: P, event: RegisteredBy, turn: Turn) -> None:
    """A new transfer under an id whose old transfer has ended."""
    record.request_id = None
    _renew_record(record)
    hold(record, event, turn)


def accept_and_write(record: P, event: RegisteredBy, turn: Turn) -> None:
    _note(record, event, turn)
    _accept(record, turn, Standing.TRANSFERRING)
    _write(record, turn)


def refuse_mismatch(record: P, event: RegisteredBy, turn: Turn) -> None:
    _note(record, event, turn)
    _release(record, record.request_id, turn)
    _tell(record, turn, Reason.MISMATCH)
    _end(record, turn, Reason.MISMATCH)


def refuse_failed(record: P, event: RegisteredBy, turn: Turn) -> None:
    reason = record.reason or Reason.EXPIRED
    _refuse(record, turn, event.peer, event.register.attempt, reason)


def refuse_stale(record: P, event: RegisteredBy, turn: Turn) -> None:
    _refuse(record, turn, event.peer, event.register.attempt, Reason.STALE)


def refuse_forgotten(record: P, event: RegisteredBy, turn: Turn) -> None:
    _refuse(record, turn, event.peer, event.register.attempt, Reason.FORGOTTEN)


def answer_waiting(record: P, event: RegisteredBy, turn: Turn) -> None:
    _extend(record, turn)
    _grant(record, event.register.write_until_s, turn)
    _accept(record, turn, Standing.WAITING)


def answer_transferring(record: P, event: RegisteredBy, turn: Turn) -> None:
    _extend(record, turn)
    _grant(record, event.register.write_until_s, turn)
    _accept(record, turn, Standing.TRANSFERRING)


def answer_stopping(record: P, event: object, turn: Turn) -> None:
    _accept(record, turn, Standing.STOPPING)


def answer_done(record: P, event: object, turn: Turn) -> None:
    assert record.registration is not None
    done = Done(transfer_id=record.transfer_id, attempt=record.attempt)
    turn.send(record.registration.peer, done)


def answer_failed(record: P, event: object, turn: Turn) -> None:
    _tell(record, turn, record.reason or Reason.EXPIRED)


def extend(record: P, event: Renew, turn: Turn) -> None:
    _extend(record, turn)
    _grant(record, event.write_until_s, turn)


def refuse_rival(record: P, event: RegisteredBy, turn: Turn) -> None:
    fail_ambiguous(record, event, turn)
    _refuse(record, turn, event.peer, event.register.attempt, Reason.AMBIGUOUS)


def stop_for_rival(record: P, event: RegisteredBy, turn: Turn) -> None:
    _stop(record, turn, Reason.AMBIGUOUS)
    _refuse(record, turn, event.peer, event.register.attempt, Reason.AMBIGUOUS)


def refuse_ambiguous(record: P, event: RegisteredBy, turn: Turn) -> None:
    _refuse(record, turn, event.peer, event.register.attempt, Reason.AMBIGUOUS)


def stop_superseded(record: P, event: RegisteredBy, turn: Turn) -> None:
    _stop(record, turn, Reason.SUPERSEDED)
    refuse_superseded(record, event, turn)


def refuse_superseded(record: P, event: RegisteredBy, turn: Turn) -> None:
    _refuse(record, turn, event.peer, event.register.attempt, Reason.SUPERSEDED)


# -- actions: cancel -----------------------------------------------------------------------------


def confirm_cancel(record: P, event: CancelledBy, turn: Turn) -> None:
    """Nothing of the cancelled attempt can land: say so."""
    _refuse(record, turn, event.peer, event.cancel.attempt, Reason.CANCELLED)


def cancel(record: P, event: CancelledBy, turn: Turn) -> None:
    confirm_cancel(record, event, turn)
    _end(record, turn, Reason.CANCELLED)


def cancel_and_release(record: P, event: CancelledBy, turn: Turn) -> None:
    _release(record, record.request_id, turn)
    cancel(record, event, turn)


def stop_cancelled(record: P, event: CancelledBy, turn: Turn) -> None:
    _settle(record, event.peer, event.cancel.attempt)
    _stop(record, turn, Reason.CANCELLED)


def answer_cancel_stopping(record: P, event: CancelledBy, turn: Turn) -> None:
    _settle(record, event.peer, event.cancel.attempt)
    answer_stopping(record, event, turn)


# -- actions: writing and ending -----------------------------------------------------------------


def _write(record: P, turn: Turn) -> None:
    """The rendezvous: both sides are here, so the WRITE starts."""
    wanted = record.registration
    assert wanted is not None and record.request_id is not None
    source = tuple(
        ids[skip : skip + len(to)]
        for ids, to, skip in zip(record.blocks, wanted.blocks, wanted.skip, strict=True)
    )
    turn.ledger.open_write(record.transfer_id, wanted.attempt, record.request_id)
    turn.effects.append(
        PostWrite(
            transfer_id=record.transfer_id,
            attempt=wanted.attempt,
            agent=wanted.peer,
            source=source,
            destination=wanted.blocks,
        )
    )


def _stop(record: P, turn: Turn, reason: Reason) -> None:
    record.reason = reason
    stop = StopWrite(transfer_id=record.transfer_id, attempt=record.attempt)
    turn.effects.append(stop)
    turn.arm(_deadline_key(record), turn.timings.write_drain_s)


def _close(record: P, turn: Turn) -> None:
    turn.ledger.close_write(record.transfer_id)
    _release(record, record.request_id, turn)


def finish(record: P, event: WriteDone, turn: Turn) -> None:
    record.bytes = event.bytes
    record.runs = event.runs
    _close(record, turn)
    answer_done(record, event, turn)
    _end(record, turn, None)


def fail_write(record: P, event: WriteFailed, turn: Turn) -> None:
    record.detail = event.detail
    _close(record, turn)
    _tell(record, turn, Reason.WRITE_FAILED)
    _end(record, turn, Reason.WRITE_FAILED)


def finish_draining(record: P, event: object, turn: Turn) -> None:
    """The last handle has ended: now, and not before, blocks go back and the consumer is told."""
    _close(record, turn)
    answer_failed(record, event, turn)
    _end(record, turn, record.reason)


def stop_expired(record: P, event: object, turn: Turn) -> None:
    _stop(record, turn, Reason.EXPIRED)


def tear_down(record: P, event: object, turn: Turn) -> None:
    """A write that neither ends nor fails: make its peer unreachable, so that it must."""
    assert record.registration is not None
    turn.arm(_deadline_key(record), turn.timings.write_drain_s)
    gone = PeerGone(agent=record.registration.peer, detail="a write to it did not end")
    turn.follow_ups.append(gone)


def fail_expired(record: P, event: object, turn: Turn) -> None:
    _tell(record, turn, Reason.EXPIRED)
    _end(record, turn, Reason.EXPIRED)


def release_expired(record: P, event: object, turn: Turn) -> None:
    _release(record, record.request_id, turn)
    fail_expired(record, event, turn)


def fail_peer_lost(record: P, event: object, turn: Turn) -> None:
    _end(record, turn, Reason.PEER_LOST)


def stop_peer_lost(record: P, event: object, turn: Turn) -> None:
    _stop(record, turn, Reason.PEER_LOST)


def fail_closing(record: P, event: object, turn: Turn) -> None:
    _tell(record, turn, Reason.SHUTDOWN)
    _end(record, turn, Reason.SHUTDOWN)


def release_closing(record: P, event: object, turn: Turn) -> None:
    _release(record, record.request_id, turn)
    fail_closing(record, event, turn)


def bound_by_drain(record: P, event: object, turn: Turn) -> None:
    record.ends_by = turn.now + turn.timings.drain_s
    turn.arm(_deadline_key(record), turn.timings.drain_s)
