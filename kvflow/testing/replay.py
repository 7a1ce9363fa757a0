"""Runs traces of real engines (`kvflow.tracing.lines`) through the tables.

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

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvflow.core import TABLES, Row, Table
from kvflow.testing.rows import Taken, every_row
from kvflow.tracing.lines import Line, Traces, is_of, read_all

_TABLES = {table.name: table for table in TABLES}


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
    traces = read_all(map(Path, paths))
    report = Report()
    for file in traces.files:
        _follow(file.lines, report)
    _match(traces, report)
    return report


# -- each record by itself -------------------------------------------------------------------------


def _follow(lines: Iterable[Line], report: Report) -> None:
    """The lines of one file."""
    latest: dict[tuple[str, ...], Line] = {}
    for line in lines:
        if line.machine not in _TABLES:
            continue
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
            report.outcomes[line.machine, line.dest, line.reason or ""] += 1
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


def _match(lines: Traces, report: Report) -> None:
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
            if is_of(by[1], line.engine, line.rank)
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
