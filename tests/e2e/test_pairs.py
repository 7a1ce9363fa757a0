"""Pairs of real engines set up in other ways than the shared one."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvflow.demo.engines import EnginePair, EngineSettings, kvflow_connector, wait_ready
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import Client, Dispatch, Endpoints, prompts
from kvflow.demo.traces import TRACE_SUFFIX

from .metrics import usage_after

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(420)]


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
    assert (alone.error, through.error) == (None, None)
    assert through.decode.token_ids == alone.token_ids


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnginePair, Path]]:
    """Two kv_both engines, loaded by name, that recompute what fails and cache prefixes."""
    directory = tmp_path_factory.mktemp("both")
    first, second = (
        EngineSettings(
            name=name,
            model=tiny_model(),
            log_path=directory / f"{name}.log",
            kv_transfer_config={
                **kvflow_connector("kv_both", by_name=True),
                "kv_load_failure_policy": "recompute",
            },
            extra_env={"KVFLOW_TRACE": str(directory / f"{name}-%p{TRACE_SUFFIX}")},
            extra_args=("--enable-prefix-caching",),
        )
        for name in ("first", "second")
    )
    with EnginePair(producer=first, consumer=second) as pair:
        wait_ready(pair.engines)
        yield pair, directory


def test_two_kv_both_engines_loaded_by_name_push_in_both_directions(
    both: tuple[EnginePair, Path],
) -> None:
    pair, directory = both
    there = Endpoints.of(pair.producer, pair.consumer)
    back = Endpoints.of(pair.consumer, pair.producer)
    before = received(directory, "first"), received(directory, "second")
    own = prompts(12, shortest=64, longest=512, seed=2)
    for number, dispatch in enumerate(Dispatch):
        for one, other in zip(own[number::4], own[number + 2 :: 4], strict=True):
            asyncio.run(exchange(there, one, dispatch))
            asyncio.run(exchange(back, other, dispatch))
    after = received(directory, "first"), received(directory, "second")
    assert (after[0] - before[0], after[1] - before[1]) == (6, 6)


def test_a_load_that_cannot_be_tried_is_recomputed_when_the_policy_says_so(
    both: tuple[EnginePair, Path],
) -> None:
    pair, _ = both
    endpoints = Endpoints.of(pair.producer, pair.consumer)
    prompt = prompts(1, shortest=300, longest=300, seed=3)[0]

    async def decode_without_port() -> None:
        async with Client(endpoints) as client:
            alone = await client.monolithic(prompt)
            params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "transfer_id": "x"}
            decoded = await client.complete(endpoints.consumer_url, prompt, params=params)
        assert decoded.error is None
        assert decoded.token_ids == alone.token_ids

    asyncio.run(decode_without_port())


@pytest.mark.parametrize("dispatch", Dispatch)
def test_a_full_prefix_hit_gives_the_producers_blocks_back_at_once(
    both: tuple[EnginePair, Path], dispatch: Dispatch
) -> None:
    pair, _ = both
    endpoints = Endpoints.of(pair.producer, pair.consumer)
    # A multiple of the block size, so that a second run finds all of it but the last token.
    prompt = prompts(1, shortest=256, longest=256, seed=4 + list(Dispatch).index(dispatch))[0]
    for _ in range(3):
        asyncio.run(exchange(endpoints, prompt, dispatch))
    assert usage_after(endpoints.producer_url, 10) == 0, "far less than the lease of 30 s"
    assert usage_after(endpoints.consumer_url, 10) == 0


def test_a_partial_prefix_hit_moves_only_what_is_missing(
    both: tuple[EnginePair, Path],
) -> None:
    pair, directory = both
    endpoints = Endpoints.of(pair.producer, pair.consumer)
    long = prompts(1, shortest=512, longest=512, seed=7)[0]
    for length in (160, 320, 512):
        for dispatch in Dispatch:
            prompt = (*long[:length], list(Dispatch).index(dispatch) + 65)
            asyncio.run(exchange(endpoints, prompt, dispatch))
    moved = [
        json.loads(line)["bytes"]
        for path in directory.glob(f"first-*{TRACE_SUFFIX}")
        for line in path.read_text(encoding="utf-8").splitlines()
        if '"to":"sent"' in line
    ]
    per_block = max(moved) // 16
    assert min(moved[-6:]) <= 6 * per_block, "a hit of 5 blocks leaves one or few to move"
