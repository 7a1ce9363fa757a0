"""Reads the NDJSON traces that kvflow writes under `KVFLOW_TRACE`, one line per transition.

Only lines about transfers (machines `producer` and `consumer`) are kept. A line that is not yet
finished, at the end of a file that is being written, is left for the next reading.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from kvflow.observe.trace import READABLE

Machine: TypeAlias = Literal["producer", "consumer"]

TRACE_SUFFIX = ".ndjson"
_OVER = frozenset({"received", "kept", "sent", "failed", "released", "forgotten"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One line of a trace."""

    at: float
    machine: Machine
    rank: str
    transfer_id: str
    request_id: str
    attempt: int
    trigger: str
    source: str
    dest: str
    reason: str | None
    moved_bytes: int | None
    moved_runs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTime:
    """How long a transfer was in one state of one machine (the slowest rank's time)."""

    machine: Machine
    state: str
    spent_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """All transitions of one transfer, on both engines, in the order of their time."""

    transfer_id: str
    transitions: tuple[Transition, ...]

    def reached(self, machine: Machine, state: str) -> bool:
        return any(t.machine == machine and t.dest == state for t in self.transitions)

    def last_state(self, machine: Machine) -> str | None:
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
        return self._over_ranks(lambda t: t.moved_bytes)

    def kv_runs(self) -> int | None:
        """In how many runs, likewise: each is one descriptor for NIXL."""
        return self._over_ranks(lambda t: t.moved_runs)

    def _over_ranks(self, of: Callable[[Transition], int | None]) -> int | None:
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
        spent: dict[tuple[Machine, str, str], float] = {}
        by_rank: dict[tuple[Machine, str], list[Transition]] = {}
        for t in self.transitions:
            by_rank.setdefault((t.machine, t.rank), []).append(t)
        for (machine, rank), steps in by_rank.items():
            for entered, left in pairwise(steps):
                if entered.dest in _OVER:
                    continue  # how long an ended transfer is remembered says nothing
                key = (machine, entered.dest, rank)
                spent[key] = spent.get(key, 0.0) + (left.at - entered.at) * 1000
        slowest: dict[tuple[Machine, str], float] = {}
        for (machine, state, _), ms in spent.items():
            slowest[machine, state] = max(slowest.get((machine, state), 0.0), ms)
        return [
            StateTime(machine=machine, state=state, spent_ms=ms)
            for (machine, state), ms in slowest.items()
        ]


def read_journeys(directory: Path) -> dict[str, Journey]:
    """The transfers in all traces of a directory, by transfer id."""
    transitions = [
        transition
        for path in sorted(directory.glob(f"*{TRACE_SUFFIX}"))
        for transition in _parse(path.read_bytes())
    ]
    return _by_transfer(transitions)


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
        if any(request_id in t.request_id for t in journey.transitions):
            return journey
    return None


def _by_transfer(transitions: Sequence[Transition]) -> dict[str, Journey]:
    grouped: dict[str, list[Transition]] = {}
    for transition in sorted(transitions, key=lambda t: t.at):  # stable: keeps a file's order
        grouped.setdefault(transition.transfer_id, []).append(transition)
    return {
        transfer_id: Journey(transfer_id=transfer_id, transitions=tuple(found))
        for transfer_id, found in grouped.items()
    }


def _parse(data: bytes) -> Iterable[Transition]:
    finished, _, _ = data.rpartition(b"\n")
    for line in finished.splitlines():
        fields = json.loads(line)
        if fields["v"] not in READABLE or fields["machine"] not in ("producer", "consumer"):
            continue
        yield Transition(
            at=float(fields["t"]),
            machine=fields["machine"],
            rank=str(fields["rank"]),
            transfer_id=str(fields["id"]),
            request_id=str(fields.get("request") or ""),
            attempt=int(fields["attempt"]),
            trigger=str(fields["trigger"]),
            source=str(fields["from"]),
            dest=str(fields["to"]),
            reason=fields.get("reason"),
            moved_bytes=fields.get("bytes"),
            moved_runs=fields.get("runs"),
        )
