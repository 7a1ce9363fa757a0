"""What is remembered of transfers' moves, and how much at most."""

import logging

import pytest

from kvflow.core import TABLES
from kvflow.core.effects import Moved
from kvflow.ids import RequestId
from kvflow.observe.history import MOVES_MAX, History, RememberingWatch, watching
from kvflow.observe.watch import Watch


def moved(key: str, dest: str, *, machine: str = "consumer", request: str = "r", at: float = 1.0):
    return Moved(
        machine=machine,
        key=key,
        attempt=1,
        request_id=RequestId(request),
        trigger="trigger",
        source="before",
        dest=dest,
        at=at,
    )


def dests(history: History, key: str, machine: str = "consumer", request: str = "r") -> list[str]:
    return [each.dest for each in history.of(machine, key, request)]


def test_moves_are_remembered_in_order_by_machine_and_transfer() -> None:
    history = History()
    for dest in ("allocated", "registering", "registered"):
        history.note(moved("t", dest))
    history.note(moved("u", "allocated"))
    history.note(moved("t", "prefilled", machine="producer"))
    assert dests(history, "t") == ["allocated", "registering", "registered"]
    assert dests(history, "u") == ["allocated"]
    assert dests(history, "t", "producer") == ["prefilled"]
    assert dests(history, "nobody") == []


def test_two_loads_with_one_transfer_id_have_a_history_each() -> None:
    history = History()
    history.note(moved("t", "allocated", request="one"))
    history.note(moved("t", "failed", request="two"))
    assert dests(history, "t", request="one") == ["allocated"]
    assert dests(history, "t", request="two") == ["failed"]


def test_a_producer_keeps_its_history_when_it_hears_of_the_prefill() -> None:
    """Its request is not known from the beginning."""
    history = History()
    history.note(moved("t", "held", machine="producer", request=""))
    history.note(moved("t", "registered", machine="producer", request="r"))
    assert dests(history, "t", "producer") == ["held", "registered"]


def test_only_the_last_moves_of_a_transfer_are_remembered() -> None:
    history = History()
    for number in range(3 * MOVES_MAX):
        history.note(moved("t", "registered", at=float(number)))
    told = history.of("consumer", "t", "r")
    assert [each.at for each in told] == [float(n) for n in range(2 * MOVES_MAX, 3 * MOVES_MAX)]


def test_a_transfer_that_is_stuck_outlives_any_number_that_end() -> None:
    history = History(transfers_max=10)
    history.note(moved("stuck", "registered"))
    for number in range(1000):
        history.note(moved(f"t{number}", "allocated"))
        history.note(moved(f"t{number}", "received"))
        assert len(history) <= 10
    assert dests(history, "stuck") == ["registered"]
    assert dests(history, "t999") == ["allocated", "received"]
    assert dests(history, "t0") == []


def test_of_live_ones_beyond_the_limit_the_longest_unmoved_is_forgotten() -> None:
    history = History(transfers_max=2)
    for key in ("a", "b"):
        history.note(moved(key, "allocated"))
    history.note(moved("a", "registered"))
    history.note(moved("c", "allocated"))
    assert [dests(history, key) for key in "abc"] == [
        ["allocated", "registered"],
        [],
        ["allocated"],
    ]


def test_one_that_begins_anew_after_its_end_is_live_again() -> None:
    history = History(transfers_max=2)
    for dest in ("allocated", "received", "allocated"):
        history.note(moved("t", dest))
    for key in "ab":
        history.note(moved(key, "received"))
    assert dests(history, "t") == ["allocated", "received", "allocated"]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_what_the_worker_forgets_is_forgotten_here(table) -> None:
    history = History()
    for state in table.states:
        history.note(moved("t", state, machine=table.name))
    assert len(history) == 0


def test_without_a_history_the_watch_is_the_plain_one() -> None:
    """So it costs nothing."""
    assert type(watching(None, engine="e")) is Watch


def test_with_a_history_the_log_is_the_same(kvflow_log: pytest.LogCaptureFixture) -> None:
    history = History()
    remembering = watching(history, engine="e")
    assert isinstance(remembering, RememberingWatch)
    for watch in (remembering, watching(None, engine="e")):
        watch.moved(moved("t", "allocated"))
        watch.refused("frame", "no")
        watch.ignored("kind", "key")
    lines = [record.getMessage() for record in kvflow_log.records]
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    assert any(record.levelno == logging.WARNING for record in kvflow_log.records)
    assert dests(history, "t") == ["allocated"]
