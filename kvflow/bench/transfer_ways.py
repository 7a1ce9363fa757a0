"""The other ways of moving the same blocks, each in one call: what kvflow is measured against.

- `Prepared`: as vLLM's own push connector does. A list of every block of every layer is prepared
  once per peer on both sides; a transfer is two arrays of indices into them, one request, one post.
- `Bare`: the library alone. The merged runs are known already; one request, one post.
- `copy`: numpy copies as many bytes within this process, in one piece.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.bench.transfer_cases import Case
from kvflow.errors import TransportError
from kvflow.layout import Int64s, Region, Runs, pair


class Moment(NamedTuple):
    """A moment of one thread: on the wall, and in its processor time; seconds."""

    wall: float
    cpu: float


def now() -> Moment:
    return Moment(time.perf_counter(), time.thread_time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one transfer.

    plan      from block ids to what the library is given.
    post      making requests, starting, polling and releasing them, without the copying.
    copy      moving bytes, inside the library.
    until_posted
              kvflow's only: from the end of the prefill, as vLLM's thread tells it, to the loop
              thread's first post: waking up, the state machine, and planning.
    cpu_work, cpu_copy
              processor time of plan and post, and of copy.
    """

    plan: float
    post: float
    copy: float
    until_posted: float = 0.0
    cpu_work: float = 0.0
    cpu_copy: float = 0.0

    @property
    def calls(self) -> float:
        """Planning and posting until all is written: what all ways do."""
        return self.plan + self.post + self.copy

    @property
    def work(self) -> float:
        """The same but for the moving of bytes."""
        return self.plan + self.post

    @property
    def cpu_calls(self) -> float:
        return self.cpu_work + self.cpu_copy


def between(start: Moment, planned: Moment, made: Moment, copied: Moment, ended: Moment) -> Times:
    """Of one request: it was made, its bytes were copied, it was released."""
    return Times(
        plan=planned.wall - start.wall,
        post=(made.wall - planned.wall) + (ended.wall - copied.wall),
        copy=copied.wall - made.wall,
        cpu_work=(made.cpu - start.cpu) + (ended.cpu - copied.cpu),
        cpu_copy=copied.cpu - made.cpu,
    )


class Agent:
    """A NIXL agent of its own, without kvflow's port; its progress thread is off, as in kvflow."""

    def __init__(self, name: str, memory: NDArray[np.uint8]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransportError(f"NIXL cannot be imported: {error}") from error
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.api: Any = nixl_agent(name, config)
        row = np.array([[memory.ctypes.data, memory.nbytes, 0]], dtype=np.uint64)
        self._registered = self.api.register_memory(row, "DRAM")

    def meet(self, metadata: bytes) -> str:
        name = self.api.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def written(self, transfer: Any) -> None:
        """Start a request and wait for its end."""
        said = self.api.transfer(transfer)
        while said == "PROC":
            said = self.api.check_xfer_state(transfer)
        if said != "DONE":
            raise TransportError(f"NIXL says {said} of a write")

    def close(self) -> None:
        self.api.deregister_memory(self._registered)


class Prepared:
    """Whole-pool lists, prepared once per peer; indices per transfer."""

    def __init__(
        self, agent: Agent, peer: str, ours: Sequence[Region], theirs: Sequence[Region]
    ) -> None:
        self._agent = agent
        self._offsets = np.arange(len(ours), dtype=np.int64)[:, None] * ours[0].blocks
        api = agent.api
        own, other = (
            api.get_xfer_descs(_every_block(regions), "DRAM") for regions in (ours, theirs)
        )
        self._lists = (
            api.prep_xfer_dlist("NIXL_INIT_AGENT", own),
            api.prep_xfer_dlist(peer, other),
        )

    def write(self, source: Sequence[int], destination: Sequence[int]) -> Times:
        """Write blocks `source` to blocks `destination`, in all layers."""
        start = now()
        indices, others = (self._indices(ids) for ids in (source, destination))
        planned = now()
        ours, theirs = self._lists
        transfer = self._agent.api.make_prepped_xfer("WRITE", ours, indices, theirs, others)
        made = now()
        self._agent.written(transfer)
        copied = now()
        transfer.release()
        return between(start, planned, made, copied, now())

    def _indices(self, ids: Sequence[int]) -> Int64s:
        indices: Int64s = (self._offsets + np.asarray(ids, dtype=np.int32)[None, :]).ravel()
        return indices

    def close(self) -> None:
        for each in self._lists:
            each.release()


class Bare:
    """Runs that are merged already, in one request."""

    def __init__(
        self,
        agent: Agent,
        peer: str,
        ours: Sequence[Region],
        theirs: Sequence[Region],
        case: Case,
    ) -> None:
        self._agent = agent
        self._peer = peer
        (runs,) = pair(ours, theirs, range).plan([case.group()])
        self.runs: Runs = runs
        self._rows = tuple(
            np.stack([each, runs.length, np.zeros_like(each)], axis=1)
            for each in (runs.source, runs.destination)
        )

    def write(self) -> Times:
        start = now()
        source, destination = (self._agent.api.get_xfer_descs(rows, "DRAM") for rows in self._rows)
        transfer = self._agent.api.initialize_xfer("WRITE", source, destination, self._peer)
        made = now()
        self._agent.written(transfer)
        copied = now()
        transfer.release()
        return between(start, start, made, copied, now())


def copy(target: NDArray[np.uint8], memory: NDArray[np.uint8], size: int) -> Times:
    """`size` bytes from the start of `memory` to that of `target`."""
    start = now()
    np.copyto(target[:size], memory[:size])
    ended = now()
    return between(start, start, start, ended, ended)


def _every_block(regions: Sequence[Region]) -> NDArray[np.uint64]:
    """(address, bytes, device) of every block, region by region."""
    rows = np.zeros((len(regions), regions[0].blocks, 3), dtype=np.uint64)
    for nth, region in enumerate(regions):
        rows[nth, :, 0] = region.base + np.arange(region.blocks) * region.stride_bytes
        rows[nth, :, 1] = region.block_bytes
    return rows.reshape(-1, 3)
