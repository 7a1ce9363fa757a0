"""Which rows were taken, and whether exactly one applied each time.

`transitions` takes the first row whose guard holds, so overlapping guards would hide behind the
order of rows. While a `RowWatch` is active, every firing evaluates all guards of its pair.
"""

from collections import Counter
from types import TracebackType
from typing import Any, Self

from kvflow.core import TABLES, Row, Table
from kvflow.errors import LocalProtocolError

Taken = tuple[str, str, int]
"""(machine, source state, index of the row in its table)."""


def every_row() -> set[Taken]:
    """One entry per source state of every row of every table."""
    return {
        (table.name, source, index)
        for table in TABLES
        for index, row in enumerate(table.rows)
        for source in row.sources
    }


def describe(taken: Taken) -> str:
    table = next(table for table in TABLES if table.name == taken[0])
    row = table.rows[taken[2]]
    guard = f" [{row.guard.__name__}]" if row.guard else ""
    return f"{table.name}: {taken[1]} --{row.trigger}{guard}--> {row.dest or '='}"


class RowWatch:
    """Context manager: counts the rows that are taken while it is active.

    Raises `LocalProtocolError` from the firing itself when two rows apply at once.
    """

    def __init__(self) -> None:
        self.taken: Counter[Taken] = Counter()
        self._fire = Table.fire
        self._rows: dict[tuple[str, str, str], list[tuple[int, Row]]] = {}
        for table in TABLES:
            for index, row in enumerate(table.rows):
                for source in row.sources:
                    pair = (table.name, row.trigger, source)
                    self._rows.setdefault(pair, []).append((index, row))

    def __enter__(self) -> Self:
        fire = self._fire

        def watched(table: Table, record: Any, trigger: str, event: Any, turn: Any) -> None:
            source = record.state
            applying = [
                index
                for index, row in self._rows.get((table.name, trigger, source), ())
                if row.guard is None or row.guard(record, event, turn)
            ]
            if len(applying) > 1:
                raise LocalProtocolError(f"{table.name}: {trigger} in {source} is ambiguous")
            fire(table, record, trigger, event, turn)
            self.taken[table.name, source, applying[0]] += 1

        Table.fire = watched  # type: ignore[method-assign,assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        Table.fire = self._fire  # type: ignore[method-assign]
