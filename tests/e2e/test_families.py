"""One pair of engines per model family: every kind of cache group, in the kinds of set-up it meets.

What is right is in `pairs`, but for latent attention: there vLLM's plain CPU kernels round the last
prompt token in one way when they prefill and in another when they decode, and random weights turn
that into other tokens. So the bytes of the KV are compared, read by a class that vLLM mixes into
its workers (`reader/kv_reader.py`).
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvflow.demo.engines import Json
from kvflow.demo.requests import Client, Completion, Dispatch, Naming, decode_params

from .pairs import (
    Prompt,
    RunningPair,
    Setup,
    Side,
    check_fresh_prompts,
    check_shared_heads,
    fresh_prompts,
    running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(420)]

SETUPS = (
    Setup(
        name="gemma3, blocks 64 to 32, both cache prefixes, chunks of 512",
        family="gemma3",
        producer=Side(block_tokens=64, prefix_caching=True, chunk_tokens=512),
        consumer=Side(prefix_caching=True),
    ),
    Setup(
        name="gpt_oss, ranks 2 to 1, consumer caches prefixes",
        family="gpt_oss",
        producer=Side(ranks=2),
        consumer=Side(prefix_caching=True),
    ),
    Setup(
        name="mistral, blocks 32 to 64, chunks of 512",
        family="mistral",
        producer=Side(chunk_tokens=512),
        consumer=Side(block_tokens=64),
    ),
    Setup(
        name="qwen3_moe, blocks 96 to 32, producer caches prefixes",
        family="qwen3_moe",
        producer=Side(block_tokens=96, prefix_caching=True),
    ),
    Setup(
        # vLLM makes the producer's blocks 160 tokens long, so that a page can hold a state.
        name="granite_moe_hybrid, blocks 160 to 320, chunks of 512",
        family="granite_moe_hybrid",
        producer=Side(chunk_tokens=512),
        consumer=Side(block_tokens=320),
        computed=1,
    ),
)
LENGTHS = (2, 100, 127, 128, 129, 160, 161, 321, 700, 1500)
"""Among them those about a window (128) and about the blocks of `granite_moe_hybrid` (160)."""
HEADS = (100, 700)

BOTH_ORDERS = pytest.mark.parametrize("dispatch", list(Dispatch), ids=lambda d: d.value)

LATENT = Setup(
    name="deepseek_v2, ranks 2 to 1",
    family="deepseek_v2",
    producer=Side(ranks=2),
    modules=(Path(__file__).parent / "reader",),
    env={"VLLM_SERVER_DEV_MODE": "1"},
    args=("--worker-extension-cls", "kv_reader.KVReader"),
)
LONG_ANSWER_TOKENS = 2000
READ_WITHIN_S = 60.0


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningPair]:
    with running(request.param, tmp_path_factory.mktemp("family")) as pair:
        yield pair


@BOTH_ORDERS
def test_tokens_are_those_of_one_engine_alone(pair: RunningPair, dispatch: Dispatch) -> None:
    check_fresh_prompts(pair, LENGTHS, dispatch, together=False)


@BOTH_ORDERS
def test_requests_at_the_same_time_do_not_mix(pair: RunningPair, dispatch: Dispatch) -> None:
    check_fresh_prompts(pair, LENGTHS, dispatch, together=True)


@BOTH_ORDERS
def test_a_prefix_hit_moves_only_what_is_missing(pair: RunningPair, dispatch: Dispatch) -> None:
    check_shared_heads(pair, HEADS, dispatch)


@BOTH_ORDERS
def test_a_prompt_of_one_token_is_served(pair: RunningPair, dispatch: Dispatch) -> None:
    """Of a model with states nothing can be moved: the only token is computed by both engines."""
    prompts = fresh_prompts((1,), f"one token {dispatch}")
    (exchange,) = pair.exchanges(prompts, dispatch)
    (alone,) = pair.alone(pair.producer_url, prompts)
    assert exchange.error is None
    assert exchange.decode.token_ids == alone.token_ids
    pair.assert_empty()


# -- latent attention ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latent_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    with running(LATENT, tmp_path_factory.mktemp("latent")) as pair:
        yield pair


@BOTH_ORDERS
def test_latents_arrive_as_they_were_computed(latent_pair: RunningPair, dispatch: Dispatch) -> None:
    prompts = fresh_prompts((2, 16, 17, 33, 500, 1500), f"latents {dispatch}")
    for prompt in prompts:
        kept, arrived = asyncio.run(_kv_of(latent_pair, prompt, dispatch))
        assert arrived == kept
        assert len({digest for layer in arrived for digest in layer}) == sum(map(len, arrived))
    latent_pair.assert_empty()


async def _kv_of(
    pair: RunningPair, prompt: Prompt, dispatch: Dispatch
) -> tuple[list[list[str]], list[list[str]]]:
    """Digests of a prompt's KV by layer and block, in the producer and in the consumer.

    Without the last token, which the consumer computes again. It is read there while the request
    runs, since only then is it known which blocks are the request's.
    """
    naming = Naming.by_transfer_id()
    async with Client(pair.endpoints) as client:
        if dispatch is Dispatch.SEQUENTIAL:
            prefill = await client.prefill_leg(prompt, naming)
        decode = asyncio.create_task(_long_decode(client, prompt, naming))
        if dispatch is Dispatch.CONCURRENT:
            prefill = await client.prefill_leg(prompt, naming)
        assert prefill.error is None
        (blocks,) = prefill.kv_transfer_params["remote_block_ids"]
        async with asyncio.timeout(READ_WITHIN_S):
            while not (arrived := await _ask(pair.consumer_url, "kv_of_running", list(prompt))):
                assert not decode.done(), decode.result().error
        decode.cancel()  # vLLM aborts the request
        kept = await _ask(pair.producer_url, "kv_of_blocks", blocks, len(prompt) - 1)
    return kept, arrived


async def _long_decode(client: Client, prompt: Prompt, naming: Naming) -> Completion:
    """A decode leg that runs long enough to be looked at."""
    return await client.complete(
        client.endpoints.consumer_url,
        prompt,
        tokens=LONG_ANSWER_TOKENS,
        params=decode_params(client.endpoints, naming),
    )


async def _ask(url: str, method: str, *arguments: Json) -> list[list[str]]:
    """Calls the reader in the first worker."""
    body = {"method": method, "args": [json.dumps(argument) for argument in arguments]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/collective_rpc", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        answer = await response.json()
    layers: list[list[str]] = answer["results"][0]
    return layers
