"""How often each edge was taken, and how long records stayed in each state, counted in traces.

A trace has a line per change of state (`kvflow.tracing.lines`). The time in a state is what lies
between two consecutive lines of one record: a transfer id (producer), a request (consumer) or a
peer, in one rank of one engine in one file. Rows that stay in their state have no line, so nothing
is lost of it; a state in which a record still is at the end of its trace does not count.

Known limit: whether the lines of a record follow one another is not checked; `kvflow replay` does.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from kvflow.core import TABLES
from kvflow.diagrams.graph import Pair, edges_of
from kvflow.tracing.lines import Line, UnreadableTraceError, read_all

_TRIGGERS = {table.name: {edge.pair: edge.triggers for edge in edges_of(table)} for table in TABLES}
_STAYS = {
    table.name: {
        (source, source) for row in table.rows for source in row.sources if row.dest == source
    }
    for table in TABLES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """What the traces say of one machine.

    taken     how often each edge was taken; edges that were never taken are not there.
    triggers  the same by trigger.
    median_s  of the times in each state that records have left.
    """

    taken: Mapping[Pair, int]
    triggers: Mapping[tuple[Pair, str], int]
    median_s: Mapping[str, float]
    traces: int


@dataclass(slots=True, kw_only=True)
class _Count:
    taken: Counter[Pair] = field(default_factory=Counter)
    triggers: Counter[tuple[Pair, str]] = field(default_factory=Counter)
    spent_s: dict[str, list[float]] = field(default_factory=dict)


def heat_of(paths: Iterable[Path]) -> dict[str, Heat]:
    """Every machine's heat, over all traces; a file given twice counts once.

    Raises `UnreadableTraceError`, also for a line that is no row of its table.
    """
    counts = {table.name: _Count() for table in TABLES}
    files = read_all(paths).files
    for file in files:
        latest: dict[tuple[str, ...], Line] = {}
        for line in file.lines:
            if line.machine in counts and (line.source, line.dest) not in _STAYS[line.machine]:
                _count_line(line, counts[line.machine], latest.get(line.record))
                latest[line.record] = line
    return {
        name: Heat(
            taken=dict(count.taken),
            triggers=dict(count.triggers),
            median_s={state: median(spent) for state, spent in count.spent_s.items()},
            traces=len(files),
        )
        for name, count in counts.items()
    }


def _count_line(line: Line, count: _Count, before: Line | None) -> None:
    """`before`: the previous line of its record."""
    pair = (line.source, line.dest)
    if line.trigger not in _TRIGGERS[line.machine].get(pair, ()):
        leads = f"leads from {line.source} to {line.dest} on {line.trigger}"
        raise UnreadableTraceError(line.place, f"no row of the {line.machine} {leads}")
    count.taken[pair] += 1
    count.triggers[pair, line.trigger] += 1
    if before is not None and before.dest == line.source:
        count.spent_s.setdefault(line.source, []).append(max(line.t - before.t, 0.0))
