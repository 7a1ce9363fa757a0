"""An analysis as Chrome trace events: for https://ui.perfetto.dev or chrome://tracing.

One process for each engine. Its threads: one for each record (a request in one worker, or a part
of a transfer), with a slice for the whole and one inside it for each state; beside it those for
WRITE and READ orders, one for what vLLM told, and one for the parts of the critical path. Arrows:
REGISTER from the consumer to the producer's ranks, the last DONE back. Counters: live records by
state, of each machine.

Rules: times are whole microseconds since the first one, so no number loses digits; slices of one
thread lie beside or inside each other; an arrow starts and ends inside a slice, and never goes back
in time. One that the clocks' uncertainty would turn around is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from kvflow.observe.schema import ORDERS, REQUEST
from kvflow.tracing.figures import Analysis
from kvflow.tracing.lines import is_of
from kvflow.tracing.transfers import MOVED, Event, Transfer

Value = str | int | float | bool | None
_RECORDS = ("producer", "consumer")
_ENDED = frozenset({"sent", "failed", "received", "released", "forgotten"})
_SHORTEST_US = 1
"""A state that nothing follows still has a slice, so that an arrow can end in it."""


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One trace event. Which keys a phase has is the format's: `dur` is of slices, say."""

    ph: str
    name: str
    pid: int
    tid: int = 0
    ts: int | None = None
    dur: int | None = None
    cat: str | None = None
    id: int | None = None
    bp: str | None = None
    args: dict[str, Value] | None = None


