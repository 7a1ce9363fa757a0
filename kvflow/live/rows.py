"""The table of live transfers. A narrow screen has fewer columns; what matters most stays.

The idea: every column but one has a width of its own, ids are cut to what is left over, and what is
waited for gets the rest. A pipe is wide enough for all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from kvflow.live.client import OfWorker
from kvflow.live.polling import View
from kvflow.live.words import duration, megabytes, printable
from kvflow.wire import live

Row = tuple[View, OfWorker, live.TransferRow]
STUCK = "bold red"
_SINCE = "in state for"
_WAITS = "waits for"
_IDS = ("transfer", "request")
_GAP = 2
_ID_CHARS = (10, 60)
_ENDLESS = 1000
"""In so wide a console, a pipe's, nothing is cut."""
_WAITS_CHARS = 36
"""What is waited for has at least so much before ids get more than their least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column.

    chars       it has at most so many; 0: what is left over.
    from_width  consoles of at least so many columns have it.
    """

    title: str
    cell: Callable[[Row], str]
    chars: int
    from_width: int = 0
    right: bool = False


def _transfer(row: Row) -> str:
    told = row[2]
    return told.transfer_id + (f" part {told.part}" if told.part else "")


def _side(row: Row) -> str:
    view, worker, told = row
    several = view.engine is not None and len(view.engine.workers) > 1
    return f"{told.machine} {worker.rank}" if several else told.machine


def _waits_for(row: Row) -> str:
    told = row[2]
    return told.waits_for + (f" ({told.reason})" if told.reason else "")


_ENGINE = Column(title="engine", cell=lambda row: str(row[0].address), chars=21)
_COLUMNS = (
    Column(title="transfer", cell=_transfer, chars=0),
    Column(title="request", cell=lambda row: row[2].request_id, chars=0, from_width=100),
    Column(title="side", cell=_side, chars=17),
    Column(title="state", cell=lambda row: row[2].state, chars=12),
    Column(title=_SINCE, cell=lambda row: duration(row[2].in_state_ms), chars=13, right=True),
    Column(
        title="age",
        cell=lambda row: duration(row[2].total_ms),
        chars=11,
        from_width=120,
        right=True,
    ),
    Column(
        title="attempt",
        cell=lambda row: str(row[2].attempt or ""),
        chars=7,
        from_width=160,
        right=True,
    ),
    Column(title="peer", cell=lambda row: row[2].peer, chars=24, from_width=140),
    Column(title=_WAITS, cell=_waits_for, chars=0),
    Column(
        title="MB",
        cell=lambda row: megabytes(row[2].bytes),
        chars=8,
        from_width=120,
        right=True,
    ),
)


def table(rows: Sequence[Row], *, several: bool, stuck_s: float, width: int, wrap: bool) -> Table:
    """The rows in their order. `several`: of several engines. `wrap`: a row may take some lines."""
    columns = [column for column in _COLUMNS if width >= column.from_width]
    if several:
        columns = [_ENGINE, *columns]
    stuck = [row[2].in_state_ms >= stuck_s * 1000 for row in rows]
    cells = [
        [_cell(column, row, is_stuck) for column in columns]
        for row, is_stuck in zip(rows, stuck, strict=True)
    ]
    ids = _id_chars(columns, cells, width)
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        folds = wrap and column.title == _WAITS
        most = ids if column.title in _IDS else column.chars
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            max_width=most or None if width < _ENDLESS else None,
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    for texts, is_stuck in zip(cells, stuck, strict=True):
        made.add_row(*map(Text, texts), style=STUCK if is_stuck else None)
    return made


def _cell(column: Column, row: Row, is_stuck: bool) -> str:
    mark = "! " if is_stuck and column.title == _SINCE else ""
    return mark + printable(column.cell(row))


def _id_chars(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> int:
    """Of a transfer's or a request's id, so much is shown."""
    least, most = _ID_CHARS
    ids = sum(column.title in _IDS for column in columns)
    taken = _GAP * len(columns) + _WAITS_CHARS
    for number, column in enumerate(columns):
        longest = max([len(column.title), *(len(texts[number]) for texts in cells)])
        taken += min(longest, column.chars)
    return min(max((width - taken) // ids, least), most)
