"""Every (state, trigger) pair of the three tables.

The idea: for each state there are a few ways to get there, and for each trigger a few real events
that mean it. A row passes when one of them takes it through an `Engine`, with exactly one guard
true; a pair without a row must raise. So a row that nothing can take is found, too.
"""

from collections.abc import Callable, Iterator

import pytest

from kvflow.core import TABLES, Standing, Table
from kvflow.core import events as ev
from kvflow.core.consumer import ConsumerRecord
from kvflow.core.peer import PeerRecord
from kvflow.core.producer import ProducerRecord
from kvflow.errors import LocalProtocolError
from kvflow.ids import AgentName, Incarnation, Rank, RequestId, TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import ADDRESS, C1, C2, P0, P1, Bench, T
from kvflow.testing.rows import RowWatch, Taken, describe, every_row

Script = Callable[[Bench], object]

# -- the producer ----------------------------------------------------------------------------------


def p_unknown(bench: Bench) -> None:
    bench.introduce()


def p_allocated(bench: Bench) -> None:
    p_unknown(bench)
    bench.take(b.started())


def p_held(bench: Bench) -> None:
    p_unknown(bench)
    bench.hear(C1, b.register())


def p_registered(bench: Bench) -> None:
    p_held(bench)
    bench.take(b.started())


def p_preempted(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.preempted())


def p_prefilled(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.finished())


def p_transferring(bench: Bench) -> None:
    p_prefilled(bench)
    bench.hear(C1, b.register())


def p_draining(bench: Bench) -> None:
    p_transferring(bench)
    bench.hear(C1, b.cancel())


def p_sent(bench: Bench) -> None:
    p_transferring(bench)
    bench.take(b.written())


def p_failed(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.aborted())


def p_failed_registered(bench: Bench) -> None:
    p_registered(bench)
    bench.take(b.aborted())


def p_failed_ambiguous(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.started("rival"))


def p_reused(bench: Bench) -> None:
    """The id is used again: by the prefill `r`, after another's transfer was cancelled."""
    p_unknown(bench)
    bench.take(b.started("before"))
    bench.hear(C1, b.register(), b.cancel())
    bench.take(b.started())


def p_reused_preempted(bench: Bench) -> None:
    p_reused(bench)
    bench.take(b.preempted())


def p_reused_prefilled(bench: Bench) -> None:
    p_reused(bench)
    bench.take(b.finished())


def p_floor(bench: Bench) -> None:
    """An attempt 5 of another transfer was settled here, and forgotten."""
    p_unknown(bench)
    bench.hear(C1, b.register(of=TransferId("before")), b.cancel(of=TransferId("before")))
    bench.wait(bench.engine.timings.tombstone_s + 1)


PRODUCER_WAYS: dict[str, list[Script]] = {
    "unknown": [p_unknown, p_floor],
    "allocated": [p_allocated, p_reused],
    "held": [p_held],
    "registered": [p_registered],
    "preempted": [p_preempted, p_reused_preempted],
    "prefilled": [p_prefilled, p_reused_prefilled],
    "transferring": [p_transferring],
    "draining": [p_draining],
    "sent": [p_sent],
    "failed": [p_failed, p_failed_registered, p_failed_ambiguous],
}


def until_due(bench: Bench) -> None:
    """Exactly the next deadline."""
    at = bench.engine.next_deadline()
    assert at is not None
    bench.wait(at - bench.now)


def until_over(bench: Bench) -> None:
    """Long enough for each deadline of a transfer, one after the other."""
    bench.wait(700.0)


def lose_consumer(bench: Bench) -> None:
    bench.take(ev.NoticeFailed(agent=C1, detail="no such agent"))


def takes(*events: ev.Event) -> Script:
    return lambda bench: bench.take(*events)


def hears(sender: AgentName, *notices: b.Notice) -> Script:
    return lambda bench: bench.hear(sender, *notices)



TOO_MANY = ((4, 5, 6, 7),)
PRODUCER_EVENTS: dict[str, list[Script]] = {
    "prefill_started": [takes(b.started())],
    "prefill_finished": [takes(b.finished()), takes(b.finished(blocks=((1, 2),)))],
    "prefill_aborted": [takes(b.aborted())],
    "prefill_preempted": [takes(b.preempted())],
    "rival_started": [takes(b.started("rival"))],
    "rival_finished": [takes(b.finished("rival"))],
    "rival_ended": [takes(b.aborted("rival")), takes(b.preempted("rival"))],
    "registered": [hears(C1, b.register(6)), hears(C1, b.register(6, blocks=TOO_MANY))],
    "registered_again": [hears(C1, b.register())],
    "registered_anew": [hears(C1, b.register(6))],
    "registered_stale": [hears(C1, b.register(4)), hears(C1, b.register(0))],
    "registered_rival": [hears(C2, b.register())],
    "cancel_asked": [hears(C1, b.cancel(6))],
    "cancel_stale": [hears(C1, b.cancel(4))],
    "renewed": [hears(C1, b.renew())],
    "write_done": [takes(b.written())],
    "write_failed": [takes(ev.WriteFailed(transfer_id=T, attempt=5, detail="EIO"))],
    "write_stopped": [takes(ev.WriteStopped(transfer_id=T, attempt=5))],
    "peer_lost": [lose_consumer],
    "expired": [until_over],
    "closing": [takes(ev.Closing())],
}

