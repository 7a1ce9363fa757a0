"""What is written below a picture: every state's edges by number, with their triggers."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvflow.core import Table
from kvflow.diagrams.graph import Edge, Pair
from kvflow.diagrams.layout import CHAR_PX, Box

LINE_PX = 15.0
HEAD_PX = 22.0
TRIGGER_CHARS = 44
COLUMN_SPACE_PX = 26.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One piece of text in the legend.

    kind  "head", "number", "dest" or "trigger".
    edge  what it tells of; None for a "head", which names the state that edges lead away from.
    """

    kind: str
    edge: Pair | None
    box: Box
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """All pieces, placed; a legend's upper left corner is (0, 0)."""

    width: float
    height: float
    texts: tuple[Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One line or more of a column: a state's name, or one edge."""

    height: float
    edge: Pair | None
    number: str
    name: str
    triggers: tuple[str, ...]


def legend_of(
    table: Table,
    edges: Sequence[Edge],
    say: Callable[[Edge, str], str],
    *,
    width_min: float,
) -> Legend:
    """As many columns as fit into `width_min`, one at least, filled evenly.

    `edges` in the order of their numbers; `say` tells how a trigger of an edge is written.
    """
    number_chars = len(str(len(edges)))
    name_chars = max(map(len, table.states))
    starts = [0.0, (number_chars + 1) * CHAR_PX, (number_chars + name_chars + 4) * CHAR_PX]
    column_px = starts[-1] + TRIGGER_CHARS * CHAR_PX
    count = max(1, int((width_min + COLUMN_SPACE_PX) // (column_px + COLUMN_SPACE_PX)))
    columns = _evenly(_groups(table, edges, say), count)
    texts: list[Text] = []
    for at, column in enumerate(columns):
        left, y = at * (column_px + COLUMN_SPACE_PX), 0.0
        for entry in column:
            texts += _texts(entry, left, y, starts)
            y += entry.height
    tallest = max(sum(entry.height for entry in column) for column in columns)
    return Legend(
        width=round(len(columns) * (column_px + COLUMN_SPACE_PX) - COLUMN_SPACE_PX, 1),
        height=tallest,
        texts=tuple(texts),
    )


def _groups(
    table: Table, edges: Sequence[Edge], say: Callable[[Edge, str], str]
) -> list[list[_Entry]]:
    """Per state that something leads away from: its name, then its edges."""
    groups = []
    for state in table.states:
        entries = [_Entry(height=HEAD_PX, edge=None, number="", name=state, triggers=())]
        for number, edge in enumerate(edges, 1):
            if edge.source == state:
                told = ", ".join(say(edge, trigger) for trigger in edge.triggers)
                lines = textwrap.wrap(told, TRIGGER_CHARS, break_on_hyphens=False)
                entries.append(
                    _Entry(
                        height=LINE_PX * len(lines),
                        edge=edge.pair,
                        number=str(number),
                        name=f"→ {edge.dest}",
                        triggers=tuple(lines),
                    )
                )
        if len(entries) > 1:
            groups.append(entries)
    return groups


def _evenly(groups: Sequence[Sequence[_Entry]], count: int) -> list[list[_Entry]]:
    """Whole groups, in their order, in `count` columns at most, the tallest as low as can be."""
    heights = [sum(entry.height for entry in group) for group in groups]
    limit = max(max(heights), sum(heights) / count)
    while True:
        columns: list[list[_Entry]] = [[]]
        filled = 0.0
        for group, height in zip(groups, heights, strict=True):
            if columns[-1] and filled + height > limit:
                columns.append([])
                filled = 0.0
            columns[-1] += group
            filled += height
        if len(columns) <= count:
            return columns
        limit += LINE_PX


def _texts(entry: _Entry, left: float, y: float, starts: Sequence[float]) -> list[Text]:
    def text(kind: str, words: str, at: float, line: int) -> Text:
        box = Box(
            x=round(left + at, 1),
            y=y + line * LINE_PX,
            width=round(len(words) * CHAR_PX, 1),
            height=HEAD_PX if kind == "head" else LINE_PX,
        )
        return Text(kind=kind, edge=entry.edge, box=box, text=words)

    if entry.edge is None:
        return [text("head", entry.name, 0.0, 0)]
    return [
        text("number", entry.number, starts[0], 0),
        text("dest", entry.name, starts[1], 0),
        *(text("trigger", line, starts[2], at) for at, line in enumerate(entry.triggers)),
    ]
