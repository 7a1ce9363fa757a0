"""The other process of `test_transfer_loop` and of `tests/bench/loop_cost.py`.

    python loop_process.py NAME SEED COMMAND_FD ANSWER_FD

It has one engine: a `TransferLoop` with a real `NixlPort` over a buffer of its own, and a side
channel on loopback. It is led by JSON lines and ends when its command pipe does. (NIXL logs to
stdout, hence the fds.) `Engine` is used by the tests' own process too.
"""

import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Self, TextIO

import numpy as np

from kvflow.core import Reason
from kvflow.core import events as ev
from kvflow.core.effects import Moved
from kvflow.core.notices import Offer
from kvflow.core.producer import prefill_name
from kvflow.ids import Address, AgentName, Rank, RequestId, TransferId, new_incarnation
from kvflow.io.coordinates import Identity
from kvflow.io.nixl_port import NixlPort
from kvflow.io.side_channel import SideChannel
from kvflow.io.transfer_loop import TransferLoop
from kvflow.layout import Facts, Region
from kvflow.observe.meter import Meter
from kvflow.observe.observer import Carried, Observer
from kvflow.settings import Settings

LAYERS = 3
BLOCKS = 256
BLOCK_BYTES = 8192
GAP_BYTES = 512
BLOCK_TOKENS = 16
FACTS = Facts(
    model="none",
    kv_dtype="uint8",
    block_sizes=(BLOCK_TOKENS,),
    group_kinds=("FullAttentionSpec",),
    tp_size=1,
    pp_size=1,
    kv_layout="flat",
)


@dataclass
class Notes:
    """An observer that keeps where each transfer is, and what went wrong."""

    latest: dict[tuple[str, str], Moved] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def moved(self, moved: Moved) -> None:
        self.latest[moved.machine, moved.key] = moved

    def carried(self, carried: Carried) -> None:
        """Not kept."""

    def ignored(self, kind: str, key: str) -> None:
        """Not kept."""

    def refused(self, kind: str, detail: str) -> None:
        self.faults.append(f"refused {kind}: {detail}")

    def failed(self, what: str, error: BaseException) -> None:
        self.faults.append(f"failed {what}: {error!r}")


