"""`KVFlowConnector`: vLLM's KVConnectorBase_V1 in terms of two halves. Delegation only."""

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvflow.connector.account import Account
from kvflow.connector.groups import groups_of, transferred
from kvflow.connector.metadata import StepEvents, WorkerHello
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.connector.stats import KVFlowPromMetrics, KVFlowStats
from kvflow.connector.supported import check_supported
from kvflow.connector.worker import WorkerHalf
from kvflow.io.seal import from_file
from kvflow.observe import trace
from kvflow.observe.metrics import SCHEDULER
from kvflow.settings import parse

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVFlowConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes KV from prefill to decode engines; every request is a state machine.

    Raises `ConfigurationError` at start for a bad setting or an unsupported configuration.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None and transfer.engine_id is not None
        settings = parse(transfer.kv_connector_extra_config)
        seal = from_file(settings.shared_key_file)
        check_supported(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._account: Account | None = None
        if role is KVConnectorRole.SCHEDULER:
            groups = groups_of(kv_cache_config)
            self._scheduler = SchedulerHalf(vllm_config, transfer.engine_id, settings, groups, seal)
            self._account = Account(
                groups=groups,
                recomputes=transfer.kv_load_failure_policy == "recompute",
                randomized=not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
                trace=trace.from_environment(transfer.engine_id, SCHEDULER),
            )
        else:
            self._worker = WorkerHalf(
                vllm_config, kv_cache_config, transfer.engine_id, settings, seal
            )

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler half; a bug of the caller's in a worker."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        """The worker half; a bug of the caller's in the scheduler."""
        assert self._worker is not None
        return self._worker

    @property
    def account(self) -> Account:
        """What the scheduler sees, counted; a bug of the caller's in a worker."""
        assert self._account is not None
        return self._account

    def shutdown(self) -> None:
        if self._account is not None:
            self._account.close()
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # -- scheduler ---------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        self.account.arrived(request)
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count, loads = self.scheduler.tokens_to_load(request, num_computed_tokens)
        self.account.asked(request, num_computed_tokens, count)
        return count, loads

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self.account.allocated(request, num_external_tokens)
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        self.account.stepped(scheduler_output)
        return self.scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self.account.reported(connector_output)
        self.scheduler.reported(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.account.finished(request)
        return self.scheduler.finished(request, block_ids)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """The setting `cache_layout`; one head has no use for it."""
        model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
        if model is None or model.use_mla or transfer is None:
            return None
        return parse(transfer.kv_connector_extra_config).cache_layout or None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_events

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return transferred(self._kv_cache_config)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        hellos = {rank: hello for rank, hello in metadata.items() if isinstance(hello, WorkerHello)}
        self.scheduler.introduce(hellos)

    # -- worker ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self.worker.copy_with(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.hello()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepEvents)
        self.worker.take(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepEvents)
        self.worker.withdraw(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.rest(forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved by layer."""

    def wait_for_save(self) -> None:
        """Nothing is waited for: blocks stay pinned, or lent, until they were read."""
        self.worker.made()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_changed_hello()

    # -- metrics -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        reading = self._worker.read() if self._worker is not None else self.account.read()
        return KVFlowStats.of(reading) if reading else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KVFlowStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KVFlowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- sleep mode (vLLM 0.33) --------------------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        self.worker.suspend()

    def restore_kv_caches(self) -> None:
        self.worker.resume()
