"""The scheduler half: what vLLM's scheduler does, and which events come out of it."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from vllm.v1.request import RequestStatus

from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev
from kvflow.ids import ATTEMPT_STRIDE, Address

from .fakes import (
    BLOCK,
    DECODE,
    PREFILL,
    FakeRequest,
    finish,
    kinds,
    make,
    report,
    schedule,
    step,
)


@pytest.fixture
def half() -> Iterator[SchedulerHalf]:
    half = make()
    yield half
    half.close()


# -- prefill legs --------------------------------------------------------------------------------


def test_a_prefill_leg_loads_nothing_and_is_announced(half: SchedulerHalf) -> None:
    assert schedule(half, FakeRequest(PREFILL)) == (0, False)
    assert half.has_events
    assert step(half) == (ev.PrefillStarted(transfer_id="t", request_id="r-12345678"),)
    assert not half.has_events
    assert step(half) == ()


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED]
)
def test_a_finished_prefill_keeps_its_blocks_and_answers_with_upstreams_keys(
    half: SchedulerHalf, status: RequestStatus
) -> None:
    request = FakeRequest(PREFILL, status=status)
    schedule(half, request)
    step(half)
    delay, params = finish(half, request)
    assert delay
    assert params["do_remote_prefill"]
    assert not params["do_remote_decode"]
    assert params["transfer_id"] == params["remote_request_id"] == "t"
    assert params["remote_engine_id"] == "engine-here"
    assert (params["remote_host"], params["remote_port"]) == half.address
    assert params["remote_block_ids"] == ([1, 2, 3],)
    assert params["tp_size"] == params["pp_size"] == 1
    (event,) = step(half)
    assert event == ev.PrefillFinished(
        transfer_id="t",
        request_id="r-12345678",
        blocks=((1, 2, 3),),
        tokens=5 * BLOCK,
    )


def test_the_answer_of_a_prefill_leg_is_good_for_a_decode_leg() -> None:
    producer, consumer = make(), make()
    prefill = FakeRequest(PREFILL)
    schedule(producer, prefill)
    _, params = finish(producer, prefill)
    decode = FakeRequest(params, request_id="d-87654321")
    assert schedule(consumer, decode) == (5 * BLOCK, True)
    (event,) = step(consumer)
    assert isinstance(event, ev.BlocksAllocated)
    assert event.transfer_id == "t"
    assert event.address == producer.address
    assert event.engine_id == "engine-here"


def test_without_a_transfer_id_both_legs_use_the_routers_request_id() -> None:
    producer, consumer = make(), make()
    schedule(producer, FakeRequest({"do_remote_decode": True}, request_id="cmpl-7-aaaaaaaa"))
    decode = {**DECODE, "transfer_id": None}
    schedule(consumer, FakeRequest(decode, request_id="cmpl-7-bbbbbbbb"))
    (started,), (allocated,) = step(producer), step(consumer)
    assert started.transfer_id == allocated.transfer_id == "cmpl-7"


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED])
def test_an_aborted_prefill_gives_its_blocks_back_at_once(
    half: SchedulerHalf, status: RequestStatus
) -> None:
    request = FakeRequest(PREFILL, status=status)
    schedule(half, request)
    assert finish(half, request) == (False, None)
    assert kinds(step(half)) == ["PrefillStarted", "PrefillAborted"]


def test_a_prefill_that_ends_without_blocks_is_aborted(half: SchedulerHalf) -> None:
    request = FakeRequest(PREFILL)
    schedule(half, request)
    assert finish(half, request, blocks=[]) == (False, None)
    assert kinds(step(half)) == ["PrefillStarted", "PrefillAborted"]


def test_a_preempted_prefill_is_told_before_its_next_start(half: SchedulerHalf) -> None:
    request = FakeRequest(PREFILL)
    schedule(half, request)
    step(half)
    assert step(half, preempted={request.request_id, "another"}) == (
        ev.PrefillPreempted(transfer_id="t", request_id="r-12345678"),
    )
    schedule(half, request)
    assert kinds(step(half)) == ["PrefillStarted"]


def test_a_prefill_that_was_never_scheduled_ends_without_a_word(half: SchedulerHalf) -> None:
    request = FakeRequest(PREFILL, status=RequestStatus.FINISHED_ABORTED)
    assert finish(half, request) == (False, None)
    assert step(half) == ()


def test_a_prefill_that_ends_while_it_waits_in_the_queue_is_told_as_aborted_f1(
    half: SchedulerHalf,
) -> None:
    request: Any = FakeRequest(PREFILL, status=RequestStatus.FINISHED_ABORTED)
    half.arrived(request)
    assert finish(half, request, blocks=[]) == (False, None)
    assert kinds(step(half)) == ["PrefillStarted", "PrefillAborted"]


def test_a_prefill_leg_at_an_engine_that_only_consumes_keeps_no_blocks() -> None:
    half = make("kv_consumer")
    request = FakeRequest(PREFILL)
    schedule(half, request)
    assert finish(half, request) == (False, None)
    assert step(half) == ()


@pytest.mark.parametrize("given", ["", "a b", 7, "x" * 300, ["t"]])
def test_a_prefill_with_a_bad_transfer_id_is_served_without_a_transfer(
    half: SchedulerHalf, given: object
) -> None:
    request = FakeRequest({**PREFILL, "transfer_id": given})
    assert schedule(half, request) == (0, False)
    assert finish(half, request) == (False, None)
    assert step(half) == ()


# -- decode legs ---------------------------------------------------------------------------------


def test_a_decode_leg_loads_its_whole_prompt(half: SchedulerHalf) -> None:
    assert schedule(half, FakeRequest(DECODE)) == (5 * BLOCK, True)
    assert step(half) == (
        ev.BlocksAllocated(
            transfer_id="t",
            request_id="r-12345678",
            attempt=16,
            address=Address("prefill", 5600),
            engine_id="engine-p",
            blocks=((10, 11, 12, 13, 14),),
            starts=(0,),
            tokens=5 * BLOCK,
        ),
    )


@pytest.mark.parametrize(
    ("tokens", "computed", "external", "blocks"),
    [
        (80, 0, 80, (10, 11, 12, 13, 14)),
        (80, 16, 64, (11, 12, 13, 14)),
        (80, 64, 16, (14,)),
        (70, 0, 70, (10, 11, 12, 13, 14)),
        (70, 64, 6, (14,)),
        (65, 48, 17, (13, 14)),
        (1, 0, 1, (10,)),
        (33, 0, 33, (10, 11, 12)),
    ],
)
def test_what_is_cached_here_is_not_loaded(
    half: SchedulerHalf,
    tokens: int,
    computed: int,
    external: int,
    blocks: tuple[int, ...],
) -> None:
    request = FakeRequest(DECODE, num_prompt_tokens=tokens)
    assert schedule(half, request, computed) == (external, True)
    (event,) = step(half)
    assert isinstance(event, ev.BlocksAllocated)
    assert (event.blocks, event.starts, event.tokens) == ((blocks,), (computed,), tokens)


def test_when_all_is_cached_here_the_producer_is_told_so(half: SchedulerHalf) -> None:
    request = FakeRequest(DECODE)
    assert schedule(half, request, computed=5 * BLOCK) == (0, False)
    (event,) = step(half)
    assert isinstance(event, ev.ReleaseWanted)
    assert (event.transfer_id, event.address) == ("t", Address("prefill", 5600))
    assert finish(half, request)[0] is False
    assert step(half) == ()


def test_a_decode_leg_loads_once_and_computes_whatever_is_missing_later(
    half: SchedulerHalf,
) -> None:
    request = FakeRequest(DECODE)
    schedule(half, request)
    step(half)
    report(half, request.request_id)
    for computed in (0, 2 * BLOCK):
        assert schedule(half, request, computed) == (0, False)
    assert step(half) == ()
    assert finish(half, request)[0] is False
    assert step(half) == ()


def test_asking_twice_before_allocation_changes_nothing(half: SchedulerHalf) -> None:
    request: Any = FakeRequest(DECODE)
    assert half.tokens_to_load(request, 0) == half.tokens_to_load(request, 0) == (80, True)
    schedule(half, request)
    assert kinds(step(half)) == ["BlocksAllocated"]


def test_attempts_count_up_over_all_requests_of_the_engine(half: SchedulerHalf) -> None:
    """In steps, since a retry takes the number after its load's."""
    for number in range(3):
        schedule(half, FakeRequest(DECODE, request_id=f"r{number}-12345678"))
    finish(half, FakeRequest(DECODE, request_id="gone-12345678"))
    assert [event.attempt for event in step(half)] == [16, 32, 48, 64]
    assert ATTEMPT_STRIDE == 16


