"""What all requests of some traces say together."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvflow.core import TABLES
from kvflow.observe.schema import REQUEST
from kvflow.tracing.clocks import Clocks, estimate
from kvflow.tracing.lines import Line, Traces, read_all
from kvflow.tracing.parts import Part
from kvflow.tracing.transfers import Transfer, gather, requests_of
from kvflow.tracing.waterfall import COUNTED, TO_FIRST_TOKEN, Waterfall, waterfall

_TERMINAL = {table.name: table.terminal | {"forgotten"} for table in TABLES}
_DONE = {"producer": frozenset({"kept"})}
"""States that are not terminal, but in which nothing is waited for that the request needs."""

_WAIT = ("producer", "consumer", REQUEST)

AWAITS: dict[tuple[str, str], str] = {
    ("consumer", "allocated"): "the meeting with {peer}",
    ("consumer", "registering"): "an answer of {peer} to the registration",
    ("consumer", "registered"): "the KV from {peer}",
    ("consumer", "transferring"): "the rest of the writes of {peer}",
    ("consumer", "expecting"): "a word of {peer} that the KV can be read",
    ("consumer", "reading"): "its own READs, and the confirmation of {peer}",
    ("consumer", "draining"): "a word of {peer} that nothing can land any more",
    ("consumer", "fencing"): "the end of the fence time",
    ("consumer", "stopping"): "the end of its own READs",
    ("consumer", "releasing"): "a word of {peer} that it knows that nothing is wanted",
    ("producer", "allocated"): "its own vLLM, which computes the prompt",
    ("producer", "held"): "a prefill with this id; {peer} waits for it",
    ("producer", "registered"): "its own vLLM, which computes the prompt for {peer}",
    ("producer", "streaming"): "its own vLLM, and the write of what is complete to {peer}",
    ("producer", "recalled"): "the end of a write to {peer} that was stopped",
    ("producer", "preempted"): "its own vLLM, which took the blocks and computes again",
    ("producer", "prefilled"): "a consumer, which has not registered",
    ("producer", "transferring"): "the end of the write to {peer}",
    ("producer", "lent"): "a word of {peer} that it has read",
    ("producer", "draining"): "the last handle of a write to {peer} that was stopped",
    ("request", "arrived"): "its own vLLM, which has not scheduled it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Traces, and what is made of them. `waterfalls` are in the order of their start."""

    traces: Traces
    clocks: Clocks
    transfers: Sequence[Transfer]
    waterfalls: Sequence[Waterfall]

    def notes(self) -> list[str]:
        """What a reader has to know before he believes the numbers."""
        return [*self.traces.notes(), *self._notes_on_spans(), *self._notes_on_clocks()]

    def _notes_on_spans(self) -> list[str]:
        counted = [w for w in self.waterfalls if w.outcome in COUNTED]
        short = sum(w.outcome not in TO_FIRST_TOKEN for w in counted)
        late = sum(not w.has_arrival for w in counted)
        notes = []
        if short:
            notes.append(
                f"{short} of {len(counted)} requests have no line of a first token (version 1, or "
                "no scheduler's file): they end when the KV was received"
            )
        if late:
            notes.append(
                f"{late} of {len(counted)} requests have no line of an arrival: they begin with "
                "their first line, and have no queue before it"
            )
        return notes

    def _notes_on_clocks(self) -> list[str]:
        offsets = self.clocks.offsets
        notes = [
            f"clock of {engine}: no message links it to {self.clocks.reference}; "
            f"it is taken to show the same time as {offset.reference}"
            if offset.reference != engine
            else f"clock of {engine}: no message links it to {self.clocks.reference}; offset 0"
            for engine, offset in offsets.items()
            if not self.clocks.is_known(engine)
        ]
        notes += [
            f"clock of {engine}: the messages contradict each other by "
            f"{offset.contradicts_us / 1000:.3f} ms: it drifts, or was set meanwhile"
            for engine, offset in offsets.items()
            if offset.contradicts_us
        ]
        return notes


def analyse(paths: Iterable[Path]) -> Analysis:
    """Read files and follow every request. Raises `UnreadableTraceError`."""
    traces = read_all(paths)
    clocks = estimate(traces)
    transfers = gather(traces, clocks)
    falls = [waterfall(request) for transfer in transfers for request in requests_of(transfer)]
    return Analysis(
        traces=traces,
        clocks=clocks,
        transfers=transfers,
        waterfalls=sorted(falls, key=lambda fall: fall.start),
    )


