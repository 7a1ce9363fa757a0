"""What a worker says is live: counts, rows, records, made in pieces that block nobody for long."""

import asyncio
from collections.abc import Callable

import pytest

from kvflow.core import events as ev
from kvflow.core import waiting
from kvflow.ids import Address, TransferId
from kvflow.io import snapshot as module
from kvflow.io.snapshot import PIECE, Snapshot
from kvflow.observe.history import History
from kvflow.settings import Settings
from kvflow.wire import codec, live

from .sides import DESTINATION, SOURCE, Clock, Pair, Side, allocated, load_of, prefill_of

MANY = 10_000


def of(side: Side, clock: Clock, **options: object) -> Snapshot:
    history = side.notes.history or History()
    return Snapshot(driver=side.driver, history=history, clock=clock, **options)


def every_row(side: Side, clock: Clock, limit: int = 1000) -> live.Live:
    told = asyncio.run(of(side, clock).of_all(limit))
    assert codec.decode_reply(codec.encode(told)) == told
    return told


def one(side: Side, clock: Clock, name: str) -> live.Inspected:
    told = asyncio.run(of(side, clock).of_one(name))
    assert codec.decode_reply(codec.encode(told)) == told
    return told


def start(side: Side, transfer: str, request: str | None = None) -> None:
    side.driver.take(
        ev.PrefillStarted(
            transfer_id=TransferId(transfer), request_id=request or prefill_of(transfer)
        )
    )


@pytest.fixture
def crowd(make_side: Callable[..., Side], clock: Clock) -> Side:
    """Ten thousand prompts are computed, begun a millisecond after one another."""
    side = make_side("producer", settings=Settings())
    for number in range(MANY):
        start(side, f"t{number:05d}")
        clock.now += 0.001
    return side


# -- many ------------------------------------------------------------------------------------------


