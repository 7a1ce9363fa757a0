"""The two engines of `kvflow bench transfer`, each one worker without vLLM.

Everything between a prefill's end and the last byte is the code that runs in vLLM's workers: a
`TransferLoop` in its thread, its `Driver`, a `Write` in slices, a `NixlPort`. Only the port notes
when it was called.

    python -m kvflow.bench.transfer_engine BYTES COMMAND_FD ANSWER_FD

runs the consumer: led by JSON lines, it ends when its command pipe does. (NIXL logs to stdout.)
"""

import json
import os
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvflow.bench.transfer_cases import Case
from kvflow.bench.transfer_ways import Moment, now
from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.core.effects import Moved
from kvflow.errors import TransportError
from kvflow.ids import Address, AgentName, Rank, RequestId, TransferId, new_incarnation
from kvflow.io.coordinates import Identity
from kvflow.io.nixl_port import NixlPort
from kvflow.io.port import PostState
from kvflow.io.side_channel import SideChannel
from kvflow.io.transfer_loop import TransferLoop
from kvflow.layout import Int64s, Region, Runs
from kvflow.observe.observer import Carried
from kvflow.settings import Settings

WAIT_S = 60.0
_STOP_S = 10.0
_NEVER = Moment(0.0, 0.0)


@dataclass(slots=True, kw_only=True)
class Span:
    """One write as the port saw it.

    begun, ended          the first post, and the last handle's release.
    copying, copying_cpu  seconds of it where NIXL moves bytes: starting a request, and polling it.
    posts, runs           how many of them.
    """

    begun: Moment | None = None
    ended: Moment = _NEVER
    copying: float = 0.0
    copying_cpu: float = 0.0
    posts: int = 0
    runs: int = 0

    def copied(self, since: Moment) -> None:
        until = now()
        self.copying += until.wall - since.wall
        self.copying_cpu += until.cpu - since.cpu


class TimedPort(NixlPort):
    """A `NixlPort` that notes the `span` of what was posted since `span` was set."""

    span = Span()

    def post(self, name: AgentName, runs: Runs, *, reads: bool = False) -> int:
        self.span.begun = self.span.begun or now()
        self.span.posts += 1
        self.span.runs += len(runs)
        return super().post(name, runs, reads=reads)

    def _start(self, transfer: Any) -> str:
        start = now()
        said = super()._start(transfer)
        self.span.copied(start)
        return said

    def poll(self, handle: int) -> PostState:
        start = now()
        state = super().poll(handle)
        if state is PostState.PENDING:
            self.span.copied(start)
        return state

    def release(self, handle: int) -> None:
        super().release(handle)
        self.span.ended = now()


