"""Figures of points, medians over rounds, and ratios within rounds.

- A figure of a point (a percentile, say) is over the requests of one round that were answered.
- What is shown for several rounds is the median of their figures.
- A ratio is taken within each round, and then the median over the rounds is: two connectors are
  compared only with what ran on the machine within the same round.

A figure that cannot be known is None, and so is whatever would be made of it.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvflow.bench.report_data import Point, RequestRecord
from kvflow.demo.engines import Json

UPSTREAM_PULL = "upstream-pull"
UPSTREAM_PUSH = "upstream-push"


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation between the two nearest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _of_requests(
    of: Callable[[RequestRecord], float | None], over: Callable[[Sequence[float]], float | None]
) -> Callable[[Point], float | None]:
    def figure(point: Point) -> float | None:
        times = [of(request) for request in point.requests if request.error is None]
        return over([time for time in times if time is not None])

    return figure


def _at(percent: float) -> Callable[[Sequence[float]], float | None]:
    return lambda values: percentile(values, percent)


def _per_request(of: Callable[[Point], float]) -> Callable[[Point], float | None]:
    """All requests count, answered or not: each of them cost something."""
    return lambda point: of(point) / len(point.requests) if point.requests else None


def _ttft(request: RequestRecord) -> float | None:
    return request.ttft_ms


def _tpot(request: RequestRecord) -> float | None:
    return request.tpot_ms


def _handover(request: RequestRecord) -> float | None:
    return request.handover_ms


_OVER: Mapping[str, Callable[[Sequence[float]], float | None]] = {
    "mean": _mean,
    "p50": _at(50),
    "p90": _at(90),
    "p99": _at(99),
}

FIGURES: Mapping[str, Callable[[Point], float | None]] = {
    **{f"ttft_ms_{name}": _of_requests(_ttft, over) for name, over in _OVER.items()},
    **{f"tpot_ms_{name}": _of_requests(_tpot, over) for name, over in _OVER.items()},
    **{f"handover_ms_{name}": _of_requests(_handover, over) for name, over in _OVER.items()},
    "producer_cpu_s": _per_request(lambda point: point.producer_cpu_s),
    "consumer_cpu_s": _per_request(lambda point: point.consumer_cpu_s),
    "cpu_s": _per_request(lambda point: point.producer_cpu_s + point.consumer_cpu_s),
    "others_cores": lambda point: point.others_cpu_s / point.window_s if point.window_s else None,
    "kv_bytes": lambda point: point.kv_bytes,
    "kv_descriptors": lambda point: point.kv_descriptors,
}
"""Every figure of a point. CPU seconds are per request, bytes and descriptors per transfer."""

COMPARED = ("ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50", "handover_ms_p50", "cpu_s")
"""The figures whose ratios are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is shown of one connector in one dispatch order at one rate and length."""

    connector: str
    name: str
    dispatch: str
    rate: float
    length: int
    rounds: int
    figures: Mapping[str, float | None]
    right: int
    mismatched: int
    failed: int

    @property
    def total(self) -> int:
        return self.right + self.mismatched + self.failed

    def json(self) -> dict[str, Json]:
        return {
            **_place(self),
            "rounds": self.rounds,
            "right": self.right,
            "mismatched": self.mismatched,
            "failed": self.failed,
            "figures": self.figures,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One of kvflow's rows over one of upstream's: below 1, kvflow needs less."""

    connector: str
    name: str
    dispatch: str
    rate: float
    length: int
    against: str
    against_dispatch: str
    rounds: int
    figures: Mapping[str, float | None]

    def json(self) -> dict[str, Json]:
        return {
            **_place(self),
            "against": self.against,
            "against_dispatch": self.against_dispatch,
            "rounds": self.rounds,
            "figures": self.figures,
        }


def summary(points: Sequence[Point]) -> list[Row]:
    """A row for each connector, dispatch order, rate and length; by length, then by rate."""
    groups = _groups(points)
    return [_row(group) for _, group in sorted(groups.items(), key=lambda item: item[0][:2])]


def ratios(points: Sequence[Point]) -> list[Ratio]:
    """Each of kvflow's rows against upstream's pull, and against its better push."""
    groups = _groups(points)
    found: list[Ratio] = []
    for place, group in sorted(groups.items(), key=lambda item: item[0][:2]):
        if group[0].origin != "kvflow":
            continue
        there = [peer for key, peer in groups.items() if key[:2] == place[:2]]
        pulls = [peer for peer in there if peer[0].connector == UPSTREAM_PULL]
        pushes = [peer for peer in there if peer[0].connector == UPSTREAM_PUSH]
        for peer in (pulls[:1], better(pushes)):
            found += [_ratio(group, each) for each in peer]
    return found


def better(groups: Sequence[Sequence[Point]]) -> Sequence[Sequence[Point]]:
    """The one group with the lowest median TTFT (p50), as a sequence of one; or none."""
    figure = FIGURES["ttft_ms_p50"]
    times = [(median(map(figure, group)), number) for number, group in enumerate(groups)]
    known = [(time, number) for time, number in times if time is not None]
    return [groups[min(known)[1]]] if known else []


def _groups(points: Sequence[Point]) -> dict[tuple[int, float, str, str], list[Point]]:
    """The rounds of each (length, rate, connector, dispatch)."""
    groups: dict[tuple[int, float, str, str], list[Point]] = {}
    for point in points:
        key = (point.length, point.rate, point.connector, point.dispatch)
        groups.setdefault(key, []).append(point)
    return groups


def _row(group: Sequence[Point]) -> Row:
    requests = [request for point in group for request in point.requests]
    failed = sum(request.error is not None for request in requests)
    right = sum(request.is_right for request in requests)
    return Row(
        connector=group[0].connector,
        name=group[0].name,
        dispatch=group[0].dispatch,
        rate=group[0].rate,
        length=group[0].length,
        rounds=len(group),
        figures={name: median(map(figure, group)) for name, figure in FIGURES.items()},
        right=right,
        mismatched=len(requests) - failed - right,
        failed=failed,
    )


def _ratio(ours: Sequence[Point], theirs: Sequence[Point]) -> Ratio:
    by_round = {point.round: point for point in theirs}
    pairs = [(point, by_round[point.round]) for point in ours if point.round in by_round]
    return Ratio(
        connector=ours[0].connector,
        name=ours[0].name,
        dispatch=ours[0].dispatch,
        rate=ours[0].rate,
        length=ours[0].length,
        against=theirs[0].name,
        against_dispatch=theirs[0].dispatch,
        rounds=len(pairs),
        figures={
            name: median(_over(FIGURES[name](one), FIGURES[name](other)) for one, other in pairs)
            for name in COMPARED
        },
    )


def _over(ours: float | None, theirs: float | None) -> float | None:
    """None also where either is not above 0 (a hand-over may be): a ratio says nothing then."""
    if ours is None or theirs is None or ours <= 0 or theirs <= 0:
        return None
    return ours / theirs


def _place(row: Row | Ratio) -> dict[str, Json]:
    return {
        "connector": row.connector,
        "name": row.name,
        "dispatch": row.dispatch,
        "rate": row.rate,
        "length": row.length,
    }
