"""One worker's engine: events in, effects out, time passed in.

Rules: no clock, no input or output; every effect comes out of a row; an event about something that
is not on record here is `Ignored` by kind, never acted on.

The idea: `receive` finds the record that an event concerns, names the trigger
(`kvflow.core.classify`) and fires its table. Actions that concern another machine leave follow-ups,
which are worked off in the same turn, so a caller never sees half of a consequence.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvflow.core import (
    classify,
    consumer,
    consumer_table,
    contention,
    parts,
    peer,
    producer,
    producer_table,
)
from kvflow.core import events as ev
from kvflow.core.consumer import RENEWING, ConsumerRecord
from kvflow.core.effects import DropPeer, Effect, Ignored
from kvflow.core.inbox import Inbox, said
from kvflow.core.ledger import Ledger
from kvflow.core.notices import (
    Renew,
)
from kvflow.core.peer import PeerRecord, Tick
from kvflow.core.reasons import Reason
from kvflow.core.records import Records
from kvflow.core.table import Table
from kvflow.core.tally import Tally
from kvflow.core.timings import Timings
from kvflow.core.turn import FollowUp, PeerGone, PeerMet, RenewalDue, Turn, Wanted
from kvflow.core.urgency import Urgency, of_population
from kvflow.errors import LocalProtocolError
from kvflow.ids import AgentName, PartId, Rank, RequestId, TransferId

TABLES: tuple[Table, ...] = (producer_table.TABLE, consumer_table.TABLE, peer.TABLE)


class Engine:
    """The state of all transfers of one worker.

    prompt_tokens_max  tokens of the longest prompt that vLLM takes here; None: any.
    tally              where what happens is counted; it may outlive this engine.
    """

    def __init__(
        self,
        timings: Timings | None = None,
        prompt_tokens_max: int | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.timings = timings or Timings()
        self.prompt_tokens_max = prompt_tokens_max
        self.ledger = Ledger()
        self.tally = tally or Tally()
        self.records = Records(self.tally)
        self._handlers: dict[type, Callable[[Any, Turn], None]] = {
            ev.PrefillStarted: self._prefill,
            ev.PrefillPreempted: self._prefill,
            ev.PrefillAdvanced: self._prefill,
            ev.PrefillFinished: self._prefill,
            ev.PrefillAborted: self._prefill,
            ev.PrefillsStalled: contention.watch,
            ev.PrefillsResumed: contention.watch,
            ev.ReleaseAsked: self._release_asked,
            ev.BlocksAllocated: self._allocated,
            ev.LoadRefused: self._refused,
            ev.ReleaseWanted: self._release_wanted,
            ev.LoadAborted: self._load_ended,
            ev.RequestEnded: self._load_ended,
            ev.NoticeReceived: Inbox(self.records).take,
            ev.NoticeFailed: self._notice_failed,
            ev.PeerIntroduced: self._introduced,
            ev.MeetingSucceeded: self._meeting,
            ev.MeetingFailed: self._meeting,
            ev.WriteDone: self._write_ended,
            ev.WriteFailed: self._write_ended,
            ev.WriteStopped: self._write_ended,
            ev.ReadDone: self._read_ended,
            ev.ReadFailed: self._read_ended,
            ev.ReadStopped: self._read_ended,
            ev.Closing: self._closing,
        }

    # -- the three calls -------------------------------------------------------------------------

    def receive(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done.

        Raises `LocalProtocolError` if the event is one that cannot happen (a bug of ours).
        """
        turn = self._turn(now)
        self._handlers[type(event)](event, turn)
        self._follow_up(turn)
        return self._effects(turn)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, or None."""
        return self.records.deadlines.next()

    def expire(self, now: float) -> list[Effect]:
        """Fire every deadline that is not after `now`."""
        turn = self._turn(now)
        while (due := self.records.deadlines.pop_due(now)) is not None:
            self._expired(due, turn)
            self._follow_up(turn)
        return self._effects(turn)

    # -- questions -------------------------------------------------------------------------------

    def may_write(self, part: PartId, attempt: int, now: float) -> bool:
        """Whether another slice of this write may be posted now (asked before every slice).

        No is not for ever: a write pauses while the consumer is silent, and goes on when it is
        heard again. What ends it is `StopWrite`.
        """
        record = self.records.producers.get(part)
        return (
            record is not None
            and record.state in producer.WRITING
            and record.attempt == attempt
            and now < min(record.lease_until, record.write_until)
            and self.ledger.is_open(part, attempt)
        )

    def urgency(self) -> Urgency:
        """How soon news should be looked for."""
        return of_population(self.records.population)

    @property
    def live(self) -> int:
        """Transfers that are not over, both directions."""
        return sum(
            count
            for (machine, state), count in self.records.population.items()
            if (machine == producer.NAME and state in producer.LIVE)
            or (machine == consumer.NAME and state in consumer.LIVE)
        )

    def _turn(self, now: float) -> Turn:
        return Turn(
            now=now,
            timings=self.timings,
            ledger=self.ledger,
            deadlines=self.records.deadlines,
            clocks=self.records.clocks,
            tally=self.tally,
            prompt_tokens_max=self.prompt_tokens_max,
        )

    def _effects(self, turn: Turn) -> list[Effect]:
        """An agent that is still known in its other role (it may have two) is not dropped."""
        return [
            effect
            for effect in turn.effects
            if not (isinstance(effect, DropPeer) and self.records.knows(effect.agent))
        ]

    # -- events of vLLM --------------------------------------------------------------------------

    def _prefill(self, event: classify.PrefillEvent, turn: Turn) -> None:
        parts.tell_all(self.records, event, turn)

    def _release_asked(self, event: ev.ReleaseAsked, turn: Turn) -> None:
        for record in self.records.parts(event.transfer_id, turn.now):
            self.records.fire_producer(record, "release_asked", event, turn)

    def _load(
        self, event: ev.BlocksAllocated | ev.LoadRefused | ev.ReleaseWanted, turn: Turn
    ) -> ConsumerRecord:
        return self.records.consumer(event.request_id, event.transfer_id, turn.now)

    def _rival(self, event: ev.BlocksAllocated | ev.ReleaseWanted) -> ConsumerRecord | None:
        """Another load with the same transfer id that is under way here."""
        other = self.records.load(event.transfer_id)
        if other is None or other.request_id == event.request_id:
            return None
        return other if other.state in consumer.LIVE else None

    def _allocated(self, event: ev.BlocksAllocated, turn: Turn) -> None:
        rival = self._rival(event)
        record = self._load(event, turn)
        if rival is not None:
            if not event.again:
                self.records.fire_consumer(rival, "rival_allocated", event, turn)
            refused = ev.LoadRefused(
                transfer_id=event.transfer_id,
                request_id=event.request_id,
                attempt=event.attempt,
                detail=f"{rival.request_id} waits for the same transfer id",
                reason=Reason.AMBIGUOUS,
            )
            self.records.fire_consumer(record, "load_refused", refused, turn)
            return
        self.records.claim(event.transfer_id, record)
        trigger = "allocated_again" if event.again else "blocks_allocated"
        self.records.fire_consumer(record, trigger, event, turn)

    def _refused(self, event: ev.LoadRefused, turn: Turn) -> None:
        self.records.fire_consumer(self._load(event, turn), "load_refused", event, turn)

    def _release_wanted(self, event: ev.ReleaseWanted, turn: Turn) -> None:
        if self._rival(event) is not None:
            turn.effects.append(Ignored(kind="release_of_live_transfer", key=event.transfer_id))
            return
        record = self._load(event, turn)
        self.records.claim(event.transfer_id, record)
        self.records.fire_consumer(record, "release_wanted", event, turn)

    def _load_ended(self, event: ev.LoadAborted | ev.RequestEnded, turn: Turn) -> None:
        record = self.records.consumers.get(event.request_id)
        trigger = "load_aborted" if isinstance(event, ev.LoadAborted) else "request_ended"
        if record is None:
            turn.effects.append(Ignored(kind=f"{trigger}_of_unknown", key=event.request_id))
            return
        self.records.fire_consumer(record, trigger, event, turn)

    # -- events of the network -------------------------------------------------------------------

    def _notice_failed(self, event: ev.NoticeFailed, turn: Turn) -> None:
        gone = PeerGone(agent=event.agent, detail=event.detail, is_dead=event.is_dead)
        turn.follow_ups.append(gone)

    def _introduced(self, event: ev.PeerIntroduced, turn: Turn) -> None:
        known = event.agent in self.records.workers
        if not known and len(self.records.workers) >= self.timings.peers_max:
            turn.effects.append(Ignored(kind="peer_beyond_limit", key=event.agent))
            turn.effects.append(DropPeer(agent=event.agent))
            return
        record = self.records.worker(event.agent, event.rank, turn.now)
        self.records.fire_peer(record, "introduced", event, turn)

    def _meeting(self, event: ev.MeetingSucceeded | ev.MeetingFailed, turn: Turn) -> None:
        record = self.records.engines.get(event.address)
        if record is None:
            turn.effects.append(Ignored(kind="meeting_of_forgotten_peer", key=str(event.address)))
            if isinstance(event, ev.MeetingSucceeded):
                turn.effects.extend(DropPeer(agent=agent) for agent in event.agents.values())
            return
        met = event.agents if isinstance(event, ev.MeetingSucceeded) else None
        if record.state == "meeting":
            self._tell_replaced(record, met or {}, turn)
        trigger = "meeting_failed" if met is None else "meeting_succeeded"
        self.records.fire_peer(record, trigger, event, turn)

    # -- events of the driver --------------------------------------------------------------------

    def _write_ended(
        self, event: ev.WriteDone | ev.WriteFailed | ev.WriteStopped, turn: Turn
    ) -> None:
        trigger = {
            ev.WriteDone: "write_done",
            ev.WriteFailed: "write_failed",
            ev.WriteStopped: "write_stopped",
        }[type(event)]
        record = self.records.producers.get(event.part)
        if record is None or not self.ledger.is_open(event.part, event.attempt):
            raise LocalProtocolError(
                f"{trigger} of {event.part}, attempt {event.attempt}: no such write is open"
            )
        self.records.fire_producer(record, trigger, event, turn)

    def _read_ended(self, event: ev.ReadDone | ev.ReadFailed | ev.ReadStopped, turn: Turn) -> None:
        trigger = {
            ev.ReadDone: "read_done",
            ev.ReadFailed: "read_failed",
            ev.ReadStopped: "read_stopped",
        }[type(event)]
        record = self.records.consumers.get(event.request_id)
        if record is None or not self.ledger.is_reading(event.request_id, event.rank):
            raise LocalProtocolError(
                f"{trigger} of {event.request_id} from {event.rank}: no such read is open"
            )
        self.records.fire_consumer(record, trigger, event, turn)

    def _closing(self, event: ev.Closing, turn: Turn) -> None:
        for producing in list(self.records.producers.values()):
            self.records.fire_producer(producing, "closing", event, turn)
        for consuming in list(self.records.consumers.values()):
            self.records.fire_consumer(consuming, "closing", event, turn)

    # -- deadlines and follow-ups ----------------------------------------------------------------

    def _expired(self, due: Any, turn: Turn) -> None:
        kind, key = due
        if kind == producer.NAME:
            self.records.fire_producer(self.records.producers[key], "expired", None, turn)
        elif kind == consumer.NAME:
            self.records.fire_consumer(self.records.consumers[key], "expired", None, turn)
        elif kind == consumer.RESEND:
            self.records.fire_consumer(self.records.consumers[key], "resend_due", None, turn)
        elif due == contention.STALL:
            contention.give_way(self.records, turn)
        else:
            record = self.records.peer(key)
            if record.state == "meeting":
                self._tell_replaced(record, {}, turn)
            self.records.fire_peer(record, "expired", Tick(awaited=self._awaited(record)), turn)

    def _awaited(self, record: PeerRecord) -> frozenset[Rank]:
        """The ranks of a producer engine from which some load waits for a word."""
        if record.address is None:
            return frozenset()
        loads = (self.records.consumers[RequestId(key)] for key in record.using)
        return frozenset(rank for load in loads for rank in load.unsettled)

    def _follow_up(self, turn: Turn) -> None:
        while turn.follow_ups:
            follow_up: FollowUp = turn.follow_ups.pop(0)
            match follow_up:
                case Wanted():
                    self._wanted(follow_up, turn)
                case PeerMet():
                    self._peer_met(follow_up, turn)
                case PeerGone():
                    self._peer_gone(follow_up, turn)
                case RenewalDue():
                    self._renewal_due(self.records.engines[follow_up.address], turn)

        while len(self.records.tombs) > self.timings.tombstones_max:
            oldest = next(iter(self.records.tombs))
            self.records.deadlines.cancel(oldest)
            self._expired(oldest, turn)

    def _wanted(self, wanted: Wanted, turn: Turn) -> None:
        record = self.records.engine(wanted.address, turn.now)
        asked = self.records.consumers[wanted.request_id].engine_id
        outdated = record.state == "met" and asked not in (None, record.engine_id)
        self.records.fire_peer(record, "outdated" if outdated else "peer_wanted", wanted, turn)

    def _peer_met(self, met: PeerMet, turn: Turn) -> None:
        record = self.records.consumers.get(met.request_id)
        if record is None or record.state not in consumer.WAITING_FOR_PEER:
            return
        engine = self.records.engines[record.address]
        if met.refusal is None and record.engine_id not in (None, engine.engine_id):
            refusal = (
                f"remote_engine_id is {record.engine_id!r}, "
                f"but {record.address} is {engine.engine_id!r}"
            )
            met = PeerMet(request_id=met.request_id, refusal=refusal)
        trigger = "peer_met" if met.refusal is None else "peer_unreachable"
        self.records.fire_consumer(record, trigger, met, turn)

    def _peer_gone(self, gone: PeerGone, turn: Turn) -> None:
        for record in (
            self.records.engine_of.get(gone.agent),
            self.records.workers.get(gone.agent),
        ):
            if record is None:
                continue
            agents = list(record.agents.values())
            for agent in agents:
                self._tell_lost(record, agent, gone.is_dead, turn)
            self.records.fire_peer(record, "gone", gone, turn)

    def _tell_replaced(
        self, record: PeerRecord, agents: Mapping[Rank, AgentName], turn: Turn
    ) -> None:
        """Of an engine that was asked again who it is: the transfers of workers that are gone.

        Where others listen at its address, the old process has ended; where nobody does, it may be
        stopped, or cut off.
        """
        for agent in sorted(set(record.agents.values()) - set(agents.values())):
            self._tell_lost(record, agent, bool(agents), turn)

    def _tell_lost(self, record: PeerRecord, agent: AgentName, is_dead: bool, turn: Turn) -> None:
        """Every transfer that depends on this agent."""
        for key in sorted(record.using):
            if record.address is None:
                written = self.records.producers[PartId(TransferId(key))]
                self.records.fire_producer(written, "peer_lost", None, turn)
            else:
                word = said(record, agent, is_dead=is_dead)
                load = self.records.consumers[RequestId(key)]
                self.records.fire_consumer(load, "peer_lost", word, turn)

    def _renewal_due(self, record: PeerRecord, turn: Turn) -> None:
        for rank, agent in sorted(record.agents.items()):
            wanted = tuple(_renewable(self.records.consumers, record, rank))
            if wanted:
                turn.send(agent, Renew(wanted=wanted, write_until_s=turn.write_until(agent)))


def _renewable(
    consumers: dict[RequestId, ConsumerRecord], record: PeerRecord, rank: Rank
) -> Iterator[tuple[TransferId, int]]:
    for request_id in sorted(record.using):
        load = consumers[RequestId(request_id)]
        if load.state in RENEWING and rank in load.unsettled & load.answered:
            yield load.transfer_id, load.attempt
