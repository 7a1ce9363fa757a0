"""What a notice means: finds the record that it concerns and names the trigger to fire.

Rules: a notice of an unknown sender changes nothing; whatever a known one says, it lives, unless
it is a `Probe`, which says nothing.
"""

from kvflow.core import classify, parts, producer
from kvflow.core import events as ev
from kvflow.core.consumer import FromRank
from kvflow.core.effects import Ignored
from kvflow.core.notices import (
    FROM_CONSUMER,
    Accepted,
    Alive,
    Cancel,
    Done,
    Failed,
    Fetched,
    Offer,
    Probe,
    Readable,
    Register,
    Renew,
)
from kvflow.core.peer import PeerRecord
from kvflow.core.producer import CancelledBy, ProducerRecord, RegisteredBy
from kvflow.core.reasons import Reason, Standing
from kvflow.core.records import Records
from kvflow.core.turn import Turn
from kvflow.ids import AgentName, Rank, TransferId, part_id


class Inbox:
    """The notices of one worker."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def take(self, event: ev.NoticeReceived, turn: Turn) -> None:
        notice, sender = event.notice, event.sender
        if isinstance(notice, Probe):  # It is the sending that tells its sender something.
            return
        from_consumer = isinstance(notice, FROM_CONSUMER)
        record = (self.records.workers if from_consumer else self.records.engine_of).get(sender)
        if record is None:
            turn.effects.append(Ignored(kind="unknown_sender", key=sender))
            return
        self.records.fire_peer(record, "heard", event, turn)
        if isinstance(notice, Accepted | Alive):
            self.records.clocks.hear(sender, notice.clock_s, turn.now)
        match notice:
            case Register():
                self._register(record, sender, notice, turn)
            case Fetched():
                self._fetched(record, sender, notice, turn)
            case Cancel():
                self._cancel(record, sender, notice, turn)
            case Renew():
                self._renew(record, sender, notice, turn)
            case Accepted():
                self._stands(_rank(record, sender), (*_key(notice), notice.standing, None), turn)
            case Readable():
                offer = Offer(blocks=notice.blocks, tokens=notice.tokens, prefill=notice.prefill)
                word = said(record, sender, offer=offer)
                self._said(notice.transfer_id, notice.attempt, "readable", word, turn)
            case Done():
                word = FromRank(
                    rank=_rank(record, sender),
                    prefill=notice.prefill,
                    prompt=notice.prompt,
                    kept_s=notice.kept_s,
                )
                self._said(notice.transfer_id, notice.attempt, "done", word, turn)
            case Failed():
                word = said(record, sender, reason=notice.reason)
                self._said(notice.transfer_id, notice.attempt, "rank_failed", word, turn)
            case Alive():
                rank = _rank(record, sender)
                for standing in notice.standings:
                    self._stands(rank, standing, turn)

    def _register(
        self, worker: PeerRecord, sender: AgentName, notice: Register, turn: Turn
    ) -> None:
        if worker.refusal is not None:
            refusal = Failed(
                transfer_id=notice.transfer_id,
                attempt=notice.attempt,
                reason=Reason.INCOMPATIBLE,
            )
            turn.send(sender, refusal)
            return
        record = self._part(worker, notice.transfer_id, turn)
        trigger = classify.registration(record, sender, notice, self.records.floors.get(sender, 0))
        held = self.records.population[producer.NAME, "held"]
        if trigger == "registered" and record.state == "unknown" and held >= turn.timings.held_max:
            trigger = "registered_beyond"
        event = RegisteredBy(peer=sender, register=notice)
        self.records.fire_producer(record, trigger, event, turn)

    def _part(self, worker: PeerRecord, transfer_id: TransferId, turn: Turn) -> ProducerRecord:
        """What this rank owes that worker of a transfer."""
        parts.adjust(self.records, transfer_id, worker.parts, turn)
        return self.records.producer(transfer_id, turn.now, worker.part)

    def _fetched(self, worker: PeerRecord, sender: AgentName, notice: Fetched, turn: Turn) -> None:
        record = self.records.producers.get(part_id(notice.transfer_id, worker.part))
        if record is not None and classify.is_registered_by(record, sender, notice.attempt):
            self.records.fire_producer(record, "fetched", notice, turn)
            return
        # What was read may have been overwritten before the READ had ended.
        forgotten = Failed(
            transfer_id=notice.transfer_id, attempt=notice.attempt, reason=Reason.FORGOTTEN
        )
        turn.send(sender, forgotten)

    def _cancel(self, worker: PeerRecord, sender: AgentName, notice: Cancel, turn: Turn) -> None:
        record = self._part(worker, notice.transfer_id, turn)
        floor = self.records.floors.get(sender, -1)
        trigger = classify.cancellation(record, sender, notice, floor)
        event = CancelledBy(peer=sender, cancel=notice)
        self.records.fire_producer(record, trigger, event, turn)

    def _renew(self, worker: PeerRecord, sender: AgentName, notice: Renew, turn: Turn) -> None:
        standings: list[tuple[TransferId, int, Standing, Reason | None]] = []
        for transfer_id, attempt in notice.wanted:
            record = self.records.producers.get(part_id(transfer_id, worker.part))
            if record is None or not classify.is_registered_by(record, sender, attempt):
                standings.append((transfer_id, attempt, *_unregistered(record, sender, attempt)))
                continue
            self.records.fire_producer(record, "renewed", notice, turn)
            standing = classify.STANDINGS[record.state]
            standings.append((transfer_id, attempt, standing, record.reason))
        turn.send(sender, Alive(standings=tuple(standings), clock_s=turn.now))

    def _stands(
        self, rank: Rank, standing: tuple[TransferId, int, Standing, Reason | None], turn: Turn
    ) -> None:
        transfer_id, attempt, stands, reason = standing
        over = stands in (Standing.FAILED, Standing.UNKNOWN)
        trigger = "rank_failed" if over else "accepted"
        word = FromRank(rank=rank, standing=stands, reason=reason)
        self._said(transfer_id, attempt, trigger, word, turn)

    def _said(
        self, transfer_id: TransferId, attempt: int, trigger: str, word: FromRank, turn: Turn
    ) -> None:
        record = self.records.load(transfer_id)
        if record is None:
            turn.effects.append(Ignored(kind=f"{trigger}_of_unknown_load", key=transfer_id))
            return
        if attempt != record.attempt:
            turn.effects.append(Ignored(kind=f"{trigger}_of_another_attempt", key=transfer_id))
            trigger = "stale"
        self.records.fire_consumer(record, trigger, word, turn)


def _unregistered(
    record: ProducerRecord | None, sender: AgentName, attempt: int
) -> tuple[Standing, Reason | None]:
    """Of a registration that is not on record; a failed WRITE is told, so that it is retried."""
    if record is not None and record.retry_of == (sender, attempt):
        return Standing.FAILED, Reason.WRITE_FAILED
    return Standing.UNKNOWN, None


def _key(notice: Accepted) -> tuple[TransferId, int]:
    return notice.transfer_id, notice.attempt


def _rank(record: PeerRecord, agent: AgentName) -> Rank:
    return next(rank for rank, name in record.agents.items() if name == agent)


def said(
    record: PeerRecord,
    agent: AgentName,
    *,
    reason: Reason | None = None,
    is_dead: bool = False,
    offer: Offer | None = None,
) -> FromRank:
    return FromRank(
        rank=_rank(record, agent),
        reason=reason,
        is_dead=is_dead,
        offer=offer,
    )
