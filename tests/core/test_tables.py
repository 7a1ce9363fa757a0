"""Every (state, trigger) pair of the three tables.

The idea: for each state there are a few ways to get there, and for each trigger a few real events
that mean it (`kvflow.testing.ways`). A row passes when one of them takes it through an `Engine`,
with exactly one guard true; a pair without a row must raise. So a row that nothing can take is
found, too.
"""

from collections.abc import Iterator

import pytest

from kvflow.core import TABLES, Table
from kvflow.core import events as ev
from kvflow.core.consumer import ConsumerRecord
from kvflow.core.peer import PeerRecord
from kvflow.core.producer import ProducerRecord
from kvflow.errors import LocalProtocolError
from kvflow.ids import Incarnation, Rank, RequestId
from kvflow.testing.bench import ADDRESS, C1, PART, Bench, T, aborted
from kvflow.testing.rows import RowWatch, Taken, describe, every_row
from kvflow.testing.ways import EVENTS, WAYS, Script

RECORDS = {
    "producer": lambda state: ProducerRecord(state=state, since=0.0, transfer_id=T, part=PART),
    "consumer": lambda state: ConsumerRecord(
        state=state, since=0.0, transfer_id=T, request_id=RequestId("c")
    ),
    "peer": lambda state: PeerRecord(state=state, since=0.0, address=ADDRESS),
}


def find(taken: Taken) -> Bench | None:
    """A bench on which this row was taken, or None if no way and no event takes it."""
    machine, source, index = taken
    table = next(table for table in TABLES if table.name == machine)
    for way in WAYS[machine][source]:
        for event in EVENTS[machine][table.rows[index].trigger]:
            bench = Bench()
            way(bench)
            with RowWatch() as watch:
                try:
                    event(bench)
                except LocalProtocolError:
                    continue
            if watch.taken[taken]:
                return bench
    return None


def states_of(bench: Bench, machine: str) -> set[str]:
    records = bench.engine.records
    found = {
        "producer": {bench.produced},
        "consumer": {bench.consumed},
        "peer": {each.state for each in [*records.engines.values(), *records.workers.values()]}
        or {"unmet"},
    }
    return found[machine]


@pytest.mark.parametrize(
    ("machine", "state", "way"),
    [
        pytest.param(machine, state, way, id=f"{machine}-{state}-{way.__name__}")
        for machine, ways in WAYS.items()
        for state, scripts in ways.items()
        for way in scripts
    ],
)
def test_each_way_leads_to_its_state(machine: str, state: str, way: Script) -> None:
    bench = Bench()
    way(bench)
    assert state in states_of(bench, machine)


@pytest.mark.parametrize("taken", sorted(every_row()), ids=describe)
def test_every_row_is_taken_by_a_real_event_and_then_everything_ends_l1(taken: Taken) -> None:
    bench = find(taken)
    assert bench is not None
    settle(bench)
    bench.wait(3000.0)
    engine = bench.engine
    assert (engine.live, engine.ledger.empty, engine.next_deadline()) == (0, True, None)
    assert not any(engine.records.population.values())


def settle(bench: Bench) -> None:
    """What the driver and vLLM owe: each open write ends, and each running request."""
    bench.wait(400.0)
    for request in sorted(bench.engine.ledger._lent):
        bench.take(aborted(request))
    for part, (attempt, _) in list(bench.engine.ledger._writes.items()):
        bench.take(ev.WriteDone(part=part, attempt=attempt, bytes=0, runs=0))
    for request_id, rank in sorted(bench.engine.ledger._reads):
        bench.take(ev.ReadDone(request_id=request_id, rank=rank, bytes=0, runs=0))


def impossible() -> Iterator[tuple[Table, str, str]]:
    for table in TABLES:
        for state, trigger in sorted(table.impossible):
            yield table, state, trigger


@pytest.mark.parametrize(
    ("table", "state", "trigger"),
    [pytest.param(*each, id=f"{each[0].name}-{each[1]}-{each[2]}") for each in impossible()],
)
def test_an_impossible_pair_raises_and_changes_nothing(
    table: Table, state: str, trigger: str
) -> None:
    record = RECORDS[table.name](state)
    before = repr(record)
    with pytest.raises(LocalProtocolError, match=f"{table.name}: {trigger} in {state}"):
        table.fire(record, trigger, None, None)
    assert repr(record) == before


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_pair_has_a_row_or_is_declared_impossible_with_a_reason(table: Table) -> None:
    with_row = {(source, row.trigger) for row in table.rows for source in row.sources}
    every = {(state, trigger) for state in table.states for trigger in table.triggers}
    assert with_row | set(table.impossible) == every
    assert not with_row & set(table.impossible)
    assert all(why.strip() for why in table.impossible.values())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_row_says_why(table: Table) -> None:
    assert [row for row in table.rows if len(row.why) < 5] == []
    assert all(text.strip() for text in table.states.values())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_that_waits_has_a_deadline_f1(table: Table) -> None:
    waiting = set(table.states) - {table.initial, "forgotten"}
    expiring = {source for row in table.rows if row.trigger == "expired" for source in row.sources}
    assert waiting <= expiring


@pytest.mark.parametrize(
    ("machine", "state", "way"),
    [
        pytest.param(machine, state, way, id=f"{machine}-{state}-{way.__name__}")
        for machine, ways in WAYS.items()
        for state, scripts in ways.items()
        for way in scripts
        if (machine, state) not in {("producer", "unknown"), ("consumer", "new"), ("peer", "unmet")}
    ],
)
def test_whatever_state_a_record_is_in_its_deadline_is_armed_f1(
    machine: str, state: str, way: Script
) -> None:
    bench = Bench()
    way(bench)
    records = bench.engine.records
    armed = set(records.deadlines._armed)
    keys = {("producer", key) for key in records.producers}
    keys |= {("consumer", key) for key in records.consumers}
    keys |= {("peer", each.key) for each in records.engines.values()}
    keys |= {("peer", each.key) for each in records.workers.values()}
    assert keys <= armed


def test_a_table_with_a_pair_that_is_neither_is_refused() -> None:
    row = TABLES[0].rows[0]
    with pytest.raises(LocalProtocolError, match="no row for"):
        Table(
            name="half",
            initial="unknown",
            states={"unknown": "", "allocated": ""},
            terminal=frozenset(),
            rows=(row,),
            impossible={},
        )


def test_an_introduced_agent_is_named_once() -> None:
    bench = Bench()
    bench.introduce(C1, C1)
    bench.take(ev.PeerIntroduced(agent=C1, incarnation=Incarnation("i"), rank=Rank(0, 0)))
    assert list(bench.engine.records.workers) == [C1]
