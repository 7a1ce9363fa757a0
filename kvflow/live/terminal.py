"""The terminal while `kvflow top` has it: `q` and Ctrl-C leave, and it is as it was afterwards.

Known limits: keys are read where standard input is a terminal; suspending (Ctrl-Z) does not give
the screen back.
"""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator

_LEAVE = frozenset(b"qQ")


@contextlib.contextmanager
def leaving(leave: asyncio.Event, *, keys: bool) -> Iterator[None]:
    """Sets `leave` when whoever looks wants to go; a context within a running loop.

    keys  the keyboard is taken, too. Not in a pipe, where a pager, or another job, may have it.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, leave.set)
            undo.callback(loop.remove_signal_handler, number)
        if keys and sys.stdin.isatty():
            keyboard = sys.stdin.fileno()
            before = termios.tcgetattr(keyboard)
            undo.callback(termios.tcsetattr, keyboard, termios.TCSADRAIN, before)
            tty.setcbreak(keyboard)
            loop.add_reader(keyboard, _pressed, keyboard, leave)
            undo.callback(loop.remove_reader, keyboard)
        yield


def _pressed(keyboard: int, leave: asyncio.Event) -> None:
    try:
        keys = os.read(keyboard, 64)
    except OSError:
        keys = b""
    if not keys or _LEAVE & set(keys):
        leave.set()