# -- the consumer ----------------------------------------------------------------------------------


def c_new(bench: Bench) -> None:
    """Nothing."""


def c_rival_new(bench: Bench) -> None:
    bench.take(b.allocated("other", blocks=((9,),)))


def c_allocated(bench: Bench) -> None:
    bench.take(b.allocated())


def c_allocated_of_met(bench: Bench) -> None:
    """Another load has met the producer; this one names an engine that is met anew."""
    bench.take(b.allocated("other", 4, TransferId("o"), ((9,),)))
    bench.meet()
    bench.hear(P0, b.accepted(attempt=1))


def c_again(bench: Bench) -> None:
    """A second attempt waits for a meeting, while another engine is heard of the first."""
    c_failed(bench)
    bench.take(ev.NoticeFailed(agent=P0, detail="gone"), b.allocated(attempt=6))


def c_registering(bench: Bench) -> None:
    c_allocated(bench)
    bench.meet()


def c_registering_one_done(bench: Bench) -> None:
    c_registering(bench)
    bench.hear(P0, b.done())


def c_registering_one_answered(bench: Bench) -> None:
    c_registering(bench)
    bench.hear(P0, b.accepted())


def c_registering_one_rank(bench: Bench) -> None:
    c_allocated(bench)
    bench.meet(ranks=1)


def c_registered(bench: Bench) -> None:
    c_registering(bench)
    bench.hear(P0, b.accepted())
    bench.hear(P1, b.accepted())


def c_registered_one_rank(bench: Bench) -> None:
    c_registering_one_rank(bench)
    bench.hear(P0, b.accepted())


def c_transferring(bench: Bench) -> None:
    c_registered(bench)
    bench.hear(P0, b.accepted(Standing.TRANSFERRING))


def c_transferring_one_done(bench: Bench) -> None:
    c_transferring(bench)
    bench.hear(P0, b.done())


def c_draining(bench: Bench) -> None:
    c_registered(bench)
    bench.take(b.load_aborted())


def c_draining_one_settled(bench: Bench) -> None:
    c_draining(bench)
    bench.hear(P1, b.failed())


def c_fencing(bench: Bench) -> None:
    """The producer is lost, and met again for another load: it can still be heard."""
    c_registered(bench)
    bench.take(ev.NoticeFailed(agent=P0, detail="gone"))
    bench.take(b.allocated("other", 6, TransferId("o"), ((9,),)))
    bench.wait(0.3)
    bench.meet()


def c_releasing(bench: Bench) -> None:
    bench.take(b.release(attempt=5))


def c_releasing_met(bench: Bench) -> None:
    c_releasing(bench)
    bench.meet()


def c_releasing_one_rank(bench: Bench) -> None:
    c_releasing(bench)
    bench.meet(ranks=1)


def c_received(bench: Bench) -> None:
    c_transferring_one_done(bench)
    bench.hear(P1, b.done())


def c_failed(bench: Bench) -> None:
    c_draining_one_settled(bench)
    bench.hear(P0, b.failed())


def c_released(bench: Bench) -> None:
    c_releasing_one_rank(bench)
    bench.hear(P0, b.failed())


CONSUMER_WAYS: dict[str, list[Script]] = {
    "new": [c_new, c_rival_new],
    "allocated": [c_allocated, c_again],
    "registering": [
        c_registering,
        c_registering_one_done,
        c_registering_one_answered,
        c_registering_one_rank,
    ],
    "registered": [c_registered, c_registered_one_rank],
    "transferring": [c_transferring, c_transferring_one_done],
    "draining": [c_draining, c_draining_one_settled],
    "fencing": [c_fencing],
    "releasing": [c_releasing, c_releasing_met, c_releasing_one_rank],
    "received": [c_received],
    "failed": [c_failed],
    "released": [c_released],
}


def lose_producer(bench: Bench) -> None:
    bench.take(ev.NoticeFailed(agent=P0, detail="no such agent"))


