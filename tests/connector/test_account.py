"""What the scheduler half's account counts and traces, through vLLM's hooks."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvflow.connector.account import Account
from kvflow.observe.trace import TraceWriter

from .fakes import BLOCK, DECODE, FULL, PREFILL, FakeRequest, step_output

RECEIVED = ("kvflow_prompt_tokens_received_total", "scheduler")
COMPUTED = ("kvflow_prompt_tokens_computed_locally_total", "scheduler")
WAITED = ("kvflow_requests_waiting_for_room_total", "scheduler")
PROMPT = 5 * BLOCK


@dataclass
class Traced(FakeRequest):
    """What a trace reads beside it."""

    arrival_time: float = 1000.25
    num_output_tokens: int = 0


def make(*, recomputes: bool = True, trace: TraceWriter | None = None) -> Account:
    return Account(groups=(FULL,), recomputes=recomputes, randomized=True, trace=trace)


def load(account: Account, request: Any, external: int, cached: int = 0) -> None:
    account.asked(request, cached, external)
    account.allocated(request, external)


def end(account: Account, *ended: str, failed: tuple[str, ...] = ()) -> None:
    output: Any = SimpleNamespace(finished_recving={*ended, *failed}, failed_recving={*failed})
    account.reported(output)


def test_tokens_whose_kv_has_landed_are_counted_as_received() -> None:
    account, request = make(), FakeRequest(DECODE)
    load(account, request, PROMPT - BLOCK, cached=BLOCK)
    assert not account.read()
    end(account, request.request_id)
    end(account, request.request_id)
    assert account.read().counts == {RECEIVED: PROMPT - BLOCK}
    assert not account.read()


@pytest.mark.parametrize("recomputes", [True, False])
def test_tokens_of_a_failed_load_are_computed_here_unless_the_request_fails(
    recomputes: bool,
) -> None:
    account, request = make(recomputes=recomputes), FakeRequest(DECODE)
    load(account, request, PROMPT)
    end(account, failed=(request.request_id,))
    account.allocated(request, 0)  # type: ignore[arg-type]
    expected = {(*COMPUTED, "load_failed"): PROMPT} if recomputes else {}
    assert account.read().counts == expected


def test_a_load_that_was_not_worth_it_is_computed_here_as_far_as_nothing_is_cached() -> None:
    account, request = make(), FakeRequest(DECODE)
    load(account, request, 0, cached=2 * BLOCK)
    assert account.read().counts == {(*COMPUTED, "few_tokens"): PROMPT - 2 * BLOCK}


def test_a_prompt_that_is_all_cached_is_neither_received_nor_computed() -> None:
    account, request = make(), FakeRequest(DECODE)
    load(account, request, 0, cached=PROMPT)
    account.allocated(request, 0)  # type: ignore[arg-type]
    assert not account.read()


def test_what_had_landed_and_is_computed_after_a_preemption_is_counted() -> None:
    account, request = make(), FakeRequest(DECODE)
    load(account, request, PROMPT)
    end(account, request.request_id)
    account.allocated(request, 0)  # type: ignore[arg-type]
    account.read()
    account.stepped(step_output(preempted={request.request_id}))
    account.allocated(request, 0)  # type: ignore[arg-type]
    account.allocated(request, 0)  # type: ignore[arg-type]
    assert account.read().counts == {(*COMPUTED, "preempted"): PROMPT}


def test_what_is_loaded_once_more_after_a_preemption_is_received_twice() -> None:
    account, request = make(), FakeRequest(DECODE)
    load(account, request, PROMPT)
    end(account, request.request_id)
    account.stepped(step_output(preempted={request.request_id}))
    load(account, request, PROMPT)
    end(account, request.request_id)
    assert account.read().counts == {RECEIVED: 2 * PROMPT}


def test_each_question_without_room_is_counted() -> None:
    account, request = make(), FakeRequest(DECODE)
    for _ in range(3):
        account.asked(request, 0, None)  # type: ignore[arg-type]
    assert account.read().counts == {WAITED: 3}


@pytest.mark.parametrize("params", [None, {}, PREFILL])
def test_other_requests_count_nothing(params: Any) -> None:
    account, request = make(), FakeRequest(params)
    load(account, request, 0)
    end(account, request.request_id)
    account.finished(request)  # type: ignore[arg-type]
    assert not account.read()


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    account = make()
    for number in range(100):
        request = FakeRequest(DECODE, request_id=f"r{number}-12345678")
        load(account, request, PROMPT)
        account.finished(request)  # type: ignore[arg-type]
    assert not account._loads
    assert not account._cached


# -- the trace -------------------------------------------------------------------------------------


def trace_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("params", "role"), [(PREFILL, "producer"), (DECODE, "consumer")])
def test_a_request_is_traced_from_its_arrival_to_its_end(
    tmp_path: Path, params: Any, role: str
) -> None:
    path = tmp_path / "trace"
    account = make(trace=TraceWriter(str(path), engine_id="e", rank="scheduler"))
    request: Any = Traced(params)
    account.arrived(request)
    account.stepped(step_output())
    account.stepped(step_output(new={request.request_id: (0, PROMPT, ([],))}))
    account.stepped(step_output())
    request.num_output_tokens = 1
    account.stepped(step_output())
    account.stepped(step_output())
    account.finished(request)
    lines = trace_of(path)
    assert [line["trigger"] for line in lines] == [
        "arrived",
        "scheduled",
        "first_token",
        "finished",
    ]
    assert [line["from"] for line in lines] == ["", "arrived", "scheduled", "first_token"]
    assert {(line["id"], line["request"]) for line in lines} == {("t", request.request_id)}
    assert lines[0]["role"] == role
    assert (lines[0]["tokens"], lines[0]["arrival"]) == (PROMPT, 1000.25)
    assert lines[-1]["reason"] == "finished_length_capped"
    assert not account._traced


def test_a_first_token_that_no_further_step_has_seen_is_told_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    account = make(trace=TraceWriter(str(path), engine_id="e", rank="scheduler"))
    request: Any = Traced(PREFILL)
    account.arrived(request)
    account.stepped(step_output(new={request.request_id: (0, PROMPT, ([],))}))
    request.num_output_tokens = 1
    account.finished(request)
    triggers = [line["trigger"] for line in trace_of(path)]
    assert triggers == ["arrived", "scheduled", "first_token", "finished"]


def test_a_leg_whose_parameters_name_no_transfer_is_traced_without_one(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    account = make(trace=TraceWriter(str(path), engine_id="e", rank="scheduler"))
    request: Any = Traced({"do_remote_prefill": True})
    account.arrived(request)
    account.finished(request)
    assert [line["id"] for line in trace_of(path)] == ["", ""]


def test_requests_without_parameters_are_not_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    account = make(trace=TraceWriter(str(path), engine_id="e", rank="scheduler"))
    request: Any = Traced(None)
    account.arrived(request)
    account.finished(request)
    account.close()
    assert path.read_text() == ""


# -- OpenTelemetry ---------------------------------------------------------------------------------

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    """A provider can be set once in a process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    otel.set_tracer_provider(provider)
    return exporter


@pytest.mark.parametrize("outcome", ["landed", "failed"])
def test_a_load_of_a_traced_request_is_a_span_below_its_clients(
    spans: InMemorySpanExporter, outcome: str
) -> None:
    spans.clear()
    account = make()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    request = FakeRequest(DECODE, trace_headers=headers)
    before = time.time_ns()
    load(account, request, PROMPT)
    assert not spans.get_finished_spans()
    if outcome == "failed":
        end(account, failed=(request.request_id,))
    else:
        end(account, request.request_id)
    (span,) = spans.get_finished_spans()
    assert span.name == "kvflow.load"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    assert dict(span.attributes) == {
        "kvflow.transfer_id": "t",
        "kvflow.outcome": outcome,
        "kvflow.tokens": PROMPT,
        "gen_ai.request.id": request.request_id,
    }


def test_a_load_that_nobody_traces_is_no_span(spans: InMemorySpanExporter) -> None:
    spans.clear()
    account, request = make(), FakeRequest(DECODE)
    load(account, request, PROMPT)
    end(account, request.request_id)
    assert not spans.get_finished_spans()
