"""What the scheduler half reads of vLLM's objects, and vLLM's calls to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from vllm.v1.request import RequestStatus

from kvflow.connector.groups import Group
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev
from kvflow.io.seal import Seal
from kvflow.settings import Settings
from kvflow.wire import messages as m

BLOCK = 16
FULL = Group(index=0, block_tokens=BLOCK)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
DECODE = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_host": "prefill",
    "remote_port": 5600,
    "remote_engine_id": "engine-p",
}
HELLO = m.Hello(
    agent="agent",
    engine_id="engine",
    incarnation="incarnation",
    pp_rank=0,
    tp_rank=0,
    metadata=b"",
    facts=m.Facts(
        model="tiny",
        kv_dtype="bf16",
        block_sizes=(16,),
        group_kinds=("FullAttentionSpec",),
        tp_size=1,
        pp_size=1,
        kv_layout="",
    ),
    regions=(),
)


@dataclass
class FakeRequest:
    """What the half reads of a `vllm.v1.request.Request`."""

    kv_transfer_params: Any = None
    request_id: str = "r-12345678"
    num_prompt_tokens: int = 5 * BLOCK
    num_computed_tokens: int = 5 * BLOCK
    status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    trace_headers: Mapping[str, str] | None = None
    prompt_token_ids: list[int] | None = None
    lora_request: Any = None


@dataclass
class FakeBlocks:
    """What it reads of `KVCacheBlocks`."""

    ids: list[int] = field(default_factory=lambda: [10, 11, 12, 13, 14])

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


def config(role: str, policy: str, buffer: str = "cuda") -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role,
            is_kv_producer=role != "kv_consumer",
            kv_load_failure_policy=policy,
            kv_buffer_device=buffer,
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(
            data_parallel_index=0, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
    )


def make(
    role: str = "kv_both",
    settings: Settings | None = None,
    seal: Seal | None = None,
    groups: tuple[Group, ...] = (),
    policy: str = "fail",
    buffer: str = "cuda",
) -> SchedulerHalf:
    return SchedulerHalf(
        config(role, policy, buffer), "engine-here", settings or Settings(), groups or (FULL,), seal
    )


def step(
    half: SchedulerHalf, preempted: set[str] | None = None, tokens: int = 1
) -> tuple[ev.Event, ...]:
    """A step in which vLLM computes so many tokens, of nothing that is looked at here."""
    made = half.step(step_output(preempted=preempted, tokens=tokens))
    return (*made.withdrawn, *made.events)


def step_output(
    *,
    preempted: set[str] | None = None,
    tokens: int = 1,
    new: Mapping[str, tuple[int, int, tuple[list[int], ...]]] | None = None,
    cached: Mapping[str, tuple[int, int, tuple[list[int], ...] | None]] | None = None,
    resumed: set[str] | None = None,
) -> Any:
    """vLLM's `SchedulerOutput`.

    new, cached  by request: tokens computed before, tokens of this step, new block ids per group.
    """
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        preempted_req_ids=preempted,
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={id_: each[1] for id_, each in {**new, **cached}.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=id_, num_computed_tokens=computed, block_ids=ids)
            for id_, (computed, _, ids) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=resumed or set(),
            new_block_ids=[ids for _, _, ids in cached.values()],
            num_computed_tokens=[computed for computed, _, _ in cached.values()],
        ),
    )


def kinds(events: tuple[ev.Event, ...]) -> list[str]:
    return [type(event).__name__ for event in events]


def report(half: SchedulerHalf, *ended: str, failed: tuple[str, ...] = ()) -> None:
    """Loads have ended; those in `failed` without their KV."""
    output: Any = SimpleNamespace(
        finished_recving={*ended, *failed},
        failed_recving={*failed},
        kv_connector_worker_meta=None,
    )
    half.reported(output)


def schedule(half: SchedulerHalf, request: FakeRequest, computed: int = 0) -> tuple[int, bool]:
    """As vLLM does: ask, then allocate."""
    asked: Any = request
    external, is_async = half.tokens_to_load(asked, computed)
    assert external is not None
    blocks: Any = FakeBlocks()
    half.allocated(asked, blocks, external)
    return external, is_async


def finish(half: SchedulerHalf, request: FakeRequest, blocks: list[int] | None = None) -> Any:
    asked: Any = request
    return half.finished(asked, ([1, 2, 3] if blocks is None else blocks,))
