"""The records of one worker, and the one place where their tables are fired.

Invariants: a record is in its dict exactly until it is `forgotten`; `population` counts records by
(machine, state); a peer's `using` holds exactly the live transfers that depend on it.
"""

from collections import Counter
from typing import Any

from kvflow.core import consumer, consumer_table, peer, producer, producer_table
from kvflow.core.clocks import Clocks
from kvflow.core.consumer import ConsumerRecord
from kvflow.core.deadlines import Deadlines
from kvflow.core.effects import Moved
from kvflow.core.peer import PeerRecord
from kvflow.core.producer import ProducerRecord
from kvflow.core.table import Table
from kvflow.core.tally import Tally
from kvflow.core.turn import Turn
from kvflow.ids import Address, AgentName, PartId, Rank, RequestId, TransferId, part_id


class Records:
    """Every record of one worker.

    producers  by part.
    part_counts
               parts of a transfer that has more than one.
    consumers  by request id.
    engines    producer engines, by their side channel's address.
    workers    consumer workers, by agent name.
    load_of    transfer id -> the request whose load it is (the latest).
    floors     by consumer worker, also one that is not known (any more): the highest attempt that
               was settled and forgotten here; lower ones are stale. Least recently raised first.
    tombs      deadline keys of the transfers that have ended, oldest first.
    engine_of  agent name -> the met engine that it belongs to.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.producers: dict[PartId, ProducerRecord] = {}
        self.part_counts: dict[TransferId, int] = {}
        self.consumers: dict[RequestId, ConsumerRecord] = {}
        self.engines: dict[Address, PeerRecord] = {}
        self.workers: dict[AgentName, PeerRecord] = {}
        self.load_of: dict[TransferId, RequestId] = {}
        self.engine_of: dict[AgentName, PeerRecord] = {}
        self.population: Counter[tuple[str, str]] = Counter()
        self.deadlines = Deadlines()
        self.floors: dict[AgentName, int] = {}
        self.tombs: dict[tuple[str, str], None] = {}
        self.clocks = Clocks()

    # -- find or make ----------------------------------------------------------------------------

    def producer(self, transfer_id: TransferId, now: float, part: int = 0) -> ProducerRecord:
        key = part_id(transfer_id, part)
        record = self.producers.get(key)
        if record is None:
            record = ProducerRecord(
                state=producer_table.TABLE.initial, since=now, transfer_id=transfer_id, part=key
            )
            self.producers[key] = record
            self.population[producer.NAME, record.state] += 1
        return record

    def parts(self, transfer_id: TransferId, now: float) -> list[ProducerRecord]:
        """Every part of a transfer; there is at least one."""
        count = self.part_counts.get(transfer_id, 1)
        return [self.producer(transfer_id, now, part) for part in range(count)]

    def consumer(
        self, request_id: RequestId, transfer_id: TransferId, now: float
    ) -> ConsumerRecord:
        record = self.consumers.get(request_id)
        if record is None:
            record = ConsumerRecord(
                state=consumer_table.TABLE.initial,
                since=now,
                request_id=request_id,
                transfer_id=transfer_id,
            )
            self.consumers[request_id] = record
            self.population[consumer.NAME, record.state] += 1
        elif record.transfer_id != transfer_id:
            self._unclaim(record)
        return record

    def engine(self, address: Address, now: float) -> PeerRecord:
        record = self.engines.get(address)
        if record is None:
            record = PeerRecord(state=peer.TABLE.initial, since=now, address=address)
            self.engines[address] = record
            self.population[peer.NAME, record.state] += 1
        return record

    def worker(self, agent: AgentName, rank: Rank, now: float) -> PeerRecord:
        record = self.workers.get(agent)
        if record is None:
            record = PeerRecord(state=peer.TABLE.initial, since=now, agents={rank: agent})
            self.workers[agent] = record
            self.population[peer.NAME, record.state] += 1
        return record

    def load(self, transfer_id: TransferId) -> ConsumerRecord | None:
        """The latest load with this transfer id."""
        request_id = self.load_of.get(transfer_id)
        return self.consumers.get(request_id) if request_id is not None else None

    def claim(self, transfer_id: TransferId, record: ConsumerRecord) -> None:
        """This request's load is the latest with this transfer id."""
        self.load_of[transfer_id] = record.request_id

    def _unclaim(self, record: ConsumerRecord) -> None:
        if self.load_of.get(record.transfer_id) == record.request_id:
            del self.load_of[record.transfer_id]

    def knows(self, agent: AgentName) -> bool:
        """Whether some peer's record, in either role, has this agent."""
        return agent in self.engine_of or agent in self.workers

    def peer(self, key: str) -> PeerRecord:
        worker = self.workers.get(AgentName(key))
        if worker is not None:
            return worker
        host, _, port = key.rpartition(":")
        return self.engines[Address(host, int(port))]

    # -- firing ----------------------------------------------------------------------------------

    def _fire(self, table: Table, record: Any, trigger: str, event: Any, turn: Turn) -> None:
        source = record.state
        table.fire(record, trigger, event, turn)
        self.tally.took(table, record, trigger, source)
        if record.state == source:
            return
        spent = (turn.now - record.since) * 1000
        record.spent_ms[source] = record.spent_ms.get(source, 0.0) + spent
        record.since = turn.now
        self.population[table.name, source] -= 1
        self.population[table.name, record.state] += 1
        turn.effects.append(_moved(table, record, trigger, source, turn.now))

    def _bury(self, table: Table, record: Any, key: tuple[str, str]) -> None:
        """Keep the order in which transfers ended."""
        if record.state in table.terminal:
            self.tombs[key] = None
        else:
            self.tombs.pop(key, None)

    def fire_producer(self, record: ProducerRecord, trigger: str, event: Any, turn: Turn) -> None:
        before = record.registration
        self._fire(producer_table.TABLE, record, trigger, event, turn)
        over = record.state in producer_table.TABLE.terminal
        self.tally.registered(record, trigger, before, over=over)
        self._bury(producer_table.TABLE, record, (producer.NAME, record.part))
        for registration in (before, record.registration):
            worker = self.workers.get(registration.peer) if registration else None
            if worker is not None:
                worker.using.discard(record.part)
                worker.last_used = turn.now
        now_of = record.registration
        if now_of is not None and record.state in producer.LIVE and now_of.peer in self.workers:
            self.workers[now_of.peer].using.add(record.part)
        if record.state == "forgotten":
            self._forget_producer(record, turn.timings.floors_max)

    def fire_consumer(self, record: ConsumerRecord, trigger: str, event: Any, turn: Turn) -> None:
        before = self.engines.get(record.address)
        self._fire(consumer_table.TABLE, record, trigger, event, turn)
        self._bury(consumer_table.TABLE, record, (consumer.NAME, record.request_id))
        engine = self.engines.get(record.address)
        if before is not None and before is not engine:
            before.using.discard(record.request_id)
            before.waiting.discard(record.request_id)
        if engine is not None:
            if record.state in consumer.ASKING and record.agents:
                engine.using.add(record.request_id)
            else:
                engine.using.discard(record.request_id)
        if record.state not in consumer.WAITING_FOR_PEER and engine is not None:
            engine.waiting.discard(record.request_id)
        if record.state == "forgotten":
            self.population[consumer.NAME, "forgotten"] -= 1
            del self.consumers[record.request_id]
            self._unclaim(record)

    def fire_peer(self, record: PeerRecord, trigger: str, event: Any, turn: Turn) -> None:
        before = tuple(record.agents.values())
        if record.address is not None:
            for agent in before:
                del self.engine_of[agent]
        self._fire(peer.TABLE, record, trigger, event, turn)
        if record.address is not None and record.state != "forgotten":
            self.engine_of.update(dict.fromkeys(record.agents.values(), record))
        for agent in before:
            if agent not in self.engine_of:
                self.clocks.forget(agent)
        if record.state == "forgotten":
            self.population[peer.NAME, "forgotten"] -= 1
            self.deadlines.cancel((peer.NAME, record.key))
            if record.address is not None:
                del self.engines[record.address]
            else:
                del self.workers[AgentName(record.key)]

    def _forget_producer(self, record: ProducerRecord, floors_max: int) -> None:
        self.population[producer.NAME, "forgotten"] -= 1
        self.deadlines.cancel((producer.NAME, record.part))
        del self.producers[record.part]
        count = self.part_counts.get(record.transfer_id, 1)
        if not any(part_id(record.transfer_id, part) in self.producers for part in range(count)):
            self.part_counts.pop(record.transfer_id, None)
        settled = dict(record.settled)
        if record.registration is not None:
            settled[record.registration.peer] = max(
                record.registration.attempt, settled.get(record.registration.peer, 0)
            )
        for agent, attempt in settled.items():
            self.floors[agent] = max(self.floors.pop(agent, 0), attempt)
            if len(self.floors) > floors_max:
                del self.floors[next(iter(self.floors))]


def _moved(table: Table, record: Any, trigger: str, source: str, at: float) -> Moved:
    over = record.state in table.terminal
    common: dict[str, Any] = {
        "machine": table.name,
        "trigger": trigger,
        "source": source,
        "dest": record.state,
        "at": at,
        "reason": record.reason,
        "detail": record.detail,
        "spent_ms": dict(record.spent_ms) if over else None,
    }
    if isinstance(record, PeerRecord):
        return Moved(key=record.key, attempt=0, request_id=None, **common)
    common |= {"bytes": record.bytes, "runs": record.runs} if over else {}
    if isinstance(record, ProducerRecord):
        known = record.registration
        common["peer"] = known.peer if known else ""
        key = record.part
    else:
        common["peer"] = str(record.address)
        key = record.transfer_id
    return Moved(key=key, attempt=record.attempt, request_id=record.request_id, **common)
