"""The worker half: hands step events to the loop thread, and its reports to vLLM."""

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvflow.connector.groups import transferred
from kvflow.connector.memory import facts_of, regions_of
from kvflow.connector.metadata import NewHellos, StepEvents, WorkerHello
from kvflow.connector.staging import HostStaging
from kvflow.connector.supported import excluded_layers, prompt_tokens_max
from kvflow.core.events import PrefillAdvanced
from kvflow.ids import AgentName, Rank, new_incarnation
from kvflow.io.coordinates import Identity
from kvflow.io.gates import Ready
from kvflow.io.nixl_port import NixlPort
from kvflow.io.seal import Seal
from kvflow.io.transfer_loop import TransferLoop
from kvflow.io.window import Inspection
from kvflow.observe.history import History, watching
from kvflow.observe.log import get_logger
from kvflow.observe.meter import Meter
from kvflow.observe.metrics import Reading
from kvflow.observe.trace import from_environment
from kvflow.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_REST_FIRST_MS = 1.0
_READ_S = 0.25
"""So often counts are read while steps are made, and whenever a transfer has ended: an engine that
has nothing left to do makes no further step."""
_REST_MOST_MS = 1000.0
"""Far above any sensible `idle_wait_ms`."""

loops_here: dict[str, TransferLoop] = {}
"""By engine id: the loops of workers that live in this process, as vLLM's do with one rank."""


