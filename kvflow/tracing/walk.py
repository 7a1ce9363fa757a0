"""The walk along one request's critical path, from its end to its start.

Each function takes the walk back over what it knows, and says whether it has arrived at the start.
`Path.back` ignores what is unknown and bounds what contradicts itself, so nothing here has to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.ids import ATTEMPT_STRIDE
from kvflow.observe.schema import READ, WRITE
from kvflow.tracing.lines import is_of
from kvflow.tracing.parts import Part
from kvflow.tracing.path import Path
from kvflow.tracing.transfers import MOVED, Event, Request

ENDS = frozenset({"received", "failed"})
_GIVEN_UP = ("draining", "fencing", "stopping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of the consumer's: its lines from `allocated` to where it ended, of one rank."""

    events: Sequence[Event]

    def first(self, *dests: str) -> int | None:
        return next((e.at for e in self.events if e.line.dest in dests), None)

    @property
    def over(self) -> Event | None:
        return next((e for e in self.events if e.line.dest in ENDS), None)

    @property
    def attempts(self) -> list[int]:
        """Oldest first."""
        return list(dict.fromkeys(e.line.attempt for e in self.events)) or [0]

    def of(self, attempt: int) -> "Load":
        return Load(events=[e for e in self.events if e.line.attempt == attempt])


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One producer rank's record of the transfer, or of its part."""

    engine: str
    rank: str
    part: str
    events: Sequence[Event]

    def attempt_of_load(self, attempt: int) -> int | None:
        """The latest attempt, up to this one, of the same load of the consumer's."""
        load = attempt // ATTEMPT_STRIDE
        mine = {e.line.attempt for e in self.events if e.line.load == load}
        return max((own for own in mine if own <= attempt), default=None)

    def recorded(self, attempt: int) -> int | None:
        """When this attempt's registration was on record."""
        return next((e.at for e in self._of(attempt) if _is_registration(e)), None)

    def ended(self, attempt: int) -> int | None:
        """When its last WRITE ended, or its blocks had been read."""
        for event in self._of(attempt):
            line = event.line
            if line.dest in MOVED and line.source not in MOVED:
                return event.at
            if line.trigger == "write_failed":
                return event.at
        return None

    def lent(self, attempt: int) -> int | None:
        return next((e.at for e in self._of(attempt) if e.line.dest == "lent"), None)

    def fetched(self, attempt: int) -> int | None:
        return next((e.at for e in self._of(attempt) if e.line.trigger == "fetched"), None)

    def moving(self, attempt: int) -> int | None:
        """When something was first written."""
        into = ("streaming", "transferring")
        return next((e.at for e in self._of(attempt) if e.line.dest in into), None)

    @property
    def started(self) -> int | None:
        return next((e.at for e in self.events if e.line.trigger == "prefill_started"), None)

    def finished(self, until: int | None) -> int | None:
        """When vLLM ended the prefill, if that was not later than `until`."""
        return self._last("prefill_finished", until)

    def advanced(self, until: int | None) -> int | None:
        """When more of the prompt was last seen to be complete."""
        return self._last("prefill_advanced", until)

    def _last(self, trigger: str, until: int | None) -> int | None:
        found = [e.at for e in self.events if e.line.trigger == trigger and e.line.dest != "failed"]
        return max((at for at in found if until is None or at <= until), default=None)

    def _of(self, attempt: int) -> list[Event]:
        return [e for e in self.events if e.line.attempt == attempt]


def _is_registration(event: Event) -> bool:
    return event.line.trigger in ("registered", "registered_anew", "registered_rival")


