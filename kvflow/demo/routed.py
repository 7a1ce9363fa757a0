"""`kvflow demo --router`: two producers, a consumer and the router; one producer is killed.

Chat requests of mixed lengths are streamed through the router, at random moments. In the middle one
producer gets SIGKILL while it computes. Every answer is compared with that of one engine alone; the
table says which engine served what. The exit status is 0 when all are equal.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from kvflow.demo.engines import (
    SERVED_MODEL,
    Engine,
    EngineSettings,
    Json,
    kvflow_connector,
    start_engine,
    stop_engines,
    wait_ready_async,
)
from kvflow.demo.loading import loading
from kvflow.demo.requests import OUTPUT_TOKENS, http_session
from kvflow.demo.router import Router, router
from kvflow.demo.traces import TRACE_SUFFIX

REQUESTS = 60
_PER_S = 3.0
_SHORTEST, _LONGEST = 64, 1500
_TIMEOUT_S = 120.0
_IDLE_MAX_S = 5.0
_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 .,:;!?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of one request."""

    tokens: tuple[int, ...] = ()
    error: str | None = None
    first_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The engines behind a router."""

    producers: tuple[Engine, ...]
    consumers: tuple[Engine, ...]

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (*self.producers, *self.consumers)


@asynccontextmanager
async def served(
    directory: Path,
    model: Path,
    notes: Console,
    *,
    producers: int = 2,
    consumers: int = 1,
    both_roles: bool = False,
) -> AsyncIterator[Served]:
    """Engines that take chats, ready; they end with the block.

    both_roles  each may compute KV for others and load others'.
    """
    started: list[Engine] = []
    counts = {"producer": producers, "consumer": consumers}
    try:
        for role, count in counts.items():
            kv_role = "kv_both" if both_roles else f"kv_{role}"
            names = [f"{role}-{number + 1}" for number in range(count)]
            settings = [_settings(directory, model, name, kv_role) for name in names]
            started.extend(map(start_engine, settings))
        with loading(notes) as progress:
            await wait_ready_async(started, progress=progress)
        yield Served(producers=tuple(started[:producers]), consumers=tuple(started[producers:]))
    finally:
        stop_engines(started)


def _settings(directory: Path, model: Path, name: str, kv_role: str) -> EngineSettings:
    return EngineSettings(
        name=name,
        model=model,
        log_path=directory / f"{name}.log",
        kv_transfer_config=kvflow_connector(kv_role),
        extra_env={"KVFLOW_TRACE": str(directory / f"{name}-%p{TRACE_SUFFIX}")},
        extra_args=("--chat-template", _TEMPLATE),
    )


def chats(count: int, seed: int = 5) -> list[list[dict[str, Json]]]:
    """Messages of random text; their lengths are spread evenly on a logarithmic scale."""
    source = random.Random(seed)
    ratio = (_LONGEST / _SHORTEST) ** (1 / max(1, count - 1))
    lengths = [round(_SHORTEST * ratio**number) for number in range(count)]
    source.shuffle(lengths)
    texts = ["".join(source.choices(_LETTERS, k=length)) for length in lengths]
    return [[{"role": "user", "content": text}] for text in texts]


async def chat(
    session: aiohttp.ClientSession, url: str, messages: Sequence[Json], *, tokens: int
) -> Answered:
    """One streamed chat; what goes wrong is in the answer."""
    body = {
        "model": SERVED_MODEL,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    began = time.monotonic()
    got: list[int] = []
    first_s: float | None = None
    is_whole = False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return Answered(error=f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                is_whole = is_whole or data == b"[DONE]"
                if not data or is_whole:
                    continue
                event = json.loads(data)
                if "error" in event:
                    return Answered(tokens=tuple(got), error=json.dumps(event["error"])[:300])
                new = [id_ for c in event["choices"] for id_ in c.get("token_ids") or ()]
                first_s = time.monotonic() - began if new and first_s is None else first_s
                got += new
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Answered(tokens=tuple(got), error=f"{type(error).__name__}: {error}")
    error_ = None if is_whole else "the stream ended early"
    return Answered(tokens=tuple(got), error=error_, first_s=first_s)


async def demo_routed(directory: Path, model: Path, notes: Console, *, as_json: bool) -> int:
    """Runs it; returns the exit status."""
    asked = chats(REQUESTS)
    async with (
        served(directory, model, notes) as engines,
        http_session(_TIMEOUT_S) as session,
    ):
        with notes.status("each prompt by one engine alone"):
            url = engines.producers[0].url
            alone = [await chat(session, url, each, tokens=OUTPUT_TOKENS) for each in asked]
        producers = [each.url for each in engines.producers]
        consumers = [each.url for each in engines.consumers]
        async with router(producers, consumers, directory / "router.log") as running:
            with notes.status("sending requests; a producer will be killed"):
                answers = await send_and_kill(session, running, engines.producers[-1], asked)
    lines = list(running.lines())
    wrong = [
        f"request {number}: {answer.error or 'other tokens'}"
        for number, (answer, right) in enumerate(zip(answers, alone, strict=True), 1)
        if answer.error or answer.tokens != right.tokens
    ]
    names = {each.url: each.name for each in engines.engines}
    out = notes if as_json else Console(highlight=False)
    out.print(_table(lines, names, killed=engines.producers[-1].name))
    for line in wrong:
        out.print(line, style="red", markup=False)
    again = sum(line["dispatches"] > 1 for line in lines)
    if as_json:
        print(json.dumps({"requests": lines, "wrong": wrong, "again": again}))
    out.print(
        f"router demo: {len(asked) - len(wrong)}/{len(asked)} requests token-identical, "
        f"{again} dispatched again"
    )
    return 1 if wrong else 0


async def send_and_kill(
    session: aiohttp.ClientSession,
    running: Router,
    victim: Engine,
    asked: Sequence[Sequence[Json]],
) -> list[Answered]:
    """At random moments; the victim is killed when half of them are sent and it has one."""
    source = random.Random(7)
    tasks: list[asyncio.Task[Answered]] = []
    async with asyncio.TaskGroup() as group:
        for number, messages in enumerate(asked):
            if number == len(asked) // 2:
                group.create_task(_kill_when_busy(session, running, victim))
            work = chat(session, running.url, messages, tokens=OUTPUT_TOKENS)
            tasks.append(group.create_task(work))
            await asyncio.sleep(source.expovariate(_PER_S))
    return [task.result() for task in tasks]


async def _kill_when_busy(session: aiohttp.ClientSession, running: Router, victim: Engine) -> None:
    deadline = time.monotonic() + _IDLE_MAX_S
    while time.monotonic() < deadline:
        async with session.get(f"{running.url}/health") as response:
            engines = (await response.json())["engines"]
        if any(each["in_flight"] for each in engines if each["engine"] == victim.url):
            break
        await asyncio.sleep(0.01)
    os.killpg(victim.process.pid, signal.SIGKILL)


def _table(lines: Sequence[dict[str, object]], names: dict[str, str], *, killed: str) -> Table:
    table = Table(title=f"{killed} was killed in the middle", title_justify="left")
    for title in ("producer", "consumer", "mode", "answered", "dispatched again", "first byte p50"):
        table.add_column(title, justify="right" if title[-1] in "dn0" else "left")
    groups: dict[tuple[str, str, str], list[dict[str, object]]] = {}
    for line in lines:
        producer = names.get(str(line.get("producer")), "-")
        consumer = names.get(str(line.get("consumer")), "-")
        groups.setdefault((producer, consumer, str(line["mode"])), []).append(line)
    for key, each in sorted(groups.items()):
        outcomes = Counter(str(line["outcome"]) for line in each)
        again = sum(line["dispatches"] != 1 for line in each)
        firsts = [f for line in each if isinstance(f := line.get("first_ms"), float)]
        middle = f"{statistics.median(firsts):.0f} ms" if firsts else "-"
        table.add_row(*key, f"{outcomes['answered']}/{len(each)}", str(again), middle)
    return table