def test_a_request_that_ends_before_it_was_scheduled_releases_the_producer(
    half: SchedulerHalf,
) -> None:
    request = FakeRequest(DECODE, status=RequestStatus.FINISHED_ABORTED)
    assert finish(half, request, blocks=[]) == (False, None)
    assert kinds(step(half)) == ["ReleaseWanted"]


def test_a_request_that_ends_while_it_loads_aborts_the_load(half: SchedulerHalf) -> None:
    request = FakeRequest(DECODE, status=RequestStatus.FINISHED_ABORTED)
    schedule(half, request)
    step(half)
    assert finish(half, request)[0] is False
    assert step(half) == (ev.LoadAborted(request_id="r-12345678"),)
    report(half, request.request_id)
    assert step(half) == ()


def test_a_request_whose_load_was_reported_ends_without_a_word(half: SchedulerHalf) -> None:
    request = FakeRequest(DECODE)
    schedule(half, request)
    report(half, request.request_id)
    step(half)
    assert finish(half, request)[0] is False
    assert step(half) == ()


def test_a_request_id_may_come_again_after_its_end(half: SchedulerHalf) -> None:
    request = FakeRequest(DECODE)
    for _ in range(2):
        assert schedule(half, request) == (80, True)
        report(half, request.request_id)
        finish(half, request)
    assert kinds(step(half)) == ["BlocksAllocated"] * 2


