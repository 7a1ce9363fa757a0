"""What the two legs say, and which requests have none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.ids import Address, TransferId
from kvflow.router import legs

ID = TransferId("route-1")
TEXT = {"model": "m", "prompt": "hello"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (legs.COMPLETIONS, TEXT),
        (legs.COMPLETIONS, {"model": "m", "prompt": [1, 2, 3]}),
        (legs.COMPLETIONS, {"model": "m", "prompt": ["hello"]}),
        (legs.COMPLETIONS, {"model": "m", "prompt": [[1, 2, 3]]}),
        (legs.COMPLETIONS, {**TEXT, "n": 1, "echo": False, "prompt_logprobs": None}),
        (legs.CHAT, CHAT),
        (legs.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        (legs.CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}),
    ],
)
def test_one_prompt_of_text_has_two_legs(path: str, body: dict[str, Any]) -> None:
    assert legs.why_local(path, body) is None


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (legs.COMPLETIONS, {**TEXT, "n": 2}, "n"),
        (legs.COMPLETIONS, {**TEXT, "best_of": 3}, "n"),
        (legs.COMPLETIONS, {**TEXT, "use_beam_search": True}, "beam_search"),
        (legs.COMPLETIONS, {**TEXT, "echo": True}, "prompt_logprobs"),
        (legs.COMPLETIONS, {**TEXT, "prompt_logprobs": 0}, "prompt_logprobs"),
        (legs.COMPLETIONS, {"prompt": ["a", "b"]}, "several_prompts"),
        (legs.COMPLETIONS, {"prompt": [[1], [2]]}, "several_prompts"),
        (legs.COMPLETIONS, {"prompt": []}, "several_prompts"),
        (legs.COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (legs.CHAT, {**CHAT, "n": 2}, "n"),
        (legs.CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, "multimodal"),
        (legs.CHAT, {"messages": [{"role": "user", "content": [{"x": 1}, 3]}]}, "multimodal"),
    ],
)
def test_what_has_no_legs_says_why(path: str, body: dict[str, Any], why: str) -> None:
    assert legs.why_local(path, body) == why


@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_the_prefill_leg_asks_for_one_token_and_the_rest_as_it_is(body: dict[str, Any]) -> None:
    asked = {
        **body,
        "max_tokens": 100,
        "min_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "seed": 3,
        "kv_transfer_params": {"transfer_id": "somebody else's"},
    }
    leg = legs.prefill_leg(asked, ID)
    assert leg == {
        **body,
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.5,
        "seed": 3,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": ID},
    }
    assert asked["max_tokens"] == 100


def test_a_chat_bounded_by_completion_tokens_is_bounded_in_its_prefill_leg() -> None:
    leg = legs.prefill_leg({**CHAT, "max_completion_tokens": 100}, ID)
    assert leg["max_completion_tokens"] == 1
    assert leg["max_tokens"] == 1


def test_the_decode_leg_is_the_request_with_the_router_s_id_whatever_was_passed_on() -> None:
    passed_on = {"remote_block_ids": [[1]], "transfer_id": "another", "remote_port": 7}
    leg = legs.decode_leg({**TEXT, "max_tokens": 9}, ID, Address("h", 5600), passed_on)
    assert leg["max_tokens"] == 9
    assert leg["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "remote_host": "h",
        "remote_port": 7,
        "remote_block_ids": [[1]],
        "transfer_id": ID,
    }


def test_a_client_cannot_name_a_transfer() -> None:
    stolen = {**TEXT, "kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "x"}}
    assert legs.local(stolen) == TEXT
    assert (
        legs.decode_leg(stolen, ID, Address("h", 1), {})["kv_transfer_params"]["transfer_id"] == ID
    )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
BODIES = st.dictionaries(
    st.sampled_from(["prompt", "messages", "n", "echo", "stream", "max_tokens", "best_of"]),
    ANYTHING,
)


@given(path=st.sampled_from(legs.PATHS), body=BODIES)
def test_whatever_a_client_sends_it_is_sorted_and_not_raised_at(
    path: str, body: dict[str, Any]
) -> None:
    assert legs.why_local(path, body) is None or isinstance(legs.why_local(path, body), str)
    assert legs.head(path, body, 64) == legs.head(path, dict(body), 64)
    assert legs.size(path, body) >= 1
    assert legs.prefill_leg(body, ID)["kv_transfer_params"]["transfer_id"] == ID


@pytest.mark.parametrize("kind", ["text", "ids", "chat"])
def test_prompts_that_begin_alike_have_one_head(kind: str) -> None:
    def body(end: str) -> tuple[str, dict[str, Any]]:
        begin = "x" * 64
        match kind:
            case "text":
                return legs.COMPLETIONS, {"prompt": begin + end}
            case "ids":
                return legs.COMPLETIONS, {"prompt": [*([7] * 64), *map(ord, end)]}
            case _:
                said = [{"role": "system", "content": begin}, {"role": "user", "content": end}]
                return legs.CHAT, {"messages": said}

    (path, one), (_, other) = body("one"), body("other")
    assert legs.head(path, one, 64) == legs.head(path, other, 64)
    assert legs.head(path, one, 4096) != legs.head(path, other, 4096)
