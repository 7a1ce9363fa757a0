"""Engines with room for three requests, a producer that refuses some, and vLLM's own SIGTERM."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvflow.demo.requests import Client, Dispatch, Naming, prefill_params, prompts

from .trio import FAILS, LEASE_S, LOSS_S, PRODUCER, Prompt, Sent, Trio, note, until
from .ways import Way

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(300)]

HOLD_S = 6.0
"""Instead of the default of 30 s."""
PROMPTS = prompts(16, shortest=900, longest=900, seed=21)
"""29 blocks each, of 99."""
ONE = PROMPTS[0]
LENGTH = 1024
"""vLLM's bound on a prompt and its answer, at the producer; the consumer's is twice that."""
LONGEST = prompts(1, shortest=LENGTH - 1, longest=LENGTH - 1, seed=22)[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, way: Way) -> Iterator[Trio]:
    """A producer and a consumer with tiny pools; the consumer takes longer prompts."""
    small = Trio(directory=tmp_path_factory.mktemp(f"small-{way}"), way=way)
    tiny = ("--num-gpu-blocks-override", "100", "--shutdown-timeout", "0")

    async def start() -> None:
        producer = small.settings(
            PRODUCER, *tiny, "--max-model-len", f"{LENGTH}", extra={"hold_max_s": HOLD_S}
        )
        consumer = small.settings(FAILS, *tiny, "--max-model-len", f"{2 * LENGTH}")
        await small.start(producer, consumer)
        await small.expect(PROMPTS, 16)

    try:
        asyncio.run(start())
        yield small
    finally:
        small.stop()


async def ends(sent: list[Sent], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        await asyncio.gather(*(each.exchange for each in sent))


@pytest.mark.parametrize("dispatch", Dispatch)
def test_sixteen_requests_pass_through_pools_for_three(small: Trio, dispatch: Dispatch) -> None:
    async def work() -> None:
        async with Client(small.endpoints(FAILS)) as client:
            began = time.monotonic()
            sent = [small.send(client, FAILS, prompt, dispatch=dispatch) for prompt in PROMPTS]
            await ends(sent, 90)
            note(f"16 requests, {dispatch.value}: {time.monotonic() - began:.1f} s")
            failures = [f for s in sent if (f := small.traces.failure(FAILS, s.transfer_id))]
            assert not failures
            for each in sent:
                small.assert_right(each.prompt, each.decode)
            await small.assert_empty(3, *small.engines)

    asyncio.run(work())


def test_requests_that_reach_the_two_engines_in_opposite_orders_end(small: Trio) -> None:
    """The producer's blocks wait for loads that wait for the consumer's blocks, and the reverse.

    It is not the prefills' leases that end it.
    """

    async def work() -> None:
        async with Client(small.endpoints(FAILS)) as client:
            namings = {prompt: Naming.by_transfer_id() for prompt in PROMPTS[:8]}
            began = time.monotonic()
            prefills = []
            for prompt in reversed(namings):
                prefills.append(asyncio.create_task(client.prefill_leg(prompt, namings[prompt])))
                await asyncio.sleep(0.02)
            decodes = {}
            for prompt, naming in namings.items():
                decodes[prompt] = asyncio.create_task(client.decode_leg(prompt, naming))
                await asyncio.sleep(0.02)
            errors = 0
            async with asyncio.timeout(4 * LEASE_S + 10):
                for prompt, decode in decodes.items():
                    small.assert_as_configured(FAILS, prompt, await decode)
                    errors += decode.result().error is not None
                    failure = small.traces.failure(FAILS, str(namings[prompt].transfer_id))
                    took_s = time.monotonic() - began
                    note(f"ended by {took_s:.1f} s: {failure.reason if failure else 'right'}")
                await asyncio.gather(*prefills)
            note(f"{errors} of {len(decodes)} loads failed")
            ids = [str(naming.transfer_id) for naming in namings.values()]
            steps = [step for each in ids for step in small.traces.steps(PRODUCER, each)]
            assert errors == sum(step.trigger == "contended" for step in steps) > 0
            assert not any(step.trigger == "expired" and step.dest == "failed" for step in steps)
            await small.assert_empty(LEASE_S + 3, *small.engines)
            await serves(small, client)

    asyncio.run(work())


async def serves(small: Trio, client: Client, prompt: Prompt = ONE) -> None:
    sent = small.send(client, FAILS, prompt)
    await sent.exchange
    small.assert_right(prompt, sent.decode)


@pytest.mark.parametrize("dispatch", Dispatch)
def test_the_longest_prompt_that_the_producer_takes_goes_through(
    small: Trio, dispatch: Dispatch
) -> None:
    async def work() -> None:
        async with Client(small.endpoints(FAILS)) as client:
            alone = await client.complete(client.endpoints.consumer_url, LONGEST)
            small.expected[LONGEST] = alone.token_ids
            sent = small.send(client, FAILS, LONGEST, dispatch=dispatch)
            await ends([sent], 60)
            small.assert_right(LONGEST, sent.decode)
            assert small.traces.failure(FAILS, sent.transfer_id) is None

    asyncio.run(work())


@pytest.mark.parametrize("more", [1, 400])
def test_a_prompt_too_long_for_the_producer_fails_its_load_at_once_without_a_router(
    small: Trio, more: int
) -> None:
    """Its API server refuses the prefill leg; the producer says so when the decode leg registers.

    Not a lease, nor `hold_max_s`, nor the consumer's own deadlines end it: the reason says which.
    """
    tokens = len(LONGEST) + more
    (prompt,) = prompts(1, shortest=tokens, longest=tokens, seed=23)

    async def work() -> None:
        async with Client(small.endpoints(FAILS)) as client:
            sent = small.send(client, FAILS, prompt)
            await ends([sent], HOLD_S + 30)
            assert sent.exchange.result().prefill.http_status == 400
            assert sent.decode.error is not None
            (refusal,) = small.traces.steps(PRODUCER, sent.transfer_id)
            assert (refusal.trigger, refusal.dest) == ("registered", "failed")
            failure = small.traces.failure(FAILS, sent.transfer_id)
            assert failure is not None
            assert (refusal.reason, failure.reason) == ("too_long", "too_long")
            note(f"{tokens} tokens: failed after {sent.decode.total_s:.2f} s")
            await small.assert_empty(3, *small.engines)
            await serves(small, client)

    asyncio.run(work())


@pytest.mark.parametrize("has_router", [False, True], ids=["alone", "released"])
def test_a_load_whose_prefill_is_refused_ends(small: Trio, has_router: bool) -> None:
    """When its router says so; else when the producer has waited long enough for the prefill.

    The prefill leg is refused for what it asks of vLLM, which nobody can tell from the decode leg.
    """

    async def work() -> None:
        async with Client(small.endpoints(FAILS)) as client:
            naming = Naming.by_transfer_id()
            began = small.mark()
            decode = asyncio.create_task(client.decode_leg(ONE, naming))
            url = client.endpoints.producer_url
            prefill = await client.complete(
                url, ONE, tokens=2 * LENGTH, params=prefill_params(naming)
            )
            assert prefill.http_status == 400
            transfer_id = str(naming.transfer_id)
            if has_router:
                await until(
                    lambda: small.traces.reached(FAILS, transfer_id, *small.way.waiting),
                    within_s=10,
                    what="the registration",
                )
                began = small.mark()
                await small.release(transfer_id)
            async with asyncio.timeout(HOLD_S + 30):
                assert (await decode).error is not None
            failure = small.traces.failure(FAILS, transfer_id)
            assert failure is not None
            took_s = failure.at - began
            note(f"refused after {prefill.total_s:.2f} s; {failure.reason} {took_s:.2f} s later")
            assert took_s <= (0 if has_router else HOLD_S + 1) + small.slack_s()
            await small.assert_empty(3, *small.engines)
            await serves(small, client)

    asyncio.run(work())


def test_vllms_own_answer_to_sigterm_is_noticed_like_a_death(small: Trio) -> None:
    """Without `--shutdown-timeout` vLLM kills its engine at once, which can tell nobody.

    Its API server then waits for connections whose answers never come; that is not looked at.
    """

    async def work() -> None:
        async with Client(small.endpoints(FAILS)) as client:
            # More than a busy machine can do before vLLM has acted upon the signal.
            namings = [(prompt, Naming.by_transfer_id()) for prompt in PROMPTS[:12]]
            ids = [str(naming.transfer_id) for _, naming in namings]
            prefills = [asyncio.create_task(client.prefill_leg(*each)) for each in namings]
            decodes = [asyncio.create_task(client.decode_leg(*each)) for each in namings]
            await until(
                lambda: small.traces.count(PRODUCER, ids, "sent") >= 2, within_s=60, what="two sent"
            )
            told_unix = small.mark()
            os.kill(small.engines[PRODUCER].process.pid, signal.SIGTERM)
            try:
                # Three at a time have blocks, and each finds out for itself.
                async with asyncio.timeout(4 * LOSS_S + 10):
                    answers = await asyncio.gather(*decodes)
            finally:
                small.signal(PRODUCER, signal.SIGKILL)
            await asyncio.gather(*prefills)
            failures = [f for i in ids if (f := small.traces.failure(FAILS, i))]
            times = sorted(f"{f.at - told_unix:.1f} s {f.reason}" for f in failures)
            note(f"{len(failures)} of {len(ids)} failed: {times}")
            assert failures
            assert min(f.at for f in failures) - told_unix <= LOSS_S + small.slack_s()
            for (prompt, _), answer in zip(namings, answers, strict=True):
                small.assert_as_configured(FAILS, prompt, answer)
            await small.assert_empty(3, FAILS)

    asyncio.run(work())
