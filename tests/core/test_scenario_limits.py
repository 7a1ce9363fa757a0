"""Scenarios as transcripts: a router releases, a queue is left, a limit is reached.

Each line is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.core.notices import Failed
from kvflow.ids import RequestId, TransferId
from kvflow.testing.decode_engine import Consumer
from kvflow.testing.prefill_engine import Producer
from kvflow.testing.scenes import T, acquainted, both_legs, prefilled
from kvflow.testing.sizes import tokens_of
from kvflow.testing.transcript import check
from kvflow.testing.world import World

ALL = ("producer", "consumer", "peer")

# -- released by a router ------------------------------------------------------------------------


def test_a_released_prefill_gives_its_blocks_back_at_once_f18() -> None:
    world, producer, _ = acquainted(ranks=2)
    prefilled(producer)
    world.advance(0.1)
    producer.release(T)
    check(
        world,
        """
        1.000 P.0: producer t --prefill_started--> allocated
        1.000 P.1: producer t --prefill_started--> allocated
        1.000 P.0: producer t --prefill_finished--> prefilled
        1.000 P.1: producer t --prefill_finished--> prefilled
        1.100 P.0: told vLLM that P.p3 may be freed
        1.100 P.0: producer t --release_asked--> failed (cancelled)
        1.100 P.1: told vLLM that P.p3 may be freed
        1.100 P.1: producer t --release_asked--> failed (cancelled)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_consumer_that_waits_is_told_of_a_release_f18() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    producer.release(T)
    world.advance(0.1)
    producer.finish(prefill)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --release_asked--> failed (cancelled)
        1.011 C: told vLLM that C.c4 failed (cancelled)
        1.011 C: consumer t --rank_failed--> failed (cancelled)
        1.110 P: told vLLM that P.p3 may be freed
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_release_of_what_is_being_written_waits_for_the_last_slice_s3() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    world.faults.slow_slices = 1.0
    producer.finish(prefill)
    world.advance(0.002)
    producer.release(T)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.012 P: producer t --release_asked--> draining (cancelled)
        """,
        since=1.0,
    )
    assert (prefill.state, load.state) == ("finished", "loading")
    world.advance(world.timings.slice_max_s)
    assert (prefill.state, load.state, load.reason) == ("over", "failed", "cancelled")
    world.everything_ends()


def test_a_release_that_comes_before_both_legs_holds_for_both_f18() -> None:
    world, producer, consumer = acquainted()
    producer.release(T)
    prefill, _ = both_legs(producer, consumer)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --release_asked--> failed (cancelled)
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.002 C: told vLLM that C.c4 failed (cancelled)
        1.002 C: consumer t --rank_failed--> failed (cancelled)
        1.010 P: told vLLM that P.p3 may be freed
        """,
        since=1.0,
    )
    world.everything_ends()


# -- in vLLM's queue -----------------------------------------------------------------------------


def test_an_abort_while_queued_reaches_a_registered_consumer_at_once_f1() -> None:
    """vLLM has told of the request's arrival; it never gets blocks."""
    world, producer, consumer = acquainted()
    (node,) = producer.nodes
    queued = RequestId("queued")
    consumer.allocate(T, producer)
    world.advance(0.1)
    node.take(ev.PrefillStarted(transfer_id=T, request_id=queued))
    world.advance(0.1)
    node.take(ev.PrefillAborted(transfer_id=T, request_id=queued))
    world.advance(0.1)
    check(
        world,
        """
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> held
        1.002 C: consumer t --accepted--> registered
        1.100 P: producer t --prefill_started--> registered
        1.200 P: producer t --prefill_aborted--> failed (aborted)
        1.201 C: told vLLM that C.c3 failed (aborted)
        1.201 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


# -- limits --------------------------------------------------------------------------------------


def with_timings(timings: Timings) -> tuple[World, Producer, Consumer]:
    world = World(skewed=False, timings=timings)
    return world, world.add_producer("P"), world.add_consumer("C")


def test_a_registration_too_many_for_unknown_ids_is_refused_and_known_ones_are_not_f17() -> None:
    world, producer, consumer = with_timings(Timings(held_max=1))
    consumer.allocate(TransferId("first"), producer)
    world.advance(0.01)
    consumer.allocate(TransferId("beyond"), producer)
    world.advance(0.01)
    prefill, _ = both_legs(producer, consumer)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        0.000 C: consumer first --blocks_allocated--> allocated
        0.002 C: consumer first --peer_met--> registering
        0.003 P: producer first --registered--> held
        0.004 C: consumer first --accepted--> registered
        0.010 C: consumer beyond --blocks_allocated--> allocated
        0.010 C: consumer beyond --peer_met--> registering
        0.011 P: ignored registration_beyond_limit C-1
        0.011 P: producer beyond --registered_beyond--> failed (capacity)
        0.012 C: told vLLM that C.c2 failed (capacity)
        0.012 C: consumer beyond --rank_failed--> failed (capacity)
        0.020 P: producer t --prefill_started--> allocated
        0.020 C: consumer t --blocks_allocated--> allocated
        0.020 C: consumer t --peer_met--> registering
        0.021 P: producer t --registered--> registered
        0.022 C: consumer t --accepted--> registered
        0.030 P: producer t --prefill_finished--> transferring
        0.033 P: told vLLM that P.p3 may be freed
        0.033 P: producer t --write_done--> sent
        0.034 C: told vLLM that C.c4 has its KV
        0.034 C: consumer t --done--> received
        """,
    )
    world.everything_ends()