def other_engine(bench: Bench) -> None:
    """The meeting cannot help: it is refused for good."""
    bench.take(ev.MeetingFailed(address=ADDRESS, final=True, detail="another page size"))


def stale_after_meeting(bench: Bench) -> None:
    """A word of attempt 4, from a producer that is known by way of another load."""
    bench.hear(P0, b.done(4))


CONSUMER_EVENTS: dict[str, list[Script]] = {
    "blocks_allocated": [takes(b.allocated(attempt=6))],
    "load_refused": [takes(b.refused())],
    "release_wanted": [takes(b.release())],
    "rival_allocated": [takes(b.allocated("rival", 7, blocks=((8,),)))],
    "load_aborted": [takes(b.load_aborted())],
    "peer_met": [lambda bench: bench.meet()],
    "peer_unreachable": [other_engine],
    "peer_lost": [lose_producer],
    "accepted": [
        hears(P0, b.accepted()),
        hears(P1, b.accepted()),
        hears(P1, b.accepted(Standing.TRANSFERRING)),
        hears(P1, b.alive(Standing.STOPPING)),
    ],
    "done": [hears(P0, b.done()), hears(P1, b.done()), hears(P0, b.alive(Standing.DONE))],
    "rank_failed": [
        hears(P0, b.failed()),
        hears(P1, b.failed()),
        hears(P0, b.alive(Standing.UNKNOWN)),
    ],
    "stale": [stale_after_meeting],
    "resend_due": [until_due],
    "expired": [until_over],
    "closing": [takes(ev.Closing())],
}

# -- the peer --------------------------------------------------------------------------------------


def r_met_again(bench: Bench) -> None:
    """Met, though the answer to an earlier meeting is still on its way."""
    c_allocated(bench)
    bench.wait(20.0)
    bench.take(b.allocated("other", 6, blocks=((9,),)))
    bench.wait(5.0)
    bench.meet()


def r_backing_off(bench: Bench) -> None:
    c_allocated(bench)
    bench.take(ev.MeetingFailed(address=ADDRESS, final=False, detail="refused"))


def r_backing_off_alone(bench: Bench) -> None:
    r_backing_off(bench)
    bench.take(b.load_aborted())


PEER_WAYS: dict[str, list[Script]] = {
    "unmet": [c_new],
    "meeting": [c_allocated],
    "met": [c_registering],
    "introduced": [p_unknown],
    "backing_off": [r_backing_off, r_backing_off_alone],
}
OTHER = TransferId("o")
PEER_EVENTS: dict[str, list[Script]] = {
    "peer_wanted": [takes(b.allocated("other", 6, OTHER, ((9,),)))],
    "outdated": [takes(b.allocated("other", 6, OTHER, ((9,),), engine_id="engine-2"))],
    "meeting_succeeded": [lambda bench: bench.meet()],
    "meeting_failed": [other_engine],
    "introduced": [lambda bench: bench.introduce()],
    "heard": [hears(P0, b.accepted()), hears(C1, b.register())],
    "gone": [lose_producer, lose_consumer],
    "expired": [lambda bench: bench.wait(3000.0)],
}

# -- the tests -------------------------------------------------------------------------------------

WAYS = {"producer": PRODUCER_WAYS, "consumer": CONSUMER_WAYS, "peer": PEER_WAYS}
EVENTS = {"producer": PRODUCER_EVENTS, "consumer": CONSUMER_EVENTS, "peer": PEER_EVENTS}
RECORDS = {
    "producer": lambda state: ProducerRecord(state=state, since=0.0, transfer_id=T),
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
def test_every_row_is_taken_by_a_real_event_and_then_everything_ends_L1(taken: Taken) -> None:
    bench = find(taken)
    assert bench is not None
    settle(bench)
    bench.wait(3000.0)
    engine = bench.engine
    assert (engine.live, engine.ledger.empty, engine.next_deadline()) == (0, True, None)
    assert not any(engine.records.population.values())


def settle(bench: Bench) -> None:
    """What the driver owes: each open write ends."""
    bench.wait(400.0)
    for transfer_id, (attempt, _) in list(bench.engine.ledger._writes.items()):
        bench.take(ev.WriteDone(transfer_id=transfer_id, attempt=attempt, bytes=0, runs=0))


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
def test_every_state_that_waits_has_a_deadline_F1(table: Table) -> None:
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
def test_whatever_state_a_record_is_in_its_deadline_is_armed_F1(
    machine: str, state: str, way: Script
) -> None:
    bench = Bench()
    way(bench)
    records = bench.engine.records
    armed = set(records.deadlines._serials)
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
