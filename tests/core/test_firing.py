"""`Table.fire` does what the table's `transitions.Machine` would do, for every pair."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from transitions import MachineError

from kvflow.core import TABLES, Row, Table
from kvflow.errors import LocalProtocolError

Verdicts = Mapping[str, bool]
"""What each guard of a pair answers, by its name."""


@dataclass(slots=True)
class Marked:
    """A record that keeps which guards and actions it was given to, and in which state."""

    state: str
    calls: list[tuple[str, str, object, object]] = field(default_factory=list)


def with_recorders(table: Table, verdicts: dict[str, bool]) -> Table:
    """The same table, whose guards answer `verdicts` and whose actions do nothing."""

    def recorder(function: Any, answer: bool) -> Any:
        name = function.__name__

        def called(record: Marked, event: object, turn: object) -> bool:
            record.calls.append((name, record.state, event, turn))
            return verdicts[name] if answer else False

        return called

    def row(of: Row) -> Row:
        return dataclasses.replace(
            of,
            guard=of.guard and recorder(of.guard, True),
            action=of.action and recorder(of.action, False),
        )

    return dataclasses.replace(table, rows=tuple(row(each) for each in table.rows))


def outcomes(rows: list[Row]) -> Iterator[Verdicts]:
    """Every combination of what the guards of these rows may answer."""
    names = sorted({row.guard.__name__ for row in rows if row.guard})
    for answers in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, answers, strict=True))


def fired(table: Table, state: str, trigger: str) -> tuple[Marked, bool]:
    """By `Table.fire`; whether a row was taken."""
    record = Marked(state)
    try:
        table.fire(record, trigger, "event", "turn")
    except LocalProtocolError:
        return record, False
    return record, True


def triggered(table: Table, state: str, trigger: str) -> tuple[Marked, bool]:
    """By the machine."""
    record = Marked(state)
    try:
        return record, bool(table.machine.events[trigger].trigger(record, "event", "turn"))
    except MachineError:
        return record, False


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_pair_does_the_same_as_in_the_machine_whatever_its_guards_say(table: Table) -> None:
    verdicts: dict[str, bool] = {}
    recording = with_recorders(table, verdicts)
    taken = 0
    for state, trigger in itertools.product(table.states, table.triggers):
        rows = [row for row in table.rows if state in row.sources and row.trigger == trigger]
        for said in outcomes(rows):
            verdicts.clear()
            verdicts.update(said)
            ours = fired(recording, state, trigger)
            assert ours == triggered(recording, state, trigger), (state, trigger, said)
            taken += ours[1]
    assert taken >= sum(len(row.sources) for row in table.rows)


def test_a_firing_that_cannot_be_says_why() -> None:
    table = TABLES[0]
    (state, trigger), why = next(iter(table.impossible.items()))
    with pytest.raises(LocalProtocolError, match=trigger) as raised:
        table.fire(Marked(state), trigger, None, None)
    assert str(raised.value) == f"{table.name}: {trigger} in {state}: {why}"
    with pytest.raises(LocalProtocolError, match="no such pair"):
        table.fire(Marked(state), "surprised", None, None)


def test_a_state_stays_as_it_was_when_its_action_raises() -> None:
    def fail(record: Marked, event: object, turn: object) -> None:
        raise ZeroDivisionError

    table = Table(
        name="two",
        initial="a",
        states={"a": "", "b": ""},
        terminal=frozenset({"b"}),
        rows=(Row(trigger="go", sources=("a",), dest="b", action=fail, why=""),),
        impossible={("b", "go"): "over"},
    )
    record = Marked("a")
    with pytest.raises(ZeroDivisionError):
        table.fire(record, "go", None, None)
    assert record.state == "a"
