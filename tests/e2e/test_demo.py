"""Real engines: tokens against a monolithic run, under load, and after requests that must fail."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from kvflow.demo.engines import EnginePair, Json
from kvflow.demo.report import Trial, Verdict
from kvflow.demo.requests import (
    Client,
    Completion,
    Dispatch,
    Endpoints,
    Exchange,
    Naming,
    decode_params,
    load,
    prefill_params,
    prompts,
)
from kvflow.demo.run import judged

pytestmark = pytest.mark.e2e

Result = TypeVar("Result")
Prompt = Sequence[int]

BOTH_ORDERS = pytest.mark.parametrize("dispatch", list(Dispatch), ids=lambda d: d.value)
FAILURE_TIMEOUT_S = 60.0
DEMO_TIMEOUT_S = 280.0
DEMO = [sys.executable, "-c", "from kvflow.cli import main; raise SystemExit(main())", "demo"]


def with_client(endpoints: Endpoints, work: Callable[[Client], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        async with Client(endpoints) as client:
            return await work(client)

    return asyncio.run(run())


def verdicts_of(
    directory: Path,
    dispatch: Dispatch,
    monolithic: Sequence[Completion],
    exchanges: Sequence[Exchange],
) -> list[Verdict]:
    trials = [
        Trial(
            number=number,
            dispatch=dispatch,
            prompt_tokens=0,
            monolithic=alone,
            exchange=exchange,
        )
        for number, (alone, exchange) in enumerate(zip(monolithic, exchanges, strict=True), start=1)
    ]
    return asyncio.run(judged(trials, directory))


def assert_all_good(verdicts: Sequence[Verdict]) -> None:
    """Token-identical, and the KV of each was received by push."""
    problems = {verdict.trial.number: verdict.problem for verdict in verdicts if verdict.problem}
    assert not problems


def assert_one_request_is_good(endpoints: Endpoints, directory: Path, dispatch: Dispatch) -> None:
    prompt = prompts(1, shortest=300, seed=7)[0]

    async def work(client: Client) -> tuple[Completion, Exchange]:
        alone = await client.monolithic(prompt)
        return alone, await client.disaggregated(prompt, dispatch=dispatch)

    alone, exchange = with_client(endpoints, work)
    assert_all_good(verdicts_of(directory, dispatch, [alone], [exchange]))


@BOTH_ORDERS
def test_tokens_are_those_of_a_monolithic_run(
    endpoints: Endpoints, trace_directory: Path, dispatch: Dispatch
) -> None:
    asked = prompts(8, seed=2)

    async def work(client: Client) -> tuple[list[Completion], list[Exchange]]:
        return (
            [await client.monolithic(prompt) for prompt in asked],
            [await client.disaggregated(prompt, dispatch=dispatch) for prompt in asked],
        )

    assert_all_good(
        verdicts_of(trace_directory, dispatch, *with_client(endpoints, work)),
    )


@BOTH_ORDERS
def test_the_same_request_id_on_both_legs_names_a_transfer(
    endpoints: Endpoints, trace_directory: Path, dispatch: Dispatch
) -> None:
    asked = prompts(4, seed=3)

    async def work(client: Client) -> tuple[list[Completion], list[Exchange]]:
        return (
            [await client.monolithic(prompt) for prompt in asked],
            [
                await client.disaggregated(prompt, dispatch=dispatch, naming=Naming.by_request_id())
                for prompt in asked
            ],
        )

    assert_all_good(
        verdicts_of(trace_directory, dispatch, *with_client(endpoints, work)),
    )


@BOTH_ORDERS
def test_fifty_requests_at_three_per_second_are_token_identical(
    endpoints: Endpoints, trace_directory: Path, dispatch: Dispatch
) -> None:
    asked = [prompts(1, shortest=1024, seed=100 + number)[0] for number in range(50)]

    async def work(client: Client) -> tuple[list[Completion], list[Exchange]]:
        alone = [await client.monolithic(prompt) for prompt in asked]
        return alone, await load(client, asked, per_s=3.0, dispatch=dispatch)

    assert_all_good(
        verdicts_of(trace_directory, dispatch, *with_client(endpoints, work)),
    )


ABSENT = object()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_port", ABSENT),
        ("remote_port", "5600"),
        ("remote_port", -1),
        ("remote_port", 70_000),
        ("remote_host", ABSENT),
        ("remote_host", 17),
        ("transfer_id", 17),
        ("transfer_id", ["a", "b"]),
        ("transfer_id", ""),
        ("transfer_id", "x" * 10_000),
    ],
    ids=lambda part: "absent" if part is ABSENT else str(part)[:12],
)
def test_a_decode_leg_with_a_wrong_parameter_fails_alone(
    engine_pair: EnginePair,
    endpoints: Endpoints,
    trace_directory: Path,
    key: str,
    value: Json,
) -> None:
    params = {**decode_params(endpoints, Naming.by_transfer_id()), key: value}
    if value is ABSENT:
        del params[key]

    async def work(client: Client) -> Completion:
        prompt = prompts(1, shortest=200, seed=5)[0]
        return await client.complete(endpoints.consumer_url, prompt, params=params)

    began = time.monotonic()
    wrong = with_client(endpoints, work)
    assert wrong.http_status is not None
    assert 400 <= wrong.http_status < 600
    assert time.monotonic() - began < FAILURE_TIMEOUT_S
    assert all(engine.is_running() for engine in engine_pair.engines)
    assert_one_request_is_good(endpoints, trace_directory, Dispatch.CONCURRENT)


@pytest.mark.parametrize("transfer_id", [17, ["a"], "", "x" * 10_000], ids=lambda v: str(v)[:12])
def test_a_prefill_leg_with_a_wrong_transfer_id_leaves_the_producer_serving(
    engine_pair: EnginePair, endpoints: Endpoints, trace_directory: Path, transfer_id: Json
) -> None:
    params = {**prefill_params(Naming()), "transfer_id": transfer_id}

    async def work(client: Client) -> Completion:
        prompt = prompts(1, shortest=200, seed=6)[0]
        return await client.complete(endpoints.producer_url, prompt, tokens=1, params=params)

    answer = with_client(endpoints, work)
    assert answer.http_status is not None, "any answer will do; no answer will not"
    assert all(engine.is_running() for engine in engine_pair.engines)
    assert_one_request_is_good(endpoints, trace_directory, Dispatch.SEQUENTIAL)


def test_the_command_reports_json_and_succeeds(tmp_path: Path) -> None:
    ran = subprocess.run(
        [*DEMO, "--json", "--requests", "2", "--trace", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["ok"]
    assert (result["identical"], result["total"]) == (4, 4)
    assert [request["dispatch"] for request in result["requests"]] == (
        ["concurrent"] * 2 + ["sequential"] * 2
    )
    assert all(request["received"] for request in result["requests"])
    assert all(request["kv_bytes"] for request in result["requests"])
    assert ran.stderr.splitlines()[-1] == "demo: 4/4 requests token-identical"
    assert not processes_that_know(tmp_path)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_a_signal_while_loading_ends_everything(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    command = subprocess.Popen(
        [*DEMO, "--trace", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    with command, command.stderr as notes:
        for line in notes:
            if "importing vLLM" in line:
                break
        assert processes_that_know(tmp_path)
        command.send_signal(number)
        notes.read()
        assert command.wait(DEMO_TIMEOUT_S) == status
    assert not processes_that_know(tmp_path)


def processes_that_know(directory: Path) -> list[int]:
    """Processes whose environment names the directory: engines with traces in it, and workers."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            known = environ.read_bytes()
        except OSError:
            continue  # it has ended, or is somebody else's
        if f"KVFLOW_TRACE={directory}".encode() in known:
            found.append(int(environ.parent.name))
    return found
