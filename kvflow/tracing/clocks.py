"""How far the engines' clocks are apart, estimated from the messages that they sent each other.

The idea: a message cannot arrive before it was sent. A REGISTER (consumer's clock t1, producer's
t2) says that the producer's clock is ahead by at most t2 - t1; its answer, a DONE or a READABLE
(sent at t2, seen at t3) by at least t2 - t3. One exchange gives what NTP takes from one: the
offset t2 - (t1 + t3) / 2, known to within (t3 - t1) / 2. All exchanges of a pair together bound it
from both sides. If they leave it possible that both clocks show the same time, that is taken: few
messages, such as those of a slow first meeting, shall not set two clocks apart that a host or a
time service keeps together. Else the middle of what they leave is taken, with half of it as the
uncertainty. If they leave nothing, the clocks have drifted apart or were set, and the exchange of
the least round trip is taken, with the contradiction added to the uncertainty.

Offsets go from a reference over the pairs that have spoken, along the least uncertainty. Ranks of
an engine share one clock. An engine that cannot be compared with the reference, not even by way of
others, is taken to show the same time, or is compared with a reference of its own.

Known limit: one offset for the whole trace, whatever the clocks do meanwhile.
"""

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvflow.ids import TransferId
from kvflow.tracing.lines import Line, is_of, micros

_ASKED = frozenset({"registering", "expecting", "reading"})
_ANSWERED = frozenset({"registered", "transferring"})
_MOVED = frozenset({"sent", "kept"})
Key = tuple[TransferId, int]
"""A transfer and its attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """One engine's clock.

    reference       the engine that it is compared with.
    ahead_us        how far it is ahead of the reference's.
    uncertainty_us  it is within this much more or less.
    exchanges       messages and answers that the last pair on the way was compared by.
    contradicts_us  by how much these contradict each other: the clocks drift, or were set.
    """

    engine: str
    reference: str
    ahead_us: int
    uncertainty_us: int
    exchanges: int = 0
    contradicts_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """All engines' clocks, and the one that the others are told by ("" without engines)."""

    reference: str
    offsets: Mapping[str, Offset]

    def is_known(self, engine: str) -> bool:
        """Whether the traces tell how this engine's clock stands to the reference's."""
        return self.offsets[engine].reference == self.reference

    def at(self, engine: str, seconds: float) -> int:
        """A time of this engine's, in microseconds of the reference's clock."""
        return micros(seconds) - self.offsets[engine].ahead_us


