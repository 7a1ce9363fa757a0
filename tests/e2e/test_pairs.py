"""Pairs of real engines set up in other ways than the shared one."""

import asyncio
from pathlib import Path

import pytest

from kvflow.demo.engines import EnginePair, EngineSettings, kvflow_connector, wait_ready
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import Client, Dispatch, Endpoints, prompts
from kvflow.demo.traces import TRACE_SUFFIX

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(420)]

QUIET_QUEUE = Path(__file__).parent / "quiet_queue"
ROOT = Path(__file__).parents[2]


def received(directory: Path, name: str) -> int:
    """Loads that the traces of one engine report as received."""
    lines = [
        line
        for path in directory.glob(f"{name}-*{TRACE_SUFFIX}")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sum('"to":"received"' in line for line in lines)


async def exchange(endpoints: Endpoints, prompt: tuple[int, ...], dispatch: Dispatch) -> None:
    """One prompt through both engines, compared with the producer alone."""
    async with Client(endpoints) as client:
        alone = await client.monolithic(prompt)
        through = await client.disaggregated(prompt, dispatch=dispatch)
    assert alone.error is None and through.error is None, (alone.error, through.error)
    assert through.decode.token_ids == alone.token_ids


def test_two_kv_both_engines_loaded_by_name_push_in_both_directions(tmp_path: Path) -> None:
    first, second = (
        EngineSettings(
            name=name,
            model=tiny_model(),
            log_path=tmp_path / f"{name}.log",
            kv_transfer_config=kvflow_connector("kv_both", by_name=True),
            extra_env={"KVFLOW_TRACE": str(tmp_path / f"{name}-%p{TRACE_SUFFIX}")},
        )
        for name in ("first", "second")
    )
    with EnginePair(producer=first, consumer=second) as pair:
        wait_ready(pair.engines)
        there = Endpoints.of(pair.producer, pair.consumer)
        back = Endpoints.of(pair.consumer, pair.producer)
        for prompt in prompts(3, shortest=64, longest=512):
            for dispatch in Dispatch:
                asyncio.run(exchange(there, prompt, dispatch))
                asyncio.run(exchange(back, prompt, dispatch))
    assert received(tmp_path, "first") == received(tmp_path, "second") == 6


def test_tensor_parallel_engines_push_rank_to_rank(tmp_path: Path) -> None:
    producer, consumer = (
        EngineSettings(
            name=name,
            model=tiny_model(),
            log_path=tmp_path / f"{name}.log",
            kv_transfer_config=kvflow_connector(f"kv_{name}"),
            extra_env={
                "KVFLOW_TRACE": str(tmp_path / f"{name}-%p{TRACE_SUFFIX}"),
                "PYTHONPATH": f"{QUIET_QUEUE}:{ROOT}",
            },
            extra_args=(
                *("--tensor-parallel-size", "2"),
                *("--distributed-executor-backend", "mp"),
            ),
        )
        for name in ("producer", "consumer")
    )
    with EnginePair(producer=producer, consumer=consumer) as pair:
        wait_ready(pair.engines)
        endpoints = Endpoints.of(pair.producer, pair.consumer)
        for prompt in prompts(3, shortest=64, longest=512):
            for dispatch in Dispatch:
                asyncio.run(exchange(endpoints, prompt, dispatch))
    assert received(tmp_path, "consumer") == 2 * 6, "each of two ranks receives its own part"
