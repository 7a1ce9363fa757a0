"""What two engines compare a prompt by."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from kvflow.connector.prompt import digest_of
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev
from kvflow.core.events import Event
from kvflow.ids import NO_DIGEST

from .fakes import BLOCK, DECODE, PREFILL, FakeRequest, finish, make, schedule, step

TOKENS = list(range(5 * BLOCK))
OTHERS = [*TOKENS[:-1], 7]


def request(tokens: list[int] | None, params: Any = None, lora: str | None = None) -> Any:
    adapter = SimpleNamespace(lora_name=lora) if lora else None
    return FakeRequest(params, prompt_token_ids=tokens, lora_request=adapter)


def digest(tokens: list[int] | None, lora: str | None = None) -> bytes:
    return digest_of(request(tokens, lora=lora), 5 * BLOCK)


def test_whatever_changes_the_kv_changes_the_digest() -> None:
    prompts = [
        digest(TOKENS),
        digest(OTHERS),
        digest(TOKENS[::-1]),
        digest(TOKENS[:-1]),
        digest([2**32 + token for token in TOKENS]),
        digest(TOKENS, lora="a"),
        digest(TOKENS, lora="b"),
        digest(OTHERS, lora="a"),
    ]
    assert len(set(prompts)) == len(prompts)
    assert {len(each) for each in prompts} == {16}


def test_the_same_prompt_has_the_same_digest_in_every_process() -> None:
    assert digest([1, 2, 3]).hex() == "abccad42d03c940bc2b249bf5a4e1e3d"
    assert digest(TOKENS) == digest(list(TOKENS))


def test_of_a_longer_prompt_only_what_is_shared_is_compared() -> None:
    assert digest_of(request([*TOKENS, 9]), 5 * BLOCK) == digest(TOKENS)


def test_embeddings_have_none() -> None:
    assert digest(None) == NO_DIGEST


def prompts_of(events: tuple[Event, ...]) -> set[bytes]:
    kinds = ev.PrefillStarted | ev.PrefillAdvanced | ev.PrefillFinished | ev.BlocksAllocated
    return {event.prompt for event in events if isinstance(event, kinds)}


def told(half: SchedulerHalf, params: Any, tokens: list[int]) -> set[bytes]:
    """What every event of one request says of its prompt."""
    asked = request(tokens, params)
    schedule(half, asked)
    said = prompts_of(step(half))
    if params is PREFILL:
        finish(half, asked)
        said |= prompts_of(step(half))
    return said


def test_both_legs_say_the_same_of_one_prompt_and_another_of_another() -> None:
    halves = [make() for _ in range(3)]
    prefill, decode, other = (
        told(half, params, tokens)
        for half, params, tokens in zip(
            halves, (PREFILL, DECODE, DECODE), (TOKENS, TOKENS, OTHERS), strict=True
        )
    )
    assert prefill == decode == {digest(TOKENS)}
    assert other == {digest(OTHERS)}
    for half in halves:
        half.close()
