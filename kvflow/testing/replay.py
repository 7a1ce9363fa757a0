"""Runs traces of real engines (`kvflow.observe.trace`) through the tables.

    report = replay([Path("prefill.ndjson"), Path("decode.ndjson")])
    assert report.first is None, report.first

Each record is followed: a line's `from` must be where the record's previous line left it (the
initial state for the first line, and after `forgotten`), and (trigger, from, to) must be a row of
its machine's table. A record is one transfer id (producer), one request (consumer) or one peer, in
one rank of one engine in one file: a restarted engine writes a file of its own.

Across files, if both sides' lines are there:

- a consumer's `received` needs a complete WRITE or READ (to `sent` or `kept`) of the same id and
  attempt (or of an earlier attempt of the same load: a retry concerns one rank only) from every
  rank of that producer engine, in the traces, that ever had a registration of this consumer worker;
- a rank has one complete WRITE or READ per id, attempt and consumer.

Known limits: the trace has no line for a row that stays in its state, and guards cannot be checked;
two lines of different engines are never compared by time, since their clocks differ.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvflow.core import TABLES, Row, Table
from kvflow.errors import KVFlowError
from kvflow.ids import ATTEMPT_STRIDE
from kvflow.observe.trace import ASIDE, READABLE
from kvflow.testing.rows import Taken, every_row

_TABLES = {table.name: table for table in TABLES}
_TEXTS = ("engine", "rank", "machine", "id", "trigger", "from", "to")


class UnreadableTraceError(KVFlowError):
    """A line that is not of the trace's schema: names file, line and what is wrong."""

    def __init__(self, place: str, said: str) -> None:
        super().__init__(f"{place}: {said}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a trace. `place` is `file:number`."""

    place: str
    file: str
    engine: str
    rank: str
    machine: str
    id: str
    attempt: int
    request: str
    trigger: str
    source: str
    dest: str
    reason: str
    peer: str

    @property
    def worker(self) -> tuple[str, str, str]:
        """Where it was written: file, engine, rank."""
        return self.file, self.engine, self.rank

    @property
    def load(self) -> int:
        """Which load of its engine this attempt belongs to: a retry is one more attempt of it."""
        return self.attempt // ATTEMPT_STRIDE

    @property
    def record(self) -> tuple[str, str, str, str, str]:
        """Which record it is about."""
        key = self.request if self.machine == "consumer" else self.id
        return *self.worker, self.machine, key

    def __str__(self) -> str:
        who = f"{self.engine} {self.rank} {self.machine} {self.id}"
        return f"{who} attempt {self.attempt}: {self.source} --{self.trigger}--> {self.dest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A line that cannot be. `rows`: those that there are for its state and trigger."""

    line: Line
    said: str
    rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.line.place}: {self.line}\n  {self.said}"
        return "\n".join([text, *(f"  there is: {row}" for row in self.rows)])


@dataclass(slots=True, kw_only=True)
class Report:
    """What the traces say.

    broken     lines that cannot be, in the order in which they were found; the first one says most.
    rows       rows that were taken (of several with one trigger, source and dest: all of them).
    outcomes   (machine, state, reason) of transfers that ended.
    live       the last line of each record that was not over at the end of its trace.
    matched    `received` lines for which every `sent` was found.
    unmatched  `received` lines of which no producer's lines are in the traces.
    """

    lines: int = 0
    records: int = 0
    broken: list[Broken] = field(default_factory=list)
    rows: set[Taken] = field(default_factory=set)
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    live: list[Line] = field(default_factory=list)
    matched: int = 0
    unmatched: int = 0

    @property
    def first(self) -> Broken | None:
        return self.broken[0] if self.broken else None

    @property
    def rows_of_all(self) -> int:
        """Rows that change the state: the only ones of which a trace can tell."""
        return sum(_changes(taken) for taken in every_row())


def replay(paths: Iterable[Path | str]) -> Report:
    """Follow all records of all traces. Raises `UnreadableTraceError`."""
    files = list(dict.fromkeys(Path(path) for path in paths))
    report = Report()
    lines = [line for file in files for line in read(file)]
    _follow(lines, report)
    _match(lines, report)
    return report


