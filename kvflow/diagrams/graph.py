"""A table as a graph: states, and one edge per pair of states that some row leads between."""

from dataclasses import dataclass

from kvflow.core import Row, Table

Pair = tuple[str, str]
"""Where an edge comes from, and where it leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """All rows that lead from `source` to `dest`, in the table's order; there is at least one."""

    source: str
    dest: str
    rows: tuple[Row, ...]

    @property
    def pair(self) -> Pair:
        return self.source, self.dest

    @property
    def triggers(self) -> tuple[str, ...]:
        """What leads along it, each once."""
        return tuple(dict.fromkeys(row.trigger for row in self.rows))


def edges_of(table: Table) -> tuple[Edge, ...]:
    """Every change of state, in the order of the rows; rows that stay in their state are left out.

    "sent failed" to "forgotten" are two edges; two rows between the same states are one.
    """
    rows: dict[Pair, list[Row]] = {}
    for row in table.rows:
        for source in row.sources:
            if row.dest is not None and row.dest != source:
                rows.setdefault((source, row.dest), []).append(row)
    return tuple(
        Edge(source=source, dest=dest, rows=tuple(found)) for (source, dest), found in rows.items()
    )


def final_states(table: Table) -> frozenset[str]:
    """States that nothing leads away from: the record is deleted there."""
    return frozenset(table.states) - {edge.source for edge in edges_of(table)}
