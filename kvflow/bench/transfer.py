"""`kvflow bench transfer`: one prefill's KV from one process to another, without engines.

The four ways of `Measured` move the same blocks between the same two processes, one after the other
in every round, so whatever else the machine does hits all of them alike. Only ratios within a case
mean anything.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvflow.bench.transfer_cases import Case
from kvflow.bench.transfer_engine import BenchEngine, LedEngine, patient
from kvflow.bench.transfer_ways import Agent, Bare, Prepared, Times, copy
from kvflow.errors import TransportError

KVFLOW, PREPARED, BARE, COPY = "kvflow", "prepared lists", "bare agent", "memory copy"
WAYS = (KVFLOW, PREPARED, BARE, COPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case.

    runs, posts  of kvflow's write: merged runs, cut to slices, and the slices.
    times        of each round, by way.
    """

    case: Case
    runs: int
    posts: int
    times: dict[str, list[Times]]

    def median_s(self, way: str, part: str = "total") -> float:
        """`part` as in `Times`."""
        return statistics.median(getattr(each, part) for each in self.times[way])

    def best_s(self, way: str, part: str = "total") -> float:
        return min(getattr(each, part) for each in self.times[way])

    def ratio(self, way: str, part: str = "total") -> float:
        """kvflow's median to another way's."""
        return self.median_s(KVFLOW, part) / self.median_s(way, part)

    def gbytes_per_s(self, way: str) -> float:
        """From the first moment of planning to the last byte, by the median."""
        return self.case.bytes / self.median_s(way) / 1e9


class Pair:
    """A producer here and a consumer in a process of its own, with memory for every case.

    Raises `TransportError` where NIXL is missing.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        size = max(case.buffer_bytes for case in cases)
        self.producer = BenchEngine("bench-producer", size, 1, patient())
        self.consumer: LedEngine | None = None
        self._copied = np.ones(max(case.bytes for case in cases), dtype=np.uint8)
        self._transfers = 0
        try:
            self.agent = Agent("bench-bare", self.producer.memory)
            self.consumer = LedEngine(size)
        except TransportError:
            self.close()
            raise

    def measure(self, case: Case, repeats: int) -> Measured:
        """Warm up, check that every way moves the right bytes, then `repeats` rounds."""
        assert self.consumer is not None
        answer = self.consumer.ask("lay_out", case)
        self.producer.lay_out(case)
        peer = self.agent.meet(bytes.fromhex(answer["metadata"]))
        regions = self.producer.regions, case.regions(answer["address"])
        prepared = Prepared(self.agent, peer, *regions)
        bare = Bare(self.agent, peer, *regions, case)
        source, destination = (ids.tolist() for ids in case.ids())
        spans: list[tuple[int, int]] = []

        def kvflow() -> Times:
            times, runs, posts = self._write(case, tuple(source))
            spans.append((runs, posts))
            return times

        ways: dict[str, Callable[[], Times]] = {
            KVFLOW: kvflow,
            PREPARED: lambda: prepared.write(source, destination),
            BARE: bare.write,
            COPY: lambda: copy(self._copied, self.producer.memory, case.bytes),
        }
        wanted = self.producer.checksum(case, case.ids()[0])
        for name in (KVFLOW, PREPARED, BARE):
            self.consumer.ask("clear", case)
            ways[name]()
            if self.consumer.ask("checksum", case)["checksum"] != wanted:
                raise TransportError(f"{name}: other bytes arrived than were sent ({case})")
        times: dict[str, list[Times]] = {name: [] for name in ways}
        for number in range(repeats):
            for name in _turned(WAYS, number):
                times[name].append(ways[name]())
        prepared.close()
        self.agent.api.remove_remote_agent(peer)
        runs, posts = spans[-1]
        return Measured(case=case, runs=runs, posts=posts, times=times)

    def _write(self, case: Case, source: tuple[int, ...]) -> tuple[Times, int, int]:
        """One transfer of kvflow's, from the end of the prefill to the last byte."""
        assert self.consumer is not None
        self._transfers += 1
        name = f"transfer-{self._transfers}"
        address = self.producer.address
        self.consumer.ask("load", case, transfer=name, address=address)
        start, span = self.producer.write(name, source, case.tokens)
        reason = self.consumer.ask("outcome", case)["reason"]
        if reason is not None:
            raise TransportError(f"{name} has failed: {reason}")
        times = Times(
            plan=span.begun - start,
            post=span.ended - span.begun - span.copying_s,
            copy=span.copying_s,
        )
        return times, span.runs, span.posts

    def close(self) -> None:
        if self.consumer is not None:
            self.consumer.close()
        self.producer.close()


def run(cases: Sequence[Case], repeats: int) -> Iterator[Measured]:
    """Measure one case after the other. Raises `TransportError`."""
    pair = Pair(cases)
    try:
        for case in cases:
            yield pair.measure(case, repeats)
    finally:
        pair.close()


def _turned(names: Sequence[str], by: int) -> Sequence[str]:
    """Each way comes first in its turn."""
    by %= len(names)
    return [*names[by:], *names[:by]]
