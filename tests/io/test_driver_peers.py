"""The driver and its peers: whom it refuses, who introduces itself, and who was quiet."""

from collections.abc import Callable

import msgspec
import pytest

from kvflow.core import Reason
from kvflow.core.notices import Accepted, Cancel, Done, Register
from kvflow.core.reasons import Standing
from kvflow.core.timings import Timings
from kvflow.ids import Address, AgentName, Rank, TransferId
from kvflow.settings import Settings
from kvflow.testing.port import MemoryNetwork
from kvflow.wire import codec
from kvflow.wire import messages as m

from .sides import (
    BLOCK_TOKENS,
    FACTS,
    Clock,
    Memory,
    Pair,
    Side,
    changed,
    frame_of,
    load_of,
    prefill_of,
)

SOURCE = [3, 4, 5, 9]
DESTINATION = [6, 7, 8, 2]
MakeSide = Callable[..., Side]


# -- bad frames ----------------------------------------------------------------------------------


def bad_frames(pair: Pair) -> dict[str, bytes]:
    consumer = pair.consumer
    other_version = bytearray(frame_of(consumer))
    other_version[0] += 1
    return {
        "empty": b"",
        "noise": bytes(range(256)),
        "cut": frame_of(consumer)[:-1],
        "version": bytes(other_version),
        "other_name": frame_of(consumer, agent="somebody else"),
        "other_metadata": frame_of(consumer, metadata=pair.producer.port.metadata()),
        "unreadable_metadata": frame_of(consumer, metadata=b"scribble"),
        "too_large": bytes([m.PROTOCOL_VERSION]) + bytes(m.FRAME_BYTES_MAX),
        "not_a_frame": codec.encode(m.MeetRequest(engine_id="e")),
        "bad_region": frame_of(
            consumer,
            regions=tuple(
                msgspec.structs.replace(region, head_first=1)
                for region in consumer.driver.hello.regions
            ),
        ),
    }


BAD_FRAMES = (
    "empty noise cut version other_name other_metadata unreadable_metadata too_large "
    "not_a_frame bad_region"
).split()


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_a_bad_frame_is_refused_counted_and_survived(pair: Pair, kind: str) -> None:
    frame = bad_frames(pair)[kind]
    pair.producer.port.deliver(pair.consumer.agent, frame)
    pair.turn()
    assert [refused for refused, _ in pair.producer.notes.refusals] == ["frame"]
    assert str(pair.consumer.agent) in pair.producer.notes.refusals[0][1]
    assert not pair.producer.port.peers
    assert not pair.producer.driver._pairings
    assert not pair.producer.driver.engine.records.workers
    pair.finish_prefill("t", SOURCE)
    pair.load("t", DESTINATION)
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]


def test_every_bad_frame_is_tried(pair: Pair) -> None:
    assert sorted(bad_frames(pair)) == sorted(BAD_FRAMES)


def test_a_registration_for_blocks_outside_the_pool_fails_that_transfer_only(pair: Pair) -> None:
    pair.finish_prefill("t", SOURCE)
    register = Register(
        transfer_id=TransferId("t"),
        attempt=1,
        blocks=((31, 32),),
        starts=(0,),
        tokens=32,
        lease_s=30.0,
        write_until_s=pair.clock.now + 1.0,
    )
    pair.consumer.port.add_peer(pair.producer.port.metadata())
    pair.consumer.port.send(pair.producer.agent, frame_of(pair.consumer, register))
    pair.turn_times(5)
    assert pair.producer.reports.sent_ids == [prefill_of("t")]
    assert pair.producer.notes.ended("producer")[0].reason is Reason.WRITE_FAILED
    assert pair.producer.port.counts.posts == 0


def test_a_notice_of_a_stranger_changes_nothing(pair: Pair) -> None:
    done = codec.encode_frame([Done(transfer_id=TransferId("t"), attempt=1)], None)
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    pair.consumer.port.deliver(AgentName("stranger"), done)
    pair.turn_times(3)
    assert pair.consumer.notes.ignored_kinds["unknown_sender"] == 1
    assert pair.consumer.reports.received_ids == []


