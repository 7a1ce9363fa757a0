"""The scheduler half: a decode request that is preempted after its KV has landed."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from vllm.v1.request import RequestStatus

from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev
from kvflow.errors import ConfigurationError
from kvflow.ids import ATTEMPT_STRIDE
from kvflow.settings import Settings

from .fakes import BLOCK, DECODE, FakeRequest, finish, kinds, make, report, schedule, step

R = "r-12345678"
ALL = (5 * BLOCK, True)
NOTHING = (0, False)
REGISTERS = Settings(after_preemption="register")


@pytest.fixture
def half() -> Iterator[SchedulerHalf]:
    """A half that registers again."""
    half = make(settings=REGISTERS, policy="recompute")
    yield half
    half.close()


def landed(half: SchedulerHalf, request: FakeRequest) -> None:
    """Its load was asked for and has come; nothing is left to be told."""
    assert schedule(half, request) == ALL
    report(half, request.request_id)
    step(half)


def preempted(half: SchedulerHalf, request: FakeRequest) -> None:
    assert step(half, preempted={request.request_id, "another"}) == ()


def test_a_preempted_request_is_loaded_once_more_as_a_new_attempt_f9(half: SchedulerHalf) -> None:
    request = FakeRequest(DECODE)
    assert schedule(half, request) == ALL
    (first,) = step(half)
    report(half, R)
    preempted(half, request)
    assert schedule(half, request, computed=2 * BLOCK) == (3 * BLOCK, True)
    (again,) = step(half)
    assert isinstance(first, ev.BlocksAllocated)
    assert isinstance(again, ev.BlocksAllocated)
    assert (first.keep, first.again, again.keep, again.again) == (True, False, True, True)
    assert again.attempt == first.attempt + ATTEMPT_STRIDE
    assert (again.blocks, again.starts, again.tokens) == (((12, 13, 14),), (2 * BLOCK,), 5 * BLOCK)


def test_it_is_asked_for_again_after_every_preemption_f9(half: SchedulerHalf) -> None:
    request = FakeRequest(DECODE)
    landed(half, request)
    for _ in range(3):
        preempted(half, request)
        landed(half, request)


def test_a_request_that_is_not_preempted_is_not_asked_for_again(half: SchedulerHalf) -> None:
    """vLLM asks again for a prompt of one token that was loaded: it computes the last one."""
    request = FakeRequest(DECODE, num_prompt_tokens=1)
    assert schedule(half, request) == (1, True)
    report(half, R)
    step(half)
    assert schedule(half, request) == NOTHING
    assert step(half) == ()


def test_after_a_load_that_failed_the_prompt_is_computed_here_f9(half: SchedulerHalf) -> None:
    """vLLM asks again at once, and after each later preemption."""
    request = FakeRequest(DECODE)
    landed(half, request)
    preempted(half, request)
    assert schedule(half, request) == ALL
    step(half)
    report(half, failed=(R,))
    assert schedule(half, request) == NOTHING
    preempted(half, request)
    assert schedule(half, request) == NOTHING
    assert step(half) == ()


def test_what_is_cached_here_after_a_preemption_releases_nobody_yet(half: SchedulerHalf) -> None:
    """It may be preempted once more, and then less may be cached."""
    request = FakeRequest(DECODE)
    landed(half, request)
    preempted(half, request)
    assert schedule(half, request, computed=5 * BLOCK) == NOTHING
    assert step(half) == ()
    preempted(half, request)
    assert schedule(half, request) == ALL


@pytest.mark.parametrize("computed", [5 * BLOCK, 7 * BLOCK])
def test_output_tokens_are_never_loaded(half: SchedulerHalf, computed: int) -> None:
    request = FakeRequest(DECODE)
    landed(half, request)
    preempted(half, request)
    asked: Any = request
    assert half.tokens_to_load(asked, computed) == NOTHING


def test_loads_after_a_preemption_are_parked_like_others_f17() -> None:
    settings = Settings(after_preemption="register", parked_max=1)
    half = make(settings=settings, policy="recompute")
    request: Any = FakeRequest(DECODE)
    landed(half, request)
    schedule(half, FakeRequest(DECODE, request_id="other-12345678"))
    step(half)
    preempted(half, request)
    assert half.tokens_to_load(request, 0) == (None, False)
    report(half, "other-12345678")
    assert schedule(half, request) == ALL


# -- its end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED])
def test_the_end_of_a_request_is_told_so_that_nothing_is_kept_for_it(
    half: SchedulerHalf, status: RequestStatus, preempt: bool
) -> None:
    request = FakeRequest(DECODE, status=status)
    landed(half, request)
    if preempt:
        preempted(half, request)
    assert finish(half, request)[0] is False
    assert step(half) == (ev.RequestEnded(request_id=R),)
    assert not half._asked


def test_so_is_that_of_one_whose_load_failed_for_a_rank_may_keep_its_part(
    half: SchedulerHalf,
) -> None:
    request = FakeRequest(DECODE)
    schedule(half, request)
    step(half)
    report(half, failed=(R,))
    finish(half, request)
    assert kinds(step(half)) == ["RequestEnded"]


def test_the_end_of_a_request_that_is_being_loaded_again_aborts_the_load_f2(
    half: SchedulerHalf,
) -> None:
    request = FakeRequest(DECODE, status=RequestStatus.FINISHED_ABORTED)
    landed(half, request)
    preempted(half, request)
    schedule(half, request)
    finish(half, request)
    assert kinds(step(half)) == ["BlocksAllocated", "LoadAborted"]
    report(half, failed=(R,))
    assert not half._loads
    assert not half._asked


def test_of_a_request_that_loaded_nothing_only_the_release_is_told(half: SchedulerHalf) -> None:
    request = FakeRequest(DECODE)
    assert schedule(half, request, computed=5 * BLOCK) == NOTHING
    finish(half, request)
    assert kinds(step(half)) == ["ReleaseWanted"]


def test_other_requests_are_preempted_and_end_without_a_word(half: SchedulerHalf) -> None:
    request = FakeRequest(None)
    assert schedule(half, request) == NOTHING
    preempted(half, request)
    finish(half, request)
    assert step(half) == ()


# -- the settings --------------------------------------------------------------------------------


def test_by_default_a_preempted_request_computes_its_prompt_and_nothing_is_kept_f9() -> None:
    half = make()
    request = FakeRequest(DECODE)
    assert schedule(half, request) == ALL
    (first,) = step(half)
    assert isinstance(first, ev.BlocksAllocated)
    assert not first.keep
    report(half, R)
    preempted(half, request)
    assert schedule(half, request) == NOTHING
    finish(half, request)
    assert step(half) == ()


def test_registering_again_needs_a_policy_that_recomputes_what_fails() -> None:
    with pytest.raises(ConfigurationError, match="kv_load_failure_policy='fail'") as raised:
        make(settings=REGISTERS, policy="fail")
    assert "recompute" in raised.value.allowed
    assert "can be computed here" in raised.value.allowed
    for settings, policy in ((REGISTERS, "recompute"), (Settings(), "fail")):
        make(settings=settings, policy=policy).close()


@pytest.mark.parametrize(
    ("settings", "what"),
    [(REGISTERS, "asks for its KV once more"), (Settings(), "computes its prompt here")],
)
def test_the_log_says_what_becomes_of_a_preempted_request_f22(
    settings: Settings, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    half = make(settings=settings, policy="recompute")
    request = FakeRequest(DECODE)
    landed(half, request)
    with caplog.at_level(logging.INFO, logger="vllm.kvflow"):
        preempted(half, request)
    assert [what in r.getMessage() and R in r.getMessage() for r in caplog.records] == [True]
