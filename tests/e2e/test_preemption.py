"""Real engines: a decode engine too small for the outputs of what it has loaded preempts."""

import asyncio
from collections.abc import Iterator

import pytest

from kvflow.demo.requests import Client, Completion, Naming, decode_params, prompts
from kvflow.demo.traces import TRACE_SUFFIX
from kvflow.testing.replay import replay

from .metrics import kv_usage
from .trio import PRODUCER, RECOMPUTES, Prompt, Trio, note, until
from .ways import Way

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(420)]

KEEP_S = 30.0
PROMPTS = prompts(4, shortest=320, longest=320, seed=31)
"""10 blocks of 32 tokens each."""
TOKENS = 200
"""6 or 7 blocks more."""
BLOCKS = 46
"""One is vLLM's own. Four prompts fit, and two of them with all of their output."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, way: Way) -> Iterator[Trio]:
    """A producer that keeps what it has sent, and a consumer that registers again."""
    small = Trio(directory=tmp_path_factory.mktemp(f"preemption-{way}"), way=way)

    async def start() -> None:
        await small.start(
            small.settings(PRODUCER, extra={"keep_sent_s": KEEP_S}),
            small.settings(
                RECOMPUTES,
                *("--num-gpu-blocks-override", str(BLOCKS)),
                *("--max-model-len", "1024"),
                extra={"after_preemption": "register"},
            ),
        )

    try:
        asyncio.run(start())
        yield small
    finally:
        small.stop()


async def both_legs(client: Client, prompt: Prompt, naming: Naming) -> Completion:
    """The decode leg's answer; nobody waits for the prefill leg's."""
    prefill = asyncio.create_task(client.prefill_leg(prompt, naming))
    decode = await client.complete(
        client.endpoints.consumer_url,
        prompt,
        tokens=TOKENS,
        params=decode_params(client.endpoints, naming),
        stream=True,
    )
    assert (await prefill).error is None
    return decode


def test_preempted_requests_fetch_their_kv_once_more_and_both_pools_end_empty(
    small: Trio,
) -> None:
    async def work() -> None:
        async with Client(small.endpoints(RECOMPUTES)) as client:
            url = client.endpoints.producer_url
            alone = [await client.complete(url, prompt, tokens=TOKENS) for prompt in PROMPTS]
            namings = [Naming.by_transfer_id() for _ in PROMPTS]
            ids = [str(naming.transfer_id) for naming in namings]
            asked = [
                asyncio.create_task(both_legs(client, *each))
                for each in zip(PROMPTS, namings, strict=True)
            ]
            await until(
                lambda: all(small.traces.reached(PRODUCER, each, "kept") for each in ids),
                within_s=60,
                what="everything is sent and kept",
            )
            assert kv_usage(url) > 0
            answers = await asyncio.gather(*asked)
        # With the ends of the requests, and long before KEEP_S.
        await small.assert_empty(5, PRODUCER, RECOMPUTES)
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert [a.token_ids for a in answers] == [a.token_ids for a in alone]
        preempted = [i for i in ids if small.traces.taken(RECOMPUTES, i, "allocated_again")]
        note(f"{len(preempted)} of {len(ids)} requests preempted")
        assert preempted
        for each in ids:
            loads = 1 + small.traces.taken(RECOMPUTES, each, "allocated_again")
            assert small.traces.taken(RECOMPUTES, each, "done", "received") == loads
            assert small.traces.taken(PRODUCER, each, small.way.moved, "kept") == loads
            assert not small.traces.reached(RECOMPUTES, each, "failed")

    asyncio.run(work())
    log = small.engines[RECOMPUTES].log_path.read_text()
    assert "preempted after its KV had landed: asks for its KV once more" in log
    report = replay(sorted(small.directory.glob(f"*{TRACE_SUFFIX}")))
    assert report.first is None, report.first
    assert report.live == []
