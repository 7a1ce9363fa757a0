"""Free TCP ports on one host, leased so that two pairs of engines never pick the same one.

A port is taken below the range from which Linux draws the ports of outgoing connections, tried
with a bind, and locked with a file for as long as its engine lives: other demos and tests of this
user on this machine pass it over, although its engine listens only many seconds later.

Known limit: a program that knows nothing of the lock may still take the port in between; the
engine then dies with "address already in use" in its log.
"""

import fcntl
import os
import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvflow.errors import CapacityError

_PORTS = range(20_000, 32_000)
_PICKS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLease:
    """One port, and the open file whose lock keeps it."""

    port: int
    lock: IO[bytes]

    def release(self) -> None:
        """Gives the port back; doing it twice does no harm."""
        self.lock.close()


def lease_port(host: str) -> PortLease:
    """A port of `host` on which nobody listens and which nobody else has leased."""
    directory = Path(tempfile.gettempdir()) / f"kvflow-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    for port in random.SystemRandom().sample(_PORTS, _PICKS_MAX):
        lock = (directory / str(port)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if _is_free(host, port):
            return PortLease(port=port, lock=lock)
        lock.close()
    raise CapacityError("port picks", _PICKS_MAX)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
