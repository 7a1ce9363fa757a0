"""The scheduler half: how many loads may be parked, what routers release, what arrives."""

from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from vllm.v1.request import RequestStatus

from kvflow.connector.facade import KVFlowConnector
from kvflow.connector.metadata import WorkerHello
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.core import events as ev
from kvflow.errors import RemoteProtocolError
from kvflow.ids import TransferId
from kvflow.io.seal import KEY_BYTES_MIN, Seal
from kvflow.io.side_channel import meet, release
from kvflow.settings import Settings
from kvflow.wire import codec

from .fakes import (
    BLOCK,
    DECODE,
    HELLO,
    PREFILL,
    FakeRequest,
    finish,
    kinds,
    make,
    report,
    schedule,
    step,
)

WAIT_S = 30.0
T = TransferId("t")
ASK_LATER = (None, False)


def decode(number: int, **params: object) -> Any:
    return FakeRequest({**DECODE, **params}, request_id=f"r{number}-12345678")


# -- prompts that find no blocks -----------------------------------------------------------------


def test_that_prompts_wait_and_nothing_is_computed_is_told_when_it_changes_f17() -> None:
    half = make()
    prompt: Any = FakeRequest(PREFILL)
    half.arrived(prompt)
    assert kinds(step(half, tokens=0)) == ["PrefillStarted", "PrefillsStalled"]
    assert kinds(step(half, tokens=0)) == []
    assert kinds(step(half, tokens=16)) == ["PrefillsResumed"]
    assert kinds(step(half, tokens=16)) == []
    assert kinds(step(half, tokens=0)) == ["PrefillsStalled"]
    finish(half, prompt)
    assert kinds(step(half, tokens=0)) == ["PrefillFinished", "PrefillsResumed"]
    assert kinds(step(half, tokens=0)) == []
    half.close()


def test_an_engine_in_which_no_prefill_leg_waits_is_never_stalled() -> None:
    half = make()
    schedule(half, decode(1))
    assert kinds(step(half, tokens=0)) == ["BlocksAllocated"]
    half.close()


# -- parked loads --------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[SchedulerHalf]:
    """A half that may park two loads."""
    half = make(settings=Settings(parked_max=2))
    yield half
    half.close()


def test_as_many_loads_as_may_be_are_parked_and_the_next_waits_its_turn_f17(
    two: SchedulerHalf,
) -> None:
    for number in (1, 2):
        assert schedule(two, decode(number)) == (5 * BLOCK, True)
    for _ in range(3):
        assert two.tokens_to_load(decode(3), 0) == ASK_LATER
    assert kinds(step(two)) == ["BlocksAllocated"] * 2
    report(two, "r1-12345678")
    assert schedule(two, decode(3)) == (5 * BLOCK, True)
    assert two.tokens_to_load(decode(4), 0) == ASK_LATER
    assert kinds(step(two)) == ["BlocksAllocated"]


def test_a_load_that_was_aborted_is_parked_until_it_is_reported_f17(two: SchedulerHalf) -> None:
    """Its blocks are reserved until then."""
    for number in (1, 2):
        schedule(two, decode(number))
    finish(two, decode(1))
    assert two.tokens_to_load(decode(3), 0) == ASK_LATER
    report(two, "r1-12345678")
    assert two.tokens_to_load(decode(3), 0) == (5 * BLOCK, True)


def test_who_loads_nothing_does_not_wait_for_those_who_do_f17(two: SchedulerHalf) -> None:
    for number in (1, 2):
        schedule(two, decode(number))
    cached = decode(3)
    assert schedule(two, cached, computed=5 * BLOCK) == (0, False)
    assert schedule(two, FakeRequest(PREFILL)) == (0, False)
    assert schedule(two, FakeRequest(None)) == (0, False)
    loaded: Any = decode(1)
    assert two.tokens_to_load(loaded, 2 * BLOCK) == (0, False)
    events = [event for event in step(two) if isinstance(event, ev.ReleaseWanted)]
    assert [event.request_id for event in events] == ["r3-12345678"]


