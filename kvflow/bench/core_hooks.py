"""What an engine step spends in kvflow's hooks, with so many transfers live. Needs vLLM.

The two halves of the connector are real, and get what vLLM's scheduler and worker would give them:
in each step one request comes, one ends, and reports arrive. The loop thread gets its events and
does nothing with them (`kvflow.bench.core` measures that).
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvflow.bench.core import BLOCK_TOKENS, BLOCKS
from kvflow.io.seal import Seal
from kvflow.settings import Settings

WARM_UP_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class HookTimes:
    """Seconds in the hooks per step, sorted; of a prefill or a decode engine.

    wall_s  as a clock on the wall shows, hence with whatever else the machine did meanwhile.
    cpu_s   on a processor.
    """

    role: str
    live: int
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


def quantile(times: tuple[float, ...], share: float) -> float:
    """Of sorted times, the one that `share` of all do not exceed."""
    return times[min(int(share * len(times)), len(times) - 1)]


@dataclass(slots=True, kw_only=True)
class _Request:
    """What the halves read of a `vllm.v1.request.Request`."""

    request_id: str
    kv_transfer_params: dict[str, Any]
    status: Any
    num_prompt_tokens: int = BLOCKS * BLOCK_TOKENS
    num_computed_tokens: int = BLOCKS * BLOCK_TOKENS
    prompt_token_ids: tuple[int, ...] = tuple(range(BLOCKS * BLOCK_TOKENS))
    lora_request: None = None


@dataclass(slots=True, kw_only=True)
class _Blocks:
    """What they read of its `KVCacheBlocks`."""

    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


class _Halves:
    """One engine's connector, without vLLM around it. Raises `ImportError` where vLLM is missing.

    `step` yields once per step, when what vLLM does between two steps is to be done.
    """

    role: str
    kv_role: str

    def __init__(self, live: int) -> None:
        from vllm.v1.request import RequestStatus

        from kvflow.connector import worker
        from kvflow.connector.groups import Group
        from kvflow.connector.scheduler import SchedulerHalf

        config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_role=self.kv_role,
                is_kv_producer=self.kv_role == "kv_producer",
                kv_load_failure_policy="fail",
                kv_buffer_device="cpu",
            ),
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(
                data_parallel_index=0, tensor_parallel_size=1, pipeline_parallel_size=1
            ),
        )
        settings = Settings(parked_max=live + 2)
        groups = (Group(index=0, block_tokens=BLOCK_TOKENS),)
        self._finished = RequestStatus.FINISHED_LENGTH_CAPPED
        self.scheduler = SchedulerHalf(config, "bench", settings, groups)
        # No process groups of torch here: there is one rank.
        alone = mock.Mock(return_value=SimpleNamespace(rank_in_group=0))
        with mock.patch.multiple(worker, get_pp_group=alone, get_tp_group=alone):
            cache_config: Any = None
            self.worker = worker.WorkerHalf(config, cache_config, "bench", settings, Seal())
        on_cpu: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.worker._caches = {"layer": on_cpu}
        self.live: deque[Any] = deque()
        self._number = 0

    def request(self, **params: object) -> Any:
        """The next one."""
        self._number += 1
        params |= {"transfer_id": f"9f1c7a52-{self._number}"}
        return _Request(
            request_id=f"cmpl-{self._number}-0-1a2b3c4d",
            kv_transfer_params=params,
            status=self._finished,
        )

    def blocks(self) -> Any:
        first = 1000 + self._number * BLOCKS
        return _Blocks(ids=list(range(first, first + BLOCKS)))

    def begin(self) -> None:
        """A request comes."""
        raise NotImplementedError

    def end(self) -> None:
        """The oldest one ends."""
        raise NotImplementedError

    def hand_over(self) -> None:
        """The step itself: what the scheduler says to the worker, and the worker's reports."""
        step = self.scheduler.step(self.scheduled())
        self.worker.withdraw(step)
        self.worker.take(step)
        self.worker.made()
        results = self.worker.results()
        reported: Any = SimpleNamespace(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=None,
        )
        self.scheduler.reported(reported)

    def scheduled(self) -> Any:
        """What vLLM's scheduler has made of the step."""
        return SimpleNamespace(
            preempted_req_ids=None,
            total_num_scheduled_tokens=1,
            num_scheduled_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
            ),
        )

    def loop_thread(self) -> None:
        """What the loop thread has reported meanwhile; not counted."""

    def steps(self, count: int) -> Iterator[tuple[float, float]]:
        """Seconds in the hooks, step by step: on the wall, and on a processor."""
        for _ in range(count):
            self.loop_thread()
            start, cpu_start = time.perf_counter(), time.thread_time()
            self.begin()
            self.hand_over()
            self.end()
            cpu_s = time.thread_time() - cpu_start
            yield time.perf_counter() - start, cpu_s

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


class _Prefill(_Halves):
    role = "prefill"
    kv_role = "kv_producer"

    def begin(self) -> None:
        request = self.request(do_remote_decode=True, do_remote_prefill=False)
        blocks = self.blocks()
        self.live.append((request, blocks))
        self.scheduler.arrived(request)
        self.scheduler.tokens_to_load(request, 0)
        self.scheduler.allocated(request, blocks, 0)

    def scheduled(self) -> Any:
        """The prompt that came last is computed as a whole."""
        output = super().scheduled()
        request, blocks = self.live[-1]
        output.num_scheduled_tokens = {request.request_id: request.num_prompt_tokens}
        output.scheduled_new_reqs = [
            SimpleNamespace(
                req_id=request.request_id, num_computed_tokens=0, block_ids=(blocks.ids,)
            )
        ]
        return output

    def end(self) -> None:
        request, blocks = self.live.popleft()
        self.scheduler.finished(request, (blocks.ids,))

    def loop_thread(self) -> None:
        self.worker.loop.outbox.sent(self.live[0][0].request_id)


class _Decode(_Halves):
    role = "decode"
    kv_role = "kv_consumer"

    def begin(self) -> None:
        request = self.request(
            do_remote_prefill=True, remote_host="10.0.0.1", remote_port=5600, remote_engine_id="p"
        )
        self.live.append(request)
        external, _ = self.scheduler.tokens_to_load(request, 0)
        assert external
        self.scheduler.allocated(request, self.blocks(), external)

    def end(self) -> None:
        self.scheduler.finished(self.live.popleft(), ([],))

    def loop_thread(self) -> None:
        self.worker.loop.outbox.received(self.live[0].request_id, None)


def hooks(live: int, steps: int) -> list[HookTimes]:
    """Both roles. Raises `ImportError` where vLLM is missing."""
    measured = []
    for make in (_Prefill, _Decode):
        halves = make(live)
        try:
            for _ in range(live):
                halves.begin()
            halves.hand_over()
            for _ in halves.steps(WARM_UP_STEPS):
                pass
            wall_s, cpu_s = (tuple(sorted(each)) for each in zip(*halves.steps(steps), strict=True))
        finally:
            halves.close()
        measured.append(HookTimes(role=make.role, live=live, wall_s=wall_s, cpu_s=cpu_s))
    return measured
