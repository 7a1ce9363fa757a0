"""`kvflow top`'s screen: a header per engine, then the live transfers of all, oldest first."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvflow.live.client import OfWorker
from kvflow.live.polling import View
from kvflow.live.rows import Row, table
from kvflow.live.words import counts, duration, printable

PEERS_SHOWN = 4
_ASIDE = "dim"
_BAD = "red"


def screen(
    views: Sequence[View], *, stuck_s: float, width: int, height: int | None = None
) -> RenderableType:
    """Everything. `height`: lines that there are for all of it; None: as many as it takes."""
    heads = [line for view in views for line in _head(view)]
    for line in heads if height is not None else ():
        line.no_wrap, line.overflow = True, "ellipsis"
    rows = sorted(_rows(views), key=lambda row: -row[2].in_state_ms)
    known = sum(_live(each) for view in views for each in _workers(view))
    most = len(rows) if height is None else max(height - len(heads) - 4, 1)
    parts: list[RenderableType] = [*heads, Text("")]
    if rows:
        several, wrap = len(views) > 1, height is None
        parts.append(table(rows[:most], several=several, stuck_s=stuck_s, width=width, wrap=wrap))
    else:
        parts.append(Text("no live transfers", style=_ASIDE))
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


def _rows(views: Sequence[View]) -> Iterator[Row]:
    for view in views:
        for worker in _workers(view):
            for row in worker.told.transfers if worker.told is not None else ():
                yield view, worker, row
