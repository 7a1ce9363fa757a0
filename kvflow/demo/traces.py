"""Each transfer's way through both engines, from what they write under `KVFLOW_TRACE`.

A line that is not yet finished, at the end of a file that is being written, is left for the next
reading.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvflow.tracing.lines import Line, read_all

TRACE_SUFFIX = ".ndjson"
_OVER = frozenset({"received", "kept", "sent", "failed", "released", "forgotten"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTime:
    """How long a transfer was in one state of one machine (the slowest rank's time)."""

    machine: str
    state: str
    spent_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """All transitions of one transfer, on both engines, in the order of their time."""

    transfer_id: str
    transitions: tuple[Line, ...]

    def reached(self, machine: str, state: str) -> bool:
        return any(t.machine == machine and t.dest == state for t in self.transitions)

    def last_state(self, machine: str) -> str | None:
        """The state that the machine is in, or None if it never saw the transfer."""
        states = [t.dest for t in self.transitions if t.machine == machine]
        return states[-1] if states else None

    def failures(self) -> list[str]:
        """Why it failed, by machine, as far as the traces say."""
        return [
            f"{t.machine} {t.rank}: {t.source} -> {t.dest} on {t.trigger}"
            + (f" ({t.reason})" if t.reason else "")
            for t in self.transitions
            if t.dest == "failed" and t.source != "failed"
        ]

    def kv_bytes(self) -> int | None:
        """What the producer's ranks wrote; what the consumer's read, if those wrote nothing."""
        return self._over_ranks(lambda t: t.bytes)

    def kv_runs(self) -> int | None:
        """In how many runs, likewise: each is one descriptor for NIXL."""
        return self._over_ranks(lambda t: t.runs)

    def _over_ranks(self, of: Callable[[Line], int | None]) -> int | None:
        """The sum over the ranks of each one's highest count, of the first side that moved any."""
        for machine in ("producer", "consumer"):
            by_rank: dict[str, int] = {}
            for t in self.transitions:
                count = of(t)
                if t.machine == machine and count is not None:
                    by_rank[t.rank] = max(by_rank.get(t.rank, 0), count)
            if any(by_rank.values()):
                return sum(by_rank.values())
        return None

    def state_times(self) -> list[StateTime]:
        """The time spent in every state on the way to an end, over all attempts."""
        spent: dict[tuple[str, str, str], float] = {}
        by_rank: dict[tuple[str, str], list[Line]] = {}
        for t in self.transitions:
            by_rank.setdefault((t.machine, t.rank), []).append(t)
        for (machine, rank), steps in by_rank.items():
            for entered, left in pairwise(steps):
                if entered.dest in _OVER:
                    continue  # how long an ended transfer is remembered says nothing
                key = (machine, entered.dest, rank)
                spent[key] = spent.get(key, 0.0) + (left.t - entered.t) * 1000
        slowest: dict[tuple[str, str], float] = {}
        for (machine, state, _), ms in spent.items():
            slowest[machine, state] = max(slowest.get((machine, state), 0.0), ms)
        return [
            StateTime(machine=machine, state=state, spent_ms=ms)
            for (machine, state), ms in slowest.items()
        ]


def read_journeys(directory: Path) -> dict[str, Journey]:
    """The transfers in all traces of a directory, by transfer id. Raises `UnreadableTraceError`."""
    found: dict[str, list[Line]] = {}
    lines = read_all(sorted(directory.glob(f"*{TRACE_SUFFIX}")))
    for line in sorted(lines, key=lambda line: line.t):  # stable: keeps a file's order
        if line.machine in ("producer", "consumer"):
            found.setdefault(line.id, []).append(line)
    return {id_: Journey(transfer_id=id_, transitions=tuple(found[id_])) for id_ in found}


def find_journey(
    journeys: dict[str, Journey], *, transfer_id: str | None, request_id: str | None
) -> Journey | None:
    """One request's journey: by its transfer id, else by the `X-Request-Id` of its legs.

    vLLM puts the header's value inside its own request ids, and a transfer without an id of the
    router's is named after them.
    """
    if transfer_id is not None:
        return journeys.get(transfer_id)
    if request_id is None:
        return None
    for journey in journeys.values():
        if request_id in journey.transfer_id:
            return journey
        if any(request_id in (t.request or "") for t in journey.transitions):
            return journey
    return None
