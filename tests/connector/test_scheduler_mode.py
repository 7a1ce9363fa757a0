"""The settings `mode` and `recompute_below_tokens`: who moves the KV, and what is not moved."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from kvflow import __version__
from kvflow.connector import params as p
from kvflow.connector.groups import Group
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev
from kvflow.core.notices import Offer
from kvflow.core.producer import prefill_name
from kvflow.settings import Settings

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

FINISHED = {**DECODE, "remote_block_ids": [[7, 8, 9, 4, 5]], "remote_num_tokens": 5 * BLOCK}
TOLD = {**FINISHED, "remote_prefill": "p"}
OFFER = Offer(blocks=((7, 8, 9, 4, 5),), tokens=5 * BLOCK, prefill="p")


def allocated(mode: str, params: dict[str, Any], **how: Any) -> ev.BlocksAllocated:
    half = make(settings=Settings(mode=mode), **how)
    schedule(half, FakeRequest(params))
    (event,) = step(half)
    assert isinstance(event, ev.BlocksAllocated)
    return event


@pytest.mark.parametrize(
    ("mode", "params", "reads", "offer"),
    [
        ("push", DECODE, False, None),
        ("push", TOLD, False, None),
        ("pull", DECODE, True, None),
        ("pull", FINISHED, True, None),
        ("pull", TOLD, True, OFFER),
        ("auto", DECODE, False, None),
        ("auto", FINISHED, False, None),
        ("auto", TOLD, True, OFFER),
    ],
)
def test_the_mode_says_who_moves_the_kv(
    mode: str, params: dict[str, Any], reads: bool, offer: Offer | None
) -> None:
    event = allocated(mode, params)
    assert (event.reads, event.offer) == (reads, offer)


def test_a_producers_answer_tells_a_consumer_what_it_will_say_itself() -> None:
    """Also when a router has carried it as JSON."""
    producer = make()
    prefill = FakeRequest(PREFILL)
    schedule(producer, prefill)
    _, params = finish(producer, prefill, blocks=[4, 5, 6, 7, 8])
    finished = step(producer)[-1]
    assert isinstance(finished, ev.PrefillFinished)
    offer = allocated("pull", json.loads(json.dumps(params))).offer
    name = prefill_name(finished.request_id)
    assert offer == Offer(blocks=finished.blocks, tokens=finished.tokens, prefill=name)


def test_of_a_state_the_one_block_that_has_it_is_told() -> None:
    groups = (Group(index=0, block_tokens=BLOCK), Group(index=2, block_tokens=0, scratch_blocks=1))
    params = {**TOLD, "remote_block_ids": [[7, 8], [3], [21, 22, 23]]}
    assert p.offer(params) is not None
    half = make(settings=Settings(mode="pull"), groups=groups)
    offer = half._offer(FakeRequest(params))  # type: ignore[arg-type]
    assert offer is not None
    assert offer.blocks == ((7, 8), (22,))


@pytest.mark.parametrize(
    "odd",
    [
        {"remote_prefill": None},
        {"remote_prefill": 7},
        {"remote_num_tokens": "80"},
        {"remote_num_tokens": True},
        {"remote_num_tokens": -1},
        {"remote_block_ids": None},
        {"remote_block_ids": []},
        {"remote_block_ids": [7, 8]},
        {"remote_block_ids": [[7, "8"]]},
        {"remote_block_ids": [[7, -1]]},
        {"remote_block_ids": [[7, 1.5]]},
        {"remote_block_ids": [[7, None]]},
        {"remote_block_ids": [[7, 10**30]]},
        {"remote_block_ids": [[[7], [8]]]},
        {"remote_block_ids": [[[7], 8]]},
        {"remote_block_ids": {"0": [7]}},
    ],
)
def test_what_is_told_in_an_odd_way_is_waited_for_f12(odd: dict[str, Any]) -> None:
    event = allocated("pull", {**TOLD, **odd})
    assert (event.reads, event.offer) == (True, None)


def test_blocks_that_peers_read_from_a_host_copy_are_not_told_of() -> None:
    """The copy is made with the next step, when the answer may have reached the consumer."""
    producer = make(buffer="cpu")
    prefill = FakeRequest(PREFILL)
    schedule(producer, prefill)
    _, params = finish(producer, prefill)
    assert "remote_prefill" not in params
    assert "remote_prefill" in finish_of(make())


def finish_of(half: Any) -> dict[str, Any]:
    prefill = FakeRequest(PREFILL)
    schedule(half, prefill)
    _, params = finish(half, prefill)
    return params


# -- what is not moved -----------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "is_loaded"), [(0, True), (80, True), (81, False)])
def test_a_prompt_of_which_little_is_missing_is_computed_and_its_producer_is_released(
    least: int, is_loaded: bool
) -> None:
    half = make(settings=Settings(recompute_below_tokens=least))
    assert schedule(half, FakeRequest(DECODE)) == ((80, True) if is_loaded else (0, False))
    assert kinds(step(half)) == ["BlocksAllocated" if is_loaded else "ReleaseWanted"]


def test_what_is_cached_here_is_not_missing() -> None:
    half = make(settings=Settings(recompute_below_tokens=2 * BLOCK))
    assert schedule(half, FakeRequest(DECODE), computed=4 * BLOCK) == (0, False)
    assert kinds(step(half)) == ["ReleaseWanted"]


def test_a_decode_legs_answer_says_what_became_of_its_load() -> None:
    """A router that tries an engine, or an operator with curl, sees whether KV has come."""

    def outcome(half: SchedulerHalf, request: FakeRequest) -> str:
        must_keep, params = finish(half, request)
        assert not must_keep
        told: dict[str, str] = params["kvflow"]
        assert told.pop("version") == __version__
        assert told.pop("mode") == "auto"
        return told.pop("outcome")

    half = make(settings=Settings(mode="auto"))
    loading, landed, failed, computed = (FakeRequest(DECODE, f"r{n}") for n in range(4))
    for request in (loading, landed, failed):
        schedule(half, request)
    schedule(half, computed, computed=5 * BLOCK)
    report(half, "r1", failed=("r2",))
    assert outcome(half, loading) == "loading"
    assert outcome(half, landed) == "landed"
    assert outcome(half, failed) == "failed"
    assert outcome(half, computed) == "computed"
    plain = FakeRequest({})
    schedule(half, plain)
    assert finish(half, plain) == (False, None)
