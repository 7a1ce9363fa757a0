"""What vLLM's scheduler sees of requests that kvflow has to do with: counted, and traced.

Rules: decides nothing; a request without parameters for a transfer costs one look at them.

The idea: a decode leg's load is followed through vLLM's own hooks, so that tokens which were to
come from a producer and are computed here instead are counted whatever the reason was.
"""

import enum
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.tracing import SpanKind, extract_trace_context, instrument_manual

from kvflow.connector import params as p
from kvflow.connector.groups import Group, tokens_to_share
from kvflow.errors import ConfigurationError
from kvflow.observe.metrics import SCHEDULER, Reading
from kvflow.observe.trace import TraceWriter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_RECEIVED = "kvflow_prompt_tokens_received_total"
_COMPUTED = "kvflow_prompt_tokens_computed_locally_total"
_WAITED = "kvflow_requests_waiting_for_room_total"


class _Stage(enum.Enum):
    LOADING = enum.auto()
    LANDED = enum.auto()
    PREEMPTED = enum.auto()
    COMPUTED = enum.auto()


@dataclass(slots=True)
class _Load:
    """A decode leg's load: how far it is, and how many tokens it is of.

    request  kept while it is loading, if its client is traced.
    """

    stage: _Stage
    tokens: int
    began_ns: int = 0
    request: "Request | None" = None


@dataclass(slots=True)
class _Traced:
    """A request whose next step is of interest."""

    request: "Request"
    transfer_id: str
    state: str = "arrived"


class Account:
    """Every request with parameters of ours, from its arrival to its end.

    recomputes  whether vLLM computes a prompt whose load has failed, rather than fail it.
    trace       where arrivals, first steps and first tokens are written; None: nowhere.
    """

    def __init__(
        self,
        *,
        groups: Sequence[Group],
        recomputes: bool,
        randomized: bool,
        trace: TraceWriter | None = None,
    ) -> None:
        self._groups = groups
        self._recomputes = recomputes
        self._randomized = randomized
        self._trace = trace
        self._loads: dict[str, _Load] = {}
        self._cached: dict[str, int] = {}
        self._traced: dict[str, _Traced] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()

    # -- vLLM's hooks ------------------------------------------------------------------------------

    def arrived(self, request: "Request") -> None:
        """vLLM's scheduler has taken a request."""
        if self._trace is None or not _is_ours(request):
            return
        traced = _Traced(request, self._transfer_id(request))
        self._traced[request.request_id] = traced
        wants = p.wants_remote_prefill(request.kv_transfer_params)
        self._trace.request(
            traced.transfer_id,
            request.request_id,
            "",
            "arrived",
            {
                "role": "consumer" if wants else "producer",
                "tokens": request.num_prompt_tokens,
                "arrival": round(request.arrival_time, 6),
            },
        )

    def asked(self, request: "Request", cached: int, answer: int | None) -> None:
        """How many tokens beyond the cached ones a load will bring; None: there is no room."""
        if not p.wants_remote_prefill(request.kv_transfer_params):
            return
        if answer is None:
            self._counts[_WAITED,] += 1
        else:
            self._cached[request.request_id] = cached

    def allocated(self, request: "Request", external: int) -> None:
        """Blocks are there; so many tokens of them are to be loaded."""
        if not p.wants_remote_prefill(request.kv_transfer_params):
            return
        id_ = request.request_id
        cached = self._cached.pop(id_, 0)
        load = self._loads.get(id_)
        if external > 0:
            traced = request if request.trace_headers else None
            self._loads[id_] = _Load(_Stage.LOADING, external, time.time_ns(), traced)
        elif load is None:
            missing = max(tokens_to_share(request, self._groups) - cached, 0)
            self._loads[id_] = _Load(_Stage.COMPUTED, missing)
            self._computes("few_tokens", missing)
        elif load.stage is _Stage.PREEMPTED:
            load.stage = _Stage.COMPUTED
            self._computes("preempted", load.tokens)

    def stepped(self, output: "SchedulerOutput") -> None:
        """vLLM has decided what a step computes."""
        for id_ in output.preempted_req_ids or ():
            load = self._loads.get(id_)
            if load is not None and load.stage is _Stage.LANDED:
                load.stage = _Stage.PREEMPTED
        for id_, traced in list(self._traced.items()):
            if traced.state == "arrived" and id_ in output.num_scheduled_tokens:
                self._tell(traced, "scheduled")
            self._tell_first_token(traced)

    def reported(self, output: "KVConnectorOutput") -> None:
        """The workers' reports: loads that have ended."""
        failed = output.failed_recving or ()
        for id_ in output.finished_recving or ():
            load = self._loads.get(id_)
            if load is None or load.stage is not _Stage.LOADING:
                continue
            if load.request is not None:
                self._tell_span(load, load.request, "failed" if id_ in failed else "landed")
                load.request = None
            if id_ not in failed:
                load.stage = _Stage.LANDED
                self._counts[_RECEIVED,] += load.tokens
                continue
            load.stage = _Stage.COMPUTED
            if self._recomputes:
                self._computes("load_failed", load.tokens)

    def finished(self, request: "Request") -> None:
        """A request has ended."""
        self._loads.pop(request.request_id, None)
        self._cached.pop(request.request_id, None)
        traced = self._traced.pop(request.request_id, None)
        if traced is not None:
            self._tell_first_token(traced)
            self._tell(traced, "finished", reason=request.status.name.lower())

    # -- reading -----------------------------------------------------------------------------------

    def read(self) -> Reading:
        """What has been counted since the last call."""
        counts, self._counts = self._counts, Counter()
        return Reading(counts={(name, SCHEDULER, *rest): n for (name, *rest), n in counts.items()})

    def close(self) -> None:
        """Write nothing more. Idempotent."""
        if self._trace is not None:
            self._trace.close()

    # -- the rest ----------------------------------------------------------------------------------

    def _computes(self, why: str, tokens: int) -> None:
        if tokens:
            self._counts[_COMPUTED, why] += tokens

    def _tell_span(self, load: _Load, request: "Request", outcome: str) -> None:
        """An OpenTelemetry span below the client's, beside vLLM's own; nothing without a tracer."""
        instrument_manual(
            span_name="kvflow.load",
            start_time=load.began_ns,
            end_time=time.time_ns(),
            attributes={
                "kvflow.transfer_id": self._transfer_id(request),
                "kvflow.outcome": outcome,
                "kvflow.tokens": load.tokens,
                "gen_ai.request.id": request.request_id,
            },
            context=extract_trace_context(request.trace_headers),
            kind=SpanKind.CLIENT,
        )

    def _tell_first_token(self, traced: _Traced) -> None:
        if traced.state != "first_token" and traced.request.num_output_tokens > 0:
            self._tell(traced, "first_token")

    def _tell(self, traced: _Traced, state: str, **fields: object) -> None:
        assert self._trace is not None
        id_ = traced.request.request_id
        self._trace.request(traced.transfer_id, id_, traced.state, state, fields)
        traced.state = state

    def _transfer_id(self, request: "Request") -> str:
        """Empty where the parameters name none: that load is refused anyway."""
        params, id_ = request.kv_transfer_params, request.request_id
        assert params is not None
        try:
            if p.wants_remote_prefill(params):
                return p.remote(params, id_, randomized=self._randomized).transfer_id
            return p.prefill_transfer_id(params, id_, randomized=self._randomized)
        except ConfigurationError:
            return ""


def _is_ours(request: "Request") -> bool:
    params = request.kv_transfer_params
    return p.wants_remote_prefill(params) or p.wants_remote_decode(params)