# -- incompatible peers --------------------------------------------------------------------------

DIFFERENT = {
    "tp_size": ("tensor-parallel size", 2, 3),
    "pp_size": ("pipeline-parallel size", 2, 3),
    "kv_dtype": ("dtype", "torch.bfloat16", "torch.float16"),
    "model": ("model", "tiny layers=2", "large layers=2"),
    "group_kinds": ("cache groups", ("FullAttentionSpec",), ("MambaSpec",)),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_peers_that_differ_are_refused_at_the_meeting_with_both_values(
    make_side: MakeSide, clock: Clock, field: str
) -> None:
    name, ours, theirs = DIFFERENT[field]
    producer = make_side("producer", facts=changed(FACTS, **{field: theirs}))
    consumer = make_side("consumer", facts=changed(FACTS, **{field: ours}))
    pair = Pair(producer, consumer, clock)
    pair.load("t", DESTINATION)
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.INCOMPATIBLE)]
    (ended,) = pair.consumer.notes.ended("consumer")
    for word in (name, repr(ours), repr(theirs)):
        assert word in ended.detail
    assert not pair.consumer.port.peers


def test_different_layers_are_refused_at_the_meeting(make_side: MakeSide, clock: Clock) -> None:
    other = Memory(seed=3, block_bytes=512)
    pair = Pair(make_side("producer", memory=other), make_side("consumer"), clock)
    pair.load("t", DESTINATION)
    pair.turn_until_quiet()
    detail = pair.consumer.notes.ended("consumer")[0].detail
    assert "cell_bytes of plane page of layer.0 is 16 here and 32 there" in detail


def test_an_engine_without_our_rank_is_refused_with_the_ranks_that_it_has(
    make_side: MakeSide, clock: Clock
) -> None:
    pair = Pair(make_side("producer", rank=Rank(0, 3)), make_side("consumer"), clock)
    pair.load("t", DESTINATION)
    pair.turn_until_quiet()
    detail = pair.consumer.notes.ended("consumer")[0].detail
    assert "pp0.tp0" in detail
    assert "pp0.tp3" in detail


def test_a_consumer_that_differs_is_told_so_when_it_registers_all_the_same(
    make_side: MakeSide, clock: Clock
) -> None:
    producer = make_side("producer")
    consumer = make_side("consumer", facts=changed(FACTS, model="other"))
    pair = Pair(producer, consumer, clock)
    register = Register(
        transfer_id=TransferId("t"),
        attempt=1,
        blocks=((1,),),
        starts=(0,),
        tokens=16,
        lease_s=30.0,
        write_until_s=None,
    )
    consumer.port.add_peer(producer.port.metadata())
    consumer.port.send(producer.agent, frame_of(consumer, register))
    producer.driver.look()
    ((_, payload),) = consumer.port.receive()
    notices, _ = codec.decode_frame(payload)
    assert [notice.reason for notice in notices] == [Reason.INCOMPATIBLE]
    assert pair.producer.notes.refusals[0][0] == "peer"


def test_unreadable_metadata_fail_the_meeting_which_is_tried_again(pair: Pair) -> None:
    reply = pair.producer.reply()
    (hello,) = reply.ranks
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
    scribble = m.Hello(**{**fields, "metadata": b"scribble"})
    broken = m.MeetReply(engine_id="producer", incarnation="i", ranks=(scribble,))
    pair.load("t", DESTINATION)
    (address,) = pair.consumer.meetings
    pair.consumer.meetings.clear()
    pair.consumer.driver.met(address, broken)
    assert pair.consumer.notes.refusals[0][0] == "peer"
    pair.finish_prefill("t", SOURCE)
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]


# -- introductions -------------------------------------------------------------------------------


def hellos_sent(pair: Pair, side: Side) -> list[bool]:
    """For each frame that `side` sends from now on: whether its coordinates went along."""
    sent: list[bool] = []
    send = side.port.send

    def watched(name: AgentName, payload: bytes) -> None:
        sent.append(codec.decode_frame(payload)[1] is not None)
        send(name, payload)

    side.port.send = watched
    return sent


