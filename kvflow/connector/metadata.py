"""What travels between vLLM's scheduler and its workers, inside one engine."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvflow.core.events import Event, PrefillAborted, PrefillAdvanced, PrefillPreempted
from kvflow.ids import Address, Rank


@dataclass(frozen=True, slots=True)
class StepEvents(KVConnectorMetadata):
    """Scheduler -> every worker, once per step.

    withdrawn  blocks of running requests that vLLM has taken away: before the step reuses them.
    events     what else happened, in order: when the step begins.
    advanced   what the step computes: when it has been made.
    computes   whether the model runs in this step.
    """

    events: tuple[Event, ...] = ()
    withdrawn: tuple[PrefillPreempted | PrefillAborted, ...] = ()
    advanced: tuple[PrefillAdvanced, ...] = ()
    computes: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, at start: the worker's coordinates, encoded, and its window, if any."""

    payload: bytes
    window: Address | None = None


@dataclass(frozen=True, slots=True)
class NewHellos(KVConnectorWorkerMetadata):
    """Worker -> scheduler, after a wake-up: the workers' new coordinates, encoded."""

    payloads: dict[Rank, bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "NewHellos":
        """Those of two workers."""
        assert isinstance(other, NewHellos)
        return NewHellos(self.payloads | other.payloads)
