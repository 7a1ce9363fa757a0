"""The other process of `test_flood`: it holds its half of many connections, and says nothing.

    python silent_clients.py HOST PORT CONNECTIONS WAVE SERVED_MAX WAIT_S

It connects in waves; a wave is over when the server has closed all but `SERVED_MAX` of those that
are open. Then it prints the number that is left open, and again after each line that it reads. It
never closes a connection itself; it ends when its input does.
"""

import resource
import select
import socket
import sys
import time
from collections.abc import Iterable

FILES_BESIDE = 64
"""Files that a process has open for other reasons."""


class SilentClients:
    """Connections that are open, by file number."""

    def __init__(self, address: tuple[str, int], wait_s: float) -> None:
        self.open: dict[int, socket.socket] = {}
        self._address = address
        self._wait_s = wait_s
        self._poll = select.epoll()

    def connect(self, count: int) -> None:
        for _ in range(count):
            connection = socket.create_connection(self._address, timeout=self._wait_s)
            self.open[connection.fileno()] = connection
            self._poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)

    def see_closed(self, open_max: int) -> None:
        """Wait until the server has closed all but so many. Raises `TimeoutError`."""
        until = time.monotonic() + self._wait_s
        while True:
            self._forget(file for file, _ in self._poll.poll(0.05))
            if len(self.open) <= open_max:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"{len(self.open)} are open, not {open_max}")

    def _forget(self, files: Iterable[int]) -> None:
        """Their end has come: nothing else can, since nothing is answered."""
        for file in files:
            self._poll.unregister(file)
            self.open.pop(file).close()


def main() -> None:
    host, port, *numbers = sys.argv[1:]
    connections, wave, served_max, wait_s = map(int, numbers)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(connections + FILES_BESIDE, hard), hard))
    clients = SilentClients((host, int(port)), wait_s)
    for begun in range(0, connections, wave):
        clients.connect(min(wave, connections - begun))
        clients.see_closed(served_max)
    print(len(clients.open), flush=True)
    for _ in sys.stdin:
        clients.see_closed(0)
        print(len(clients.open), flush=True)


if __name__ == "__main__":
    main()