def test_a_consumer_introduces_itself_until_it_is_answered_and_a_producer_never(
    pair: Pair,
) -> None:
    pair.producer.port.faults.sends_lost = 1
    consumer, producer = hellos_sent(pair, pair.consumer), hellos_sent(pair, pair.producer)
    pair.load("t", DESTINATION)
    pair.finish_prefill("t", SOURCE)
    pair.turn_until_quiet()
    assert consumer[:2] == [True, True]
    assert not any(consumer[2:])
    assert not any(producer)


def test_two_engines_that_are_both_to_each_other_know_each_other_both_ways(pair: Pair) -> None:
    back = Pair(pair.consumer, pair.producer, pair.clock)
    pair.load("there", DESTINATION)
    back.load("back", DESTINATION)
    pair.turn_times(3)
    pair.finish_prefill("there", SOURCE)
    back.finish_prefill("back", SOURCE)
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("there"), None)]
    assert back.consumer.reports.received_ids == [(load_of("back"), None)]


def test_a_late_answer_of_a_dropped_producer_does_not_count_as_acquaintance(pair: Pair) -> None:
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    pair.consumer.loses(pair.producer)
    late = Accepted(
        transfer_id=TransferId("t"), attempt=1, standing=Standing.WAITING, clock_s=pair.clock.now
    )
    pair.consumer.port.deliver(pair.producer.agent, codec.encode_frame([late], None))
    pair.consumer.driver.look()
    sent = hellos_sent(pair, pair.consumer)
    pair.clock.now += 1
    pair.load("next", [9], attempt=32)
    pair.turn_times(30)
    assert sent
    assert sent[0]


def test_a_cancel_of_an_unknown_transfer_is_answered(pair: Pair) -> None:
    cancel = Cancel(transfer_id=TransferId("nobody's"), attempt=1)
    pair.consumer.port.add_peer(pair.producer.port.metadata())
    pair.consumer.port.send(pair.producer.agent, frame_of(pair.consumer, cancel))
    pair.producer.driver.look()
    ((_, payload),) = pair.consumer.port.receive()
    ((answer,), _) = codec.decode_frame(payload)
    assert answer.reason is Reason.CANCELLED


# -- quiet peers ---------------------------------------------------------------------------------


def used_and_quiet(pair: Pair) -> None:
    pair.moves_another()
    pair.clock.now += pair.producer.driver.engine.timings.verify_after_s


def test_a_quiet_producer_that_is_the_same_is_used_without_being_dropped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_and_quiet(pair)
    removed: list[AgentName] = []
    monkeypatch.setattr(pair.consumer.port, "remove_peer", removed.append)
    pair.load("t", DESTINATION, attempt=32)
    assert pair.consumer.meetings == [pair.producer.address]
    pair.finish_prefill("t", SOURCE)
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids[1:] == [(load_of("t"), None)]
    assert removed == []


def test_a_producer_restarted_while_quiet_is_used_at_once_and_the_old_one_dropped(
    pair: Pair, make_side: MakeSide, network: MemoryNetwork
) -> None:
    network.dead_are_silent = True
    used_and_quiet(pair)
    old = pair.producer
    old.port.close()
    again = Pair(make_side("producer"), pair.consumer, pair.clock)
    again.finish_prefill("t", SOURCE)
    again.load("t", DESTINATION, attempt=32)
    again.turn_times(10)
    assert pair.consumer.reports.received_ids[1:] == [(load_of("t"), None)]
    assert set(pair.consumer.port.peers) == {again.producer.agent}
    assert set(pair.consumer.driver._remotes) == {again.producer.agent}


def test_a_producer_that_died_while_quiet_is_dropped_and_fails_the_load_by_the_deadline(
    pair: Pair,
) -> None:
    used_and_quiet(pair)
    pair.load("t", DESTINATION, attempt=32)
    pair.producer.address = Address("nobody", 1)
    pair.turn()
    assert not pair.consumer.port.peers
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids[1:] == [(load_of("t"), Reason.UNREACHABLE)]
    assert not pair.consumer.notes.failures


