"""What the producer's rows do when a write ends, or a transfer. See `kvflow.core.producer`."""

from kvflow.core import producer_actions as answer
from kvflow.core import producer_steps as step
from kvflow.core.events import WriteDone, WriteFailed
from kvflow.core.producer import CancelledBy, ProducerRecord, keep_until
from kvflow.core.reasons import Reason
from kvflow.core.turn import PeerGone, Turn

P = ProducerRecord


def finish(record: P, event: WriteDone, turn: Turn) -> None:
    step.count(record, event, turn)
    step.give_back(record, turn)
    answer.answer_done(record, event, turn)
    step.end(record, turn, None)


def count_stretch(record: P, event: WriteDone, turn: Turn) -> None:
    step.count(record, event, turn)


def write_next(record: P, event: WriteDone, turn: Turn) -> None:
    step.count(record, event, turn)
    step.write(record, turn)


def close_stopped(record: P, event: object, turn: Turn) -> None:
    """The end of a write from blocks that were taken away."""
    turn.ledger.close_write(record.part)


def write_anew(record: P, event: object, turn: Turn) -> None:
    close_stopped(record, event, turn)
    step.write(record, turn)


def finish_and_keep(record: P, event: WriteDone, turn: Turn) -> None:
    step.count(record, event, turn)
    keep(record, event, turn)


def keep(record: P, event: object, turn: Turn) -> None:
    record.kept_until = keep_until(record, turn)
    turn.arm(step.deadline_key(record), record.kept_until - turn.now)
    answer.answer_kept(record, event, turn)


def let_go(record: P, event: object, turn: Turn) -> None:
    """What is kept in case that the consumer is preempted goes back."""
    step.release(record, record.request_id, turn)
    step.end(record, turn, None)


def let_go_cancelled(record: P, event: CancelledBy, turn: Turn) -> None:
    let_go(record, event, turn)
    answer.confirm_cancel(record, event, turn)


def _end_attempt(record: P, event: WriteFailed, turn: Turn) -> None:
    record.detail = event.detail
    record.failures += 1
    turn.ledger.close_write(record.part)
    step.tell(record, turn, Reason.WRITE_FAILED)
    assert record.registration is not None
    record.retry_of = (record.registration.peer, record.attempt)
    record.registration = None
    step.forget_written(record)


def keep_for_retry(record: P, event: WriteFailed, turn: Turn) -> None:
    """The attempt is over, its blocks are not: another attempt may follow, for a while."""
    _end_attempt(record, event, turn)
    turn.arm(step.deadline_key(record), turn.timings.retry_hold_s)


def compute_for_retry(record: P, event: WriteFailed, turn: Turn) -> None:
    """The attempt is over, the prefill is not."""
    _end_attempt(record, event, turn)
    turn.arm(step.deadline_key(record), turn.timings.prefill_max_s)


def fail_released(record: P, event: object, turn: Turn) -> None:
    step.tell(record, turn, Reason.CANCELLED)
    step.end(record, turn, Reason.CANCELLED)


def release_asked(record: P, event: object, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    fail_released(record, event, turn)


def stop_released(record: P, event: object, turn: Turn) -> None:
    step.stop(record, turn, Reason.CANCELLED)


def fail_write(record: P, event: WriteFailed, turn: Turn) -> None:
    record.detail = event.detail
    step.close(record, turn)
    step.tell(record, turn, Reason.WRITE_FAILED)
    step.end(record, turn, Reason.WRITE_FAILED)


def finish_draining(record: P, event: object, turn: Turn) -> None:
    """The last handle has ended: now, and not before, blocks go back and the consumer is told."""
    step.close(record, turn)
    answer.answer_failed(record, event, turn)
    step.end(record, turn, record.reason)


def stop_expired(record: P, event: object, turn: Turn) -> None:
    step.stop(record, turn, Reason.EXPIRED)


def tear_down(record: P, event: object, turn: Turn) -> None:
    """A write that neither ends nor fails: make its peer unreachable, so that it must."""
    assert record.registration is not None
    turn.arm(step.deadline_key(record), turn.timings.write_drain_s)
    gone = PeerGone(agent=record.registration.peer, detail="a write to it did not end")
    turn.follow_ups.append(gone)


def fail_expired(record: P, event: object, turn: Turn) -> None:
    step.tell(record, turn, Reason.EXPIRED)
    step.end(record, turn, Reason.EXPIRED)


def release_expired(record: P, event: object, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    fail_expired(record, event, turn)


def give_way(record: P, event: object, turn: Turn) -> None:
    record.detail = "vLLM was out of blocks, and consumers waited for other prefills"
    release_expired(record, event, turn)


def fail_peer_lost(record: P, event: object, turn: Turn) -> None:
    step.end(record, turn, Reason.PEER_LOST)


def stop_peer_lost(record: P, event: object, turn: Turn) -> None:
    step.stop(record, turn, Reason.PEER_LOST)


def fail_closing(record: P, event: object, turn: Turn) -> None:
    step.tell(record, turn, Reason.SHUTDOWN)
    step.end(record, turn, Reason.SHUTDOWN)


def release_closing(record: P, event: object, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    fail_closing(record, event, turn)


def stop_closing(record: P, event: object, turn: Turn) -> None:
    step.stop(record, turn, Reason.SHUTDOWN)


def bound_by_drain(record: P, event: object, turn: Turn) -> None:
    record.ends_by = turn.now + turn.timings.drain_s
    turn.arm(step.deadline_key(record), turn.timings.drain_s)
