"""What the scheduler half says of prompts that are being computed, step by step."""

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from vllm.v1.request import RequestStatus

from kvflow.connector.groups import Group
from kvflow.connector.metadata import StepEvents
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev
from kvflow.ids import RequestId, TransferId
from kvflow.settings import Settings

from .fakes import BLOCK, FULL, PREFILL, FakeRequest, make, step_output

ID = "r-12345678"
EVERYTHING = Settings(stream_bytes_min=1)
PROMPT = 5 * BLOCK
STATE = Group(index=1, block_tokens=0)


def half_with(
    request: FakeRequest, settings: Settings = EVERYTHING, **how: object
) -> SchedulerHalf:
    half = make(settings=settings, **how)  # type: ignore[arg-type]
    half.arrived(request)  # type: ignore[arg-type]
    return half


def first(half: SchedulerHalf, tokens: int, ids: list[int]) -> StepEvents:
    return half.step(step_output(new={ID: (0, tokens, (ids,))}))


def more(
    half: SchedulerHalf, computed: int, tokens: int, ids: list[int] | None = None
) -> StepEvents:
    return half.step(step_output(cached={ID: (computed, tokens, (ids,) if ids else None)}))


def told(made: StepEvents) -> list[tuple[int, ev.Blocks]]:
    return [(event.tokens, event.blocks) for event in made.advanced]


def test_each_step_tells_what_it_completes() -> None:
    half = half_with(FakeRequest(kv_transfer_params=PREFILL))
    assert told(first(half, 2 * BLOCK, [7, 8])) == [(2 * BLOCK, ((7, 8),))]
    assert told(more(half, 2 * BLOCK, BLOCK, [9])) == [(3 * BLOCK, ((7, 8, 9),))]
    assert told(more(half, 3 * BLOCK, 2 * BLOCK, [4, 5])) == [(PROMPT, ((7, 8, 9, 4, 5),))]


def test_a_prompt_that_fits_into_one_step_is_told_at_its_end() -> None:
    half = half_with(FakeRequest(kv_transfer_params=PREFILL, num_prompt_tokens=PROMPT - 3))
    assert told(first(half, PROMPT - 3, [1, 2, 3, 4, 5])) == [(PROMPT - 3, ((1, 2, 3, 4, 5),))]


def test_tokens_after_the_prompt_are_not_told() -> None:
    half = half_with(FakeRequest(kv_transfer_params=PREFILL))
    first(half, PROMPT, [1, 2, 3, 4, 5])
    assert told(more(half, PROMPT, 1, [6])) == []


def test_a_stretch_ends_with_a_block() -> None:
    half = half_with(FakeRequest(kv_transfer_params=PREFILL))
    assert told(first(half, 2 * BLOCK + 5, [7, 8, 9])) == [(2 * BLOCK, ((7, 8, 9),))]
    assert told(more(half, 2 * BLOCK + 5, 2)) == []


def test_cached_tokens_are_told_with_the_first_step() -> None:
    half = half_with(FakeRequest(kv_transfer_params=PREFILL))
    made = half.step(step_output(new={ID: (2 * BLOCK, BLOCK, ([7, 8, 9],))}))
    assert told(made) == [(3 * BLOCK, ((7, 8, 9),))]


def test_small_stretches_wait_for_the_next_but_not_the_last() -> None:
    settings = Settings(stream_bytes_min=2 * BLOCK * 100)
    group = Group(index=0, block_tokens=BLOCK, token_bytes=100)
    half = half_with(FakeRequest(kv_transfer_params=PREFILL), settings, groups=(group,))
    assert told(first(half, BLOCK, [1])) == []
    assert told(more(half, BLOCK, BLOCK, [2])) == [(2 * BLOCK, ((1, 2),))]
    assert told(more(half, 2 * BLOCK, BLOCK, [3])) == []
    assert told(more(half, 3 * BLOCK, 2 * BLOCK, [4, 5]))[0][0] == PROMPT


def test_several_groups_are_told_by_their_own_ids() -> None:
    groups = (Group(index=0, block_tokens=BLOCK), Group(index=2, block_tokens=BLOCK))
    half = half_with(FakeRequest(kv_transfer_params=PREFILL), groups=groups)
    made = half.step(step_output(new={ID: (0, BLOCK, ([1], [2], [3]))}))
    assert told(made) == [(BLOCK, ((1,), (3,)))]


def test_a_preempted_prompt_is_told_from_its_start_with_its_new_blocks() -> None:
    half = half_with(FakeRequest(kv_transfer_params=PREFILL))
    first(half, 2 * BLOCK, [7, 8])
    made = half.step(step_output(preempted={ID}))
    assert made.withdrawn == (
        ev.PrefillPreempted(transfer_id=TransferId("t"), request_id=RequestId(ID)),
    )
    output = step_output(cached={ID: (0, BLOCK, ([3],))}, resumed={ID})
    assert told(half.step(output)) == [(BLOCK, ((3,),))]


@pytest.mark.parametrize("some_is_told", [True, False])
def test_blocks_of_an_aborted_prompt_are_withdrawn_if_they_may_be_read(some_is_told: bool) -> None:
    request = FakeRequest(kv_transfer_params=PREFILL, status=RequestStatus.FINISHED_ABORTED)
    half = half_with(request)
    if some_is_told:
        first(half, BLOCK, [7])
    half.finished(request, ([7],))  # type: ignore[arg-type]
    made = half.step(step_output())
    aborted = [*(made.withdrawn if some_is_told else made.events)]
    assert [type(event) for event in aborted][-1:] == [ev.PrefillAborted]
    assert half.step(step_output(tokens=0)) == StepEvents()


@pytest.mark.parametrize(
    ("settings", "groups"),
    [(Settings(stream="off"), (FULL,)), (EVERYTHING, (FULL, STATE))],
    ids=["off", "a model with states"],
)
def test_nothing_is_told_before_the_end(settings: Settings, groups: tuple[Group, ...]) -> None:
    request = FakeRequest(kv_transfer_params=PREFILL)
    half = make(settings=settings, groups=groups)
    half._prefill_started(request)  # type: ignore[arg-type]
    assert told(first(half, 2 * BLOCK, [7, 8])) == []


def test_requests_without_a_consumer_are_not_looked_at() -> None:
    half = half_with(FakeRequest())
    assert told(first(half, 2 * BLOCK, [7, 8])) == []
