"""Row tables: how every machine of kvflow is written down, and how a row is fired.

Two rules:

1. A machine *is* its table. A row says `(trigger, sources, dest, action, guard, why)`; whatever
   has no row and is not declared impossible does not exist, and `Table` refuses to be built while
   one pair of (state, trigger) is neither.
2. Firing where no row applies raises `LocalProtocolError`. A tolerated stale input is a row.

The idea: one shared `transitions.Machine` per table (no model is ever added to it) says which rows
a pair of (state, trigger) has, and in which order their guards are asked. `Table.fire` reads that
from a dict that is made of the machine once, since the machine's own way costs 20 us a firing. It
moves plain slotted records that have a `state` attribute. An action gets `(record, event, turn)`,
runs before the state changes, and only appends to the turn: it does no input or output.

`transitions` imports `logging`, so it is imported when the first row is fired and not before:
`import kvflow.core` stays free of both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

from kvflow.errors import LocalProtocolError

Action = Callable[[Any, Any, Any], None]
Guard = Callable[[Any, Any, Any], bool]
Way = tuple[Guard | None, Action | None, str | None]
"""A row as it is fired: guard, action, and where to (None: nowhere)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way on: in any of `sources`, `trigger` leads to `dest` when `guard` holds.

    dest    None stays in the source state.
    action  runs before the state changes; its name is part of the generated documents.
    guard   a side-effect-free condition; None always holds.
    why     one sentence for the reader of the generated documents.
    """

    trigger: str
    sources: tuple[str, ...]
    dest: str | None
    action: Action | None = None
    guard: Guard | None = None
    why: str


def row(
    trigger: str,
    sources: str,
    dest: str | None,
    action: Action | None = None,
    guard: Guard | None = None,
    *,
    why: str,
) -> Row:
    """A `Row` as the tables write it, sources separated by spaces and dest "=" for "stay"."""
    return Row(
        trigger=trigger,
        sources=tuple(sources.split()),
        dest=None if dest == "=" else dest,
        action=action,
        guard=guard,
        why=why,
    )


@dataclass(frozen=True)
class Table:
    """A machine: its states, its rows, and the pairs that cannot happen.

    states      name -> what it means, in the order in which documents list them.
    terminal    states that wait for nothing and are forgotten after a time.
    impossible  (state, trigger) -> why the pair cannot happen.
    """

    name: str
    initial: str
    states: Mapping[str, str]
    terminal: frozenset[str]
    rows: tuple[Row, ...]
    impossible: Mapping[tuple[str, str], str]

    def __post_init__(self) -> None:
        covered = {(source, row.trigger) for row in self.rows for source in row.sources}
        named = {state for pair in covered for state in pair[:1]}
        named |= {row.dest for row in self.rows if row.dest}
        if stray := named - set(self.states):
            raise LocalProtocolError(f"{self.name}: rows name unknown states {sorted(stray)}")
        pairs = {(state, trigger) for state in self.states for trigger in self.triggers}
        if missing := pairs - covered - set(self.impossible):
            raise LocalProtocolError(f"{self.name}: no row for {sorted(missing)}")
        if both := covered & set(self.impossible):
            raise LocalProtocolError(f"{self.name}: impossible, yet with a row: {sorted(both)}")

    @property
    def triggers(self) -> tuple[str, ...]:
        """Every trigger, in the order in which the rows name them."""
        return tuple(dict.fromkeys(row.trigger for row in self.rows))

    @cached_property
    def machine(self) -> Any:
        """The same as a `transitions.Machine`."""
        from transitions import Machine

        machine = Machine(
            model=None,
            states=list(self.states),
            initial=self.initial,
            auto_transitions=False,
            send_event=True,
        )
        for row in self.rows:
            machine.add_transition(
                row.trigger,
                list(row.sources),
                row.dest,
                conditions=[_adapt(row.guard)] if row.guard else None,
                before=[_adapt(row.action)] if row.action else None,
            )
        return machine

    @cached_property
    def _ways(self) -> dict[tuple[str, str], tuple[Way, ...]]:
        """(state, trigger) -> what may be done there, in the machine's order."""
        return {
            (source, trigger): tuple(_way(transition) for transition in transitions)
            for trigger, event in self.machine.events.items()
            for source, transitions in event.transitions.items()
        }

    def fire(self, record: Any, trigger: str, event: Any, turn: Any) -> None:
        """Move `record` along the one row that applies.

        Raises `LocalProtocolError` where there is none: the pair is impossible, or no guard held.
        """
        source = record.state
        ways = self._ways.get((source, trigger))
        if ways is None:
            why = self.impossible.get((source, trigger), "no such pair")
            raise LocalProtocolError(f"{self.name}: {trigger} in {source}: {why}")
        for guard, action, dest in ways:
            if guard is None or guard(record, event, turn):
                if action is not None:
                    action(record, event, turn)
                if dest is not None:
                    record.state = dest
                return
        raise LocalProtocolError(f"{self.name}: {trigger} in {source}: no guard held")


def _adapt(function: Callable[..., Any]) -> Callable[[Any], Any]:
    @wraps(function)
    def call(data: Any) -> Any:
        return function(data.model, *data.args)

    return call


def _way(transition: Any) -> Way:
    """One transition of a machine, by the functions that `_adapt` was given."""
    guards = [condition.func.__wrapped__ for condition in transition.conditions]
    actions = [before.__wrapped__ for before in transition.before]
    (guard,), (action,) = guards or [None], actions or [None]
    return guard, action, transition.dest


def never(states: str, triggers: str, why: str) -> dict[tuple[str, str], str]:
    """Impossible pairs: each of `states` with each of `triggers`, both separated by spaces."""
    return {(state, trigger): why for state in states.split() for trigger in triggers.split()}
