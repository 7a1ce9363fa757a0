"""A request's time as segments without gaps: the ledger that the critical path is written into.

Invariant: the segments follow each other from `start` to `end` in whole microseconds, so that their
sum is the span exactly. `Path.back` is the only place where segments are made.
"""

from dataclasses import dataclass

from kvflow.tracing.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One stretch of a request's time, in microseconds of the reference's clock."""

    part: Part
    begin: int
    end: int

    @property
    def us(self) -> int:
        return self.end - self.begin


class Path:
    """Parts, made from the end to the start."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.cursor = max(start, end)
        self._segments: list[Segment] = []

    def back(self, part: Part, to: int | None) -> None:
        """What lies between `to` and where the walk is, was `part`; nothing if it is unknown."""
        if to is None:
            return
        begin = min(max(to, self.start), self.cursor)
        if begin < self.cursor:
            last = self._segments[-1] if self._segments else None
            if last and last.part is part:
                self._segments[-1] = Segment(part=part, begin=begin, end=last.end)
            else:
                self._segments.append(Segment(part=part, begin=begin, end=self.cursor))
            self.cursor = begin

    def finish(self, part: Part) -> None:
        """All that is left was `part`."""
        self.back(part, self.start)

    def segments(self) -> tuple[Segment, ...]:
        assert self.cursor == self.start
        return tuple(reversed(self._segments))