def test_a_consumer_introduces_itself_again_when_the_producer_was_quiet(pair: Pair) -> None:
    pair.moves_another()
    sent = hellos_sent(pair, pair.consumer)
    pair.clock.now += 1.9 * Timings().renew_interval_s
    pair.load("soon", DESTINATION, attempt=176)
    pair.finish_prefill("soon", SOURCE)
    pair.turn_until_quiet()
    assert sent
    assert not any(sent)
    pair.clock.now += 2 * Timings().renew_interval_s
    pair.load("later", DESTINATION, attempt=192)
    assert sent[-1]


def test_a_producer_that_forgot_its_consumer_learns_it_again_from_a_resend(pair: Pair) -> None:
    pair.load("t", DESTINATION)
    pair.turn_times(3)
    assert pair.consumer.state("consumer", load_of("t")) == "registered"
    pair.producer.loses(pair.consumer)
    assert not pair.producer.driver.engine.records.workers
    pair.load("next", [9], attempt=32)
    pair.turn()
    assert pair.producer.notes.ignored_kinds["unknown_sender"] == 1
    pair.finish_prefill("next", [9])
    pair.turn_until_quiet()
    assert pair.consumer.agent in pair.producer.port.peers
    assert dict(pair.consumer.reports.received_ids)[load_of("next")] is None


# -- limits --------------------------------------------------------------------------------------


def test_one_consumer_more_than_may_be_is_not_taken_in_and_the_others_go_on(
    make_side: MakeSide, clock: Clock
) -> None:
    two = Settings(timings=Timings(peers_max=2))
    producer = make_side("producer", settings=two)
    taken = [Pair(producer, make_side(name), clock) for name in ("one", "two")]
    beyond = Pair(producer, make_side("three"), clock)
    for number, pair in enumerate(taken):
        pair.load(f"t{number}", DESTINATION)
        pair.turn_times(3)
    beyond.load("beyond", DESTINATION)
    beyond.turn_times(3)
    assert producer.notes.ignored_kinds["peer_beyond_limit"] == 1
    assert set(producer.port.peers) == {pair.consumer.agent for pair in taken}
    for number, pair in enumerate(taken):
        pair.finish_prefill(f"t{number}", SOURCE)
        pair.turn_times(10)
        assert pair.consumer.reports.received_ids == [(load_of(f"t{number}"), None)]
    beyond.turn_until_quiet()
    assert beyond.consumer.reports.received_ids == [(load_of("beyond"), Reason.PEER_LOST)]
    assert not producer.notes.failures


def test_one_registration_more_than_may_be_kept_is_refused_and_counted(
    make_side: MakeSide, clock: Clock
) -> None:
    one = Settings(timings=Timings(held_max=1))
    pair = Pair(make_side("producer", settings=one), make_side("consumer"), clock)
    pair.start_prefill("known")
    for number, name in enumerate(("beyond-1", "known", "beyond-2", "beyond-3"), 1):
        pair.load(name, [number], attempt=16 * number)
    pair.turn_times(3)
    refused = dict(pair.consumer.reports.received_ids)
    assert refused == dict.fromkeys(map(load_of, ("beyond-2", "beyond-3")), Reason.CAPACITY)
    assert pair.producer.notes.ignored_kinds == {"registration_beyond_limit": 2}
    for name in ("known", "beyond-1"):
        pair.finish_prefill(name, [5])
    pair.turn_until_quiet()
    received = dict(pair.consumer.reports.received_ids)
    assert received[load_of("known")] is received[load_of("beyond-1")] is None


def test_a_prompt_that_the_producer_cannot_take_fails_its_load_in_one_round_trip_f1(
    make_side: MakeSide, clock: Clock
) -> None:
    tokens = len(DESTINATION) * BLOCK_TOKENS
    producer = make_side("producer", prompt_tokens_max=tokens - 1)
    pair = Pair(producer, make_side("consumer"), clock)
    pair.load("t", DESTINATION)
    pair.load("shorter", [9], attempt=32)
    pair.turn_times(3)
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.TOO_LONG)]
    assert producer.state("producer", "shorter") == "held"