def test_a_request_that_ends_while_it_waits_its_turn_releases_the_producer_f17(
    two: SchedulerHalf,
) -> None:
    for number in (1, 2):
        schedule(two, decode(number))
    step(two)
    waiting = decode(3)
    assert two.tokens_to_load(waiting, 0) == ASK_LATER
    waiting.status = RequestStatus.FINISHED_ABORTED
    assert finish(two, waiting, blocks=[]) == (False, None)
    assert kinds(step(two)) == ["ReleaseWanted"]


def test_loads_with_bad_parameters_are_parked_until_they_are_reported_f17(
    two: SchedulerHalf,
) -> None:
    for number in (1, 2):
        schedule(two, decode(number, remote_host=None))
    assert two.tokens_to_load(decode(3), 0) == ASK_LATER
    report(two, "r1-12345678", "r2-12345678")
    assert two.tokens_to_load(decode(3), 0) == (5 * BLOCK, True)


# -- releases ------------------------------------------------------------------------------------


def listening(monkeypatch: pytest.MonkeyPatch, seal: Seal | None = None) -> SchedulerHalf:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    half = make("kv_producer", seal=seal)
    half.introduce({(0, 0): WorkerHello(codec.encode(HELLO))})
    return half


def test_a_release_is_handed_over_with_the_next_step_f18(monkeypatch: pytest.MonkeyPatch) -> None:
    half = listening(monkeypatch)
    assert not half.has_events
    for name in ("t", "other", "t"):
        uvloop.run(release(half.address, TransferId(name), WAIT_S))
        assert half.has_events
    assert half.has_events
    assert step(half) == tuple(
        ev.ReleaseAsked(transfer_id=TransferId(name)) for name in ("t", "other", "t")
    )
    assert not half.has_events
    assert step(half) == ()
    half.close()


def test_a_release_comes_after_the_prefill_that_it_is_about_f18(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = listening(monkeypatch)
    request = FakeRequest(PREFILL)
    schedule(half, request)
    uvloop.run(release(half.address, T, WAIT_S))
    finish(half, request)
    assert kinds(step(half)) == ["PrefillStarted", "PrefillFinished", "ReleaseAsked"]
    half.close()


def test_the_engine_keeps_stepping_while_a_release_waits_f18(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = listening(monkeypatch)
    connector = KVFlowConnector.__new__(KVFlowConnector)
    connector._scheduler = half
    assert not connector.has_pending_push_work()
    uvloop.run(release(half.address, T, WAIT_S))
    assert connector.has_pending_push_work()
    step(half)
    assert not connector.has_pending_push_work()
    half.close()


def test_with_a_shared_key_only_who_has_it_meets_or_releases_f20(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seal = Seal(b"k" * KEY_BYTES_MIN)
    half = listening(monkeypatch, seal)
    with pytest.raises(RemoteProtocolError, match="key"):
        uvloop.run(release(half.address, T, WAIT_S))
    with pytest.raises(RemoteProtocolError, match="key"):
        uvloop.run(meet(half.address, "asker", WAIT_S))
    assert not half.has_events
    uvloop.run(release(half.address, T, WAIT_S, seal))
    assert uvloop.run(meet(half.address, "asker", WAIT_S, seal)).ranks == (HELLO,)
    assert kinds(step(half)) == ["ReleaseAsked"]
    half.close()


# -- arrivals ------------------------------------------------------------------------------------


def test_a_prefill_is_told_when_it_arrives_and_again_with_its_blocks_f1() -> None:
    half = make()
    request: Any = FakeRequest(PREFILL)
    half.arrived(request)
    assert step(half) == (ev.PrefillStarted(transfer_id=T, request_id="r-12345678"),)
    schedule(half, request)
    assert kinds(step(half)) == ["PrefillStarted"]


@pytest.mark.parametrize("params", [None, {}, DECODE, {**PREFILL, "transfer_id": "a b"}])
def test_other_arrivals_say_nothing(params: object) -> None:
    half = make()
    request: Any = FakeRequest(params)
    half.arrived(request)
    assert step(half) == ()