def test_a_prompt_that_the_producer_cannot_take_fails_its_load_at_once_on_every_rank_f1() -> None:
    """Its API server refuses the prefill leg, so no prefill with this id is ever known."""
    world = World(skewed=False)
    longest = tokens_of(T)
    producer = world.add_producer("P", ranks=2, prompt_tokens_max=longest - 1)
    roomy = world.add_producer("Q", prompt_tokens_max=longest)
    consumer = world.add_consumer("C")
    assert producer.refuses(T)
    assert not roomy.refuses(T)
    load = consumer.allocate(T, producer)
    world.network.lose(lambda frame: isinstance(frame.notice, Failed), count=2)
    world.advance(0.3)
    check(
        world,
        """
        0.000 C: consumer t --blocks_allocated--> allocated
        0.002 C: consumer t --peer_met--> registering
        0.003 P.0: producer t --registered--> failed (too_long)
        0.003 P.1: producer t --registered--> failed (too_long)
        0.254 C: consumer t --rank_failed--> draining (too_long)
        0.254 C: told vLLM that C.c1 failed (too_long)
        0.254 C: consumer t --rank_failed--> failed (too_long)
        """,
    )
    assert load is not None
    assert consumer.allocate(T, roomy, again=load) is not None
    world.advance(0.01)
    assert roomy.nodes[0].engine.records.producers[T].state == "held"
    world.everything_ends()


def test_a_consumer_too_many_is_not_taken_in_and_the_others_go_on_f17() -> None:
    world, producer, consumer = with_timings(Timings(peers_max=1))
    prefill, _ = both_legs(producer, consumer)
    stranger = world.add_consumer("D")
    load = stranger.allocate(TransferId("beyond"), producer)
    assert load is not None
    world.advance(0.1)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        0.000 P: producer t --prefill_started--> allocated
        0.000 C: consumer t --blocks_allocated--> allocated
        0.000 C: peer P:5600 --peer_wanted--> meeting
        0.002 C: peer P:5600 --meeting_succeeded--> met
        0.002 C: consumer t --peer_met--> registering
        0.003 P: peer C-1 --introduced--> introduced
        0.003 P: producer t --registered--> registered
        0.004 C: consumer t --accepted--> registered
        0.010 D: consumer beyond --blocks_allocated--> allocated
        0.010 D: peer P:5600 --peer_wanted--> meeting
        0.012 D: peer P:5600 --meeting_succeeded--> met
        0.012 D: consumer beyond --peer_met--> registering
        0.013 P: ignored peer_beyond_limit D-1
        0.013 P: ignored unknown_sender D-1
        0.110 P: producer t --prefill_finished--> transferring
        0.113 P: told vLLM that P.p1 may be freed
        0.113 P: producer t --write_done--> sent
        0.114 C: told vLLM that C.c2 has its KV
        0.114 C: consumer t --done--> received
        """,
        machines=ALL,
    )
    world.advance(world.timings.loss_report_s)
    assert (load.state, load.reason) == ("failed", "peer_lost")
    assert producer.nodes[0].reachable == {consumer.node.agent}
    world.everything_ends()