class Walk:
    """The walk of one request; it writes into `path`."""

    def __init__(self, request: Request, path: Path) -> None:
        self._request = request
        self._path = path
        self._records = _records(request)
        self._record: Record | None = None  # the one that the path last led through

    def run(self, loads: Sequence[Load], token: int | None) -> None:
        """From the first token, or from where the path ends, to the start.

        loads  those that the first token waited for, oldest first.
        """
        if token is not None:
            self._to_token(loads)
        for index in range(len(loads) - 1, -1, -1):
            if self._load(loads[index]):
                return
            if index:  # preempted, and loaded again
                before = loads[index - 1]
                self._path.back(Part.QUEUE, before.over.at if before.over else before.events[-1].at)
        if not self._request.loads and self._attempts_of_the_producer():
            return
        self._path.back(Part.QUEUE, self._request.arrival(self._request.steps))
        self._prefill_before()

    def _to_token(self, loads: Sequence[Load]) -> None:
        last = loads[-1].over if loads else None
        if last is None and not self._request.loads and (moved := self._request.moved):
            self._path.back(Part.STEP, moved)  # of the consumer only the scheduler's lines are here
        elif last is None:
            scheduled = [e.at for e in self._request.steps if e.line.trigger == "scheduled"]
            self._path.back(Part.LOCAL, scheduled[0] if scheduled else None)
        else:
            failed = last.line.dest == "failed"
            self._path.back(Part.LOCAL if failed else Part.STEP, last.at)

    def _load(self, load: Load) -> bool:
        """One load back to where its blocks were allocated; True at the start of the path."""
        if load.over is None:
            self._path.back(Part.NOTICE, load.first("releasing"))
        self._path.back(Part.GIVING_UP, load.first(*_GIVEN_UP))
        rank = load.events[0].line.rank
        for attempt in reversed(load.attempts):
            mine = load.of(attempt)
            record, own = self._critical(attempt, rank)
            self._record = record or self._record
            if mine.first("expecting", "reading") is not None:
                arrived = self._read(mine, record, own)
            else:
                arrived = self._written(mine, record, own)
            if arrived:
                return True
            self._path.back(Part.REGISTRATION, mine.events[0].at)
        return False

    def _attempts_of_the_producer(self) -> bool:
        """The same for traces without the consumer's side."""
        attempts = {event.line.attempt for event in self._request.prefills}
        for attempt in sorted(attempts, reverse=True):
            record, own = self._critical(attempt, "")
            self._record = record or self._record
            if self._written(Load(events=()), record, own):
                return True
        started = [record for record in self._records if record.started is not None]
        computing = [record for record in started if record.finished(None) is None]
        return bool(computing) and self._prefill(computing[0])

    # -- one attempt -----------------------------------------------------------------------------

    def _written(self, mine: Load, record: Record | None, attempt: int) -> bool:
        """Back over a push; True if it was the prefill that was waited for."""
        path = self._path
        if record is None:
            path.back(Part.WIRE, mine.first("transferring"))
            path.back(Part.MATCH, mine.first("registered"))
            return False
        ended = record.ended(attempt)
        path.back(Part.NOTICE, ended)
        orders = self._orders(record, attempt)
        recorded, complete = record.recorded(attempt), _complete(record, ended, self._began(orders))
        if recorded is not None and complete is not None:
            self._moved(max(recorded, complete), orders)
        elif ended is not None:
            self._moved(record.moving(attempt), orders)
        return self._matched(record, recorded, complete)

    def _read(self, mine: Load, record: Record | None, attempt: int) -> bool:
        """Back over a pull; True if it was the prefill that was waited for."""
        path = self._path
        reading, expecting = mine.first("reading"), mine.first("expecting")
        orders = self._reads(record, attempt, mine.events[0].line.rank)
        lent = record.lent(attempt) if record is not None and expecting is not None else None
        if reading is not None:
            fetched = record.fetched(attempt) if record else None
            path.back(Part.NOTICE, max((o.at for o in orders), default=fetched))
            self._moved(max(reading, lent or reading), orders)
        if record is None:
            path.back(Part.MATCH, expecting)
            return False
        if expecting is None:
            return False  # the router had told of the prefill: nothing was waited for
        path.back(Part.NOTICE, lent)
        return self._matched(record, record.recorded(attempt), _complete(record, lent, None))

    def _matched(self, record: Record, recorded: int | None, complete: int | None) -> bool:
        """From the match on back: was the prefill later, or the registration?"""
        if complete is not None:
            if recorded is not None and recorded >= complete:
                self._path.back(Part.MATCH, recorded)
                return False
            self._path.back(Part.MATCH, complete)
            return self._prefill(record)
        if recorded is not None:
            if record.started is not None:  # given up, or still waiting, while it was computed
                return self._prefill(record)
            self._path.back(Part.MATCH, recorded)
        return False

    def _moved(self, begin: int | None, orders: Sequence[Event]) -> None:
        """Back over WRITEs or READs to `begin`: planning, posting and wire, each in one piece."""
        if begin is None:
            return
        path, request = self._path, self._request
        begin, end = min(max(begin, path.start), path.cursor), path.cursor
        planning = posting = 0
        taken = end
        for order in orders:
            began = request.transfer.began(order)
            if began >= end or order.at <= begin:
                continue
            taken = min(taken, max(began, begin))
            planned = began + _us(order, "plan")
            planning += max(min(planned, end) - max(began, begin), 0)
            there = max(min(order.at, end) - max(planned, begin), 0)
            posting += _us(order, "post") * there // max(order.at - planned, 1)
        if not orders:
            taken = begin
        planning = min(planning, end - taken)
        posting = min(posting, end - taken - planning)
        path.back(Part.WIRE, taken + planning + posting)
        path.back(Part.POSTING, taken + planning)
        path.back(Part.PLANNING, taken)
        path.back(Part.MATCH, begin)

    # -- the producer's past ---------------------------------------------------------------------

    def _prefill(self, record: Record) -> bool:
        """Back over the prefill to the start of the path."""
        steps = [e for e in self._request.prefill_steps if e.line.engine == record.engine]
        scheduled = [e.at for e in steps if e.line.trigger == "scheduled"]
        self._path.back(Part.PREFILL, scheduled[0] if scheduled else record.started)
        self._path.back(Part.QUEUE, self._request.arrival(steps))
        self._path.finish(Part.MATCH)
        return True

    def _prefill_before(self) -> None:
        """The consumer's leg began here: after the prefill, if that was over by then."""
        last = [self._record] if self._record else []
        for record in [*last, *self._records]:
            complete = record.finished(self._path.cursor)
            if complete is not None:
                self._path.back(Part.MATCH, complete)
                self._prefill(record)
                return
        self._path.finish(Part.MATCH)

    # -- what is looked at -----------------------------------------------------------------------

    def _critical(self, attempt: int, rank: str) -> tuple[Record | None, int]:
        """The producer's record that was the last to end, and which attempt that was for it.

        A retry concerns one rank only: for the others, an earlier attempt of the same load counts.
        """
        found = [(r, own) for r in self._records if (own := r.attempt_of_load(attempt)) is not None]
        consumer = self._request.consumer
        mine = [
            (record, own)
            for record, own in found
            if any(is_of(e.line.peer, consumer, rank) for e in record.events)
        ]
        lowest = self._path.start - 1

        def last(each: tuple[Record, int]) -> tuple[int, int]:
            record, own = each
            ended, recorded = record.ended(own), record.recorded(own)
            return (
                lowest if ended is None else ended,
                lowest if recorded is None else recorded,
            )

        return max(mine or found, key=last, default=(None, attempt))

    def _orders(self, record: Record, attempt: int) -> list[Event]:
        return [
            e
            for e in self._request.orders
            if (e.line.machine, e.line.engine, e.line.rank) == (WRITE, record.engine, record.rank)
            and (e.line.id, e.line.attempt) == (record.part, attempt)
        ]

    def _reads(self, record: Record | None, attempt: int, rank: str) -> list[Event]:
        orders = [
            e
            for e in self._request.orders
            if (e.line.machine, e.line.rank) == (READ, rank)
            and e.line.attempt == attempt
            and e.at <= self._path.cursor
        ]
        if record is None:
            return orders
        mine = [e for e in orders if is_of(e.line.peer, record.engine, record.rank)]
        return mine or orders

    def _began(self, orders: Sequence[Event]) -> int | None:
        """When the last order was taken."""
        return max((self._request.transfer.began(order) for order in orders), default=None)


def _us(order: Event, what: str) -> int:
    return max(round((order.line.ms or {}).get(what, 0.0) * 1000), 0)


def _complete(record: Record, until: int | None, last_began: int | None) -> int | None:
    """When the KV was complete, as far as the lines tell.

    The last stretch may have been written before vLLM had ended the request. It was complete when
    the order to write it was taken, or when vLLM was last seen to have computed more.
    """
    finished = record.finished(until)
    if finished is not None:
        return finished
    advanced = record.advanced(until)
    if until is None or advanced is None:
        return None
    if last_began is not None and last_began <= until:
        return max(advanced, last_began)
    return advanced


def _records(request: Request) -> list[Record]:
    grouped: dict[tuple[str, str, str], list[Event]] = {}
    for event in request.prefills:
        line = event.line
        grouped.setdefault((line.engine, line.rank, line.id), []).append(event)
    return [
        Record(engine=engine, rank=rank, part=part, events=events)
        for (engine, rank, part), events in grouped.items()
    ]
