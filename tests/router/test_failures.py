"""What the router does when engines, or clients, do not do what they should."""

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from kvflow.router.config import Config

from .fakes import MODEL, Routed, routed, until, words

pytestmark = pytest.mark.timeout(60)

HELLO = [{"role": "user", "content": "hello"}]
STREAM = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True}
CHAT = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": True}


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


async def nothing_left(r: Routed) -> None:
    """No leg is in flight at any engine, or so the router thinks."""
    engines = (*r.producers, *r.consumers)
    await until(lambda: not any(engine.in_flight for engine in engines))
    health = json.loads(await r.page("/health"))
    assert [each["in_flight"] for each in health["engines"]] == [0] * len(engines)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_prefill_leg_that_fails_ends_the_decode_leg_at_once(mode: str) -> None:
    async def work() -> None:
        async with routed(mode=mode, dispatches_max=1) as r:
            r.producers[0].knobs.status = 500
            began = time.monotonic()
            status, answer = await r.complete()
            assert time.monotonic() - began < 5
            assert status == 502
            assert "prefill engine" in answer["error"]["message"]
            await nothing_left(r)
            decodes = {id_ for _, id_ in r.world.happened("decode")}
            assert {id_ for _, id_ in r.world.happened("decode cancelled")} <= decodes
            ids = {id_ for _, id_ in r.world.happened("prefill")}
            await until(lambda: set(r.world.released) == ids)

    run(work())


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_decode_leg_that_fails_ends_the_prefill_leg_and_releases_its_kv(in_stream: bool) -> None:
    async def work() -> None:
        async with routed(dispatches_max=1) as r:
            r.producers[0].knobs.prefill_s = 20 if not in_stream else 0.01
            if in_stream:
                r.consumers[0].knobs.in_stream = True
            else:
                r.consumers[0].knobs.status = 500
            began = time.monotonic()
            async with r.session.post(f"{r.url}/v1/completions", json=STREAM) as response:
                assert response.status == 502
                assert "decode engine" in (await response.json())["error"]["message"]
            assert time.monotonic() - began < 5
            await nothing_left(r)
            await until(lambda: len(r.world.released) == 1)

    run(work())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", ["answers 500", "is gone"])
def test_another_engine_is_tried_before_the_first_token(role: str, fault: str) -> None:
    async def work() -> None:
        async with routed(producers=2, consumers=2, prefill_policy="robin") as r:
            bad = (r.producers if role == "prefill" else r.consumers)[0]
            if fault == "is gone":
                await bad.stop()
            else:
                bad.knobs.status = 500
            for _ in range(4):
                status, _ = await r.complete()
                assert status == 200
            await nothing_left_at(r, bad.name)

    async def nothing_left_at(r: Routed, gone: str) -> None:
        engines = [e for e in (*r.producers, *r.consumers) if e.name != gone]
        await until(lambda: not any(engine.in_flight for engine in engines))

    run(work())


@pytest.mark.parametrize("role_alone_s", [0.0, 0.1])
def test_a_chat_that_has_nothing_but_its_role_is_dispatched_again(role_alone_s: float) -> None:
    """vLLM tells of a load that has failed in the second event of a chat."""

    async def work() -> None:
        async with routed(consumers=2, decode_policy="robin") as r:
            r.consumers[0].knobs.in_stream = True
            r.consumers[0].knobs.role_alone_s = role_alone_s
            for _ in range(2):
                events = await chat(r)
                assert [e["choices"][0].get("text") for e in events] == [None, *words(HELLO, 4)]
            tried = [engine for engine, _ in r.world.happened("decode")]
            assert tried.count("c1") == 2
            assert "c0" in tried

    run(work())


@pytest.mark.slow
def test_a_role_is_not_kept_back_for_long() -> None:
    async def work() -> None:
        async with routed() as r:
            r.consumers[0].knobs.role_alone_s = 6
            began = time.monotonic()
            body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": True}
            async with r.session.post(f"{r.url}/v1/chat/completions", json=body) as response:
                assert b"assistant" in await response.content.readline()
                assert time.monotonic() - began < 5
                assert b"text" in await response.content.read()

    run(work())


