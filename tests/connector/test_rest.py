"""How long an engine step without model work waits for news."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from kvflow.connector import worker
from kvflow.connector.metadata import StepEvents
from kvflow.core import events as ev
from kvflow.io.seal import Seal
from kvflow.settings import Settings

IDLE: Any = SimpleNamespace(attn_metadata=None)
COMPUTING: Any = SimpleNamespace(attn_metadata=object())
NEWS = StepEvents(events=(ev.PrefillsResumed(),))


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker half whose waits are noted and take no time."""
    alone = mock.Mock(return_value=SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(worker, "get_pp_group", alone)
    monkeypatch.setattr(worker, "get_tp_group", alone)
    nothing: Any = None
    half: Any = worker.WorkerHalf(nothing, nothing, "e", Settings(idle_wait_ms=6.0), Seal())
    half.waits = []
    monkeypatch.setattr(half.loop.outbox, "wait", lambda s: half.waits.append(round(1000 * s)))
    yield half
    half.close()


def rests(half: Any, steps: int) -> list[int]:
    half.waits.clear()
    for _ in range(steps):
        half.rest(IDLE)
    return list(half.waits)


def test_the_longer_nothing_happens_the_longer_a_step_waits(half: Any) -> None:
    assert rests(half, 5) == [1, 2, 4, 6, 6]


def test_a_step_that_computes_waits_for_nothing(half: Any) -> None:
    half.rest(COMPUTING)
    assert half.waits == []


@pytest.mark.parametrize("step", [NEWS, StepEvents(computes=True)], ids=["news", "a computed step"])
def test_when_something_happens_waits_are_short_again(half: Any, step: StepEvents) -> None:
    rests(half, 5)
    half.take(step)
    assert rests(half, 2) == [1, 2]


def test_after_a_report_waits_are_short_again(half: Any) -> None:
    rests(half, 5)
    half.loop.outbox.received("r", None)
    assert half.results().finished_recving == {"r"}
    assert rests(half, 2) == [1, 2]


def test_a_step_without_news_changes_nothing(half: Any) -> None:
    rests(half, 3)
    half.take(StepEvents())
    half.results()
    assert rests(half, 1) == [6]
