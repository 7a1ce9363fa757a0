"""How often each edge was taken, and how long records stayed in each state, counted in traces.

A trace has a line per change of state (`kvflow.observe.trace`). The time in a state is what lies
between two consecutive lines of one record: a transfer id (producer), a request (consumer) or a
peer, in one rank of one engine in one file. Rows that stay in their state have no line, so nothing
is lost of it; a state in which a record still is at the end of its trace does not count.

Known limit: whether the lines of a record follow one another is not checked; `kvflow replay` does.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median

from kvflow.core import TABLES
from kvflow.diagrams.graph import Pair, edges_of
from kvflow.errors import KVFlowError
from kvflow.observe.trace import ASIDE, READABLE

_TEXTS = ("engine", "rank", "machine", "id", "trigger", "from", "to")
_TRIGGERS = {table.name: {edge.pair: edge.triggers for edge in edges_of(table)} for table in TABLES}
_STAYS = {
    table.name: {
        (source, source) for row in table.rows for source in row.sources if row.dest == source
    }
    for table in TABLES
}


class NoTraceError(KVFlowError):
    """A file that cannot be read, or a line that no engine writes: says which, and why."""


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

    Raises `NoTraceError`.
    """
    counts = {table.name: _Count() for table in TABLES}
    files = list(dict.fromkeys(paths))
    for path in files:
        _count_trace(path, counts)
    return {
        name: Heat(
            taken=dict(count.taken),
            triggers=dict(count.triggers),
            median_s={state: median(spent) for state, spent in count.spent_s.items()},
            traces=len(files),
        )
        for name, count in counts.items()
    }


def _count_trace(path: Path, counts: Mapping[str, _Count]) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise NoTraceError(f"{path} cannot be read: {why}") from error
    entered: dict[tuple[str, ...], tuple[str, float]] = {}
    finished, _, _ = text.rpartition("\n")  # The last line of an engine that runs may be cut off.
    for number, each in enumerate(finished.split("\n"), 1):
        if each.strip():
            _count_line(f"{path}:{number}", each, counts, entered)


def _count_line(
    place: str,
    text: str,
    counts: Mapping[str, _Count],
    entered: dict[tuple[str, ...], tuple[str, float]],
) -> None:
    line = _parsed(place, text)
    machine = line["machine"]
    if isinstance(machine, str) and machine in ASIDE:
        return
    words, at = _words(place, line)
    if words["machine"] not in counts:
        known = ", ".join(counts)
        raise NoTraceError(f"{place}: machine {machine!r} is not one of {known}")
    pair, trigger = (words["from"], words["to"]), words["trigger"]
    if pair in _STAYS[words["machine"]]:
        return
    if trigger not in _TRIGGERS[words["machine"]].get(pair, ()):
        leads = f"leads from {pair[0]} to {pair[1]} on {trigger}"
        raise NoTraceError(f"{place}: no row of the {machine} {leads}")
    count = counts[words["machine"]]
    count.taken[pair] += 1
    count.triggers[pair, trigger] += 1
    key = str(line.get("request")) if machine == "consumer" else words["id"]
    record = words["engine"], words["rank"], words["machine"], key
    state, since = entered.get(record, ("", 0.0))
    if state == pair[0]:
        count.spent_s.setdefault(state, []).append(max(at - since, 0.0))
    entered[record] = pair[1], at


def _parsed(place: str, text: str) -> dict[str, object]:
    try:
        line: object = json.loads(text)
    except ValueError as error:
        raise NoTraceError(f"{place} is no line of a trace: not JSON") from error
    if not isinstance(line, dict) or "machine" not in line:
        raise NoTraceError(f"{place} is no line of a trace: not an object with a machine")
    if line.get("v") not in READABLE:
        known = " and ".join(map(str, READABLE))
        said = f"has version {line.get('v')!r} of the trace's schema"
        raise NoTraceError(f"{place} {said}; versions {known} are known")
    return line


def _words(place: str, line: Mapping[str, object]) -> tuple[dict[str, str], float]:
    """The texts of a line, and its time."""
    words: dict[str, str] = {}
    for key in _TEXTS:
        word = line.get(key)
        if not isinstance(word, str):
            raise NoTraceError(f"{place} is no line of a trace: {key!r} is {word!r}, not a text")
        words[key] = word
    at = line.get("t")
    if isinstance(at, bool) or not isinstance(at, int | float) or not isfinite(at):
        raise NoTraceError(f"{place} is no line of a trace: 't' is {at!r}, not a time")
    return words, at