def test_a_leg_in_the_middle_of_a_chain_loads_and_is_loaded_from(half: SchedulerHalf) -> None:
    request = FakeRequest({**DECODE, "do_remote_decode": True})
    assert schedule(half, request) == (80, True)
    report(half, request.request_id)
    delay, params = finish(half, request)
    assert delay
    assert params["transfer_id"] == "t"
    assert kinds(step(half)) == ["PrefillStarted", "BlocksAllocated", "PrefillFinished"]


BAD = {
    "no_host": {"remote_host": None},
    "no_port": {"remote_port": None},
    "port_as_text": {"remote_port": "5600"},
    "port_zero": {"remote_port": 0},
    "spaces": {"transfer_id": "a b"},
    "number": {"transfer_id": 7},
    "long": {"transfer_id": "x" * 257},
    "engine": {"remote_engine_id": 7},
    "host_list": {"remote_host": ["a", "b"]},
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_parameters_fail_the_load_with_a_sentence_and_never_the_engine(
    half: SchedulerHalf, kind: str
) -> None:
    request = FakeRequest({**DECODE, **BAD[kind]})
    assert schedule(half, request) == (80, True)
    (event,) = step(half)
    assert isinstance(event, ev.LoadRefused)
    assert event.request_id == request.request_id
    assert next(iter(BAD[kind])) in event.detail
    report(half, request.request_id)
    assert schedule(half, request) == (0, False)
    assert finish(half, request)[0] is False
    assert step(half) == ()


@pytest.mark.parametrize("kind", BAD)
def test_bad_parameters_release_nobody(half: SchedulerHalf, kind: str) -> None:
    assert finish(half, FakeRequest({**DECODE, **BAD[kind]})) == (False, None)
    assert step(half) == ()


@pytest.mark.parametrize("params", [None, {}, [], "text", 7, {"do_remote_prefill": False}])
def test_other_requests_pass_untouched(half: SchedulerHalf, params: object) -> None:
    request = FakeRequest(params)
    assert schedule(half, request) == (0, False)
    assert finish(half, request) == (False, None)
    assert step(half) == ()


def test_nothing_is_remembered_of_requests_that_are_over(half: SchedulerHalf) -> None:
    for number in range(20):
        for params in (PREFILL, DECODE, None):
            request = FakeRequest({**params} if params else None, request_id=f"r{number}-12345678")
            schedule(half, request)
            report(half, request.request_id)
            finish(half, request)
    step(half)
    for memory in (half._prefills, half._loads, half._asked, half._events):
        assert not memory
