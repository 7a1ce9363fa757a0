"""The scheduler half: turns what vLLM's scheduler does into events for the workers.

Rules: decides nothing about a transfer; answers vLLM's questions about one request from that
request's parameters, and remembers only whether its load was asked for. A bad parameter never
raises into the scheduler: it becomes an event that fails that one load.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.request import RequestStatus

from kvflow import __version__
from kvflow.connector import params as p
from kvflow.connector.groups import Group, has_state, leave_last_token, tokens_to_share
from kvflow.connector.metadata import NewHellos, StepEvents, WorkerHello
from kvflow.connector.progress import Progress
from kvflow.connector.prompt import digest_of
from kvflow.connector.reception import Reception
from kvflow.core.events import (
    BlocksAllocated,
    Event,
    LoadAborted,
    LoadRefused,
    PrefillAborted,
    PrefillFinished,
    PrefillPreempted,
    PrefillsResumed,
    PrefillsStalled,
    PrefillStarted,
    ReleaseWanted,
    RequestEnded,
)
from kvflow.core.notices import Offer
from kvflow.core.producer import prefill_name
from kvflow.errors import ConfigurationError
from kvflow.ids import ATTEMPT_STRIDE, Address, RequestId, TransferId
from kvflow.io.seal import Seal
from kvflow.observe.log import get_logger
from kvflow.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Asked(enum.Enum):
    """What became of the question whether a decode leg's prompt is to be loaded."""

    LOADING = "its load was asked for"
    LANDED = "its KV has landed"
    PREEMPTED = "its KV had landed and is gone: it may be loaded once more"
    FAILED = "its load failed: whatever is missing is computed here"
    COMPUTED = "whatever is missing is computed here"


_LOADED = frozenset({Asked.LANDED, Asked.PREEMPTED, Asked.FAILED})


