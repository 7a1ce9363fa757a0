"""Ten thousand connections that say nothing, to one side channel.

The clients are another process, so that each side has only its half of the files.
"""

import asyncio
import gc
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from kvflow.core import Timings
from kvflow.ids import Address, Rank
from kvflow.io import framing
from kvflow.io.side_channel import SideChannel, meet
from kvflow.settings import Settings
from kvflow.wire import codec

from .serving import HELLO, HERE, WAIT_S
from .silent_clients import FILES_BESIDE

CONNECTIONS = 10_000
WAVE = 100
"""What waits to be accepted must fit into the server's backlog."""
SERVED_MAX = Settings().side_channel_connections_max
BEYOND = ("connection", f"more than {SERVED_MAX} at once")

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _files(capsys: pytest.CaptureFixture[str]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + FILES_BESIDE:
        said = f"NO FLOOD: a process may open {hard} files, {CONNECTIONS + FILES_BESIDE} are needed"
        with capsys.disabled():
            print(f"\n{said}")
        pytest.skip(said)


class Flooded:
    """A side channel as an engine has it, and what it refused."""

    def __init__(self) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self.channel = SideChannel(
            engine_id="engine",
            refused=lambda kind, detail: self.refused.update([(kind, detail)]),
            connections_max=SERVED_MAX,
        )
        self.channel.introduce({Rank(0, 0): codec.encode(HELLO)})
        self.address = self.channel.listen(Address(HERE, 0))
        self.asks()

    def asks(self) -> None:
        """A consumer meets this engine, in the time that it has for it."""
        reply = uvloop.run(meet(self.address, "asker", Timings().meet_deadline_s))
        assert reply.engine_id == "engine"

    def tasks(self) -> int:
        """Tasks in the side channel's loop, without the one that counts."""
        thread = self.channel._thread
        assert thread is not None

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return thread.run(count(), WAIT_S)

    def is_idle(self) -> bool:
        return self.tasks() == 0 and self.channel._server._connections == 0


@pytest.fixture
def flooded() -> Iterator[Flooded]:
    flooded = Flooded()
    yield flooded
    flooded.channel.close()


@contextmanager
def silent_clients(address: Address) -> Iterator["subprocess.Popen[str]"]:
    script = str(Path(__file__).with_name("silent_clients.py"))
    numbers = map(str, (address.port, CONNECTIONS, WAVE, SERVED_MAX, int(WAIT_S)))
    clients = subprocess.Popen(
        [sys.executable, script, address.host, *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield clients
    finally:
        clients.kill()
        clients.communicate()


def left_open(clients: "subprocess.Popen[str]") -> int:
    assert clients.stdout is not None
    return int(clients.stdout.readline())


def files() -> int:
    """What earlier tests left to the garbage collector may go at any time, so it goes first."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def until(holds: Callable[[], bool]) -> None:
    """A socket is closed a moment after its task has ended."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_those_beyond_the_limit_are_closed_at_once_and_counted_f20(
    flooded: Flooded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those within it have all the time that they want."""
    monkeypatch.setattr(framing, "_REQUEST_TIMEOUT_S", 3600.0)
    before = files()
    with silent_clients(flooded.address) as clients:
        assert left_open(clients) == SERVED_MAX
        assert flooded.refused == {BEYOND: CONNECTIONS - SERVED_MAX}
        assert flooded.tasks() == SERVED_MAX
    until(flooded.is_idle)
    flooded.asks()
    assert flooded.refused.total() == CONNECTIONS
    until(lambda: files() <= before)


def test_those_within_the_limit_are_cut_off_in_time_and_a_consumer_meets_the_engine_f20(
    flooded: Flooded,
) -> None:
    """The clients hold on to every connection, and the server does not."""
    before = files()
    with silent_clients(flooded.address) as clients:
        assert left_open(clients) <= SERVED_MAX
        print("", file=clients.stdin, flush=True)
        assert left_open(clients) == 0
        until(flooded.is_idle)
        flooded.asks()
        assert flooded.refused.total() == CONNECTIONS
        assert flooded.refused["connection", "TimeoutError: "] >= SERVED_MAX
        assert flooded.refused[BEYOND] > 0
    until(lambda: files() <= before)