class Engine:
    """A whole engine with one worker, as vLLM would have it."""

    def __init__(self, name: str, seed: int, settings: Settings | None = None) -> None:
        rng = np.random.default_rng(seed)
        shape = (LAYERS, BLOCKS, BLOCK_BYTES + GAP_BYTES)
        self.name = name
        self.memory = rng.integers(0, 256, shape, dtype=np.uint8)
        self.notes = Notes()
        self.sent: list[RequestId] = []
        self.received: dict[RequestId, Reason | None] = {}
        self.port: NixlPort | None = None
        self._attempt = 0
        settings = settings or Settings()
        self.loop = TransferLoop(
            settings=settings,
            make_port=self._make_port,
            observer=self._make_observer(),
            meter=self._make_meter(),
            name=name,
        )
        identity = Identity(
            engine_id=name,
            incarnation=new_incarnation(),
            rank=Rank(0, 0),
            facts=FACTS,
            regions=regions_of(self.memory),
        )
        self.side_channel = SideChannel(
            engine_id=name, refused=self.notes.refused, connections_max=16
        )
        self.side_channel.introduce({Rank(0, 0): self.loop.open(identity)})
        self.address = self.side_channel.listen(Address("127.0.0.1", 0))

    def _make_observer(self) -> Observer:
        return self.notes

    def _make_meter(self) -> Meter | None:
        return None

    def _make_port(self, identity: Identity) -> NixlPort:
        self.port = NixlPort(AgentName(f"{self.name}/{identity.incarnation}"))
        return self.port

    def start_prefill(self, transfer: str) -> None:
        request = RequestId(f"prefill-{transfer}")
        event = ev.PrefillStarted(transfer_id=TransferId(transfer), request_id=request)
        self.loop.submit([event])

    def finish_prefill(self, transfer: str, blocks: list[int]) -> None:
        event = ev.PrefillFinished(
            transfer_id=TransferId(transfer),
            request_id=RequestId(f"prefill-{transfer}"),
            blocks=(tuple(blocks),),
            tokens=len(blocks) * BLOCK_TOKENS,
        )
        self.loop.submit([event])

    def load(
        self,
        transfer: str,
        address: Address,
        blocks: list[int],
        reads: bool = False,
        offer: list[int] | None = None,
    ) -> None:
        """`offer`: blocks of the producer's of which the router tells, if it `reads`."""
        self._attempt += 1
        event = ev.BlocksAllocated(
            transfer_id=TransferId(transfer),
            request_id=RequestId(f"load-{transfer}"),
            attempt=self._attempt,
            address=address,
            engine_id=None,
            blocks=(tuple(blocks),),
            starts=(0,),
            tokens=len(blocks) * BLOCK_TOKENS,
            reads=reads,
            offer=None if offer is None else offered(transfer, offer),
        )
        self.loop.submit([event])

    def collect(self, wait_s: float = 0.0) -> None:
        """Take what was reported, waiting up to `wait_s` for something."""
        self.loop.outbox.wait(wait_s)
        sent, received = self.loop.outbox.take()
        self.sent += sent
        for request, reason in received:
            if request in self.received:
                self.notes.faults.append(f"{request} was reported twice")
            self.received[request] = reason

    def outcome(self, transfer: str, wait_s: float = 60.0) -> Reason | None:
        request = RequestId(f"load-{transfer}")
        deadline = time.monotonic() + wait_s
        while request not in self.received:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request} was never reported")
            self.collect(0.05)
        return self.received[request]

    def collect_sent(self, transfer: str, wait_s: float) -> None:
        """Return when the blocks of its prefill may be freed."""
        request = RequestId(f"prefill-{transfer}")
        deadline = time.monotonic() + wait_s
        while request not in self.sent:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request} was never reported")
            self.collect(0.05)

    def close(self) -> None:
        self.loop.close()
        self.side_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def offered(transfer: str, blocks: list[int]) -> Offer:
    """What a router hears when the prefill of these blocks has ended."""
    return Offer(
        blocks=(tuple(blocks),),
        tokens=len(blocks) * BLOCK_TOKENS,
        prefill=prefill_name(RequestId(f"prefill-{transfer}")),
    )


def regions_of(memory: np.ndarray) -> tuple[Region, ...]:
    layers, blocks, stride = memory.shape
    return tuple(
        Region.pages(
            layer=f"layer.{layer}",
            group=0,
            base=memory[layer].ctypes.data,
            block_bytes=BLOCK_BYTES,
            stride_bytes=stride,
            blocks=blocks,
            tokens=BLOCK_TOKENS,
            memory="DRAM",
            device=0,
        )
        for layer in range(layers)
    )


def digest(memory: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(memory).tobytes()).hexdigest()


def obey(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command; returns the answer."""
    match command["do"]:
        case "start_prefill":
            engine.start_prefill(command["transfer"])
        case "finish_prefill":
            engine.finish_prefill(command["transfer"], command["blocks"])
        case "load":
            engine.load(command["transfer"], Address(*command["address"]), command["blocks"])
        case "outcome":
            return {"reason": engine.outcome(command["transfer"])}
        case "sent":
            engine.collect(0.01)
            return {"sent": engine.sent}
        case "digest":
            return {"digest": digest(engine.memory)}
        case "faults":
            return {"faults": engine.notes.faults}
        case "close":
            engine.close()
            engine.collect()
            return {"received": engine.received, "sent": engine.sent}
        case _:
            raise ValueError(command)
    return {}


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    name, seed, command_fd, answer_fd = sys.argv[1:]
    engine = Engine(name, int(seed))
    with open(int(command_fd)) as commands, open(int(answer_fd), "w") as answers:
        say(answers, {"address": engine.address})
        for line in commands:
            say(answers, obey(engine, json.loads(line)))
    engine.close()


if __name__ == "__main__":
    main()