def test_the_loop_goes_on_after_each_hundred_records(
    crowd: Side, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at, or made a row of: between two breaths there is one piece of work."""
    since_breath = {"looked": 0, "made": 0}
    seen = {"looked": 0, "made": 0}
    breaths = 0

    async def breathe() -> None:
        nonlocal breaths
        breaths += 1
        assert sum(since_breath.values()) <= 2 * PIECE
        assert max(since_breath.values()) <= PIECE
        since_breath.update(looked=0, made=0)

    def counting(what: str, function: Callable[..., object]) -> Callable[..., object]:
        def count(*args: object) -> object:
            since_breath[what] += 1
            seen[what] += 1
            return function(*args)

        return count

    monkeypatch.setattr(module, "is_live", counting("looked", module.is_live))
    monkeypatch.setattr(waiting, "of_producer", counting("made", waiting.of_producer))
    told = asyncio.run(of(crowd, clock, breathe=breathe).of_all(1000))
    assert len(told.transfers) == seen["made"] == 1000
    assert seen["looked"] >= MANY
    assert breaths >= (MANY + 1000) // PIECE
    assert max(since_breath.values()) <= PIECE


def test_other_work_of_the_loop_is_done_meanwhile(crowd: Side, clock: Clock) -> None:
    ticks = 0

    async def both() -> live.Live:
        done = asyncio.Event()

        async def tick() -> None:
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        told = await of(crowd, clock).of_all(1000)
        done.set()
        await ticking
        return told

    assert asyncio.run(both()).live == MANY
    assert ticks >= MANY // PIECE


@pytest.mark.parametrize("limit", [0, 1, 7, 1000])
def test_counts_are_complete_and_rows_are_bounded(crowd: Side, clock: Clock, limit: int) -> None:
    told = every_row(crowd, clock, limit)
    assert told.live == MANY
    assert told.population == (live.Population(machine="producer", state="allocated", count=MANY),)
    assert [row.transfer_id for row in told.transfers] == [f"t{n:05d}" for n in range(limit)]
    ages = [row.in_state_ms for row in told.transfers]
    assert ages == sorted(ages, reverse=True)
    if limit:
        assert ages[0] == pytest.approx(MANY)


def test_what_ends_while_rows_are_made_is_left_out(crowd: Side, clock: Clock) -> None:
    ended = 0

    async def breathe() -> None:
        nonlocal ended
        for number in range(ended, ended + 5):
            crowd.driver.take(
                ev.PrefillAborted(
                    transfer_id=TransferId(f"t{number:05d}"),
                    request_id=prefill_of(f"t{number:05d}"),
                )
            )
        ended += 5

    told = asyncio.run(of(crowd, clock, breathe=breathe).of_all(1000))
    assert 500 < ended < 1000
    assert {row.state for row in told.transfers} == {"allocated"}
    assert 0 < len(told.transfers) < 1000


def test_looking_changes_nothing(crowd: Side, clock: Clock) -> None:
    moves = len(crowd.notes.moves)
    before = dict(crowd.driver.engine.records.population)
    deadline = crowd.driver.engine.next_deadline()
    every_row(crowd, clock)
    one(crowd, clock, "t00001")
    assert len(crowd.notes.moves) == moves
    assert dict(crowd.driver.engine.records.population) == before
    assert crowd.driver.engine.next_deadline() == deadline


# -- rows ------------------------------------------------------------------------------------------


def test_both_sides_of_a_transfer_say_what_they_wait_for(pair: Pair, clock: Clock) -> None:
    pair.start_prefill("t")
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    clock.now += 2.0
    (here,) = every_row(pair.consumer, clock).transfers
    assert (here.machine, here.transfer_id, here.request_id) == ("consumer", "t", load_of("t"))
    assert (here.state, here.waits_on) == ("registered", "producer")
    assert here.waits_for == f"the producer's prefill, then DONE from {pair.producer.agent}"
    assert here.in_state_ms >= 2000
    assert here.total_ms == pytest.approx(here.in_state_ms + 20, abs=11)
    assert (here.peer, here.attempt) == (str(pair.producer.address), 16)
    (there,) = every_row(pair.producer, clock).transfers
    assert (there.machine, there.state, there.waits_on) == ("producer", "registered", "vllm")
    assert there.peer == pair.consumer.agent


def test_bytes_of_a_write_that_has_not_ended_are_counted(pair: Pair, clock: Clock) -> None:
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    pair.start_prefill("t")
    pair.producer.port.faults.frozen = True
    pair.finish_prefill("t", SOURCE)
    pair.turn_times(2)
    (row,) = every_row(pair.producer, clock).transfers
    posted = row.bytes
    assert row.state == "transferring"
    assert posted > 0
    pair.producer.port.faults.frozen = False
    pair.turn_until_quiet()
    told = one(pair.producer, clock, "t").records[0].row
    assert told.state == "sent"
    assert told.bytes > posted


def test_peers_tell_for_how_long_they_have_been_silent(pair: Pair, clock: Clock) -> None:
    pair.load("t", DESTINATION)
    pair.turn_times(5)
    clock.now += 1.5
    (peer,) = every_row(pair.consumer, clock).peers
    assert (peer.key, peer.state, peer.using) == (str(pair.producer.address), "met", 1)
    assert peer.silent_ms is not None
    assert 1500 <= peer.silent_ms < 1600
    assert peer.engine_id == "producer"


def test_the_ended_are_counted_and_not_listed(pair: Pair, clock: Clock) -> None:
    pair.start_prefill("t")
    pair.finish_prefill("t", SOURCE)
    pair.load("t", DESTINATION)
    pair.turn_until_quiet()
    told = every_row(pair.consumer, clock)
    assert (told.live, told.transfers) == (0, ())
    counted = {(each.machine, each.state): each.count for each in told.population}
    assert counted == {("consumer", "received"): 1, ("peer", "met"): 1}


def test_an_odd_request_id_is_cut_and_carried(make_side: Callable[..., Side], clock: Clock) -> None:
    side = make_side("producer")
    start(side, "t", request="\x1b[31m" + "ü" * 1000)
    (row,) = every_row(side, clock).transfers
    assert row.request_id == ("\x1b[31m" + "ü" * 1000)[:512]


# -- one of them -----------------------------------------------------------------------------------


def test_a_transfer_is_told_with_its_history_deadlines_and_ranks(pair: Pair, clock: Clock) -> None:
    pair.consumer.notes.history = History()
    pair.start_prefill("t")
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    clock.now += 0.1
    told = one(pair.consumer, clock, "t")
    assert (told.exact, told.matched, told.transfers) == (True, 1, ("t",))
    (record,) = told.records
    assert [move.dest for move in record.history] == ["allocated", "registering", "registered"]
    assert [move.trigger for move in record.history] == ["blocks_allocated", "peer_met", "accepted"]
    assert record.history[-1].ago_ms == pytest.approx(record.row.in_state_ms)
    ends = {each.what: each for each in record.deadlines}
    assert ends["end"].dest == "draining"
    assert ends["end"].why == "the deadline of the whole load passed"
    assert ends["end"].in_ms == pytest.approx(300_000, abs=1000)
    assert ends["peer"].in_ms < 1000
    (rank,) = record.ranks
    assert (rank.agent, rank.awaits, rank.outcome) == (pair.producer.agent, "DONE", "")
    assert dict(record.facts)["blocks"] == str(len(DESTINATION))
    assert record.peer is not None
    assert record.peer.state == "met"
    assert sum(ms for _, ms in record.spent_ms) == pytest.approx(
        record.row.total_ms - record.row.in_state_ms
    )


def test_a_producer_tells_when_it_stops_posting(pair: Pair, clock: Clock) -> None:
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    pair.start_prefill("t")
    pair.producer.port.faults.frozen = True
    pair.finish_prefill("t", SOURCE)
    pair.turn_times(2)
    (record,) = one(pair.producer, clock, "t").records
    lease = next(each for each in record.deadlines if each.what == "write lease")
    assert 0 < lease.in_ms <= 1000
    clock.now += 1.5
    (record,) = one(pair.producer, clock, "t").records
    lease = next(each for each in record.deadlines if each.what == "write lease")
    assert lease.in_ms < 0
    assert record.row.waits_for.startswith(f"RENEW from {pair.consumer.agent}")


@pytest.mark.parametrize(
    ("name", "exact", "found"),
    [
        ("abc", True, ["abc"]),
        ("prefill-abc", True, ["abc"]),
        ("abcd", False, ["abcde"]),
        ("prefill-abcd", False, ["abcde"]),
        ("x", False, ["xyz"]),
        ("a", False, ["abc", "abcde"]),
        ("prefill-", False, ["abc", "abcde", "xyz"]),
        ("bc", False, []),
        ("abcdef", False, []),
    ],
)
def test_a_transfer_is_found_by_an_id_or_by_how_it_begins(
    make_side: Callable[..., Side], clock: Clock, name: str, exact: bool, found: list[str]
) -> None:
    side = make_side("producer")
    for transfer in ("abc", "abcde", "xyz"):
        start(side, transfer)
    told = one(side, clock, name)
    assert (told.exact, list(told.transfers), told.matched) == (exact, found, len(found))
    assert len(told.records) == (len(found) == 1)


def test_two_loads_of_one_transfer_are_both_told(
    make_side: Callable[..., Side], clock: Clock
) -> None:
    side = make_side("consumer")
    first = allocated("t", Address("p", 1), [1])
    side.driver.take(first)
    side.driver.take(
        ev.LoadRefused(
            transfer_id=TransferId("t"), request_id="other", attempt=32, detail="no such key"
        )
    )
    told = one(side, clock, "other")
    assert told.transfers == ("t",)
    assert sorted(record.row.request_id for record in told.records) == ["load-t", "other"]
    (refused,) = [record for record in told.records if record.row.request_id == "other"]
    assert (refused.row.reason, refused.detail) == ("parameters", "no such key")


def test_of_very_many_that_begin_so_some_are_named_and_all_counted(
    crowd: Side, clock: Clock
) -> None:
    told = one(crowd, clock, "t")
    assert told.matched == MANY
    assert len(told.transfers) == live.MATCHES_MAX
    assert told.records == ()