async def chat(r: Routed) -> list[dict[str, Any]]:
    """The events of one."""
    async with r.session.post(f"{r.url}/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
        lines = [line.strip() async for line in response.content if line.strip()]
    assert lines.pop() == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def test_each_dispatch_has_a_transfer_id_of_its_own() -> None:
    async def work() -> None:
        async with routed(producers=2, prefill_policy="robin") as r:
            for each in r.producers:
                each.knobs.status = 500
            status, _ = await r.complete()
            assert status == 502
            ids = [id_ for _, id_ in r.world.happened("prefill")]
            assert len(ids) == len(set(ids)) == 3

    run(work())


def test_a_stream_that_breaks_after_its_first_token_is_not_repeated_but_told() -> None:
    async def work() -> None:
        async with routed(consumers=2) as r:
            for each in r.consumers:
                each.knobs.breaks_after = 2
            async with r.session.post(f"{r.url}/v1/completions", json=STREAM) as response:
                assert response.status == 200
                lines = [line async for line in response.content if line.strip()]
            events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
            assert [e["choices"][0]["text"] for e in events[:-1]] == words("hello", 2)
            assert events[-1]["error"]["code"] == 502
            assert len(r.world.happened("decode")) == 1
            assert 'requests_total{outcome="broken"} 1.0' in await r.page("/metrics")

    run(work())


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("when", ["before the prefill has ended", "after the first token"])
def test_a_client_that_goes_away_ends_both_legs(mode: str, when: str) -> None:
    async def work() -> None:
        async with routed(mode=mode) as r:
            if when == "before the prefill has ended":
                r.producers[0].knobs.prefill_s = 5
            else:
                r.consumers[0].knobs.decode_s = 0.5
            asked = asyncio.create_task(r.complete(**STREAM))
            kind = "decode" if mode == "push" or "after" in when else "prefill"
            await until(lambda: r.world.happened(kind))
            await asyncio.sleep(0.1 if "before" in when else 0.8)
            asked.cancel()
            await nothing_left(r)
            if "before" in when:
                await until(lambda: len(r.world.released) == 1)
            assert 'requests_total{outcome="gone"} 1.0' in await r.page("/metrics")

    run(work())


def test_an_engine_that_hangs_goes_out_and_its_requests_go_elsewhere() -> None:
    async def work() -> None:
        async with routed(producers=2, prefill_policy="robin") as r:
            r.producers[0].knobs.hangs = True
            answers = await asyncio.gather(*(r.complete() for _ in range(4)))
            assert [status for status, _ in answers] == [200] * 4
            health = json.loads(await r.page("/health"))
            assert [e["up"] for e in health["engines"]] == [False, True, True]
            assert "does not answer" in health["engines"][0]["why"]

    run(work())


def test_an_engine_that_is_back_is_met_and_used_again() -> None:
    async def work() -> None:
        async with routed() as r:
            (producer,) = r.producers
            await producer.stop()
            await r.shows(f'kvflow_router_engine_up{{engine="{producer.url}",role="prefill"}} 0.0')
            began = time.monotonic()
            status, answer = await r.complete()
            assert (status, time.monotonic() - began < 5) == (503, True)
            assert "no prefill engine can be used" in answer["error"]["message"]
            await producer.start()  # its side channel has another port now
            came_back = time.monotonic()
            while (last := await r.complete())[0] != 200:
                assert time.monotonic() - came_back < 5, last
                await asyncio.sleep(0.05)

    run(work())


@pytest.mark.slow
def test_more_than_the_engines_and_the_queue_take_are_told_to_come_again() -> None:
    async def work() -> None:
        async with routed(engine_limit=1, queue_max=1, queue_timeout_s=2) as r:
            r.producers[0].knobs.prefill_s = 4
            asked = [asyncio.create_task(r.complete())]
            await until(lambda: r.producers[0].in_flight)
            asked.append(asyncio.create_task(r.complete()))
            await r.shows("kvflow_router_waiting 1.0")
            asked.append(asyncio.create_task(r.complete()))
            began = time.monotonic()
            async with r.session.post(f"{r.url}/v1/completions", json=STREAM) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
            assert time.monotonic() - began < 1
            statuses = [status for status, _ in await asyncio.gather(*asked)]
            assert statuses == [200, 503, 503]  # in time; waited too long; too many wait
            await nothing_left(r)

    run(work())


def test_a_request_ends_with_its_deadline_whatever_happens() -> None:
    async def work() -> None:
        async with routed(request_timeout_s=0.4) as r:
            r.producers[0].knobs.prefill_s = 20
            status, answer = await r.complete()
            assert status == 504
            assert "not answered in 0.4 s" in answer["error"]["message"]
            await nothing_left(r)
            await until(lambda: len(r.world.released) == 1)

    run(work())


def test_of_many_requests_with_faults_and_clients_that_leave_nothing_is_left() -> None:
    async def work() -> None:
        async with routed(producers=2, consumers=2, engine_limit=8) as r:
            r.producers[0].knobs.status = 500

            async def one(number: int) -> str:
                task = asyncio.create_task(r.complete(prompt=f"p{number}", stream=number % 2 == 0))
                if number % 5 == 0:
                    await asyncio.sleep(0.01 * (number % 7))
                    task.cancel()
                    return "cut"
                status, _ = await task
                return str(status)

            ends = await asyncio.gather(*(one(number) for number in range(100)))
            assert set(ends) == {"200", "cut"}
            await nothing_left(r)

    run(work())


def test_a_leg_is_not_sent_on_a_connection_that_its_engine_may_be_closing() -> None:
    """vLLM closes what was idle for its keep-alive time, and a leg that meets that is lost."""

    async def work() -> None:
        async with routed(watch_interval_s=30, keepalive_s=0.2) as r:
            for pause_s in (0, 0.5):
                await asyncio.sleep(pause_s)
                assert (await r.complete())[0] == 200
            for engine in (*r.producers, *r.consumers):
                assert len(set(engine.connections[-2:])) == 2

    run(work())


def test_connections_are_kept_for_less_than_vllm_keeps_them() -> None:
    vllm_keeps_s = 5  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    assert Config().keepalive_s <= vllm_keeps_s / 2
