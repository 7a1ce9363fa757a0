"""Which of a request's blocks are loaded and offered, per kind of cache group."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from kvflow.connector.groups import Group, has_state, leave_last_token, tokens_to_share
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev

from .fakes import BLOCK, DECODE, PREFILL, FakeRequest, finish, make, schedule, step

FULL = Group(index=0, block_tokens=32)
WINDOW = Group(index=0, block_tokens=32, window_tokens=128)
STATE = Group(index=0, block_tokens=0)
IDS = list(range(101, 111))
"""Blocks of 320 tokens at most."""


@pytest.mark.parametrize(
    ("computed", "tokens", "start", "ids"),
    [
        (0, 300, 0, IDS),
        (64, 300, 64, IDS[2:]),
        (0, 257, 0, IDS[:9]),
        (0, 1, 0, IDS[:1]),
        (288, 300, 288, IDS[9:]),
        (300, 300, 300, IDS[9:]),
    ],
)
def test_of_full_attention_all_that_is_not_here_is_loaded(
    computed: int, tokens: int, start: int, ids: list[int]
) -> None:
    assert FULL.to_load(IDS, computed, tokens) == (start, ids)


@pytest.mark.parametrize(
    ("freed", "computed", "tokens", "start", "ids"),
    [
        (0, 0, 100, 0, IDS[:4]),
        (0, 0, 128, 1, IDS[:4]),
        (5, 0, 300, 173, IDS[5:]),
        (5, 192, 300, 192, IDS[6:]),
        (6, 0, 300, 192, IDS[6:]),
        (10, 0, 300, 300, []),
    ],
)
def test_of_a_sliding_window_only_its_tail_is_loaded(
    freed: int, computed: int, tokens: int, start: int, ids: list[int]
) -> None:
    """vLLM needs the last 127 tokens; it has freed the blocks before, whose ids are 0."""
    blocks = [0] * freed + IDS[freed:]
    assert WINDOW.to_load(blocks, computed, tokens) == (start, ids)


def test_of_blocks_of_another_size_the_same_tokens_of_a_window_are_asked_for() -> None:
    large = Group(index=0, block_tokens=96, window_tokens=128)
    assert large.to_load([0, 7, 8, 9], 0, 300) == (173, [7, 8, 9])


@pytest.mark.parametrize(("scratch", "ids", "state"), [(0, [7], 7), (2, [7, 8, 9], 7), (2, [7], 7)])
def test_of_a_state_the_block_that_has_it_is_loaded_and_offered(
    scratch: int, ids: list[int], state: int
) -> None:
    group = Group(index=0, block_tokens=0, scratch_blocks=scratch)
    assert group.to_load(ids, 0, 300) == (0, [state])
    assert group.to_offer(ids) == [state]


def test_a_prefill_offers_all_of_its_blocks_with_their_positions() -> None:
    assert WINDOW.to_offer([0, 0, 5, 6]) == [0, 0, 5, 6]


# -- models with states ----------------------------------------------------------------------------


class Prompt(FakeRequest):
    """A request with its tokens, as far as vLLM keeps them twice."""

    def __init__(self, params: Any, tokens: int) -> None:
        super().__init__(params, num_prompt_tokens=tokens, num_computed_tokens=tokens)
        self.prompt_token_ids = list(range(tokens))
        self._all_token_ids = list(range(tokens))
        self.max_tokens = 16


def of_two_kinds() -> SchedulerHalf:
    groups = (
        Group(index=0, block_tokens=0),
        Group(index=1, block_tokens=BLOCK),
    )
    return make(groups=groups)


def blocks(*ids: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: ids)


def test_a_decode_leg_loads_all_but_the_last_token_since_a_state_takes_it_only_once() -> None:
    half = of_two_kinds()
    request: Any = Prompt(DECODE, 70)
    assert half.tokens_to_load(request, 0) == (69, True)
    half.allocated(request, blocks([3], [10, 11, 12, 13, 14]), 69)
    (event,) = step(half)
    assert isinstance(event, ev.BlocksAllocated)
    assert (event.blocks, event.starts, event.tokens) == (
        ((3,), (10, 11, 12, 13, 14)),
        (0, 0),
        69,
    )


def test_a_prefill_leg_computes_all_but_the_last_token_and_is_good_for_exactly_that() -> None:
    half = of_two_kinds()
    request: Any = Prompt(PREFILL, 70)
    half.arrived(request)
    assert (request.num_prompt_tokens, request.max_tokens) == (69, 1)
    assert len(request.prompt_token_ids) == len(request._all_token_ids) == 69
    request.num_computed_tokens = 69
    half.finished(request, ([3], [4, 5, 6, 7, 8]))
    *_, event = step(half)
    assert isinstance(event, ev.PrefillFinished)
    assert (event.blocks, event.tokens, event.is_exact) == (((3,), (4, 5, 6, 7, 8)), 69, True)


def test_a_prompt_of_one_token_is_computed_where_it_is_decoded() -> None:
    half = of_two_kinds()
    prefill: Any = Prompt(PREFILL, 1)
    leave_last_token(prefill)
    assert prefill.num_prompt_tokens == 1
    decode: Any = Prompt(DECODE, 1)
    assert tokens_to_share(decode, (STATE,)) == 0
    assert half.tokens_to_load(decode, 0) == (0, False)


def test_without_states_a_prompt_stays_whole() -> None:
    half = make()
    request: Any = Prompt(PREFILL, 70)
    half.arrived(request)
    assert request.num_prompt_tokens == 70
    assert not has_state((FULL, WINDOW))
    schedule(half, request)
    finish(half, request)
    *_, event = step(half)
    assert isinstance(event, ev.PrefillFinished)
    assert not event.is_exact
