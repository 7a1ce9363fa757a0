"""Where one request's time went: its critical path, as parts that add up to its span.

The idea: walk backwards. At the end stands the first token (or whatever the traces know last). It
waited for the KV's arrival, that for the producer's word, that for the last write, that for the
later of {KV complete, registration on record}, and that one decides which engine's past is followed
further: the prefill and its queue, or the registration and the consumer's queue. What ran beside
the path is not on it: a registration during the prefill, a write of a stretch that is followed by
more prefill, a prefill that was over before the registration came.

The walk is in `kvflow.tracing.walk`, what a part means in `kvflow.tracing.parts`, and both with
their reasons in specs/tracing.md.

Known limits: of several ranks the one that was last is followed; version 1 has no lines of vLLM's
side, hence no queue, and no lines of orders, hence planning and posting are in the wire.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.tracing.parts import Part
from kvflow.tracing.path import Path, Segment
from kvflow.tracing.transfers import Event, Request
from kvflow.tracing.walk import ENDS, Load, Walk

_SETTLED = frozenset({"new", "received", "failed", "released"})
"""States in which no load is under way: one that fails from here was refused at once."""


class Outcome(enum.StrEnum):
    """How the request came to its end, as far as the traces tell."""

    FIRST_TOKEN = "first_token"
    RECOMPUTED = "recomputed"
    LOCAL = "local"
    RECEIVED = "received"
    SENT = "sent"
    FAILED = "failed"
    RELEASED = "released"
    UNFINISHED = "unfinished"


TO_FIRST_TOKEN = frozenset({Outcome.FIRST_TOKEN, Outcome.RECOMPUTED, Outcome.LOCAL})
"""Their span is the time to first token."""
COUNTED = TO_FIRST_TOKEN | {Outcome.RECEIVED}
"""They got what they were for: statistics are over these."""


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """A request, and its segments from `start` to `end` without a gap."""

    request: Request
    start: int
    end: int
    outcome: Outcome
    reason: str
    has_arrival: bool
    segments: tuple[Segment, ...]

    @property
    def span_us(self) -> int:
        return self.end - self.start

    def us(self, part: Part) -> int:
        """The time of all its segments of this part."""
        return sum(segment.us for segment in self.segments if segment.part is part)


def waterfall(request: Request) -> Waterfall:
    """Follow one request's critical path."""
    loads = _loads(request)
    token = _first(request.steps, "first_token")
    loads = _until(loads, token)
    end, outcome, reason = _end(request, loads, token)
    arrivals = (request.arrival(request.steps), request.arrival(request.prefill_steps))
    known = [at for at in arrivals if at is not None]
    events = request.all_events()
    start = min([*known, *(e.at for e in events[:1])], default=request.transfer.start)
    path = Path(start, end)
    Walk(request, path).run(loads, token)
    return Waterfall(
        request=request,
        start=start,
        end=max(start, end),
        outcome=outcome,
        reason=reason,
        has_arrival=bool(known),
        segments=path.segments(),
    )


def _first(events: Sequence[Event], trigger: str) -> int | None:
    return next((e.at for e in events if e.line.trigger == trigger), None)


def _loads(request: Request) -> list[Load]:
    """Of the rank that was last to end; oldest first."""
    ended: dict[str, int] = {}
    for event in request.loads:
        if event.line.dest in ENDS:
            ended[event.line.rank] = event.at
    if not request.loads:
        return []
    rank = max(ended, key=lambda each: ended[each]) if ended else request.loads[0].line.rank
    groups: list[list[Event]] = []
    for event in request.loads:
        if event.line.rank != rank or event.line.dest == "forgotten":
            continue
        refused = event.line.dest == "failed" and event.line.source in _SETTLED
        if event.line.dest == "allocated" or refused or not groups:
            groups.append([])
        groups[-1].append(event)
    return [Load(events=group) for group in groups]


def _until(loads: list[Load], token: int | None) -> list[Load]:
    """Those that the first token waited for.

    If it is not known when that was, the first one that was received is taken to have led to it:
    requests are preempted amid their tokens more often than before the first one.
    """
    if token is not None:
        return [load for load in loads if load.over is not None and load.over.at <= token]
    for index, load in enumerate(loads):
        if load.over is not None and load.over.line.dest == "received":
            return loads[: index + 1]
    return loads


def _end(request: Request, loads: list[Load], token: int | None) -> tuple[int, Outcome, str]:
    """When the span ends, how, and why."""
    if token is not None:
        last = loads[-1].over if loads else None
        if last is None:
            moved = request.moved is not None and not request.loads
            return token, Outcome.FIRST_TOKEN if moved else Outcome.LOCAL, ""
        failed = last.line.dest == "failed"
        outcome = Outcome.RECOMPUTED if failed else Outcome.FIRST_TOKEN
        return token, outcome, (last.line.reason or "") if failed else ""
    if loads:
        over = loads[-1].over
        if over is not None:
            return over.at, Outcome(over.line.dest), over.line.reason or ""
        released = loads[-1].first("released")
        if released is not None:
            return released, Outcome.RELEASED, ""
        return request.end, Outcome.UNFINISHED, ""
    if request.moved is not None and not request.consumer:
        return request.moved, Outcome.SENT, ""
    failed_lines = [e for e in request.prefills if e.line.dest == "failed"]
    if failed_lines and not request.consumer:
        return failed_lines[-1].at, Outcome.FAILED, failed_lines[-1].line.reason or ""
    return request.end, Outcome.UNFINISHED, ""
