"""The router in front of engines that do what they should."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from kvflow import __version__
from kvflow.router.config import Mode

from .fakes import MODEL, looked_at, routed, until, words

pytestmark = pytest.mark.timeout(60)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


def text(count: int = 4, prompt: object = "hello") -> str:
    return " ".join(words(prompt, count))


def test_push_sends_both_legs_at_once_under_one_fresh_id() -> None:
    async def work() -> None:
        async with routed() as r:
            r.producers[0].knobs.prefill_s = 1.5
            asked = [asyncio.create_task(r.complete()) for _ in range(2)]
            (producer,) = r.producers
            await until(lambda: producer.in_flight == len(r.world.happened("decode")) == 2)
            assert [a[0] for a in await asyncio.gather(*asked)] == [200, 200]
            prefills, decodes = r.world.happened("prefill"), r.world.happened("decode")
            ids = {id_ for _, id_ in prefills}
            assert ids == {id_ for _, id_ in decodes}
            assert len(ids) == 2
            assert all(len(id_) > 32 for id_ in ids)

    run(work())


@pytest.mark.parametrize("how", ["forced", "the consumer's mode", "consumers near full"])
def test_pull_sends_the_decode_leg_after_the_prefill_leg_with_what_it_answered(how: str) -> None:
    async def work() -> None:
        settings = {"forced": {"mode": "pull"}}.get(how, {})
        own = "pull" if how == "the consumer's mode" else "auto"
        async with routed(consumers_mode=own, **settings) as r:
            if how == "consumers near full":
                r.consumers[0].knobs.kv_usage = 0.95
                await looked_at(r.consumers[0])
            assert await r.complete() == (200, _answer(own))
            kinds = [kind for _, kind, _ in r.world.events]
            assert kinds == ["prefill", "decode"]

    run(work())


def _answer(mode: str) -> dict[str, Any]:
    kvflow = {"version": __version__, "mode": mode, "outcome": "landed"}
    return {
        "choices": [{"index": 0, "text": text()}],
        "kv_transfer_params": {"kvflow": kvflow},
    }


def test_a_stream_comes_event_by_event_as_the_engine_sends_it() -> None:
    async def work() -> None:
        async with routed() as r:
            r.consumers[0].knobs.decode_s = 0.1
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True}
            url = f"{r.url}/v1/completions"
            loop = asyncio.get_running_loop()
            async with r.session.post(url, json=body) as response:
                assert response.content_type == "text/event-stream"
                came = [(loop.time(), line) async for line in response.content if line.strip()]
            events = [line.removeprefix(b"data: ").strip() for _, line in came]
            assert events[-1] == b"[DONE]"
            told = [json.loads(each)["choices"][0]["text"] for each in events[:-1]]
            assert told == words("hello", 4)
            assert came[-1][0] - came[0][0] > 0.2  # not all at the end

    run(work())


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"echo": True}, "prompt_logprobs"),
    ],
)
def test_what_has_no_legs_is_answered_by_one_consumer_and_counted(
    extra: dict[str, Any], why: str
) -> None:
    async def work() -> None:
        async with routed() as r:
            status, _ = await r.complete(**extra)
            assert status == 200
            assert [(kind, id_) for _, kind, id_ in r.world.events] == [("local", "")]
            assert f'kvflow_router_local_total{{why="{why}"}} 1.0' in await r.page("/metrics")

    run(work())


def test_chat_has_two_legs_too() -> None:
    async def work() -> None:
        async with routed() as r:
            messages = [{"role": "user", "content": "hello"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 3}
            async with r.session.post(f"{r.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            assert answer["choices"][0]["text"] == text(3, messages)
            assert [kind for _, kind, _ in sorted(r.world.events)] == ["decode", "prefill"]

    run(work())


def test_what_is_no_completion_is_passed_to_a_decode_engine_as_it_is() -> None:
    async def work() -> None:
        async with routed() as r:
            async with r.session.post(f"{r.url}/tokenize", json={"prompt": "a"}) as response:
                assert await response.json() == {"engine": "c0", "asked": {"prompt": "a"}}
            assert json.loads(await r.page("/v1/models"))["data"][0]["id"] == MODEL
            async with r.session.get(f"{r.url}/no/such/page") as response:
                assert response.status == 404

    run(work())


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"null", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused_with_a_sentence(body: bytes) -> None:
    async def work() -> None:
        async with routed() as r:
            async with r.session.post(f"{r.url}/v1/completions", data=body) as response:
                assert response.status == 400
                assert "the body is not" in (await response.json())["error"]["message"]
            assert not r.world.events

    run(work())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_client_s_mistake_is_told_in_the_engine_s_own_words_and_not_repeated(leg: str) -> None:
    async def work() -> None:
        async with routed(producers=2, consumers=2) as r:
            for engine in r.producers if leg == "prefill" else r.consumers:
                engine.knobs.status = 400
            status, answer = await r.complete()
            assert status == 400
            assert "was told to" in answer["error"]["message"]
            assert len(r.world.happened(leg)) == 1

    run(work())


def test_work_is_spread_over_the_engines_and_like_prompts_meet() -> None:
    async def work() -> None:
        async with routed(producers=2, consumers=2) as r:
            # They are hashed with their engines' ports: so many do not all meet by chance.
            prompts = [f"prompt {number}" for number in range(40)]
            for prompt in prompts:
                await r.complete(prompt=prompt)
            assert {engine for engine, _ in r.world.happened("prefill")} == {"p0", "p1"}
            assert {engine for engine, _ in r.world.happened("decode")} == {"c0", "c1"}
            r.forget_meetings()
            for _ in range(4):
                await r.complete(prompt="the same")
            assert len({engine for engine, _ in r.world.happened("prefill")}) == 1

    run(work())


def test_health_and_metrics_say_how_each_engine_is() -> None:
    async def work() -> None:
        async with routed() as r:
            r.consumers[0].knobs.kv_usage = 0.5
            await r.complete()
            await looked_at(r.consumers[0])
            health = json.loads(await r.page("/health"))
            assert health["status"] == "ok"
            assert [(e["role"], e["up"]) for e in health["engines"]] == [
                ("prefill", True),
                ("decode", True),
            ]
            page = await r.page("/metrics")
            labels = f'engine="{r.consumers[0].url}",role="decode"'
            assert f"kvflow_router_kv_usage{{{labels}}} 0.5" in page
            assert f"kvflow_router_computed_locally_total{{{labels}}} 7.0" in page
            assert f"kvflow_router_in_flight{{{labels}}} 0.0" in page
            assert 'kvflow_router_requests_total{outcome="answered"} 1.0' in page
            assert 'kvflow_router_dispatches_total{mode="push"} 1.0' in page

    run(work())


def test_prompts_that_a_decode_engine_computes_although_they_had_legs_are_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        async with routed() as r:
            (consumer,) = r.consumers
            await r.complete()
            await looked_at(consumer)
            consumer.knobs.computed += 500
            await looked_at(consumer)
            await r.complete(n=2)
            consumer.knobs.computed += 300  # those of the request without legs, maybe
            await looked_at(consumer)

    run(work())
    said = [line for line in capsys.readouterr().out.splitlines() if "computed locally" in line]
    assert len(said) == 1
    assert "500" in said[0]


def test_the_client_s_headers_reach_both_legs() -> None:
    async def work() -> None:
        async with routed() as r:
            headers = {"Authorization": "Bearer x", "X-Request-Id": "mine"}
            body = {"model": MODEL, "prompt": "hello"}
            async with r.session.post(f"{r.url}/v1/completions", json=body, headers=headers):
                pass
            for engine in (*r.producers, *r.consumers):
                named = {key.lower(): value for key, value in engine.legs[-1][0].items()}
                assert (named["authorization"], named["x-request-id"]) == ("Bearer x", "mine")

    run(work())


def test_data_parallel_engines_are_used_in_turns_each_with_its_own_side_channel() -> None:
    async def work() -> None:
        async with routed(ranks=2) as r:
            (producer,), (consumer,) = r.producers, r.consumers
            ranks, ports = [], []
            for _ in range(4):
                assert (await r.complete())[0] == 200
                headers = {key.lower(): value for key, value in producer.legs[-1][0].items()}
                ranks.append(int(headers["x-data-parallel-rank"]))
                ports.append(consumer.legs[-1][1]["remote_port"])
            assert ranks == [1, 0, 1, 0]
            assert ports == [min(ports) + rank for rank in ranks]

    run(work())


def test_every_mode_has_a_name_that_the_settings_know() -> None:
    assert [str(mode) for mode in Mode] == ["auto", "push", "pull"]