class SchedulerHalf:
    """One engine's requests, as far as transfers concern them.

    Invariant: a request is in `_prefills` from its first allocation to its end, in `_loads` from
    the allocation of its load until vLLM has taken the report, and in `_asked` from its first
    allocation as a decode leg to its end.
    """

    def __init__(
        self,
        config: "VllmConfig",
        engine_id: str,
        settings: Settings,
        groups: Sequence[Group],
        seal: Seal | None = None,
    ) -> None:
        assert config.kv_transfer_config is not None
        self._config = config
        self._engine_id = engine_id
        self._groups = groups
        self._randomized = not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        self._gives = config.kv_transfer_config.is_kv_producer
        self._attempts = itertools.count(ATTEMPT_STRIDE, ATTEMPT_STRIDE)
        self._events: list[Event] = []
        self._prefills: dict[RequestId, PrefillStarted] = {}
        self._progress = Progress(groups, settings)
        self._withdrawn: list[PrefillPreempted | PrefillAborted] = []
        self._loads: set[RequestId] = set()
        self._asked: dict[RequestId, Asked] = {}
        self._registers_again = settings.after_preemption == "register"
        _check_policy(settings.after_preemption, config.kv_transfer_config.kv_load_failure_policy)
        self._log = get_logger("scheduler", engine=engine_id[:8])
        self._stalled = False
        self._parked_max = settings.parked_max
        self._mode = settings.mode
        self._load_tokens_min = max(settings.recompute_below_tokens, 1)
        # Peers read host copies then, which are made when the step after the answer begins.
        self._is_staged = (
            config.kv_transfer_config.kv_buffer_device == "cpu"
            and config.device_config.device_type != "cpu"
        )
        self._reception = Reception(config, engine_id, settings, seal)

    # -- side channel ------------------------------------------------------------------------------

    def introduce(self, hellos: Mapping[tuple[int, int], WorkerHello]) -> None:
        """Serve the workers' coordinates. Raises `TransportError` if the port is taken."""
        self._reception.introduce(hellos)

    @property
    def address(self) -> Address:
        """Where the side channel listens."""
        return self._reception.address

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._reception.close()

    # -- loads -------------------------------------------------------------------------------------

    def tokens_to_load(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """How many prompt tokens a producer will deliver beyond the `computed` ones.

        None: ask again later, as many loads as may be are parked already.
        """
        if not self._may_load(request):
            return 0, False
        count = tokens_to_share(request, self._groups) - computed
        if count < self._load_tokens_min:
            return 0, False
        if len(self._loads) >= self._parked_max:
            return None, False
        return count, True

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        """vLLM allocated blocks; `external` tokens of them are to be delivered."""
        if p.wants_remote_decode(request.kv_transfer_params):
            self._prefill_started(request)
        if not self._may_load(request):
            return
        request_id = RequestId(request.request_id)
        before = self._asked.get(request_id)
        if external > 0:
            self._asked[request_id] = Asked.LOADING
            self._loads.add(request_id)
            self._events.append(self._load(request, blocks, external, before))
        elif before is Asked.PREEMPTED:
            self._asked[request_id] = Asked.LANDED
        else:
            self._asked[request_id] = Asked.COMPUTED
            self._release(request)

    def _may_load(self, request: "Request") -> bool:
        """A decode leg loads once, and once more after each preemption if it is so set."""
        asked = self._asked.get(RequestId(request.request_id))
        wants = p.wants_remote_prefill(request.kv_transfer_params)
        return wants and asked in (None, Asked.PREEMPTED)

    def _load(
        self, request: "Request", blocks: "KVCacheBlocks", external: int, before: Asked | None
    ) -> BlocksAllocated | LoadRefused:
        request_id = RequestId(request.request_id)
        attempt = next(self._attempts)
        tokens = tokens_to_share(request, self._groups)
        try:
            remote = self._remote(request)
        except ConfigurationError as error:
            self._log.warning("load refused", request=request_id, error=error)
            return LoadRefused(
                transfer_id=TransferId(request_id[:256]),
                request_id=request_id,
                attempt=attempt,
                detail=str(error),
            )
        ids = blocks.get_block_ids()
        wanted = [
            group.to_load(ids[group.index], tokens - external, tokens) for group in self._groups
        ]
        again = before is Asked.PREEMPTED
        offer = None if again or self._mode == "push" else self._offer(request)
        return BlocksAllocated(
            transfer_id=remote.transfer_id,
            request_id=request_id,
            attempt=attempt,
            address=remote.address,
            engine_id=remote.engine_id,
            blocks=tuple(tuple(ids) for _, ids in wanted),
            starts=tuple(start for start, _ in wanted),
            tokens=tokens,
            keep=self._registers_again,
            again=again,
            reads=self._mode == "pull" or offer is not None,
            offer=offer,
            prompt=digest_of(request, tokens),
        )

    def _offer(self, request: "Request") -> Offer | None:
        """What the parameters tell of a finished prefill, as its producer would say it."""
        assert request.kv_transfer_params is not None
        told = p.offer(request.kv_transfer_params)
        if told is None or len(told.blocks) <= max(group.index for group in self._groups):
            return None
        blocks = tuple(tuple(group.to_offer(told.blocks[group.index])) for group in self._groups)
        return Offer(blocks=blocks, tokens=told.tokens, prefill=told.prefill)

    def _release(self, request: "Request") -> None:
        """Nothing has to be moved: the producer need not keep its blocks."""
        try:
            remote = self._remote(request)
        except ConfigurationError as error:
            self._log.warning("no release", request=request.request_id, error=error)
            return
        self._events.append(
            ReleaseWanted(
                transfer_id=remote.transfer_id,
                request_id=RequestId(request.request_id),
                attempt=next(self._attempts),
                address=remote.address,
                engine_id=remote.engine_id,
            )
        )

    def _remote(self, request: "Request") -> p.Remote:
        assert request.kv_transfer_params is not None
        return p.remote(request.kv_transfer_params, request.request_id, randomized=self._randomized)

    # -- prefills ----------------------------------------------------------------------------------

    def arrived(self, request: "Request") -> None:
        """vLLM has taken a request; from now on its end will be told."""
        if p.wants_remote_decode(request.kv_transfer_params):
            if has_state(self._groups):
                leave_last_token(request)
            self._prefill_started(request)

    def _prefill_started(self, request: "Request") -> None:
        assert request.kv_transfer_params is not None
        request_id = RequestId(request.request_id)
        if not self._gives:
            self._log.warning(
                "prefill without transfer: kv_role is kv_consumer", request=request_id
            )
            return
        started = self._prefills.get(request_id)
        if started is None:
            try:
                transfer_id = p.prefill_transfer_id(
                    request.kv_transfer_params, request_id, randomized=self._randomized
                )
            except ConfigurationError as error:
                self._log.warning("prefill without transfer", request=request_id, error=error)
                return
            tokens = request.num_prompt_tokens
            prompt = digest_of(request, tokens)
            started = PrefillStarted(transfer_id=transfer_id, request_id=request_id, prompt=prompt)
            self._prefills[request_id] = started
            self._progress.begin(started, tokens)
        self._events.append(started)

    def _prefill_ended(
        self, request: "Request", blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = RequestId(request.request_id)
        prefill = self._prefills.pop(request_id, None)
        if prefill is None:
            return False, None
        transfer_id = prefill.transfer_id
        may_be_read = self._progress.end(request_id)
        if request.status not in _FINISHED or not any(blocks):
            aborted = PrefillAborted(transfer_id=transfer_id, request_id=request_id)
            (self._withdrawn if may_be_read else self._events).append(aborted)
            return False, None
        self._events.append(
            PrefillFinished(
                transfer_id=transfer_id,
                request_id=request_id,
                blocks=tuple(tuple(group.to_offer(blocks[group.index])) for group in self._groups),
                tokens=request.num_computed_tokens,
                is_exact=has_state(self._groups),
                prompt=prefill.prompt,
            )
        )
        return True, self._answer(request, transfer_id, blocks)

    def _answer(
        self, request: "Request", transfer_id: TransferId, blocks: tuple[list[int], ...]
    ) -> dict[str, Any]:
        """A finished prefill's parameters for the decode leg: upstream's keys, and one of ours."""
        named = {"remote_prefill": prefill_name(RequestId(request.request_id))}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_block_ids": blocks,
            "remote_engine_id": self._engine_id,
            "remote_request_id": transfer_id,
            "remote_host": self.address.host,
            "remote_port": self.address.port,
            "tp_size": self._config.parallel_config.tensor_parallel_size,
            "pp_size": self._config.parallel_config.pipeline_parallel_size,
            "remote_num_tokens": request.num_computed_tokens,
            "transfer_mode": "push",
            "kvflow": {"version": __version__},
            **({} if self._is_staged else named),
        }

    def _told(self, asked: Asked | None) -> dict[str, Any] | None:
        """A decode leg's parameters in its answer: what became of its load."""
        if asked is None:
            return None
        outcome = asked.name.lower()
        return {"kvflow": {"version": __version__, "mode": self._mode, "outcome": outcome}}

    # -- steps -------------------------------------------------------------------------------------

    def finished(
        self, request: "Request", blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; returns whether its blocks must be kept, and the answer's parameters."""
        request_id = RequestId(request.request_id)
        asked = self._asked.pop(request_id, None)
        if request_id in self._loads:
            self._events.append(LoadAborted(request_id=request_id))
        elif asked in _LOADED and self._registers_again:
            self._events.append(RequestEnded(request_id=request_id))
        elif asked is None and p.wants_remote_prefill(request.kv_transfer_params):
            self._release(request)
        must_keep, answer = self._prefill_ended(request, blocks)
        return must_keep, answer or self._told(asked)

    def step(self, output: "SchedulerOutput") -> StepEvents:
        """Everything that happened since the last step."""
        for id_ in sorted(output.preempted_req_ids or ()):
            self._preempted(RequestId(id_))
        events, self._events = self._events, []
        withdrawn, self._withdrawn = self._withdrawn, []
        return StepEvents(
            events=(*events, *self._reception.take_released(), *self._stalls(output)),
            withdrawn=tuple(withdrawn),
            advanced=self._progress.of_step(output),
            computes=output.total_num_scheduled_tokens > 0,
        )

    def _stalls(self, output: "SchedulerOutput") -> Iterator[Event]:
        """Whether prompts wait although nothing is computed; told when it changes."""
        stalled = bool(self._prefills) and not output.total_num_scheduled_tokens
        if stalled != self._stalled:
            self._stalled = stalled
            yield PrefillsStalled() if stalled else PrefillsResumed()

    def _preempted(self, request_id: RequestId) -> None:
        prefill = self._prefills.get(request_id)
        if prefill is not None:
            self._progress.preempted(request_id)
            gone = PrefillPreempted(transfer_id=prefill.transfer_id, request_id=request_id)
            self._withdrawn.append(gone)
        if self._asked.get(request_id) is not Asked.LANDED:
            return
        again = self._registers_again
        self._asked[request_id] = Asked.PREEMPTED if again else Asked.COMPUTED
        what = "asks for its KV once more" if again else "computes its prompt here"
        self._log.info(f"preempted after its KV had landed: {what}", request=request_id)

    def reported(self, output: "KVConnectorOutput") -> None:
        """The workers' reports have reached the scheduler."""
        failed = output.failed_recving
        for id_ in sorted(output.finished_recving or ()):
            request_id = RequestId(id_)
            self._loads.discard(request_id)
            if self._asked.get(request_id) is Asked.LOADING:
                self._asked[request_id] = Asked.FAILED if id_ in failed else Asked.LANDED
        if isinstance(output.kv_connector_worker_meta, NewHellos):
            self._reception.introduce_again(output.kv_connector_worker_meta)

    @property
    def has_events(self) -> bool:
        """Whether a step is needed to hand events over."""
        return bool(self._events or self._withdrawn or self._reception.has_released)


def _check_policy(after_preemption: str, policy: str) -> None:
    """A request that was loaded once, and that can be computed here, must not fail."""
    if after_preemption == "register" and policy != "recompute":
        raise ConfigurationError(
            "kv_load_failure_policy",
            policy,
            "recompute, while after_preemption is register: a preempted request whose KV the "
            "producer does not keep (any more) would fail, though it can be computed here",
        )
