"""`kvflow top` in a pseudo-terminal: what is on the screen, and how it is left."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from kvflow.testing.port import MemoryNetwork

from .conftest import SHOWN
from .loops import WAIT_S, Worker

ROOT = Path(__file__).parents[2]
ANSI = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")
ROWS, COLUMNS = 30, 200
TYPED = """\
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from kvflow.cli import main
main()
"""


class Terminal:
    """`kvflow top` in a pseudo-terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self._ours, self.theirs = os.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        self.written = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", TYPED, "top", *map(str, arguments)],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
        )

    @property
    def text(self) -> str:
        """All that was ever written to the screen, without control sequences."""
        return ANSI.sub("", self.written.decode(errors="replace"))

    def read(self) -> bool:
        """Whether there was something. It may be a part: a read gives 4,095 bytes at most."""
        is_ready = bool(select.select([self._ours], [], [], 0.05)[0])
        if is_ready:
            self.written += os.read(self._ours, 65536)
        return is_ready

    def shows(self, pattern: str, since: int = 0) -> str:
        """Waits until something like it was written; returns that."""
        until = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.text[since:])):
            assert time.monotonic() < until, self.text
            assert self.process.poll() is None, self.text
            self.read()
        return found[0]

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def ends(self) -> int:
        """Waits for the end, reading what is written until then."""
        until = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < until, self.text
            self.read()
        while self.read():
            pass
        return self.process.returncode

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x03"], ids=["q", "Q", "ctrl-c"])
def test_a_key_leaves_and_the_terminal_is_as_it_was(
    stuck_pair: tuple[Worker, Worker], key: bytes
) -> None:
    _, consumer = stuck_pair
    with Terminal(consumer.address, "--interval", "0.2", "--stuck-s", "0.5") as terminal:
        row = terminal.shows(r"stuck +load-stuck +consumer +registered +! [^\n]+")
        assert "DONE from producer" in row
        during = termios.tcgetattr(terminal.theirs)
        assert during[3] & termios.ICANON == 0
        assert during[3] & termios.ECHO == 0
        terminal.press(key)
        assert terminal.ends() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert terminal.written.count(b"\x1b[?1049h") == 1
        assert terminal.written.count(b"\x1b[?1049l") == 1
        assert terminal.written.rindex(b"\x1b[?25h") > terminal.written.rindex(b"\x1b[?25l")


def test_other_keys_do_nothing_and_the_screen_goes_on(stuck_pair: tuple[Worker, Worker]) -> None:
    _, consumer = stuck_pair
    with Terminal(consumer.address, "--interval", "0.1") as terminal:
        terminal.shows("load-stuck")
        terminal.press(b"xyz \r\x1b[A")
        terminal.shows("load-stuck", since=len(terminal.text))
        terminal.shows("load-stuck", since=len(terminal.text))
        terminal.press(b"q")
        assert terminal.ends() == 0


def test_an_engine_that_goes_away_is_shown_as_gone_and_comes_back(network: MemoryNetwork) -> None:
    with Worker("producer", network, seed=1, settings=SHOWN) as worker:
        worker.start_prefill("t")
        address = worker.address
        with Terminal(address, "--interval", "0.1", "--timeout-s", "1") as terminal:
            terminal.shows("prefill-t")
            worker.side_channel.close()
            terminal.shows(r"does not answer since [\d.]+ m?s, [2-9]\d* tries")
            gone = len(terminal.text)
            assert worker.side_channel.listen(address) == address
            terminal.shows("prefill-t", since=gone)
            terminal.press(b"q")
            assert terminal.ends() == 0


def test_a_count_ends_it_by_itself(stuck_pair: tuple[Worker, Worker]) -> None:
    _, consumer = stuck_pair
    with Terminal(consumer.address, "--count", "2", "--interval", "0.1") as terminal:
        assert terminal.ends() == 0
        assert "load-stuck" in terminal.text
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_terminal_that_is_ended_by_a_signal_is_restored_too(
    stuck_pair: tuple[Worker, Worker],
) -> None:
    _, consumer = stuck_pair
    with Terminal(consumer.address) as terminal:
        terminal.shows("load-stuck")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ends() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_in_a_pipe_it_goes_on_until_it_is_interrupted(stuck_pair: tuple[Worker, Worker]) -> None:
    _, consumer = stuck_pair
    typed = "from kvflow.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", typed, "top", str(consumer.address), "--interval", "0.1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    ) as process:
        watchdog = threading.Timer(WAIT_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        seen = 0
        while seen < 3:
            seen += "load-stuck" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
        watchdog.cancel()
    assert process.returncode == 0
    assert errors == ""
    assert "\x1b" not in rest