class WorkerHalf:
    """One worker's transfers."""

    def __init__(
        self,
        config: "VllmConfig",
        kv_config: KVCacheConfig,
        engine_id: str,
        settings: Settings,
        seal: Seal,
    ) -> None:
        self._config = config
        self._kv_config = kv_config
        self._engine_id = engine_id
        self._settings = settings
        self._rank = Rank(get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        self._caches: dict[str, torch.Tensor] = {}
        self._staging: HostStaging | None = None
        self._advanced: tuple[PrefillAdvanced, ...] = ()
        self._rest_ms = _REST_FIRST_MS
        self._hello: bytes | None = None
        self._changed_hello: bytes | None = None
        fields = {"engine": engine_id[:8], "rank": str(self._rank)}
        self._log = get_logger("worker", **fields)
        meter = Meter(str(self._rank))
        self._read_at = 0.0
        self._has_news = False
        trace = from_environment(engine_id, self._rank)
        history = History() if settings.inspect else None
        host = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        self.loop = TransferLoop(
            settings=settings,
            seal=seal,
            make_port=self._make_port,
            observer=watching(history, trace, meter, **fields),
            meter=meter,
            name=f"kvflow-{self._rank}",
            inspection=Inspection(host=host, history=history) if history is not None else None,
        )
        loops_here[engine_id] = self.loop

    # -- memory ------------------------------------------------------------------------------------

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Register the KV caches, or copies of them, and start looking for news."""
        transfer = self._config.kv_transfer_config
        assert transfer is not None
        on_host = all(cache.device.type == "cpu" for cache in caches.values())
        if transfer.kv_buffer_device == "cpu" and not on_host:
            groups = [self._kv_config.kv_cache_groups[i] for i in transferred(self._kv_config)]
            layers = [group.layer_names for group in groups]
            self._staging = HostStaging(caches, layers, self._kv_config.num_blocks)
            caches = self._staging.host
        self._caches = caches
        self._hello = self._open()

    def copy_with(self, operation: CopyBlocksOp) -> None:
        """vLLM's operation between device and host, for a staging buffer."""
        if self._staging is not None:
            self._staging.copy_with(operation)

    def suspend(self) -> None:
        """Before vLLM unmaps the caches: end what is live and deregister."""
        self.loop.suspend()
        self._hello = None

    def resume(self) -> None:
        """After vLLM mapped them again: register, as a new incarnation."""
        if self._hello is None and self._caches:
            self._hello = self._changed_hello = self._open()

    def hello(self) -> WorkerHello | None:
        """This worker's coordinates, for the side channel."""
        return WorkerHello(self._hello, self.loop.window) if self._hello is not None else None

    def take_changed_hello(self) -> NewHellos | None:
        """The same after a wake-up, once."""
        payload, self._changed_hello = self._changed_hello, None
        return NewHellos({self._rank: payload}) if payload is not None else None

    def close(self) -> None:
        """Tell the peers, deregister, end the thread. Idempotent."""
        loops_here.pop(self._engine_id, None)
        self.loop.close()

    def _open(self) -> bytes:
        regions = regions_of(self._caches, self._config, self._kv_config, self._rank)
        identity = Identity(
            engine_id=self._engine_id,
            incarnation=new_incarnation(),
            rank=self._rank,
            facts=facts_of(self._config, self._kv_config),
            regions=regions,
            prompt_tokens_max=prompt_tokens_max(self._config),
        )
        hello = self.loop.open(identity)
        self._log.info(
            "memory registered",
            incarnation=identity.incarnation,
            layers=len(regions),
            not_moved=" ".join(excluded_layers(self._kv_config)) or "none",
            blocks=regions[0].blocks,
            encodings=" | ".join(sorted({region.encoding for region in regions})),
            memory=regions[0].memory,
            hello_bytes=len(hello),
        )
        return hello

    def _make_port(self, identity: Identity) -> NixlPort:
        name = AgentName(f"{identity.engine_id[:32]}/{identity.rank}/{identity.incarnation}")
        return NixlPort(name, backends=self._settings.nixl_backends)

    # -- steps -------------------------------------------------------------------------------------

    def withdraw(self, step: StepEvents) -> None:
        """vLLM has taken blocks away that this step may write to: see that nothing reads them."""
        if step.withdrawn:
            self.loop.withdraw(step.withdrawn)

    def take(self, step: StepEvents) -> None:
        """What the scheduler says happened. Host copies are made of complete prompts only."""
        if self._staging is not None:
            self._staging.note(step.events)
        else:
            self._advanced = step.advanced
        self.loop.submit(step.events)
        self.loop.model_runs = step.computes
        if step.events or step.computes:
            self._rest_ms = _REST_FIRST_MS

    def made(self) -> None:
        """The step has been made: what it computes is complete, or will be soon on a device."""
        advanced, self._advanced = self._advanced, ()
        if not advanced:
            return
        ready = self._when_computed()
        if ready is None:
            self.loop.submit(advanced)
        else:
            self.loop.submit_when(ready, advanced)

    def _when_computed(self) -> Ready | None:
        """Asks the device whether it has done what it was given so far. None: it always has."""
        device = next(iter(self._caches.values())).device
        if device.type == "cpu":
            return None
        event = torch.Event(device)
        event.record()
        query: Ready = event.query
        return query

    def rest(self, forward_context: Any) -> None:
        """In a step without model work there is nothing to do but to wait for news.

        The longer nothing happens, the longer: the wait doubles from step to step.
        """
        if forward_context.attn_metadata is None:
            self.loop.outbox.wait(min(self._rest_ms, self._settings.idle_wait_ms) / 1000)
            self._rest_ms = min(2 * self._rest_ms, _REST_MOST_MS)

    def results(self) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        self.loop.model_runs = False
        sent, received = self.loop.outbox.take()
        if sent or received:
            self._rest_ms = _REST_FIRST_MS
            self._has_news = True
        if self._staging is not None:
            for request_id, reason in received:
                self._staging.arrived(request_id, complete=reason is None)
        return KVConnectorTransferResults(
            finished_sending=set(sent),
            finished_recving={request_id for request_id, _ in received},
            failed_recving={request_id for request_id, reason in received if reason},
        )

    def read(self) -> Reading | None:
        """What has changed in the counts since the last reading, if it is time for one."""
        now = time.monotonic()
        if not self._has_news and now - self._read_at < _READ_S:
            return None
        self._has_news, self._read_at = False, now
        return self.loop.read_meter()
