"""What each record says it waits for, and what its deadline would lead to."""

import re
from collections.abc import Iterator

import pytest

from kvflow.core import TABLES, waiting
from kvflow.core import events as ev
from kvflow.core.consumer import ConsumerRecord
from kvflow.core.engine import Engine
from kvflow.core.producer import ProducerRecord
from kvflow.core.waiting import Wait, Whom
from kvflow.ids import AgentName, Rank, RequestId
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, P0, P1, Bench
from kvflow.testing.ways import WAYS, Script

TABLE_OF = {table.name: table for table in TABLES}
EVERY_WAY = [
    pytest.param(machine, state, way, id=f"{machine}-{state}-{way.__name__}")
    for machine, ways in WAYS.items()
    for state, scripts in ways.items()
    for way in scripts
]


def brought(way: Script) -> Bench:
    bench = Bench()
    way(bench)
    return bench


def waits(bench: Bench) -> Iterator[tuple[str, str, Wait]]:
    """Machine, state and answer of every record."""
    records = bench.engine.records
    for producing in records.producers.values():
        yield "producer", producing.state, waiting.of_producer(producing, bench.now)
    for consuming in records.consumers.values():
        engine = records.engines.get(consuming.address)
        yield "consumer", consuming.state, waiting.of_consumer(consuming, engine)
    for peer in [*records.engines.values(), *records.workers.values()]:
        yield "peer", peer.state, waiting.of_peer(peer)


def load(bench: Bench) -> tuple[ConsumerRecord, Wait]:
    record = bench.engine.records.consumers[RequestId("c")]
    engine = bench.engine.records.engines.get(record.address)
    return record, waiting.of_consumer(record, engine)


def test_every_state_of_every_table_has_an_answer() -> None:
    assert {name: set(table.states) for name, table in TABLE_OF.items()} == {
        name: set(states) for name, states in waiting.ANSWERED.items()
    }


@pytest.mark.parametrize(("machine", "state", "way"), EVERY_WAY)
def test_whatever_way_led_to_a_state_its_record_says_what_it_waits_for(
    machine: str, state: str, way: Script
) -> None:
    """Something, as long as it is live; nothing, when it is over."""
    for of, now_in, wait in waits(brought(way)):
        assert wait.what
        assert wait.what.isprintable()
        if of == "peer":
            continue
        table = TABLE_OF[of]
        over = now_in in table.terminal or now_in == table.initial
        assert (wait.whom is Whom.NOBODY) == over, (of, now_in, wait)
        assert wait.what.startswith("nothing") == over


@pytest.mark.parametrize(("machine", "state", "way"), EVERY_WAY)
def test_a_deadline_leads_where_it_is_said_to_lead(machine: str, state: str, way: Script) -> None:
    """The row that is named is the one that is taken."""
    fired = 0
    for key in list(brought(way).engine.records.deadlines._armed):
        kind, name = key
        if kind not in ("producer", "consumer", "resend"):
            continue
        bench = brought(way)
        records, turn = bench.engine.records, bench.engine._turn(bench.now)
        if kind == "producer":
            record: ProducerRecord | ConsumerRecord = records.producers[name]
        else:
            record = records.consumers[name]
        table = TABLE_OF["producer" if kind == "producer" else "consumer"]
        trigger = "resend_due" if kind == "resend" else "expired"
        told = waiting.expiry(table, record, record.state, trigger)
        assert told is not None, (key, record.state)
        assert told.why
        before = record.state
        if isinstance(record, ProducerRecord):
            records.fire_producer(record, trigger, None, turn)
        else:
            records.fire_consumer(record, trigger, None, turn)
        # A row that leads on may end at once, where nothing is left to be waited for.
        assert record.state == (told.dest or before), (key, before, told)
        fired += 1
    engine: Engine = brought(way).engine
    assert fired or not (engine.records.producers or engine.records.consumers)


# -- a load names those that it waits for ----------------------------------------------------------


def test_a_registering_load_names_the_ranks_that_have_not_answered() -> None:
    bench = Bench()
    bench.take(b.allocated())
    assert load(bench)[1] == Wait(
        whom=Whom.SIDE_CHANNEL, what="the answer of the side channel at producer:5600"
    )
    bench.meet()
    assert load(bench)[1] == Wait(whom=Whom.PRODUCER, what="ACCEPTED from p0, p1")
    bench.hear(P0, b.accepted())
    record, wait = load(bench)
    assert wait == Wait(whom=Whom.PRODUCER, what="ACCEPTED from p1")
    told = {str(each.rank): each.awaits for each in waiting.ranks(record, None)}
    assert told == {"pp0.tp0": "DONE", "pp0.tp1": "ACCEPTED"}


def test_a_registered_load_waits_for_the_prefill_and_then_for_what_is_missing() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.accepted())
    bench.hear(P1, b.accepted())
    assert load(bench)[1].what == "the producer's prefill, then DONE from p0, p1"
    bench.hear(P1, b.done())
    record, wait = load(bench)
    assert (record.state, wait.what) == ("transferring", "DONE from p0")
    (first, second) = waiting.ranks(record, None)
    assert (first.awaits, first.outcome, second.awaits) == ("DONE", None, "")
    assert second.outcome is not None
    assert second.outcome.value == "done"


def test_unanswered_renewals_are_counted_by_rank() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.accepted())
    bench.hear(P1, b.accepted())
    bench.wait(1.1)
    bench.hear(P1, b.accepted())
    record, _ = load(bench)
    first, second = waiting.ranks(record, bench.engine.records.engines[record.address])
    assert first.misses >= 4
    assert second.misses == 0


def test_a_load_whose_producer_could_not_be_met_waits_for_the_next_try() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.wait(0.0)
    bench.take(ev.MeetingFailed(address=b.ADDRESS, final=False, detail="connection refused"))
    wait = load(bench)[1]
    assert wait.whom is Whom.TIME
    assert wait.what == "the next try to meet producer:5600: connection refused"


def test_a_write_whose_lease_has_passed_waits_for_its_consumer() -> None:
    bench = Bench()
    bench.introduce()
    bench.take(b.started())
    bench.take(b.finished())
    bench.hear(C1, b.register(write_until_s=bench.now + 0.5))
    record = bench.engine.records.producers[b.PART]
    assert record.state == "transferring"
    assert waiting.of_producer(record, bench.now).whom is Whom.POSTS
    paused = waiting.of_producer(record, bench.now + 0.6)
    assert paused.whom is Whom.CONSUMER
    assert re.match(r"RENEW from c1\b", paused.what)


def test_of_many_ranks_a_few_are_named_and_the_others_counted() -> None:
    record = ConsumerRecord(
        state="transferring",
        since=0.0,
        transfer_id=b.T,
        request_id=RequestId("c"),
        agents={Rank(0, tp): AgentName(f"p{tp:02d}") for tp in range(64)},
    )
    assert waiting.of_consumer(record, None).what == "DONE from p00, p01, p02, p03 and 60 more"
