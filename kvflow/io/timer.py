"""Periodic wake-ups of an asyncio loop below one millisecond.

uvloop's timers have steps of 1 ms (and spin below 0.5 ms), so the poll of the transfer library is
driven by a Linux timerfd that the loop watches like a socket: no thread, no spinning.

Rules: every method and the callback run in the loop's thread. Ticks that were missed while the
loop was busy are one callback, and the next one comes at the timer's own pace.

Known limits: Linux only. The kernel may be late by its timer slack (50 us by default).
"""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import ClassVar

_NS_PER_S = 1_000_000_000
# The kernel's own values on every Linux platform that Python 3.11 knows.
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TICKS_BYTES = 8


class PollTimer:
    """Calls `callback` in `loop` each `interval` seconds while armed. Made disarmed.

    callback  is given the seconds by which it comes too late: of the ticks that were missed.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[float], object]
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._interval_ns = 0
        self._fd = _timerfd_create()
        loop.add_reader(self._fd, self._ticked)

    def set_interval(self, seconds: float | None) -> None:
        """Tick each `seconds` from now on; `None` or 0 disarms. The same interval is a no-op.

        An interval below one nanosecond counts as one. Raises `ValueError` if it is negative, and
        does nothing once closed.
        """
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"an interval of {seconds} s is negative")
        interval_ns = max(round(seconds * _NS_PER_S), 1) if seconds else 0
        if interval_ns == self._interval_ns or self._fd < 0:
            return
        self._interval_ns = interval_ns
        _timerfd_settime(self._fd, interval_ns)

    def close(self) -> None:
        """Stop, for ever. Idempotent; safe from inside the callback."""
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    def _ticked(self) -> None:
        if self._fd < 0:
            return
        try:
            ticks = int.from_bytes(os.read(self._fd, _TICKS_BYTES), sys.byteorder)
        except BlockingIOError:
            # Disarmed or re-armed between the loop's wake-up and this call.
            return
        self._callback((ticks - 1) * self._interval_ns / _NS_PER_S)


if sys.version_info >= (3, 13):

    def _timerfd_create() -> int:
        return os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)

    def _timerfd_settime(fd: int, interval_ns: int) -> None:
        os.timerfd_settime_ns(fd, initial=interval_ns, interval=interval_ns)

else:

    class _Timespec(ctypes.Structure):
        _fields_: ClassVar = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]

    class _Itimerspec(ctypes.Structure):
        _fields_: ClassVar = [("it_interval", _Timespec), ("it_value", _Timespec)]

    _libc = ctypes.CDLL(None, use_errno=True)

    def _timerfd_create() -> int:
        fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        return fd

    def _timerfd_settime(fd: int, interval_ns: int) -> None:
        each = _Timespec(*divmod(interval_ns, _NS_PER_S))
        spec = _Itimerspec(it_interval=each, it_value=each)
        if _libc.timerfd_settime(fd, 0, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