# -- reading ---------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[Line]:
    """The lines of one trace; a last one that is not finished is left out.

    Raises `UnreadableTraceError`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(str(path), f"cannot be read: {error}") from error
    finished, _, _ = text.rpartition("\n")
    for number, each in enumerate(finished.split("\n"), 1):
        line = _parse(path, f"{path}:{number}", each) if each.strip() else None
        if line is not None:
            yield line


def _parse(path: Path, place: str, text: str) -> Line | None:
    """One transition; None for a line about something else."""
    try:
        fields: Any = json.loads(text)
    except ValueError as error:
        raise UnreadableTraceError(place, f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UnreadableTraceError(place, "not a JSON object")
    if fields.get("v") not in READABLE:
        known = " and ".join(map(str, READABLE))
        said = f"schema version {fields.get('v')!r}; this kvflow reads versions {known}"
        raise UnreadableTraceError(place, said)
    if fields.get("machine") in ASIDE:
        return None
    for key in (*_TEXTS, "attempt", "request"):
        if key not in fields:
            raise UnreadableTraceError(place, f"the key {key!r} is missing")
    for key in _TEXTS:
        if not isinstance(fields[key], str):
            raise UnreadableTraceError(place, f"{key} is {fields[key]!r}, not a text")
    if not isinstance(fields["attempt"], int):
        raise UnreadableTraceError(place, f"attempt is {fields['attempt']!r}, not a number")
    if fields["machine"] not in _TABLES:
        known = ", ".join(_TABLES)
        raise UnreadableTraceError(place, f"machine {fields['machine']!r} is not one of {known}")
    return Line(
        place=place,
        file=str(path),
        engine=fields["engine"],
        rank=fields["rank"],
        machine=fields["machine"],
        id=fields["id"],
        attempt=fields["attempt"],
        request=str(fields["request"] or ""),
        trigger=fields["trigger"],
        source=fields["from"],
        dest=fields["to"],
        reason=str(fields.get("reason") or ""),
        peer=str(fields.get("peer") or ""),
    )


# -- each record by itself -------------------------------------------------------------------------


def _follow(lines: Iterable[Line], report: Report) -> None:
    latest: dict[tuple[str, str, str, str, str], Line] = {}
    for line in lines:
        table = _TABLES[line.machine]
        before = latest.get(line.record)
        report.lines += 1
        report.records += before is None
        if said := _breaks_off(table, before, line):
            report.broken.append(Broken(line=line, said=said, rows=_rows_from(table, line)))
        elif taken := _taken(table, line):
            report.rows |= taken
        else:
            said = f"no row leads from {line.source} to {line.dest} on {line.trigger}"
            report.broken.append(Broken(line=line, said=said, rows=_rows_from(table, line)))
        if line.dest in table.terminal and line.source not in table.terminal:
            report.outcomes[line.machine, line.dest, line.reason] += 1
        if line.dest == "forgotten":
            latest.pop(line.record, None)
        else:
            latest[line.record] = line
    for line in latest.values():
        if line.machine != "peer" and line.dest not in _TABLES[line.machine].terminal:
            report.live.append(line)


def _breaks_off(table: Table, before: Line | None, line: Line) -> str:
    """What is wrong with where the line starts."""
    expected = before.dest if before else table.initial
    if line.source == expected:
        return ""
    if before is None:
        return f"the first line of a record starts in {table.initial}, not in {line.source}"
    return f"{before.place} left it in {before.dest}, not in {line.source}"


def _leads(row: Row, line: Line) -> bool:
    to = line.source if row.dest is None else row.dest
    return row.trigger == line.trigger and line.source in row.sources and to == line.dest


def _taken(table: Table, line: Line) -> set[Taken]:
    return {
        (table.name, line.source, index)
        for index, row in enumerate(table.rows)
        if _leads(row, line)
    }


def _rows_from(table: Table, line: Line) -> tuple[str, ...]:
    """Rows for the line's state and trigger, or why there are none."""
    rows = [
        f"{line.source} --{row.trigger}{f' [{row.guard.__name__}]' if row.guard else ''}--> "
        f"{row.dest or '='}: {row.why}"
        for row in table.rows
        if row.trigger == line.trigger and line.source in row.sources
    ]
    if rows:
        return tuple(rows)
    if why := table.impossible.get((line.source, line.trigger)):
        return (f"no row, since {line.trigger} in {line.source} is impossible: {why}",)
    if line.source not in table.states:
        return (f"no state {line.source} in the machine {table.name}",)
    return (f"no trigger {line.trigger} in the machine {table.name}",)


def _changes(taken: Taken) -> bool:
    machine, source, index = taken
    return _TABLES[machine].rows[index].dest not in (None, source)


# -- both sides together ---------------------------------------------------------------------------


Asked = tuple[str, str]
"""A producer engine, and the consumer worker (its agent name) that registered with it."""


def _is_of(peer: str, engine: str, rank: str) -> bool:
    """Whether this agent name is that worker's (`kvflow.connector.worker` makes the names)."""
    return peer == engine or peer.startswith(f"{engine[:32]}/{rank}/")


def _match(lines: list[Line], report: Report) -> None:
    """What consumers received against what producers sent."""
    asked: dict[tuple[str, int], set[Asked]] = {}
    ranks: dict[Asked, set[str]] = {}
    sent: dict[tuple[Asked, str, str, int], Line] = {}
    loads_sent: set[tuple[Asked, str, str, int]] = set()
    for line in lines:
        if line.machine != "producer" or not line.peer:
            continue
        by = (line.engine, line.peer)
        ranks.setdefault(by, set()).add(line.rank)
        asked.setdefault((line.id, line.load), set()).add(by)
        if line.trigger in ("write_done", "fetched") and line.dest in ("kept", "sent"):
            key = (by, line.rank, line.id, line.attempt)
            if key in sent:
                said = f"sent twice: attempt {line.attempt} was sent at {sent[key].place} already"
                report.broken.append(Broken(line=line, said=said))
            sent[key] = line
            loads_sent.add((by, line.rank, line.id, line.load))
    for line in lines:
        if line.machine != "consumer" or line.dest != "received":
            continue
        mine = [
            by
            for by in sorted(asked.get((line.id, line.load), ()))
            if _is_of(by[1], line.engine, line.rank)
        ]
        missing = [
            (by, rank)
            for by in mine
            for rank in sorted(ranks[by])
            if (by, rank, line.id, line.load) not in loads_sent
        ]
        report.unmatched += not mine
        report.matched += bool(mine) and not missing
        for (engine, _), rank in missing[:1]:
            said = f"received, but {engine} {rank} never sent attempt {line.attempt} of {line.id}"
            report.broken.append(Broken(line=line, said=said))
