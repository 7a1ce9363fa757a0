"""`kvflow top`'s screen: a header per engine, then the live transfers of all, oldest first."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvflow.live.client import OfWorker
from kvflow.live.polling import View
from kvflow.live.words import counts, duration, megabytes, printable
from kvflow.wire import live

PEERS_SHOWN = 4
_STUCK = "bold red"
_ASIDE = "dim"
_BAD = "red"


def screen(views: Sequence[View], *, stuck_s: float, rows_max: int | None = None) -> RenderableType:
    """Everything. `rows_max`: lines that there are for all of it; None: as many as it takes."""
    heads = [line for view in views for line in _head(view)]
    rows = sorted(_rows(views), key=lambda row: -row[2].in_state_ms)
    known = sum(_live(each) for view in views for each in _workers(view))
    most = len(rows) if rows_max is None else max(rows_max - len(heads) - 4, 1)
    table = _table(rows[:most], views, stuck_s)
    parts: list[RenderableType] = [*heads, Text("")]
    parts.append(table if rows else Text("no live transfers", style=_ASIDE))
    if known > min(most, len(rows)):
        left = known - min(most, len(rows))
        parts.append(Text(f"{left} more, which have been in their state for less long", _ASIDE))
    return Group(*parts)


# -- engines ---------------------------------------------------------------------------------------


def _head(view: View) -> Iterator[Text]:
    line = Text(printable(str(view.address)), style="bold")
    if view.told is not None:
        line.append(f"  {printable(view.told.role)}", "default")
        line.append(f"  engine {printable(view.told.engine_id[:8])}", _ASIDE)
    if view.engine is None:
        line.append("  is being asked", _ASIDE)
        yield line
        return
    if view.engine.error:
        since = f"does not answer since {duration(view.failing_s * 1000)}, {_tries(view.tries)}"
        line.append(f"  {since}: {printable(view.engine.error)}", _BAD)
        yield line
        return
    if len(view.engine.workers) == 1:
        line.append_text(_of_worker(view.engine.workers[0]))
        yield line
    else:
        line.append(f"  {len(view.engine.workers)} ranks", "default")
        yield line
        for worker in view.engine.workers:
            yield Text(f"  {worker.rank}").append_text(_of_worker(worker))
    yield from _peers(view)


def _tries(count: int) -> str:
    return "1 try" if count == 1 else f"{count} tries"


def _of_worker(worker: OfWorker) -> Text:
    if worker.told is None:
        return Text(f"  {printable(worker.error)}", style=_BAD)
    return Text(f"  {worker.told.live} live  {counts(worker.told.population)}", style="default")


def _peers(view: View) -> Iterator[Text]:
    """Those on which something depends, the most silent first."""
    lives = [worker.told for worker in _workers(view) if worker.told is not None]
    found = [peer for each in lives for peer in each.peers if peer.using or peer.waiting]
    found.sort(key=lambda peer: -(peer.silent_ms or peer.in_state_ms))
    for peer in found[:PEERS_SHOWN]:
        silent = f", silent for {duration(peer.silent_ms)}" if peer.silent_ms is not None else ""
        told = f"  peer {printable(peer.key)} {printable(peer.state)}{silent}"
        told += f", {peer.using + peer.waiting} transfers depend on it"
        yield Text(told + (f": {printable(peer.detail)}" if peer.detail else ""), style=_ASIDE)
    if len(found) > PEERS_SHOWN:
        yield Text(f"  {len(found) - PEERS_SHOWN} more peers", style=_ASIDE)


def _workers(view: View) -> Sequence[OfWorker]:
    return view.engine.workers if view.engine is not None else ()


def _live(worker: OfWorker) -> int:
    return worker.told.live if worker.told is not None else 0


# -- transfers -------------------------------------------------------------------------------------

_Row = tuple[View, OfWorker, live.TransferRow]


def _rows(views: Sequence[View]) -> Iterator[_Row]:
    for view in views:
        for worker in _workers(view):
            for row in worker.told.transfers if worker.told is not None else ():
                yield view, worker, row


def _table(rows: Sequence[_Row], views: Sequence[View], stuck_s: float) -> Table:
    several = len(views) > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    if several:
        table.add_column("engine", no_wrap=True)
    table.add_column("transfer", no_wrap=True, overflow="ellipsis", min_width=10, ratio=3)
    table.add_column("request", no_wrap=True, overflow="ellipsis", min_width=8, ratio=3)
    table.add_column("side", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("in state for", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("attempt", justify="right", no_wrap=True)
    table.add_column("peer", no_wrap=True, overflow="ellipsis", min_width=8, ratio=2)
    table.add_column("waits for", overflow="fold", min_width=16, ratio=5)
    table.add_column("MB", justify="right", no_wrap=True)
    for view, worker, row in rows:
        stuck = row.in_state_ms >= stuck_s * 1000
        cells = [
            _transfer(row),
            printable(row.request_id),
            _side(view, worker, row),
            printable(row.state),
            ("! " if stuck else "") + duration(row.in_state_ms),
            duration(row.total_ms),
            str(row.attempt or ""),
            printable(row.peer),
            printable(row.waits_for) + (f" ({row.reason})" if row.reason else ""),
            megabytes(row.bytes),
        ]
        shown = [printable(str(view.address)), *cells] if several else cells
        table.add_row(*map(Text, shown), style=_STUCK if stuck else None)
    return table


def _transfer(row: live.TransferRow) -> str:
    return printable(row.transfer_id) + (f" part {row.part}" if row.part else "")


def _side(view: View, worker: OfWorker, row: live.TransferRow) -> str:
    return row.machine if len(_workers(view)) == 1 else f"{row.machine} {worker.rank}"
