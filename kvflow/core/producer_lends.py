"""What the producer's rows do for a consumer that reads: those that enter and leave `lent`.

The idea: a READ is not seen here, so nothing is promised about it. The blocks are pinned for as
long as the consumer wants to have them, within its lease; whether it has read in time is asked by
the consumer (`Fetched`), and answered by whether they are pinned still.
"""

from kvflow.core import producer_actions as p
from kvflow.core import producer_endings as e
from kvflow.core import producer_steps as step
from kvflow.core.events import PrefillFinished
from kvflow.core.producer import ProducerRecord, RegisteredBy
from kvflow.core.turn import Turn

P = ProducerRecord


def pin_and_lend(record: P, event: PrefillFinished, turn: Turn) -> None:
    p.pin(record, event, turn)
    step.extend(record, turn)
    step.lend(record, turn)


def note_and_lend(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.note(record, event, turn)
    step.lend(record, turn)


def answer_readable(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.extend(record, turn)
    step.lend(record, turn)


def release_for_rival(record: P, event: RegisteredBy, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    p.refuse_rival(record, event, turn)


def finish_lent(record: P, event: object, turn: Turn) -> None:
    """The blocks were pinned until now, so what the consumer has read is what was in them."""
    step.release(record, record.request_id, turn)
    p.answer_done(record, event, turn)
    step.end(record, turn, None)


def release_peer_lost(record: P, event: object, turn: Turn) -> None:
    step.release(record, record.request_id, turn)
    e.fail_peer_lost(record, event, turn)
