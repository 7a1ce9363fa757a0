"""`kvflow bench core`: what the state machines cost, each side by itself, without a network.

A side is one `Engine` with one peer that answers everything as it should. Its clock is a number, so
nothing waits. What is timed is only the engine's own calls, on a processor.
"""

import gc
import itertools
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvflow.core import Engine, Standing, Timings
from kvflow.core import events as ev
from kvflow.core.notices import Accepted, Alive, Blocks, Cancel, Done, Failed, Register, Renew
from kvflow.core.reasons import Reason
from kvflow.ids import (
    ATTEMPT_STRIDE,
    Address,
    AgentName,
    Incarnation,
    Rank,
    RequestId,
    TransferId,
    part_id,
)

BLOCKS = 64
"""Block ids of a transfer: a prompt of 1,024 tokens in blocks of 16."""
BLOCK_TOKENS = 16
_PEER = AgentName("peer")
_ADDRESS = Address("producer", 5600)
_RANK = Rank(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one side with so many live transfers; processor seconds, the best of the rounds.

    event     one event.
    transfer  all events of one transfer, from the first to the last.
    question  `next_deadline`, `urgency` and `live`, as the driver asks them after each turn.
    renewal   what one interval of renewals takes per live transfer.
    """

    side: str
    live: int
    event_s: float
    transfer_s: float
    question_s: float
    renewal_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one live transfer, with `BLOCKS` block ids and with one."""

    side: str
    live: int
    bytes: float
    bytes_without_ids: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """Bytes that one side holds: half-way, at the end, and when everything is forgotten."""

    side: str
    transfers: int
    aborted: int
    halfway_bytes: int
    end_bytes: int
    forgotten_bytes: int
    records_left: int


class Side(Protocol):
    """One engine and what happens to it. `begin` makes a transfer live, `end` and `abort` end it.

    Each yields the events one by one.
    """

    name: str
    engine: Engine

    def begin(self, number: int, blocks: int) -> Iterable[ev.Event]: ...

    def end(self, number: int) -> Iterable[ev.Event]: ...

    def abort(self, number: int) -> Iterable[ev.Event]: ...

    def renewals(self, live: Sequence[int], now: float) -> Iterable[ev.Event]: ...


class ProducerSide:
    """A prefill worker; the peer is a consumer's."""

    name = "producer"

    def __init__(self, timings: Timings) -> None:
        self.engine = Engine(timings)
        introduced = ev.PeerIntroduced(agent=_PEER, incarnation=Incarnation("i"), rank=_RANK)
        self.engine.receive(introduced, 0.0)

    def begin(self, number: int, blocks: int) -> Iterable[ev.Event]:
        yield ev.PrefillStarted(transfer_id=_transfer(number), request_id=_request(number))
        yield _from_peer(
            Register(
                transfer_id=_transfer(number),
                attempt=_attempt(number),
                blocks=_blocks(number, blocks),
                starts=(0,),
                tokens=blocks * BLOCK_TOKENS,
                lease_s=30.0,
                write_until_s=1e9,
            )
        )

    def end(self, number: int) -> Iterable[ev.Event]:
        record = self.engine.records.producers[part_id(_transfer(number), 0)]
        assert record.registration is not None
        blocks = len(record.registration.blocks[0])
        yield ev.PrefillFinished(
            transfer_id=_transfer(number),
            request_id=_request(number),
            blocks=_blocks(number, blocks),
            tokens=blocks * BLOCK_TOKENS,
        )
        part = part_id(_transfer(number), 0)
        yield ev.WriteDone(part=part, attempt=_attempt(number), bytes=1, runs=1)

    def abort(self, number: int) -> Iterable[ev.Event]:
        yield _from_peer(Cancel(transfer_id=_transfer(number), attempt=_attempt(number)))
        yield ev.PrefillAborted(transfer_id=_transfer(number), request_id=_request(number))

    def renewals(self, live: Sequence[int], now: float) -> Iterable[ev.Event]:
        wanted = tuple((_transfer(number), _attempt(number)) for number in live)
        yield _from_peer(Renew(wanted=wanted, write_until_s=1e9))


class ConsumerSide:
    """A decode worker; the peer is a producer's."""

    name = "consumer"

    def __init__(self, timings: Timings) -> None:
        self.engine = Engine(timings)
        self._is_met = False

    def begin(self, number: int, blocks: int) -> Iterable[ev.Event]:
        yield ev.BlocksAllocated(
            transfer_id=_transfer(number),
            request_id=_request(number),
            attempt=_attempt(number),
            address=_ADDRESS,
            engine_id=None,
            blocks=_blocks(number, blocks),
            starts=(0,),
            tokens=blocks * BLOCK_TOKENS,
        )
        if not self._is_met:
            self._is_met = True
            yield ev.MeetingSucceeded(
                address=_ADDRESS,
                engine_id="engine",
                incarnation=Incarnation("i"),
                agents={_RANK: _PEER},
            )
        yield _from_peer(
            Accepted(
                transfer_id=_transfer(number),
                attempt=_attempt(number),
                standing=Standing.WAITING,
                clock_s=0.0,
            )
        )

    def end(self, number: int) -> Iterable[ev.Event]:
        done = Done(transfer_id=_transfer(number), attempt=_attempt(number), prefill="p")
        yield _from_peer(done)

    def abort(self, number: int) -> Iterable[ev.Event]:
        yield ev.LoadAborted(request_id=_request(number))
        yield _from_peer(
            Failed(transfer_id=_transfer(number), attempt=_attempt(number), reason=Reason.CANCELLED)
        )

    def renewals(self, live: Sequence[int], now: float) -> Iterable[ev.Event]:
        standings = tuple(
            (_transfer(number), _attempt(number), Standing.WAITING, None) for number in live
        )
        yield _from_peer(Alive(standings=standings, clock_s=now))


SIDES: tuple[Callable[[Timings], Side], ...] = (ProducerSide, ConsumerSide)


class Watched:
    """A side, its clock, and the time that its engine has taken so far."""

    def __init__(self, make: Callable[[Timings], Side]) -> None:
        self.timings = Timings(load_deadline_s=1e5, prefill_max_s=1e4, lease_s=1e4, hold_max_s=1e4)
        self.side = make(self.timings)
        self.now = 1.0
        self.events = 0
        self.spent_s = 0.0

    def take(self, events: Iterable[ev.Event]) -> None:
        receive = self.side.engine.receive
        for event in events:
            start = time.thread_time()
            receive(event, self.now)
            self.spent_s += time.thread_time() - start
            self.events += 1

    def wait(self, seconds: float) -> None:
        """Let time pass; deadlines count as an event each."""
        until = self.now + seconds
        engine = self.side.engine
        while (due := engine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            start = time.thread_time()
            engine.expire(self.now)
            self.spent_s += time.thread_time() - start
            self.events += 1
        self.now = until

    def spent_in(self, work: Callable[[], None]) -> tuple[float, int]:
        """Seconds in the engine, and events."""
        before = self.spent_s, self.events
        work()
        return self.spent_s - before[0], self.events - before[1]


def cost(make: Callable[[Timings], Side], live: int, transfers: int, rounds: int = 3) -> Cost:
    """With `live` transfers at all times, `transfers` begin and end, in each of the rounds."""
    watched = Watched(make)
    side, numbers = watched.side, itertools.count(1)
    under_way = deque(itertools.islice(numbers, live))
    for number in under_way:
        watched.take(side.begin(number, BLOCKS))

    def turn_over() -> None:
        for number in itertools.islice(numbers, transfers):
            watched.take(side.begin(number, BLOCKS))
            under_way.append(number)
            watched.take(side.end(under_way.popleft()))

    def renew() -> None:
        watched.wait(watched.timings.renew_interval_s)
        watched.take(side.renewals(under_way, watched.now))

    turns = [watched.spent_in(turn_over) for _ in range(rounds)]
    renewals = [watched.spent_in(renew)[0] for _ in range(rounds)]
    return Cost(
        side=side.name,
        live=live,
        event_s=min(spent / events for spent, events in turns),
        transfer_s=min(spent for spent, _ in turns) / transfers,
        question_s=_question_s(side.engine),
        renewal_s=min(renewals) / live,
    )


def _question_s(engine: Engine) -> float:
    spent = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(200):
            engine.next_deadline()
            engine.urgency()
            _ = engine.live
        spent.append((time.thread_time() - start) / 200)
    return statistics.median(spent)


def memory(make: Callable[[Timings], Side], live: int) -> Memory:
    """What `live` transfers hold, per transfer; effects that nobody keeps are not counted."""

    def held(blocks: int) -> float:
        watched = Watched(make)
        watched.take(watched.side.begin(0, 1))
        with _Traced() as traced:
            for number in range(1, live + 1):
                watched.take(watched.side.begin(number, blocks))
            return traced.bytes() / live

    return Memory(
        side=make(Timings()).name,
        live=live,
        bytes=held(BLOCKS),
        bytes_without_ids=held(1),
    )


def soak(make: Callable[[Timings], Side], transfers: int, live: int = 16) -> Soak:
    """Transfers come and go, every third is aborted, time passes; then all is forgotten.

    They take four times as long as ended ones are remembered, so half-way as many are forgotten as
    come.
    """
    watched = Watched(make)
    side = watched.side
    step_s = 4 * watched.timings.tombstone_s / transfers
    under_way: deque[int] = deque()
    aborted = halfway = 0
    with _Traced() as traced:
        for number in range(1, transfers + 1):
            watched.take(side.begin(number, BLOCKS))
            under_way.append(number)
            if len(under_way) > live:
                oldest = under_way.popleft()
                watched.take(side.end(oldest) if oldest % 3 else side.abort(oldest))
                aborted += not oldest % 3
            watched.wait(step_s)
            watched.take(side.renewals(under_way, watched.now))
            if number == transfers // 2:
                halfway = traced.bytes()
        end = traced.bytes()
        for number in under_way:
            watched.take(side.end(number))
        under_way.clear()
        watched.wait(2.5 * watched.timings.peer_idle_s)
        records = side.engine.records
        return Soak(
            side=side.name,
            transfers=transfers,
            aborted=aborted,
            halfway_bytes=halfway,
            end_bytes=end,
            forgotten_bytes=traced.bytes(),
            records_left=len(records.producers) + len(records.consumers) + len(records.tombs),
        )


class _Traced:
    """Counts memory that is allocated while it is active, and held when it is asked."""

    def __enter__(self) -> "_Traced":
        gc.collect()
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]
        return self

    def bytes(self) -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - self._before

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()


def _transfer(number: int) -> TransferId:
    return TransferId(f"9f1c7a52-transfer-{number}")


def _request(number: int) -> RequestId:
    return RequestId(f"cmpl-9f1c7a52-{number}-0-1a2b3c4d")


def _attempt(number: int) -> int:
    return (number + 1) * ATTEMPT_STRIDE


def _blocks(number: int, count: int) -> Blocks:
    """Ids that no other live transfer has, as objects of their own, like ids from the wire."""
    first = 1000 + number * count
    return (tuple(range(first, first + count)),)


def _from_peer(
    notice: Register | Accepted | Done | Failed | Cancel | Renew | Alive,
) -> ev.NoticeReceived:
    return ev.NoticeReceived(sender=_PEER, notice=notice)
