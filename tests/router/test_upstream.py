"""How an answer's beginning is read: what counts as something that a client can be given."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.router.engines import Engine, Role
from kvflow.router.upstream import LegError, UnreachableError, _check, _first_word

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
ERROR = {"error": {"message": "KV load failure", "code": 500}}
ENGINE = Engine(url="http://127.0.0.1:1", role=Role.DECODE)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "delta", "x"]), inner),
)


def events(*said: object) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in said)


def chat(delta: object, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, **more}]}


@pytest.mark.parametrize(
    "says_more",
    [
        chat({"content": "a"}),
        chat({"role": "assistant", "content": "a"}),
        chat({"role": "assistant", "tool_calls": [{"index": 0}]}),
        chat({"role": "assistant", "reasoning": "hm"}),
        chat({"role": "assistant", "content": ""}, finish_reason="stop"),
        chat({}),
        {"choices": [], "usage": {"prompt_tokens": 3}},
        {"choices": [{"index": 0, "text": 'of a "role"'}]},
        ERROR,
    ],
)
def test_whatever_says_more_than_a_role_is_the_first_word(says_more: object) -> None:
    word = events(says_more).removesuffix(b"\n\n")
    assert _first_word(events(says_more)) == word
    assert _first_word(events(ROLE, ROLE, says_more)) == word


@pytest.mark.parametrize("delta", [{}, {"content": ""}, {"content": None, "refusal": None}])
def test_a_role_alone_is_no_word(delta: dict[str, object]) -> None:
    assert _first_word(events(chat({"role": "assistant", **delta}))) is None
    assert _first_word(events(ROLE, ROLE) + b"data: not whole") is None


def test_an_error_behind_a_role_is_the_engines_answer() -> None:
    with pytest.raises(LegError, match=r"HTTP 500.*KV load failure"):
        _check(ENGINE, events(ROLE, ERROR))
    with pytest.raises(UnreachableError):
        _check(ENGINE, b"")
    _check(ENGINE, events(ROLE))


@given(st.binary() | st.lists(JSON).map(lambda said: events(*said)))
@example(events({"choices": [{"delta": "role", "error": 1}]}))
@example(b'data: {"choices": [{"delta": {"role": \xff"error"}}]}\n\n')
def test_whatever_an_engine_says_is_sorted_and_not_raised_at(read: bytes) -> None:
    word = _first_word(read)
    if b"\n\n" in read and b'"error"' not in (word or b""):
        _check(ENGINE, read)
