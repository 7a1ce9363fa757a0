"""What is live in one worker, as its window tells it: rows and records made in pieces.

Rules: reads, changes nothing; runs in the loop thread, and lets the loop go on after every
`PIECE` records that it has looked at, so that no transfer waits for somebody's curiosity.

The idea: the counts by state are there already. Of the live records the longest in their state are
picked in one pass, and only those become rows.

Known limit: records move on while the rows are made, so a reply is no moment's photograph. Each row
is one, and says how long its state has lasted when it was made.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvflow.core import consumer, producer, waiting
from kvflow.core.consumer import ConsumerRecord
from kvflow.core.effects import Moved, PostWrite
from kvflow.core.peer import PeerRecord
from kvflow.core.producer import ProducerRecord
from kvflow.io.driver import Driver
from kvflow.io.inspected import deadlines, facts
from kvflow.observe.history import History
from kvflow.wire import live
from kvflow.wire.messages import NAME_CHARS_MAX

PIECE = 100
_DETAIL_CHARS_MAX = 1000
_WAIT_CHARS_MAX = 2000
Transferring = ProducerRecord | ConsumerRecord
T = TypeVar("T")
R = TypeVar("R", bound=Transferring | PeerRecord)
Breathe = Callable[[], Awaitable[None]]
_Moved = dict[tuple[str, str], int]
"""Bytes by machine, and part or request."""


async def _breathe() -> None:
    await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Makes one worker's replies.

    breathe  awaited between two pieces.
    """

    driver: Driver
    history: History
    clock: Callable[[], float]
    breathe: Breathe = _breathe

    # -- all of them -------------------------------------------------------------------------------

    async def of_all(self, limit: int) -> live.Live:
        """All counts, and the `limit` transfers and peers that are the longest in their state."""
        records = self.driver.engine.records
        population = [
            live.Population(machine=machine, state=state, count=count)
            for (machine, state), count in sorted(records.population.items())
            if count > 0
        ]
        count = self.driver.engine.live
        picked = await self._oldest(self._transfers(), limit)
        moved = await self._moved_bytes()
        rows = [self._row(each, moved) async for each in self._in_pieces(picked) if is_live(each)]
        peers = [*records.engines.values(), *records.workers.values()]
        oldest = await self._oldest(peers, limit)
        rank = self.driver.identity.rank
        return live.Live(
            pp_rank=rank.pp,
            tp_rank=rank.tp,
            population=tuple(population),
            live=count,
            transfers=tuple(rows),
            peers_known=len(peers),
            peers=tuple([self._peer(each) async for each in self._in_pieces(oldest)]),
        )

    def _transfers(self) -> list[Transferring]:
        records = self.driver.engine.records
        return [*records.producers.values(), *records.consumers.values()]

    async def _oldest(self, all_: Sequence[R], limit: int) -> list[R]:
        """Of those that are live, the `limit` that are the longest in their state, oldest first."""
        found: list[tuple[float, int, R]] = []
        number = itertools.count()
        if not limit:
            return []
        async for each in self._in_pieces(all_):
            if not is_live(each):
                continue
            entry = (-each.since, -next(number), each)
            if len(found) < limit:
                heapq.heappush(found, entry)
            elif entry > found[0]:
                heapq.heapreplace(found, entry)
        found.sort(reverse=True)
        await self.breathe()
        return [each for _, _, each in found]

    async def _moved_bytes(self) -> _Moved:
        """What writes and reads that have not ended have posted."""
        moved: _Moved = {}
        async for each in self._in_pieces(self.driver.under_way):
            writes = isinstance(each.order, PostWrite)
            key = (producer.NAME if writes else consumer.NAME, each.name)
            moved[key] = moved.get(key, 0) + each.bytes
        return moved

    async def _in_pieces(self, items: Iterable[T]) -> AsyncIterator[T]:
        for number, item in enumerate(items, 1):
            yield item
            if number % PIECE == 0:
                await self.breathe()

    # -- one of them -------------------------------------------------------------------------------

    async def of_one(self, name: str) -> live.Inspected:
        """Everything of the transfer that is so called: by an id of its own, or how one begins."""
        whole: dict[str, list[Transferring]] = {}
        begun: dict[str, list[Transferring]] = {}
        async for each in self._in_pieces(self._transfers()):
            names = (each.transfer_id, each.request_id or "")
            if name in names:
                whole.setdefault(each.transfer_id, []).append(each)
            elif any(one.startswith(name) for one in names):
                begun.setdefault(each.transfer_id, []).append(each)
        found = whole or begun
        records: list[live.Record] = []
        if len(found) == 1:
            (only,) = found
            of_it = [each for each in self._transfers() if each.transfer_id == only]
            moved = await self._moved_bytes()
            for each in of_it[: live.RECORDS_MAX]:
                records.append(self._record(each, moved))
                await self.breathe()
        rank = self.driver.identity.rank
        return live.Inspected(
            pp_rank=rank.pp,
            tp_rank=rank.tp,
            exact=bool(whole),
            matched=len(found),
            transfers=tuple(map(shown, itertools.islice(found, live.MATCHES_MAX))),
            records=tuple(records),
        )

    def _record(self, record: Transferring, moved: _Moved) -> live.Record:
        now = self.clock()
        known = self._peer_of(record)
        ranks = waiting.ranks(record, known) if isinstance(record, ConsumerRecord) else []
        key = record.part if isinstance(record, ProducerRecord) else record.transfer_id
        machine = producer.NAME if isinstance(record, ProducerRecord) else consumer.NAME
        moves = self.history.of(machine, key, record.request_id)
        return live.Record(
            row=self._row(record, moved),
            spent_ms=tuple((state, max(ms, 0.0)) for state, ms in record.spent_ms.items()),
            deadlines=deadlines(record, known, self.driver.engine.records.deadlines, now),
            ranks=tuple(
                live.RankRow(
                    pp_rank=each.rank.pp,
                    tp_rank=each.rank.tp,
                    agent=shown(each.agent),
                    awaits=each.awaits,
                    outcome=each.outcome.value if each.outcome else "",
                    misses=each.misses,
                )
                for each in ranks
            ),
            facts=facts(record),
            history=tuple(_moves(moves, now)),
            peer=self._peer(known) if known is not None else None,
            detail=record.detail[:_DETAIL_CHARS_MAX],
        )

    # -- rows --------------------------------------------------------------------------------------

    def _row(self, record: Transferring, moved: _Moved) -> live.TransferRow:
        now = self.clock()
        in_state_ms = max((now - record.since) * 1000, 0.0)
        if isinstance(record, ProducerRecord):
            machine, name = producer.NAME, str(record.part)
            part = int(record.part.partition(" ")[2] or 0)
            to = record.registration.peer if record.registration is not None else ""
            wait = waiting.of_producer(record, now)
        else:
            machine, name, part = consumer.NAME, record.request_id, 0
            to = str(record.address) if record.address.host else ""
            wait = waiting.of_consumer(record, self._peer_of(record))
        return live.TransferRow(
            machine=machine,
            transfer_id=shown(record.transfer_id),
            part=part,
            request_id=shown(record.request_id or ""),
            state=record.state,
            in_state_ms=in_state_ms,
            total_ms=in_state_ms + sum(record.spent_ms.values()),
            attempt=record.attempt,
            peer=shown(to),
            bytes=record.bytes + moved.get((machine, name), 0),
            reason=record.reason,
            waits_on=wait.whom,
            waits_for=wait.what[:_WAIT_CHARS_MAX],
        )

    def _peer(self, record: PeerRecord) -> live.PeerRow:
        now = self.clock()
        heard = record.heard_at > 0
        return live.PeerRow(
            key=shown(record.key),
            engine_id=shown(record.engine_id),
            state=record.state,
            in_state_ms=max((now - record.since) * 1000, 0.0),
            silent_ms=max((now - record.heard_at) * 1000, 0.0) if heard else None,
            using=len(record.using),
            waiting=len(record.waiting),
            waits_for=waiting.of_peer(record).what[:_WAIT_CHARS_MAX],
            detail=(record.refusal or record.detail)[:_DETAIL_CHARS_MAX],
        )

    def _peer_of(self, record: Transferring) -> PeerRecord | None:
        records = self.driver.engine.records
        if isinstance(record, ConsumerRecord):
            return records.engines.get(record.address)
        return records.workers.get(record.registration.peer) if record.registration else None


def is_live(record: Transferring | PeerRecord) -> bool:
    """Whether it is not over."""
    if isinstance(record, ProducerRecord):
        return record.state in producer.LIVE
    if isinstance(record, ConsumerRecord):
        return record.state in consumer.LIVE
    return record.state != "forgotten"


def shown(name: str) -> str:
    """A name from outside, as it travels."""
    return name[:NAME_CHARS_MAX]


def _moves(moves: Sequence[Moved], now: float) -> Iterator[live.Move]:
    for moved in moves[-live.HISTORY_MAX :]:
        yield live.Move(
            ago_ms=max((now - moved.at) * 1000, 0.0),
            attempt=moved.attempt,
            trigger=moved.trigger,
            source=moved.source,
            dest=moved.dest,
            reason=moved.reason,
            detail=moved.detail[:_DETAIL_CHARS_MAX],
        )
