"""One worker's counts, put in by its loop thread and read by vLLM's.

Rules: the loop thread adds, vLLM's thread copies and takes differences; neither waits for the
other. A copy of a dict with keys of strings is one operation of the interpreter.

The idea: what the state machines do is counted by them (`kvflow.core.tally`); here is what they
do not see, and the arithmetic.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping

from kvflow.core.effects import Moved
from kvflow.core.tally import Tally
from kvflow.observe.metrics import BY_NAME, NO_REASON, Reading, Series
from kvflow.observe.observer import Carried

_SEEN_MAX = 65_536
"""Observations that wait to be read; beyond that, the oldest are lost."""
_STALE = frozenset({"registered_stale", "cancel_stale", "stale"})
_Count = tuple[str, tuple[str, ...], float]


class Meter:
    """Counts since the start of the worker.

    rank     how its series are labelled.
    tally    what the state machines count.
    counts   (metric, labels) -> what they do not see.
    """

    def __init__(self, rank: str) -> None:
        self.tally = Tally()
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.delay_s = self.delay_max_s = 0.0
        self.polls = 0
        self._rank = rank
        self._seen: deque[tuple[str, tuple[str, ...], float]] = deque(maxlen=_SEEN_MAX)
        self._read: dict[tuple[str, tuple[str, ...]], float] = {}

    # -- loop thread -------------------------------------------------------------------------------

    def moved(self, moved: Moved) -> None:
        """A transfer that is over tells how long it was in each state."""
        for state, ms in (moved.spent_ms or {}).items():
            self._seen.append(("kvflow_state_seconds", (moved.machine, state), ms / 1000))

    def carried(self, carried: Carried) -> None:
        """A WRITE or READ has ended."""
        kind = (carried.kind,)
        self._counted("kvflow_orders_total", carried.kind, carried.outcome)
        self.counts["kvflow_bytes_total", kind] += carried.bytes
        self.counts["kvflow_runs_total", kind] += carried.runs
        self.counts["kvflow_posts_total", kind] += carried.posts
        self._seen.append(("kvflow_order_seconds", kind, carried.at - carried.began))
        self._seen.append(("kvflow_plan_seconds", kind, carried.plan_s))

    def ignored(self, kind: str) -> int:
        """Something about nothing that is on record; returns how often of that kind."""
        return self._counted("kvflow_messages_ignored_total", kind)

    def refused(self, kind: str) -> int:
        """A frame, or a peer; returns how often of that kind."""
        return self._counted("kvflow_messages_refused_total", kind)

    def failed(self) -> None:
        """A bug of ours."""
        self._counted("kvflow_internal_errors_total")

    def polled(self, late_s: float) -> None:
        """A look for news, and by how much it came too late."""
        self.polls += 1
        if late_s:
            self.delay_s += late_s
            self.delay_max_s = max(self.delay_max_s, late_s)

    def _counted(self, name: str, *labels: str) -> int:
        self.counts[name, labels] += 1
        return self.counts[name, labels]

    # -- vLLM's thread -----------------------------------------------------------------------------

    def read(self, population: Mapping[tuple[str, str], int]) -> Reading:
        """What has changed since the last call.

        population  how many records there are by (machine, state).
        """
        reading = Reading()
        for name, labels, value in self._totals():
            before = self._read.get((name, labels), 0)
            if value != before:
                self._read[name, labels] = value
                reading.counts[self._series(name, labels)] = value - before
        for name, labels, value in self._levels(dict(population)):
            if value != self._read.get((name, labels)):
                self._read[name, labels] = value
                reading.levels[self._series(name, labels)] = value
        for _ in range(len(self._seen)):
            name, labels, value = self._seen.popleft()
            reading.seen.setdefault(self._series(name, labels), []).append(value)
        return reading

    def _series(self, name: str, labels: tuple[str, ...]) -> Series:
        return (name, self._rank, *labels)

    def _totals(self) -> Iterator[_Count]:
        tally = self.tally
        for (name, labels), value in dict(self.counts).items():
            yield name, labels, value
        stale: Counter[str] = Counter()
        repeated = 0
        for row, count in dict(tally.rows).items():
            yield "kvflow_transitions_total", row, count
            machine, trigger, _, _ = row
            if trigger in _STALE:
                stale[machine] += count
            repeated += count if trigger == "registered_again" else 0
        for machine, count in stale.items():
            yield "kvflow_messages_stale_total", (machine,), count
        for machine, count in dict(tally.started).items():
            yield "kvflow_transfers_started_total", (machine,), count
        for (machine, dest, reason), count in dict(tally.ended).items():
            told = str(reason) if reason is not None else NO_REASON
            yield "kvflow_transfers_ended_total", (machine, dest, told), count
        for fate, count in dict(tally.registrations).items():
            yield "kvflow_registrations_settled_total", (fate,), count
        yield "kvflow_registrations_received_total", (), tally.received
        yield "kvflow_registrations_repeated_total", (), repeated
        yield "kvflow_registrations_sent_total", (), tally.sent
        yield "kvflow_registrations_resent_total", (), tally.resent
        yield "kvflow_renewals_missed_total", (), tally.misses
        yield "kvflow_polls_total", (), self.polls
        yield "kvflow_poll_delay_seconds_total", (), self.delay_s

    def _levels(self, population: Mapping[tuple[str, str], int]) -> Iterator[_Count]:
        longest, self.delay_max_s = self.delay_max_s, 0.0
        yield "kvflow_poll_delay_max_seconds", (), longest
        live = BY_NAME["kvflow_transfers_live"].known
        for machine, state in live:
            yield "kvflow_transfers_live", (machine, state), population.get((machine, state), 0)
        for (state,) in BY_NAME["kvflow_peers"].known:
            yield "kvflow_peers", (state,), population.get(("peer", state), 0)