class Notes:
    """An observer that keeps where each producer's record is, and what went wrong."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.faults: list[str] = []

    def moved(self, moved: Moved) -> None:
        if moved.machine == "producer":
            self.states[moved.key] = moved.dest

    def carried(self, carried: Carried) -> None:
        """Not kept."""

    def ignored(self, kind: str, key: str) -> None:
        """Not kept."""

    def refused(self, kind: str, detail: str) -> None:
        self.faults.append(f"refused {kind}: {detail}")

    def failed(self, what: str, error: BaseException) -> None:
        self.faults.append(f"{what}: {error!r}")


class BenchEngine:
    """One engine with one worker, whose pool is laid out anew for each case.

    Raises `TransportError` where NIXL is missing (with the first `lay_out`).
    """

    def __init__(self, name: str, buffer_bytes: int, seed: int, settings: Settings) -> None:
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(0, 256, buffer_bytes, dtype=np.uint8)
        self.regions: tuple[Region, ...] = ()
        self.notes = Notes()
        self.port: TimedPort | None = None
        self._name = name
        self._attempts = 0
        self._loop = TransferLoop(
            settings=settings, make_port=self._make_port, observer=self.notes, name=name
        )
        self._side_channel = SideChannel(
            engine_id=name, refused=self.notes.refused, connections_max=16
        )
        self.address: Address | None = None

    def _make_port(self, identity: Identity) -> NixlPort:
        self.port = TimedPort(AgentName(f"{self._name}/{identity.incarnation}"))
        return self.port

    def lay_out(self, case: Case) -> bytes:
        """Begin a case; returns the agent's metadata."""
        self._loop.suspend()
        self.notes.states.clear()
        self.regions = case.regions(self.memory.ctypes.data)
        identity = Identity(
            engine_id=self._name,
            incarnation=new_incarnation(),
            rank=Rank(0, 0),
            facts=case.engine.facts(),
            regions=self.regions,
        )
        self._side_channel.introduce({Rank(0, 0): self._loop.open(identity)})
        if self.address is None:
            self.address = self._side_channel.listen(Address("127.0.0.1", 0))
        assert self.port is not None
        return self.port.metadata()

    def load(self, transfer: str, address: Address, case: Case) -> None:
        """As a consumer: ask for a transfer's KV."""
        self._attempts += 1
        event = ev.BlocksAllocated(
            transfer_id=TransferId(transfer),
            request_id=RequestId(transfer),
            attempt=self._attempts,
            address=address,
            engine_id=None,
            blocks=(tuple(case.ids()[1].tolist()),),
            starts=(0,),
            tokens=case.tokens,
        )
        self._loop.submit([event])

    def outcome(self) -> str | None:
        """Why the next load to end has failed; None if it has not."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self._loop.outbox.wait(0.1)
            for _, reason in self._loop.outbox.take()[1]:
                return reason
        return f"no load has ended in {WAIT_S:.0f} s"

    def write(self, transfer: str, blocks: tuple[int, ...], tokens: int) -> tuple[float, Span]:
        """As a producer, of a load that is registered: when its prefill ended, and the write."""
        while self.notes.states.get(transfer) != "held":
            self._check()
            time.sleep(0.0005)
        assert self.port is not None
        self.port.span = span = Span()
        event = ev.PrefillFinished(
            transfer_id=TransferId(transfer),
            request_id=RequestId(transfer),
            blocks=(blocks,),
            tokens=tokens,
        )
        start = time.perf_counter()
        self._loop.submit([event])
        deadline = time.monotonic() + WAIT_S
        while not self._loop.outbox.take()[0]:
            if time.monotonic() > deadline:
                raise TransportError(f"{transfer} was not written in {WAIT_S:.0f} s")
            self._loop.outbox.wait(1.0)
        self._check()
        return start, span

    def checksum(self, case: Case, ids: Int64s) -> int:
        """Of the bytes in these blocks."""
        check = 0
        for layer in case.contents(self.memory, self.regions, ids):
            check = zlib.crc32(layer.tobytes(), check)
        return check

    def close(self) -> None:
        self._loop.close()
        self._side_channel.close()

    def _check(self) -> None:
        if self.notes.faults:
            raise TransportError("; ".join(self.notes.faults))


def patient() -> Settings:
    """As they are by default, but for deadlines that a busy machine might miss."""
    return Settings(timings=Timings(load_deadline_s=WAIT_S))


class LedEngine:
    """The consumer, in a process of its own."""

    def __init__(self, buffer_bytes: int) -> None:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        arguments = [str(each) for each in (buffer_bytes, command_read, answer_write)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvflow.bench.transfer_engine", *arguments],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._commands = os.fdopen(command_write, "w")
        self._answers = os.fdopen(answer_read)

    def ask(self, do: str, case: Case, **fields: object) -> dict[str, Any]:
        """Have one thing done. Raises `TransportError` if the process has ended."""
        command = {"do": do, "case": msgspec.to_builtins(case), **fields}
        try:
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TransportError(f"the consumer's process ended with {self._process.wait(_STOP_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._commands.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        self._answers.close()


def _obey(engine: BenchEngine, command: dict[str, Any]) -> dict[str, Any]:
    case = msgspec.convert(command["case"], Case)
    match command["do"]:
        case "lay_out":
            metadata = engine.lay_out(case)
            return {"metadata": metadata.hex(), "address": engine.memory.ctypes.data}
        case "load":
            engine.load(command["transfer"], Address(*command["address"]), case)
            return {}
        case "outcome":
            return {"reason": engine.outcome()}
        case "clear":
            engine.memory[:] = 0
            return {}
        case "checksum":
            return {"checksum": engine.checksum(case, case.ids()[1])}
    raise ValueError(command)


def main() -> None:
    buffer_bytes, command_fd, answer_fd = map(int, sys.argv[1:])
    engine = BenchEngine("bench-consumer", buffer_bytes, 2, patient())
    with open(command_fd) as commands, open(answer_fd, "w") as answers:
        for line in commands:
            answers.write(json.dumps(_obey(engine, json.loads(line))) + "\n")
            answers.flush()
    engine.close()


if __name__ == "__main__":
    main()
