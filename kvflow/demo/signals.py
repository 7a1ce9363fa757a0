"""SIGINT and SIGTERM for a command that must end what it started.

With an event loop the first signal cancels the task, which cleans up after itself; before there is
one SIGTERM is an exception, as SIGINT is by itself.
"""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType


class SignalledError(Exception):
    """SIGTERM came while no event loop was there to take it."""


@contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """For the moments without an event loop, in which nothing has been started yet."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise SignalledError

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def until_signalled(work: Coroutine[None, None, int]) -> int:
    """Awaits `work`; the first SIGINT or SIGTERM cancels it, and it cleans up after itself."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    received: list[int] = []

    def on_signal(number: int) -> None:
        if not received:
            received.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        print("interrupted; both engines are stopped", file=sys.stderr)
        return 128 + received[0]