@dataclass(slots=True)
class _Bounds:
    """What is known of (producer's clock - consumer's clock)."""

    low: int | None = None
    high: int | None = None
    best: tuple[int, int] | None = None  # (round trip, offset) of the least round trip
    exchanges: int = 0

    def at_least(self, offset: int) -> None:
        self.low = offset if self.low is None else max(self.low, offset)

    def at_most(self, offset: int) -> None:
        self.high = offset if self.high is None else min(self.high, offset)

    def exchange(self, sent: int, there: int, back: int) -> None:
        self.exchanges += 1
        self.at_most(there - sent)
        self.at_least(there - back)
        trip = back - sent
        if trip >= 0 and (self.best is None or trip < self.best[0]):
            self.best = (trip, there - (sent + back) // 2)

    def settled(self) -> tuple[int, int, int] | None:
        """Offset, uncertainty and contradiction, if there is enough to know it."""
        if self.low is None or self.high is None:
            return None
        if self.low <= 0 <= self.high:
            return 0, max(-self.low, self.high) + 1, 0
        if self.low <= self.high:
            middle = (self.low + self.high) // 2
            return middle, max(self.high - middle, middle - self.low) + 1, 0
        contradiction = self.low - self.high
        trip, offset = self.best or (0, (self.low + self.high) // 2)
        return offset, (trip + 1) // 2 + contradiction + 1, contradiction


@dataclass(slots=True)
class _Said:
    """What one worker's lines say of one attempt: when it did what, by its own clock."""

    engine: str
    rank: str
    at: dict[str, int] = field(default_factory=dict)
    peer: str = ""

    def note(self, what: str, line: Line) -> None:
        self.at.setdefault(what, micros(line.t))


def estimate(lines: Iterable[Line]) -> Clocks:
    """Compare all engines that occur in `lines`."""
    engines: dict[str, None] = {}
    consumers: dict[Key, dict[tuple[str, str], _Said]] = {}
    producers: dict[Key, dict[tuple[str, str, str], _Said]] = {}
    for line in lines:
        engines[line.engine] = None
        key = (line.transfer, line.attempt)
        if line.machine == "consumer" and (what := _consumer_did(line)):
            of = consumers.setdefault(key, {})
            by = (line.engine, line.rank)
            of.setdefault(by, _Said(line.engine, line.rank)).note(what, line)
        elif line.machine == "producer" and line.peer and (what := _producer_did(line)):
            at = producers.setdefault(key, {})
            where = (line.engine, line.rank, line.peer)
            at.setdefault(where, _Said(line.engine, line.rank, {}, line.peer)).note(what, line)
    pairs: dict[tuple[str, str], _Bounds] = {}
    for key, of in consumers.items():
        there = list(producers.get(key, {}).values())
        for said in of.values():
            _compare(said, [p for p in there if is_of(p.peer, said.engine, said.rank)], pairs)
    return _propagate(list(engines), pairs)


def _consumer_did(line: Line) -> str:
    if line.trigger == "peer_met" and line.dest in _ASKED:
        return "asked"
    if line.source == "registering" and line.dest in _ANSWERED:
        return "answered"
    if line.trigger == "readable" and line.dest == "reading":
        return "readable"
    return "received" if line.dest == "received" and line.trigger == "done" else ""


def _producer_did(line: Line) -> str:
    if line.dest == "lent":
        return "lent" if line.trigger == "prefill_finished" else "recorded_and_lent"
    if line.trigger.startswith("registered"):
        return "recorded"
    return "moved" if line.dest in _MOVED and line.source not in _MOVED else ""


def _compare(said: _Said, there: list[_Said], pairs: dict[tuple[str, str], _Bounds]) -> None:
    """What one consumer worker and the producer ranks that it asked say of each other."""
    at = said.at
    lent: dict[str, int] = {}
    for producer in there:
        if producer.engine == said.engine:
            continue
        bounds = pairs.setdefault((producer.engine, said.engine), _Bounds())
        on_record = producer.at.get("recorded", producer.at.get("recorded_and_lent"))
        if on_record is not None and "asked" in at and "answered" in at:
            bounds.exchange(at["asked"], on_record, at["answered"])
        elif on_record is not None and "asked" in at:
            bounds.at_most(on_record - at["asked"])
        if "moved" in producer.at and "received" in at:
            bounds.at_least(producer.at["moved"] - at["received"])
        offered = producer.at.get("lent", producer.at.get("recorded_and_lent"))
        if offered is not None:
            lent[producer.engine] = min(offered, lent.get(producer.engine, offered))
    if "readable" in at:  # one of the ranks has said so: the first one, at the earliest
        for engine, first in lent.items():
            pairs[engine, said.engine].at_least(first - at["readable"])


def _propagate(engines: list[str], pairs: Mapping[tuple[str, str], _Bounds]) -> Clocks:
    near: dict[str, dict[str, Offset]] = {engine: {} for engine in engines}
    for (producer, consumer), bounds in pairs.items():
        if settled := bounds.settled():
            ahead, uncertainty, contradiction = settled
            for one, other, by in ((consumer, producer, ahead), (producer, consumer, -ahead)):
                known = near[one].get(other)
                if known is None or uncertainty < known.uncertainty_us:
                    near[one][other] = Offset(
                        engine=other,
                        reference=one,
                        ahead_us=by,
                        uncertainty_us=uncertainty,
                        exchanges=bounds.exchanges,
                        contradicts_us=contradiction,
                    )
    offsets: dict[str, Offset] = {}
    while rest := [engine for engine in engines if engine not in offsets]:
        offsets |= _reach(max(rest, key=lambda engine: len(near[engine])), near)
    reference = next(iter(offsets), "")
    return Clocks(reference=reference, offsets={engine: offsets[engine] for engine in engines})


def _reach(reference: str, near: Mapping[str, Mapping[str, Offset]]) -> dict[str, Offset]:
    """Every engine that can be compared with this one, along the least uncertainty (Dijkstra)."""
    first = Offset(engine=reference, reference=reference, ahead_us=0, uncertainty_us=0)
    reached: dict[str, Offset] = {}
    serial = itertools.count()  # so that no two offsets are compared
    queue = [(0, next(serial), first)]
    while queue:
        uncertainty, _, offset = heapq.heappop(queue)
        if offset.engine in reached:
            continue
        reached[offset.engine] = offset
        for step in near[offset.engine].values():
            if step.engine not in reached:
                more = uncertainty + step.uncertainty_us
                found = replace(
                    step,
                    reference=reference,
                    ahead_us=offset.ahead_us + step.ahead_us,
                    uncertainty_us=more,
                )
                heapq.heappush(queue, (more, next(serial), found))
    return reached
