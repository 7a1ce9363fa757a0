"""What the producer's rows do. The machine is described in `kvflow.core.producer`."""

import dataclasses

from kvflow.core import producer_steps as step
from kvflow.core.effects import Ignored, ReportSent, StopWrite
from kvflow.core.events import (
    PrefillAdvanced,
    PrefillFinished,
    PrefillStarted,
)
from kvflow.core.notices import Renew
from kvflow.core.producer import CancelledBy, ProducerRecord, RegisteredBy, keep_until
from kvflow.core.reasons import Reason, Standing
from kvflow.core.turn import Turn

P = ProducerRecord

# -- actions: prefill ----------------------------------------------------------------------------


def note_prefill(record: P, event: PrefillStarted, turn: Turn) -> None:
    step.name(record, event)
    turn.arm(step.deadline_key(record), turn.timings.prefill_max_s)


def note_request(record: P, event: PrefillStarted, turn: Turn) -> None:
    step.name(record, event)


def note_prefill_of_registration(record: P, event: PrefillStarted, turn: Turn) -> None:
    step.name(record, event)
    step.extend(record, turn)


def note_progress(record: P, event: PrefillAdvanced, turn: Turn) -> None:
    record.blocks = event.blocks
    record.tokens = event.tokens


def note_prefill_and_progress(record: P, event: PrefillAdvanced, turn: Turn) -> None:
    step.name(record, event)
    turn.arm(step.deadline_key(record), turn.timings.prefill_max_s)
    note_progress(record, event, turn)


def note_prefill_and_progress_of_registration(
    record: P, event: PrefillAdvanced, turn: Turn
) -> None:
    step.name(record, event)
    step.extend(record, turn)
    note_progress(record, event, turn)


def write_stretch(record: P, event: PrefillAdvanced, turn: Turn) -> None:
    note_progress(record, event, turn)
    step.write(record, turn)


def begin_again(record: P, event: PrefillStarted, turn: Turn) -> None:
    """The id is used for a new transfer: nothing of the old one counts, except what is settled."""
    step.settle_registration(record)
    record.registration = None
    step.begin_anew(record)
    note_prefill(record, event, turn)


def pin(record: P, event: PrefillFinished, turn: Turn) -> None:
    step.name(record, event)
    record.blocks = event.blocks
    record.tokens = event.tokens
    record.is_exact = event.is_exact
    record.is_finished = True
    turn.arm(step.deadline_key(record), turn.timings.lease_s)


def pin_amid_write(record: P, event: PrefillFinished, turn: Turn) -> None:
    """The stretch that is being written goes on; the rest follows."""
    pin(record, event, turn)
    step.extend(record, turn)


def pin_to_release(record: P, event: PrefillFinished, turn: Turn) -> None:
    """The write that is being stopped may still read them."""
    step.name(record, event)
    record.is_finished = True


def pin_and_stop(record: P, event: PrefillFinished, turn: Turn) -> None:
    pin_to_release(record, event, turn)
    step.stop(record, turn, Reason.MISMATCH)


def pin_anew(record: P, event: PrefillFinished, turn: Turn) -> None:
    begin_again(
        record,
        PrefillStarted(
            transfer_id=event.transfer_id, request_id=event.request_id, prompt=event.prompt
        ),
        turn,
    )
    pin(record, event, turn)


