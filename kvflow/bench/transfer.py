"""`kvflow bench transfer`: one prefill's KV from one process to another, without engines.

The ways of `WAYS` move the same blocks between the same two processes, one after the other in every
round, while the consumer waits for them: whatever else the machine does hits all of them alike.
Only ratios within a case mean anything.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvflow.bench.transfer_cases import Case
from kvflow.bench.transfer_engine import BenchEngine, LedEngine, Span, patient
from kvflow.bench.transfer_ways import Agent, Bare, Prepared, Times, copy, now
from kvflow.errors import TransportError
from kvflow.layout import GroupBlocks, pair

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

    def median_s(self, way: str, part: str = "calls") -> float:
        """`part` as in `Times`."""
        return statistics.median(self._of(way, part))

    def best_s(self, way: str, part: str = "calls") -> float:
        return min(self._of(way, part))

    def _of(self, way: str, part: str) -> list[float]:
        return [float(getattr(each, part)) for each in self.times[way]]

    def ratio(self, way: str, part: str = "calls") -> float:
        """kvflow's median to another way's."""
        return self.median_s(KVFLOW, part) / self.median_s(way, part)

    def gbytes_per_s(self, way: str) -> float:
        """By the median of planning and posting until all is written."""
        return self.case.bytes / self.median_s(way, "calls") / 1e9


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
        pairing = pair(*regions, range)
        bare = Bare(self.agent, peer, *regions, case)
        ids = tuple(tuple(side.tolist()) for side in case.ids())
        spans: list[Span] = []

        def kvflow() -> Times:
            start = now()
            group = GroupBlocks(
                source=np.asarray(ids[0], dtype=np.int64),
                destination=np.asarray(ids[1], dtype=np.int64),
                start=0,
                tokens=case.tokens,
            )
            pairing.plan([group])
            planned = now()
            until_posted_s, span = self._write(case, ids[0])
            spans.append(span)
            assert span.begun is not None
            posting_cpu_s = span.ended.cpu - span.begun.cpu - span.copying_cpu
            return Times(
                plan=planned.wall - start.wall,
                post=span.ended.wall - span.begun.wall - span.copying,
                copy=span.copying,
                until_posted=until_posted_s,
                cpu_work=planned.cpu - start.cpu + posting_cpu_s,
                cpu_copy=span.copying_cpu,
            )

        ways: dict[str, Callable[[], Times]] = {
            KVFLOW: kvflow,
            PREPARED: lambda: prepared.write(*ids),
            BARE: bare.write,
            COPY: lambda: copy(self._copied, self.producer.memory, case.bytes),
        }
        wanted = self.producer.checksum(case, case.ids()[0])
        times: dict[str, list[Times]] = {name: [] for name in ways}
        for number in range(repeats + 1):
            self._ask_for(case)
            for name in in_turn(number):
                if number == 0:  # To warm up, and to see that it does what it should.
                    self.consumer.ask("clear", case)
                    ways[name]()
                    self._check(name, case, wanted)
                else:
                    times[name].append(ways[name]())
        prepared.close()
        self.agent.api.remove_remote_agent(peer)
        return Measured(case=case, runs=spans[-1].runs, posts=spans[-1].posts, times=times)

    def _check(self, name: str, case: Case, wanted: int) -> None:
        assert self.consumer is not None
        arrived = self.consumer.ask("checksum", case)["checksum"]
        if name != COPY and arrived != wanted:
            raise TransportError(f"{name}: other bytes arrived than were sent ({case})")

    def _ask_for(self, case: Case) -> None:
        """Have the consumer wait for a transfer, as it does while any of the ways is measured."""
        assert self.consumer is not None
        self._transfers += 1
        transfer = f"transfer-{self._transfers}"
        self.consumer.ask("load", case, transfer=transfer, address=self.producer.address)

    def _write(self, case: Case, source: tuple[int, ...]) -> tuple[float, Span]:
        """The transfer that is waited for: seconds from its prefill's end to the first post."""
        assert self.consumer is not None
        transfer = f"transfer-{self._transfers}"
        start, span = self.producer.write(transfer, source, case.tokens)
        reason = self.consumer.ask("outcome", case)["reason"]
        if reason is not None:
            raise TransportError(f"{transfer} has failed: {reason}")
        assert span.begun is not None
        return span.begun.wall - start, span

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


def in_turn(number: int) -> list[str]:
    """The order in a round. kvflow's write ends the consumer's waiting, so it comes last."""
    others = [PREPARED, BARE, COPY]
    first = number % len(others)
    return [*others[first:], *others[:first], KVFLOW]
