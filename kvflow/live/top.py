"""Runs `kvflow top`: engines are polled, and shown once per interval until somebody leaves."""

import asyncio
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live as Screen

from kvflow.ids import Address
from kvflow.live.client import Access, look
from kvflow.live.documents import of_top
from kvflow.live.polling import Polled, View
from kvflow.live.terminal import leaving
from kvflow.live.view import screen

_WIDTH_OF_A_PIPE = 4096
"""Columns, so that nothing is cut off where nobody looks at a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How it is shown. `count`: refreshes before it ends by itself; None: for ever."""

    interval_s: float
    count: int | None
    limit: int
    stuck_s: float
    as_json: bool


def run(addresses: Sequence[Address], options: Options, access: Access) -> int:
    """The exit status: 2 if at the end no engine showed anything."""
    return asyncio.run(_run(addresses, options, access))


async def _run(addresses: Sequence[Address], options: Options, access: Access) -> int:
    ask = functools.partial(look, limit=options.limit, access=access)
    engines = [Polled(address, ask) for address in addresses]
    polling = [asyncio.create_task(engine.poll(options.interval_s)) for engine in engines]
    leave = asyncio.Event()
    try:
        on_screen = sys.stdout.isatty() and not options.as_json and options.count != 1
        with leaving(leave, keys=on_screen):
            if on_screen:
                await _show(engines, options, leave)
            else:
                await _print(engines, options, leave)
    finally:
        for task in polling:
            task.cancel()
        await asyncio.gather(*polling, return_exceptions=True)
    views = [engine.view for engine in engines]
    if leave.is_set() or any(view.answers for view in views):
        return 0
    for view in views:
        print(f"kvflow top: {_why(view)}", file=sys.stderr)
    return 2


async def _print(engines: Sequence[Polled], options: Options, leave: asyncio.Event) -> None:
    """One table, or one line of JSON, per refresh; the first when every engine has been asked."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
    left = asyncio.create_task(leave.wait())
    seen = asyncio.create_task(_seen(engines))
    await asyncio.wait([left, seen], return_when=asyncio.FIRST_COMPLETED)
    seen.cancel()
    printed = 0
    while not leave.is_set():
        views = [engine.view for engine in engines]
        if options.as_json:
            sys.stdout.write(of_top(views, options.stuck_s).decode())
            sys.stdout.flush()
        else:
            console.print(screen(views, stuck_s=options.stuck_s, width=console.width))
        printed += 1
        if printed == options.count:
            break
        await _pause(options.interval_s, left)
    left.cancel()


async def _show(engines: Sequence[Polled], options: Options, leave: asyncio.Event) -> None:
    """The whole screen, until somebody leaves or it was shown often enough."""
    console = Console(highlight=False)
    left = asyncio.create_task(leave.wait())
    shown = 0
    with Screen(console=console, screen=True, auto_refresh=False) as on:
        while not leave.is_set():
            views = [engine.view for engine in engines]
            width, height = console.size
            shows = screen(views, stuck_s=options.stuck_s, width=width, height=height)
            on.update(shows, refresh=True)
            shown += all(view.engine is not None for view in views)
            if options.count is not None and shown >= options.count:
                break
            # Until all have been asked the screen says so, and soon more.
            settled = all(view.engine is not None for view in views)
            await _pause(options.interval_s if settled else 0.1, left)
    left.cancel()


async def _seen(engines: Sequence[Polled]) -> bool:
    for engine in engines:
        await engine.seen.wait()
    return True


async def _pause(seconds: float, left: "asyncio.Task[bool]") -> None:
    await asyncio.wait([left], timeout=seconds)


def _why(view: View) -> str:
    engine = view.engine
    if engine is None:
        return f"{view.address} was not asked to the end"
    errors = [engine.error, *(each.error for each in engine.workers)]
    error = next((error for error in errors if error), "it shows nothing")
    return error if error.startswith(str(view.address)) else f"{view.address}: {error}"
