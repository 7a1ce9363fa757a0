"""The two processes that show how NIXL moves bytes here; neither is the doctor's own.

    python -m kvflow.doctor.nixl_pair lead RESULTS ORDER
    python -m kvflow.doctor.nixl_pair follow COMMAND_FD ANSWER_FD ORDER

The leader starts the follower, writes to its memory, checks the bytes there, and measures. After
each stage it appends a JSON line to RESULTS: what is there tells how far it came, even if NIXL ends
the process. UCX and NIXL log to standard output and standard error.
"""

import json
import os
import select
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import TransportError
from kvflow.ids import AgentName, new_incarnation
from kvflow.io.nixl_port import NixlPort
from kvflow.io.port import PostState
from kvflow.layout import Int64s, Region, Runs
from kvflow.settings import Settings

MODULE = "kvflow.doctor.nixl_pair"
_ROUNDS = 3
_ROUND_TRIPS = 300
_WARM_UP = 20
_PING, _STOP = b"ping", b"stop"
_WAIT_S = 15.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. `bytes` is a multiple of `run_bytes`; `seconds` bounds the measuring."""

    backends: tuple[str, ...]
    bytes: int
    run_bytes: int
    seconds: float
    measure: bool


class Port:
    """A `NixlPort` with one buffer."""

    def __init__(self, name: str, order: Order, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        agent = AgentName(f"doctor-{name}/{new_incarnation()[:8]}")
        self.nixl = NixlPort(agent, backends=order.backends)
        self.nixl.register([_whole(memory)])

    def write(self, peer: AgentName, runs: Runs) -> None:
        """Post one write and wait for its end."""
        handle = self.nixl.post(peer, runs)
        deadline = time.monotonic() + _WAIT_S
        while (state := self.nixl.poll(handle)) is PostState.PENDING:
            self.nixl.receive()
            if time.monotonic() > deadline:
                raise TransportError(f"a write of {runs.bytes} bytes took over {_WAIT_S:.0f} s")
        self.nixl.release(handle)
        if state is PostState.FAILED:
            raise TransportError(f"a write of {runs.bytes} bytes failed")


class Follower:
    """The other process, led through pipes; its start does not wait for anything."""

    def __init__(self, order: Order) -> None:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        text = msgspec.json.encode(order).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "follow", str(command_read), str(answer_write), text],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._commands = os.fdopen(command_write, "w")
        self._answers = os.fdopen(answer_read)

    def answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise TransportError(f"the other process ended with {self._process.wait(_WAIT_S)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TransportError(f"in the other process: {answer['error']}")
        return answer

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        self._commands.write(json.dumps({"do": do, **fields}) + "\n")
        self._commands.flush()
        return self.answer()

    def close(self) -> None:
        self._commands.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


class Leader:
    """Goes from stage to stage; `say` is told what each has brought."""

    def __init__(self, order: Order, say: Callable[..., None]) -> None:
        self._order = order
        self._say = say
        self._end = 0.0
        rng = np.random.default_rng(7)
        self._memory = rng.integers(0, 256, order.bytes, dtype=np.uint8)

    def run(self) -> None:
        follower = Follower(self._order)
        try:
            self._say(at="agent")
            port = Port("leader", self._order, self._memory)
            self._say(plugins=list(port.nixl.plugins), at="peer")
            answer = follower.answer()
            peer = port.nixl.add_peer(bytes.fromhex(answer["metadata"]))
            follower.ask("add_peer", metadata=port.nixl.metadata().hex())
            base = int(answer["base"])
            self._say(at="write")
            self._write(port, peer, self._large(base))
            self._say(at="bytes")
            self._check(follower, self._memory)
            self._say(at="notify")
            self._echoed(port, peer, follower, 1)
            if self._order.measure:
                self._say(at="measuring")
                self._say(measured=self._measure(port, peer, base, follower))
            self._say(at="")
        finally:
            follower.close()

    def _measure(
        self, port: Port, peer: AgentName, base: int, follower: Follower
    ) -> dict[str, Any]:
        """The fields of `kvflow.doctor.facts.Measured`."""
        self._end = time.monotonic() + self._order.seconds
        blocks = np.random.default_rng(8).permutation(self._order.bytes // self._order.run_bytes)
        large, scattered = self._large(base), self._scattered(base, blocks)
        posts: list[float] = []
        large_s = self._timed(lambda: posts.extend(self._write(port, peer, large)))
        scattered_s = self._timed(lambda: posts.extend(self._write(port, peer, scattered)))
        wanted = np.empty_like(self._memory).reshape(-1, self._order.run_bytes)
        wanted[blocks] = self._memory.reshape(wanted.shape)
        self._check(follower, wanted)
        copy_s = self._timed(lambda: np.copyto(wanted.reshape(-1), self._memory))
        trips = self._echoed(port, peer, follower, _ROUND_TRIPS + _WARM_UP)[_WARM_UP:]
        return {
            "bytes": self._order.bytes,
            "run_bytes": self._order.run_bytes,
            "slice_bytes": Settings().post_bytes_max,
            "large_s": large_s,
            "scattered_s": scattered_s,
            "copy_s": copy_s,
            "slice_s": max(posts),
            "round_trips": len(trips),
            "round_trip_s": (statistics.median(trips), float(np.percentile(trips, 99))),
        }

    def _timed(self, work: Callable[[], object]) -> float:
        """Median of some rounds; of one, if there is no time for more."""
        times: list[float] = []
        while not times or (len(times) < _ROUNDS and time.monotonic() < self._end):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _write(self, port: Port, peer: AgentName, posts: list[Runs]) -> list[float]:
        """Seconds of each post."""
        times = []
        for runs in posts:
            start = time.perf_counter()
            port.write(peer, runs)
            times.append(time.perf_counter() - start)
        return times

    def _large(self, base: int) -> list[Runs]:
        """Everything in runs of one post each."""
        step = min(Settings().post_bytes_max, self._order.bytes)
        starts = np.arange(0, self._order.bytes, step, dtype=np.int64)
        lengths = np.minimum(step, self._order.bytes - starts)
        return [
            self._runs(base, starts[[nth]], starts[[nth]], lengths[[nth]])
            for nth in range(len(starts))
        ]

    def _scattered(self, base: int, blocks: Int64s) -> list[Runs]:
        """Everything in runs of `run_bytes`, each to a place of its own."""
        settings, length = Settings(), self._order.run_bytes
        each = max(1, min(settings.post_runs_max, settings.post_bytes_max // length))
        starts = np.arange(len(blocks), dtype=np.int64) * length
        ends = blocks * length
        lengths = np.full(len(blocks), length, dtype=np.int64)
        cuts = [slice(first, first + each) for first in range(0, len(blocks), each)]
        return [self._runs(base, starts[cut], ends[cut], lengths[cut]) for cut in cuts]

    def _runs(self, base: int, starts: Int64s, ends: Int64s, lengths: Int64s) -> Runs:
        return Runs(
            source=self._memory.ctypes.data + starts,
            destination=base + ends,
            length=lengths,
            source_memory="DRAM",
            source_device=0,
            destination_memory="DRAM",
            destination_device=0,
        )

    def _check(self, follower: Follower, wanted: NDArray[np.uint8]) -> None:
        if follower.ask("checksum")["checksum"] != zlib.crc32(wanted.reshape(-1).data):
            raise TransportError("other bytes arrived than were written")

    def _echoed(self, port: Port, peer: AgentName, follower: Follower, count: int) -> list[float]:
        """Seconds of each round trip of a notification; fewer than `count` if time runs out."""
        follower.ask("echo")
        end = time.monotonic() + max(1.0, self._order.seconds / 2)
        times: list[float] = []
        while len(times) < count and (not times or time.monotonic() < end):
            start = time.perf_counter()
            port.nixl.send(peer, _PING)
            while not port.nixl.receive():
                if time.perf_counter() - start > _WAIT_S:
                    raise TransportError(f"a notification was not answered in {_WAIT_S:.0f} s")
            times.append(time.perf_counter() - start)
        port.nixl.send(peer, _STOP)
        return times


def lead(results: str, text: str) -> None:
    """Writes JSON objects: `at` is the stage that begins, "" the end; `error` is the last one."""
    with open(results, "a", encoding="utf-8") as file:

        def say(**told: object) -> None:
            file.write(json.dumps(told) + "\n")
            file.flush()

        try:
            Leader(msgspec.json.decode(text, type=Order), say).run()
        except (TransportError, OSError, MemoryError) as error:
            say(error=str(error) or repr(error))


def follow(command_fd: int, answer_fd: int, text: str) -> None:
    """Obeys until the command pipe ends."""
    order = msgspec.json.decode(text, type=Order)
    with open(command_fd, "rb", buffering=0) as commands, open(answer_fd, "w") as answers:

        def say(**told: object) -> None:
            answers.write(json.dumps(told) + "\n")
            answers.flush()

        try:
            port = Port("follower", order, np.zeros(order.bytes, dtype=np.uint8))
            say(metadata=port.nixl.metadata().hex(), base=port.memory.ctypes.data)
            while True:
                port.nixl.receive()
                if not select.select([commands], [], [], 0.001)[0]:
                    continue
                line = commands.readline()
                if not line:
                    return
                _obey(port, json.loads(line), say)
        except (TransportError, OSError, MemoryError) as error:
            say(error=str(error) or repr(error))


def _obey(port: Port, command: dict[str, Any], say: Callable[..., None]) -> None:
    match command["do"]:
        case "add_peer":
            port.nixl.add_peer(bytes.fromhex(command["metadata"]))
            say()
        case "checksum":
            say(checksum=zlib.crc32(port.memory.data))
        case "echo":
            say()
            _echo(port)


def _echo(port: Port) -> None:
    """Answer notifications, as fast as can be, until one says that it is enough."""
    deadline = time.monotonic() + 2 * _WAIT_S
    while time.monotonic() < deadline:
        for sender, payload in port.nixl.receive():
            if payload == _STOP:
                return
            port.nixl.send(sender, payload)


def _whole(memory: NDArray[np.uint8]) -> Region:
    """The buffer as one region of one block."""
    return Region.pages(
        layer="all",
        group=0,
        base=memory.ctypes.data,
        block_bytes=memory.nbytes,
        stride_bytes=memory.nbytes,
        blocks=1,
        memory="DRAM",
        device=0,
    )


def main() -> None:
    match sys.argv[1:]:
        case ["lead", results, order]:
            lead(results, order)
        case ["follow", command_fd, answer_fd, order]:
            follow(int(command_fd), int(answer_fd), order)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