# -- where time went -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a number is spread over those that have it; `share` of the sum of all spans."""

    name: str
    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    share: float = 0.0


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Between the two nearest ones, linearly; 0 of nothing."""
    if not ordered:
        return 0.0
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _spread(name: str, micros: Iterable[int], total_us: int = 0) -> Spread:
    ordered = sorted(micros)
    sum_us = sum(ordered)
    return Spread(
        name=name,
        count=len(ordered),
        mean_ms=sum_us / len(ordered) / 1000 if ordered else 0.0,
        p50_ms=percentile(ordered, 0.5) / 1000,
        p90_ms=percentile(ordered, 0.9) / 1000,
        p99_ms=percentile(ordered, 0.99) / 1000,
        max_ms=ordered[-1] / 1000 if ordered else 0.0,
        share=sum_us / total_us if total_us else 0.0,
    )


def parts_seen(falls: Iterable[Waterfall]) -> list[Part]:
    """The parts that some request has, in the order in which they come."""
    seen = {segment.part for fall in falls for segment in fall.segments}
    return [part for part in Part if part in seen]


def where_time_went(falls: Iterable[Waterfall]) -> list[Spread]:
    """The span first, then each part, over the requests that got what they were for."""
    counted = [fall for fall in falls if fall.outcome in COUNTED]
    total_us = sum(fall.span_us for fall in counted)
    return [
        _spread("span", (fall.span_us for fall in counted), total_us),
        *(
            _spread(part.value, (fall.us(part) for fall in counted), total_us)
            for part in parts_seen(counted)
        ),
    ]


# -- states ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpread:
    """How long records were in one state, over all visits that have ended."""

    machine: str
    state: str
    spread: Spread


def time_in_states(traces: Traces) -> list[StateSpread]:
    """By machine and state, as the tables order them; states after the end are left out."""
    spent: dict[tuple[str, str], list[int]] = {}
    for file in traces.files:
        entered: dict[tuple[str, str, str, str], Line] = {}
        for line in file.lines:
            if line.machine not in _TERMINAL:
                continue
            before = entered.get(line.record)
            if before is not None and before.dest not in _TERMINAL[line.machine]:
                us = max(round((line.t - before.t) * 1e6), 0)
                spent.setdefault((line.machine, before.dest), []).append(us)
            entered[line.record] = line
    known = [(table.name, state) for table in TABLES for state in table.states]
    order = {key: index for index, key in enumerate(known)}
    return [
        StateSpread(machine=machine, state=state, spread=_spread(state, spent[machine, state]))
        for machine, state in sorted(spent, key=lambda key: order.get(key, len(order)))
    ]


def endings(traces: Traces) -> Counter[tuple[str, str, str]]:
    """How often each machine came to which end for which reason ("" when there is none)."""
    return Counter(
        (line.machine, line.dest, line.reason or "")
        for line in traces
        if line.machine in ("producer", "consumer")
        and line.dest in _TERMINAL[line.machine] - {"forgotten"}
        and line.source not in _TERMINAL[line.machine]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A record that was not over when its trace ended.

    since     the time of its last line, by the reference's clock.
    for_ms    from then to the last line of all traces.
    awaits    whom or what it waits for.
    """

    line: Line
    since: int
    for_ms: float
    awaits: str


def unfinished(analysis: Analysis) -> list[Unfinished]:
    """The longest waiting first."""
    clocks = analysis.clocks
    live: dict[tuple[str, ...], Line] = {}
    for file in analysis.traces.files:
        for line in file.lines:
            if line.machine in _WAIT:
                live[str(file.path), *line.record] = line
    waiting = [line for line in live.values() if not _is_over(line)]
    # A request that waits for its load is told by the load.
    told = {(x.engine, x.request) for x in waiting if x.machine != REQUEST}
    end = max((clocks.at(line.engine, line.t) for line in analysis.traces), default=0)
    found = []
    for line in waiting:
        if line.machine == REQUEST and (line.engine, line.request) in told:
            continue
        since = clocks.at(line.engine, line.t)
        awaits = AWAITS.get((line.machine, line.dest), "what this kvflow does not know")
        peer = line.peer or ("a consumer" if line.machine == "producer" else "the producer")
        found.append(
            Unfinished(
                line=line,
                since=since,
                for_ms=(end - since) / 1000,
                awaits=awaits.format(peer=peer),
            )
        )
    return sorted(found, key=lambda each: each.since)


def _is_over(line: Line) -> bool:
    if line.machine == REQUEST:
        return line.dest != "arrived"
    return line.dest in _TERMINAL[line.machine] | _DONE.get(line.machine, frozenset())