def let_go_and_begin_again(record: P, event: PrefillStarted, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    begin_again(record, event, turn)


def let_go_and_pin_anew(record: P, event: PrefillFinished, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    pin_anew(record, event, turn)


def pin_and_write(record: P, event: PrefillFinished, turn: Turn) -> None:
    pin(record, event, turn)
    step.extend(record, turn)
    step.write(record, turn)


def pin_and_refuse(record: P, event: PrefillFinished, turn: Turn) -> None:
    pin(record, event, turn)
    step.release(record, event.request_id, turn)
    step.tell(record, turn, Reason.MISMATCH)
    step.end(record, turn, Reason.MISMATCH)


def give_back_at_once(record: P, event: PrefillFinished, turn: Turn) -> None:
    """vLLM keeps these blocks for a transfer that is over or refused: let it have them."""
    if turn.ledger.unpin(event.request_id, record.part):
        turn.effects.append(ReportSent(request_id=event.request_id))


def fail_aborted(record: P, event: object, turn: Turn) -> None:
    step.tell(record, turn, Reason.ABORTED)
    step.end(record, turn, Reason.ABORTED)


def stop_aborted(record: P, event: object, turn: Turn) -> None:
    step.stop(record, turn, Reason.ABORTED)


def drop_prefill(record: P, event: object, turn: Turn) -> None:
    record.request_id = None
    step.forget_prefill(record)
    turn.arm(step.deadline_key(record), turn.timings.prefill_max_s)


def drop_prefill_keep_registration(record: P, event: object, turn: Turn) -> None:
    """The registration waits for a prefill anew, and its bounded time for that starts now."""
    assert record.registration is not None
    record.request_id = None
    step.forget_prefill(record)
    step.forget_written(record)
    record.registration = dataclasses.replace(record.registration, since=turn.now)
    step.extend(record, turn)


def recall(record: P, event: object, turn: Turn) -> None:
    """The next prefill is sent from its first token on, once nothing of this one can land."""
    drop_prefill_keep_registration(record, event, turn)
    turn.effects.append(StopWrite(part=record.part, attempt=record.attempt))


def fail_ambiguous(record: P, event: object, turn: Turn) -> None:
    step.tell(record, turn, Reason.AMBIGUOUS)
    step.end(record, turn, Reason.AMBIGUOUS)


def release_ambiguous(record: P, event: object, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    fail_ambiguous(record, event, turn)


def refuse_both(record: P, event: PrefillFinished, turn: Turn) -> None:
    give_back_at_once(record, event, turn)
    fail_ambiguous(record, event, turn)


def release_both(record: P, event: PrefillFinished, turn: Turn) -> None:
    give_back_at_once(record, event, turn)
    release_ambiguous(record, event, turn)


def stop_both(record: P, event: PrefillFinished, turn: Turn) -> None:
    give_back_at_once(record, event, turn)
    step.stop(record, turn, Reason.AMBIGUOUS)


def stop_ambiguous(record: P, event: object, turn: Turn) -> None:
    step.stop(record, turn, Reason.AMBIGUOUS)


# -- actions: registration -----------------------------------------------------------------------


def hold(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.note(record, event, turn)
    step.accept(record, turn, Standing.WAITING)


def hold_anew(record: P, event: RegisteredBy, turn: Turn) -> None:
    """A new transfer under an id whose old transfer has ended."""
    record.request_id = None
    step.begin_anew(record)
    hold(record, event, turn)


def let_go_and_hold_anew(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    hold_anew(record, event, turn)


def accept_and_write(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.note(record, event, turn)
    step.accept(record, turn, Standing.TRANSFERRING)
    step.write(record, turn)


def refuse_mismatch(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.note(record, event, turn)
    step.release(record, record.request_id, turn)
    step.tell(record, turn, Reason.MISMATCH)
    step.end(record, turn, Reason.MISMATCH)


def refuse_too_long(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.note(record, event, turn)
    step.tell(record, turn, Reason.TOO_LONG)
    step.end(record, turn, Reason.TOO_LONG)


def refuse_failed(record: P, event: RegisteredBy, turn: Turn) -> None:
    reason = record.reason or Reason.EXPIRED
    step.refuse(record, turn, event.peer, event.register.attempt, reason)


def refuse_stale(record: P, event: RegisteredBy, turn: Turn) -> None:
    """One whose WRITE has failed may not know it yet: only with that reason it tries again."""
    failed = record.retry_of == (event.peer, event.register.attempt)
    reason = Reason.WRITE_FAILED if failed else Reason.STALE
    step.refuse(record, turn, event.peer, event.register.attempt, reason)


def refuse_forgotten(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.refuse(record, turn, event.peer, event.register.attempt, Reason.FORGOTTEN)


def refuse_what_is_not_kept(record: P, event: RegisteredBy, turn: Turn) -> None:
    names_it = event.register.prefill == record.prefill
    reason = Reason.MISMATCH if names_it else Reason.FORGOTTEN
    step.refuse(record, turn, event.peer, event.register.attempt, reason)


def answer_waiting(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.extend(record, turn)
    step.grant(record, event.register.write_until_s, turn)
    step.accept(record, turn, Standing.WAITING)


def answer_transferring(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.extend(record, turn)
    step.grant(record, event.register.write_until_s, turn)
    step.accept(record, turn, Standing.TRANSFERRING)


def answer_stopping(record: P, event: object, turn: Turn) -> None:
    step.accept(record, turn, Standing.STOPPING)


def answer_done(record: P, event: object, turn: Turn) -> None:
    step.tell_done(record, turn, 0.0)


def answer_kept(record: P, event: object, turn: Turn) -> None:
    rest_s = keep_until(record, turn) - turn.now
    step.tell_done(record, turn, min(max(rest_s, 0.0), turn.timings.keep_sent_s))


def answer_failed(record: P, event: object, turn: Turn) -> None:
    step.tell(record, turn, record.reason or Reason.EXPIRED)


def extend(record: P, event: Renew, turn: Turn) -> None:
    step.extend(record, turn)
    step.grant(record, event.write_until_s, turn)


def refuse_rival(record: P, event: RegisteredBy, turn: Turn) -> None:
    fail_ambiguous(record, event, turn)
    step.refuse(record, turn, event.peer, event.register.attempt, Reason.AMBIGUOUS)


def stop_for_rival(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.stop(record, turn, Reason.AMBIGUOUS)
    step.refuse(record, turn, event.peer, event.register.attempt, Reason.AMBIGUOUS)


def refuse_ambiguous(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.refuse(record, turn, event.peer, event.register.attempt, Reason.AMBIGUOUS)


def stop_superseded(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.stop(record, turn, Reason.SUPERSEDED)
    refuse_superseded(record, event, turn)


def refuse_superseded(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.refuse(record, turn, event.peer, event.register.attempt, Reason.SUPERSEDED)


def refuse_capacity(record: P, event: RegisteredBy, turn: Turn) -> None:
    turn.effects.append(Ignored(kind="registration_beyond_limit", key=event.peer))
    step.refuse(record, turn, event.peer, event.register.attempt, Reason.CAPACITY)
    step.end(record, turn, Reason.CAPACITY)


# -- actions: cancel -----------------------------------------------------------------------------


def confirm_cancel(record: P, event: CancelledBy, turn: Turn) -> None:
    """Nothing of the cancelled attempt can land: say so."""
    step.refuse(record, turn, event.peer, event.cancel.attempt, Reason.CANCELLED)


def cancel(record: P, event: CancelledBy, turn: Turn) -> None:
    confirm_cancel(record, event, turn)
    step.end(record, turn, Reason.CANCELLED)


def cancel_and_release(record: P, event: CancelledBy, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    cancel(record, event, turn)


def stop_cancelled(record: P, event: CancelledBy, turn: Turn) -> None:
    step.settle(record, event.peer, event.cancel.attempt)
    step.stop(record, turn, Reason.CANCELLED)


def answer_cancel_stopping(record: P, event: CancelledBy, turn: Turn) -> None:
    step.settle(record, event.peer, event.cancel.attempt)
    answer_stopping(record, event, turn)
