"""Real engines: prompts of many lengths in 512-token chunks, a producer pool that is too small.

CI streams some of them. `KVFLOW_REQUESTS=200 KVFLOW_WAYS=streamed,push,pull pytest
tests/e2e/test_streams.py -s` sends more, and in each of the three ways.
"""

import asyncio
import os
import random
from collections.abc import Iterator

import pytest

from kvflow.demo.model import PROMPT_TOKEN_IDS
from kvflow.demo.requests import OUTPUT_TOKENS
from kvflow.demo.traces import TRACE_SUFFIX
from kvflow.testing.replay import replay

from .trio import FAILS, PRODUCER, Prompt, Sent, Trio, note
from .ways import Way

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("KVFLOW_REQUESTS", "40"))
PER_S = 3.0
SHORTEST, LONGEST = 64, 4096
CHUNK_TOKENS = 512
STEP_TOKENS = 128
"""Most of one prompt in one step, so that four prompts are computed side by side."""
BLOCKS = 160
"""Of 32 tokens: the longest prompt and one of 1,000 tokens fit."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, way: Way) -> Iterator[Trio]:
    pair = Trio(directory=tmp_path_factory.mktemp(way), way=way)

    async def start() -> None:
        await pair.start(
            pair.settings(
                PRODUCER,
                *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
                *("--long-prefill-token-threshold", str(STEP_TOKENS)),
                *("--num-gpu-blocks-override", str(BLOCKS)),
                *("--max-model-len", str(LONGEST + 64)),
            ),
            pair.settings(FAILS),
        )

    try:
        asyncio.run(start())
        yield pair
    finally:
        pair.stop()


def mixed_prompts(count: int, seed: int = 41) -> list[Prompt]:
    """Lengths are spread evenly on a logarithmic scale, in random order."""
    source = random.Random(seed)
    lengths = [
        round(SHORTEST * (LONGEST / SHORTEST) ** (each / max(count - 1, 1)))
        for each in range(count)
    ]
    source.shuffle(lengths)
    return [tuple(source.choices(PROMPT_TOKEN_IDS, k=length)) for length in lengths]


async def sent_at_random_moments(pair: Trio, prompts: list[Prompt]) -> list[Sent]:
    """Poisson arrivals, both legs at once; returns when all are answered."""
    source = random.Random(43)
    sent = []
    async with pair.client_of(FAILS) as client:
        for prompt in prompts:
            sent.append(pair.send(client, FAILS, prompt))
            await asyncio.sleep(source.expovariate(PER_S))
        await asyncio.gather(*(each.exchange for each in sent))
    return sent


def test_mixed_prompts_are_moved_right_also_when_prefills_are_preempted(
    pair: Trio, way: Way
) -> None:
    async def work() -> None:
        prompts = mixed_prompts(REQUESTS)
        sent = await sent_at_random_moments(pair, prompts)
        await pair.assert_empty(5, PRODUCER, FAILS)
        await pair.expect(prompts, OUTPUT_TOKENS)
        for each in sent:
            pair.assert_right(each.prompt, each.decode)
        taken = {
            trigger: sum(pair.traces.taken(PRODUCER, each.transfer_id, trigger) for each in sent)
            for trigger in ("prefill_advanced", "prefill_preempted")
        }
        early = [
            each
            for each in sent
            if pair.traces.taken(PRODUCER, each.transfer_id, "write_done", "sent")
            and not pair.traces.reached(PRODUCER, each.transfer_id, "transferring")
        ]
        note(
            f"{way}: {len(sent)} requests, {taken['prefill_preempted']} preemptions, "
            f"{taken['prefill_advanced']} stretches; {len(early)} were sent before vLLM had ended "
            "their prefill"
        )
        assert taken["prefill_preempted"]
        if way is Way.STREAMED:
            assert taken["prefill_advanced"] > len(sent)
            assert early
        else:
            assert not taken["prefill_advanced"]
        for each in sent:
            assert pair.traces.reached(FAILS, each.transfer_id, "received")

    asyncio.run(work())
    report = replay(sorted(pair.directory.glob(f"*{TRACE_SUFFIX}")))
    assert report.first is None, report.first
    assert report.live == []
