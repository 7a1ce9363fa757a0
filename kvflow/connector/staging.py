"""Host memory between the transfer library and a device whose memory it cannot register.

With vLLM's `kv_buffer_device` set to "cpu" on another kind of device, peers see host copies of the
caches. A finished prefill is copied out before the loop thread hears of it, a load that has arrived
is copied in before vLLM hears of it, both with the operation that vLLM gives for it and in vLLM's
thread. The copies cost host memory of the caches' size, and that much time.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp

from kvflow.core.events import BlocksAllocated, Event, PrefillFinished
from kvflow.core.notices import Blocks
from kvflow.errors import ConfigurationError
from kvflow.ids import RequestId


class HostStaging:
    """Copies of one worker's caches in host memory.

    Invariant: `_loads` has the blocks of every load that was asked for and has not been reported.
    """

    def __init__(
        self, caches: dict[str, torch.Tensor], groups: Sequence[Iterable[str]], blocks: int
    ) -> None:
        """`groups`: layer names of each transferred group; `blocks`: block ids of the pool."""
        self._device = caches
        self.host = {
            layer: torch.empty_like(cache, device="cpu", pin_memory=cache.is_cuda)
            for layer, cache in caches.items()
        }
        self._groups = [[layer for layer in group if layer in caches] for group in groups]
        self._blocks = blocks
        self._copy: CopyBlocksOp | None = None
        self._loads: dict[RequestId, Blocks] = {}

    def copy_with(self, operation: CopyBlocksOp) -> None:
        """vLLM's operation of this platform."""
        self._copy = operation

    def note(self, events: Iterable[Event]) -> None:
        """What the scheduler says happened, before the loop thread hears of it."""
        for event in events:
            if isinstance(event, PrefillFinished):
                self._move(event.blocks, "d2h")
            elif isinstance(event, BlocksAllocated):
                self._loads[event.request_id] = event.blocks

    def arrived(self, request_id: RequestId, *, complete: bool) -> None:
        """A load has ended; if it is complete, its blocks go to the device."""
        blocks = self._loads.pop(request_id, ())
        if complete:
            self._move(blocks, "h2d")

    def _move(self, blocks: Blocks, direction: Literal["h2d", "d2h"]) -> None:
        if self._copy is None:
            raise ConfigurationError(
                "kv_buffer_device", "cpu", "a device for which vLLM has a copying operation"
            )
        there, back = self._device, self.host
        source, destination = (there, back) if direction == "d2h" else (back, there)
        for layers, ids in zip(self._groups, blocks, strict=True):
            kept = [block for block in ids if block]
            if not kept or not layers:
                continue
            ratio = self._device[layers[0]].shape[0] // self._blocks
            kernel = [block * ratio + nth for block in kept for nth in range(ratio)]
            self._copy(
                {layer: source[layer] for layer in layers},
                {layer: destination[layer] for layer in layers},
                kernel,
                kernel,
                direction,
            )
