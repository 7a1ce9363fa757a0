"""The parts of a transfer: one producer's record for each consumer rank that this rank writes to.

The idea: how many there are is known with a consumer's first word, so until then there is one. Then
the others are made and brought to where the prefill stands, by the events that the first has had.
From then on each of vLLM's events goes to all of them.
"""

from collections.abc import Iterator

from kvflow.core import classify
from kvflow.core.events import (
    PrefillAborted,
    PrefillAdvanced,
    PrefillFinished,
    PrefillPreempted,
    PrefillStarted,
)
from kvflow.core.producer import COMPUTING, ProducerRecord
from kvflow.core.records import Records
from kvflow.core.turn import Turn
from kvflow.ids import TransferId, part_id


def tell_all(records: Records, event: classify.PrefillEvent, turn: Turn) -> None:
    """What vLLM says of a prefill concerns every part. A finished one is pinned by each."""
    parts = records.parts(event.transfer_id, turn.now)
    if isinstance(event, PrefillFinished):
        for record in parts:
            turn.ledger.pin(event.request_id, record.part)
    elif isinstance(event, PrefillAdvanced):
        turn.ledger.lend(event.request_id)
    elif isinstance(event, PrefillPreempted | PrefillAborted):
        turn.ledger.withdraw(event.request_id)
    for record in parts:
        records.fire_producer(record, classify.prefill(record, event), event, turn)


def adjust(records: Records, transfer_id: TransferId, parts: int, turn: Turn) -> None:
    """A consumer has spoken, whose engine has `parts` ranks to be written from here.

    Parts that only an earlier consumer had need not keep the prefill for this one.
    """
    known = records.part_counts.get(transfer_id, 1)
    if parts > known:
        records.part_counts[transfer_id] = parts
    first = records.producers.get(part_id(transfer_id, 0))
    for part in range(known, parts):
        for event in _so_far(first):
            record = records.producer(transfer_id, turn.now, part)
            if isinstance(event, PrefillFinished):
                turn.ledger.pin(event.request_id, record.part)
            records.fire_producer(record, classify.prefill(record, event), event, turn)
    for part in range(parts, known):
        surplus = records.producers.get(part_id(transfer_id, part))
        if surplus is not None and surplus.registration is None:
            records.fire_producer(surplus, "release_asked", None, turn)


def _so_far(first: ProducerRecord | None) -> Iterator[classify.PrefillEvent]:
    """The events that bring another part to where the prefill of `first` stands.

    What was sent, or is kept for whom it was sent to, is over for anybody else.
    """
    if first is None or first.request_id is None:
        return
    of, request = first.transfer_id, first.request_id
    if first.is_finished and first.state != "kept":
        yield PrefillFinished(
            transfer_id=of,
            request_id=request,
            blocks=first.blocks,
            tokens=first.tokens,
            is_exact=first.is_exact,
            prompt=first.prompt,
        )
        return
    yield PrefillStarted(transfer_id=of, request_id=request, prompt=first.prompt)
    if first.state in COMPUTING and first.tokens:
        yield PrefillAdvanced(
            transfer_id=of,
            request_id=request,
            blocks=first.blocks,
            tokens=first.tokens,
            prompt=first.prompt,
        )
    if first.state == "preempted":
        yield PrefillPreempted(transfer_id=of, request_id=request)
    if first.state in ("kept", "sent", "failed"):
        yield PrefillAborted(transfer_id=of, request_id=request)