@dataclass(slots=True)
class _Sheet:
    """What is written; process and thread ids are given out in order of their use."""

    zero: int
    events: list[TraceEvent] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    tids: dict[tuple[int, str], int] = field(default_factory=dict)
    flows: int = 0

    def pid(self, engine: str) -> int:
        if engine not in self.pids:
            self.pids[engine] = len(self.pids) + 1
            pid = self.pids[engine]
            name: dict[str, Value] = {"name": f"engine {engine}"}
            self.events.append(TraceEvent(ph="M", name="process_name", pid=pid, args=name))
            order: dict[str, Value] = {"sort_index": pid}
            self.events.append(TraceEvent(ph="M", name="process_sort_index", pid=pid, args=order))
        return self.pids[engine]

    def tid(self, pid: int, name: str) -> int:
        if (pid, name) not in self.tids:
            tid = len(self.tids) + 1
            self.tids[pid, name] = tid
            for what, args in (
                ("thread_name", {"name": name}),
                ("thread_sort_index", {"sort_index": tid}),
            ):
                self.events.append(TraceEvent(ph="M", name=what, pid=pid, tid=tid, args={**args}))
        return self.tids[pid, name]

    def slice(
        self, where: tuple[int, int], name: str, begin: int, end: int, cat: str, **args: Value
    ) -> None:
        shown: dict[str, Value] = {
            key: value for key, value in args.items() if value not in (None, "")
        }
        self.events.append(
            TraceEvent(
                ph="X",
                name=name,
                cat=cat,
                pid=where[0],
                tid=where[1],
                ts=begin - self.zero,
                dur=end - begin,
                args=shown or None,
            )
        )

    def arrow(self, name: str, source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
        """From and to (pid, tid, time)."""
        if target[2] < source[2]:
            return
        self.flows += 1
        for ph, (pid, tid, at), bp in (("s", source, None), ("f", target, "e")):
            self.events.append(
                TraceEvent(
                    ph=ph,
                    name=name,
                    cat="notice",
                    pid=pid,
                    tid=tid,
                    ts=at - self.zero,
                    id=self.flows,
                    bp=bp,
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Track:
    """One record's lines, and where they are drawn."""

    where: tuple[int, int]
    events: Sequence[Event]
    states: Sequence[tuple[Event, int, int]]

    @property
    def engine(self) -> str:
        return self.events[0].line.engine

    @property
    def rank(self) -> str:
        return self.events[0].line.rank


def as_chrome_trace(analysis: Analysis) -> bytes:
    """The whole file: a JSON object with `traceEvents`."""
    sheet = _Sheet(zero=_first(analysis))
    last = max((t.events[-1].at for t in analysis.transfers), default=0)
    for transfer in analysis.transfers:
        tracks = _records(sheet, transfer, last)
        _arrows(sheet, tracks)
        _orders(sheet, transfer)
        _steps(sheet, transfer)
    for fall in analysis.waterfalls:
        engine = fall.request.consumer or next(iter(fall.request.producers), "")
        pid = sheet.pid(engine)
        where = (
            pid,
            sheet.tid(pid, f"{_name(fall.request.transfer.id)} {fall.request.request_id} parts"),
        )
        for segment in fall.segments:
            sheet.slice(where, segment.part.value, segment.begin, segment.end, "part")
    _counters(sheet, analysis)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "zero_unix_s": sheet.zero / 1e6,
            "clock_of": analysis.clocks.reference,
            "notes": analysis.notes(),
        },
        "traceEvents": sheet.events,
    }
    return msgspec.json.encode(document)


def _first(analysis: Analysis) -> int:
    """The earliest time that will be drawn."""
    times = [fall.start for fall in analysis.waterfalls]
    for transfer in analysis.transfers:
        times.append(transfer.start)
        times += [transfer.began(e) for e in transfer.events if e.line.machine in ORDERS]
        arrivals = (transfer.arrived(e) for e in transfer.of(REQUEST))
        times += [at for at in arrivals if at is not None]
    return min(times, default=0)


def _name(transfer_id: str) -> str:
    return transfer_id or "(no transfer)"


def _records(sheet: _Sheet, transfer: Transfer, last: int) -> list[_Track]:
    """A thread for each record: the whole, and inside it its states."""
    grouped: dict[tuple[str, str, str, str], list[Event]] = {}
    for event in transfer.events:
        if event.line.machine in _RECORDS:
            grouped.setdefault(event.line.record, []).append(event)
    tracks = []
    for (engine, rank, machine, key), events in grouped.items():
        pid = sheet.pid(engine)
        shown = key if machine == "producer" else f"{transfer.id} {key}"
        where = (pid, sheet.tid(pid, f"{_name(shown)} {machine} {rank}"))
        spans = list(_states(events, last))
        tracks.append(_Track(where=where, events=events, states=spans))
        begin, end = spans[0][1], spans[-1][2]
        line = events[-1].line
        sheet.slice(
            where, _name(transfer.id), begin, end, machine, request=line.request, reason=line.reason
        )
        for event, since, until in spans:
            said = event.line
            sheet.slice(
                where,
                said.dest,
                since,
                until,
                machine,
                trigger=said.trigger,
                attempt=said.attempt,
                peer=said.peer,
                reason=said.reason,
                detail=said.detail,
                bytes=said.bytes,
            )
    return tracks


def _states(events: Sequence[Event], last: int) -> Iterator[tuple[Event, int, int]]:
    """Each state with its begin and end. What is remembered after the end is not drawn.

    A state that was not left lasts until `last`, when all traces end. Each lasts `_SHORTEST_US` at
    least, and the next one is then later by that: lines of one record with the same time are
    ordinary, and their slices must not lie inside each other.
    """
    shown = [event for event in events if event.line.dest != "forgotten"] or list(events[:1])
    cursor = shown[0].at
    for event, after in pairwise([*shown, None]):
        assert event is not None
        begin = max(event.at, cursor)
        until = last if after is None else after.at
        if event.line.dest in _ENDED:
            until = begin
        cursor = max(until, begin + _SHORTEST_US)
        yield event, begin, cursor


def _arrows(sheet: _Sheet, tracks: Sequence[_Track]) -> None:
    """REGISTER to each rank that has it on record, and the DONE that made the load complete."""
    consumers = [track for track in tracks if track.events[0].line.machine == "consumer"]
    producers = [track for track in tracks if track.events[0].line.machine == "producer"]
    for consumer in consumers:
        drawn = {
            event.line.attempt: (event, at)
            for event, at, _ in consumer.states
            if event.line.trigger == "peer_met"
        }
        received = [(e, at) for e, at, _ in consumer.states if e.line.dest == "received"]
        done: dict[int, tuple[int, int, int]] = {}
        for producer in producers:
            for event, at, _ in producer.states:
                line = event.line
                if not is_of(line.peer, consumer.engine, consumer.rank):
                    continue
                if line.trigger.startswith("registered") and line.attempt in drawn:
                    sheet.arrow(
                        "REGISTER",
                        (*consumer.where, drawn[line.attempt][1]),
                        (*producer.where, at),
                    )
                last = done.get(line.attempt)
                moved = line.dest in MOVED and line.source not in MOVED
                if moved and (last is None or at > last[2]):
                    done[line.attempt] = (*producer.where, at)
        for event, at in received:
            if event.line.attempt in done:
                sheet.arrow("DONE", done[event.line.attempt], (*consumer.where, at))


def _orders(sheet: _Sheet, transfer: Transfer) -> None:
    """WRITEs and READs, on as many threads as it takes for none to overlap."""
    lanes: dict[tuple[str, str, str], list[int]] = {}
    events = [event for event in transfer.events if event.line.machine in ORDERS]
    for event in sorted(events, key=transfer.began):
        line = event.line
        began = transfer.began(event)
        ends = lanes.setdefault((line.engine, line.rank, line.machine), [])
        lane = next((n for n, end in enumerate(ends) if end <= began), len(ends))
        if lane == len(ends):
            ends.append(event.at)
        ends[lane] = event.at
        pid = sheet.pid(line.engine)
        name = f"{_name(transfer.id)} {line.machine}s {line.rank}" + (f" ({lane + 1})" * (lane > 0))
        sheet.slice(
            (pid, sheet.tid(pid, name)),
            line.machine.upper(),
            began,
            event.at,
            line.machine,
            ended=line.dest,
            attempt=line.attempt,
            peer=line.peer,
            bytes=line.bytes,
            runs=line.runs,
            posts=line.posts,
            **{f"{key}_ms": value for key, value in (line.ms or {}).items()},
        )


def _steps(sheet: _Sheet, transfer: Transfer) -> None:
    """What vLLM told of the request: waiting, prompt, tokens."""
    grouped: dict[tuple[str, str], list[Event]] = {}
    for event in transfer.of(REQUEST):
        grouped.setdefault((event.line.engine, event.line.request or ""), []).append(event)
    names = {"arrived": "waiting", "scheduled": "prompt", "first_token": "tokens"}
    for (engine, request), events in grouped.items():
        pid = sheet.pid(engine)
        where = (pid, sheet.tid(pid, f"{_name(transfer.id)} {request} vLLM"))
        cursor = None
        for event, after in pairwise(events):
            arrived = transfer.arrived(event)
            begin = event.at if arrived is None else min(arrived, event.at)
            begin = begin if cursor is None else max(begin, cursor)
            cursor = max(after.at, begin)
            name = names.get(event.line.trigger, event.line.trigger)
            sheet.slice(where, name, begin, cursor, "vLLM", tokens=event.line.tokens)


def _counters(sheet: _Sheet, analysis: Analysis) -> None:
    """Live records by state, at each change, of each engine and machine."""
    changes: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
    for transfer in analysis.transfers:
        for machine in _RECORDS:
            for event in transfer.of(machine):
                line = event.line
                key = (line.engine, machine)
                changes.setdefault(key, []).append((event.at, line.source, line.dest))
    for (engine, machine), moves in changes.items():
        moves.sort(key=lambda move: move[0])
        counts = dict.fromkeys(_counted(moves), 0)
        pid = sheet.pid(engine)
        for (at, source, dest), after in pairwise([*moves, (None, "", "")]):
            assert at is not None
            if source in counts:
                counts[source] = max(counts[source] - 1, 0)
            if dest in counts:
                counts[dest] += 1
            if counts and at != after[0]:
                sheet.events.append(
                    TraceEvent(
                        ph="C",
                        name=f"live {machine} records",
                        pid=pid,
                        ts=at - sheet.zero,
                        args={**counts},
                    )
                )


def _counted(moves: Iterable[tuple[int, str, str]]) -> list[str]:
    """The states that are counted, in the order in which they are first entered."""
    return list(dict.fromkeys(dest for _, _, dest in moves if dest not in _ENDED))
