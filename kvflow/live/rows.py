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
_ID_CHARS = (10, 512)
_WAITS_CHARS = 36
"""What is waited for has at least so much before ids get more than their least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `from_width`: consoles of at least so many columns have it."""

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
    ids = _id_chars(columns, width)
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        is_id = column.title in _IDS
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            max_width=ids if is_id else column.chars or None,
            no_wrap=not (wrap and column.title == _WAITS),
            overflow="fold" if wrap and column.title == _WAITS else "ellipsis",
            ratio=1 if column.title == _WAITS else None,
        )
    for row in rows:
        stuck = row[2].in_state_ms >= stuck_s * 1000
        cells = [
            ("! " if stuck and column.title == _SINCE else "") + printable(column.cell(row))
            for column in columns
        ]
        made.add_row(*map(Text, cells), style=STUCK if stuck else None)
    return made


def _id_chars(columns: Sequence[Column], width: int) -> int:
    """Of a transfer's or a request's id, so much is shown."""
    least, most = _ID_CHARS
    ids = sum(column.title in _IDS for column in columns)
    taken = sum(column.chars for column in columns) + _GAP * len(columns) + _WAITS_CHARS
    return min(max((width - taken) // ids, least), most)
