"""Scenarios as transcripts: a request is preempted after its KV has landed.

The producer keeps for ten seconds what it has written, and the consumer registers again. Each line
is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.core.notices import Cancel, Register
from kvflow.testing.engines import Consumer, Load, Prefill, Producer
from kvflow.testing.network import Frame
from kvflow.testing.scenes import T, acquainted, both_legs
from kvflow.testing.transcript import check
from kvflow.testing.world import World

KEEP_S = 10.0
KEEPS = Timings(keep_sent_s=KEEP_S)
ALWAYS = 1.0
NEVER = 0.0
Scene = tuple[World, Producer, Consumer, Prefill, Load]


def landed(timings: Timings = KEEPS, *, ranks: int = 1, registers: bool = True) -> Scene:
    """A load was received at 1.013; now it is 2.0."""
    world, producer, consumer = acquainted(ranks, timings, registers=registers)
    prefill, load = both_legs(producer, consumer)
    producer.finish(prefill)
    world.advance(0.99)
    assert load.state == "received"
    return world, producer, consumer, prefill, load


def again(consumer: Consumer, producer: Producer, load: Load, skip: int = 0) -> Load:
    """vLLM preempts the request, and allocates for it once more."""
    consumer.preempt(load)
    loading = consumer.allocate(load.transfer_id, producer, again=load, skip=skip)
    assert loading is not None
    return loading


# -- the edge --------------------------------------------------------------------------------------


def test_a_preempted_request_gets_its_kv_once_more_f9() -> None:
    world, producer, consumer, prefill, load = landed()
    second = again(consumer, producer, load)
    world.advance(1.0)
    consumer.finish(second)
    world.advance(0.1)
    check(
        world,
        """
        2.000 C: consumer t --allocated_again--> allocated
        2.000 C: consumer t --peer_met--> registering
        2.001 P: producer t --registered_anew--> transferring
        2.002 C: consumer t --accepted--> transferring
        2.003 P: producer t --write_done--> kept
        2.004 C: told vLLM that C.c4 has its KV
        2.004 C: consumer t --done--> received
        3.000 C: consumer t --request_ended--> releasing
        3.001 P: told vLLM that P.p3 may be freed
        3.001 P: producer t --cancel_asked--> sent
        3.002 C: consumer t --rank_failed--> released
        """,
        since=2.0,
    )
    assert prefill.state == "over"
    world.everything_ends()


def test_every_rank_writes_its_part_once_more_f9() -> None:
    world, producer, consumer, _, load = landed(ranks=2)
    second = again(consumer, producer, load, skip=1)
    world.advance(0.1)
    check(
        world,
        """
        2.000 C: consumer t --allocated_again--> allocated
        2.000 C: consumer t --peer_met--> registering
        2.001 P.0: producer t --registered_anew--> transferring
        2.001 P.1: producer t --registered_anew--> transferring
        2.002 C: consumer t --accepted--> transferring
        2.003 P.0: producer t --write_done--> kept
        2.003 P.1: producer t --write_done--> kept
        2.004 C: told vLLM that C.c4 has its KV
        2.004 C: consumer t --done--> received
        """,
        since=2.0,
    )
    consumer.finish(second)
    world.everything_ends()


def test_what_is_kept_is_kept_for_so_long_in_all_however_often_it_is_written_l1() -> None:
    world, producer, consumer, _, load = landed()
    second = again(consumer, producer, load)
    world.advance(3.0)
    third = again(consumer, producer, second)
    world.advance(3.0)
    assert third.state == "received"
    world.advance(3.5)
    check(
        world,
        """
        5.000 C: consumer t --allocated_again--> allocated
        5.000 C: consumer t --peer_met--> registering
        5.001 P: producer t --registered_anew--> transferring
        5.002 C: consumer t --accepted--> transferring
        5.004 P: producer t --write_done--> kept
        5.005 C: told vLLM that C.c4 has its KV
        5.005 C: consumer t --done--> received
        11.012 P: told vLLM that P.p3 may be freed
        11.012 P: producer t --expired--> sent
        """,
        since=5.0,
    )
    world.everything_ends()


# -- it is not to be had ---------------------------------------------------------------------------


def test_of_a_producer_that_keeps_nothing_nothing_is_asked_f9() -> None:
    world, producer, consumer, _, load = landed(Timings())
    again(consumer, producer, load)
    world.advance(1.0)
    check(
        world,
        """
        2.000 C: told vLLM that C.c4 failed (forgotten)
        2.000 C: consumer t --allocated_again--> failed (forgotten)
        """,
        since=2.0,
    )
    world.everything_ends()


def test_for_a_consumer_that_will_not_ask_again_nothing_is_kept_f9() -> None:
    world, *_, prefill, _ = landed(registers=False)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.012 P: told vLLM that P.p3 may be freed
        1.012 P: producer t --write_done--> sent
        1.013 C: told vLLM that C.c4 has its KV
        1.013 C: consumer t --done--> received
        """,
        since=1.0,
    )
    assert prefill.state == "over"
    world.everything_ends()


def test_a_request_that_is_preempted_too_late_is_told_at_once_f9() -> None:
    world, producer, consumer, _, load = landed()
    world.advance(KEEP_S)
    again(consumer, producer, load)
    world.advance(1.0)
    check(
        world,
        """
        11.012 P: told vLLM that P.p3 may be freed
        11.012 P: producer t --expired--> sent
        12.000 C: told vLLM that C.c4 failed (forgotten)
        12.000 C: consumer t --allocated_again--> failed (forgotten)
        """,
        since=2.0,
    )
    world.everything_ends()


def test_a_registration_that_comes_too_late_is_refused_at_once_f9() -> None:
    world, producer, consumer, _, load = landed()
    world.advance(8.5)
    world.network.lose_all(lambda frame: isinstance(frame.notice, Register))
    again(consumer, producer, load)
    world.advance(1.0)
    world.network.heal()
    world.advance(0.5)
    check(
        world,
        """
        10.500 C: consumer t --allocated_again--> allocated
        10.502 C: consumer t --peer_met--> registering
        11.012 P: told vLLM that P.p3 may be freed
        11.012 P: producer t --expired--> sent
        11.504 C: told vLLM that C.c4 failed (forgotten)
        11.504 C: consumer t --rank_failed--> failed (forgotten)
        """,
        since=2.0,
    )
    world.everything_ends()


def test_a_second_write_that_fails_is_not_tried_again_f4() -> None:
    world, producer, consumer, _, load = landed()
    world.faults.post_fails = ALWAYS
    again(consumer, producer, load)
    world.advance(0.1)
    check(
        world,
        """
        2.000 C: consumer t --allocated_again--> allocated
        2.000 C: consumer t --peer_met--> registering
        2.001 P: producer t --registered_anew--> transferring
        2.002 P: told vLLM that P.p3 may be freed
        2.002 P: producer t --write_failed--> failed (write_failed)
        2.002 C: consumer t --accepted--> transferring
        2.002 C: told vLLM that C.c4 failed (write_failed)
        2.002 C: consumer t --rank_failed--> failed (write_failed)
        """,
        since=2.0,
    )
    world.everything_ends()


def test_a_restarted_producer_is_not_waited_for_f11() -> None:
    """It would keep the registration for the prefill of that id, which never comes."""
    world, producer, consumer, _, load = landed()
    producer.crash()
    producer.start()
    world.advance(5.0)
    again(consumer, producer, load)
    world.advance(0.1)
    check(
        world,
        """
        7.000 C: consumer t --allocated_again--> allocated
        7.002 C: consumer t --peer_met--> registering
        7.004 C: told vLLM that C.c4 failed (forgotten)
        7.004 C: consumer t --rank_failed--> failed (forgotten)
        """,
        since=2.0,
    )
    world.everything_ends()


# -- the id is used again --------------------------------------------------------------------------


def test_a_new_prefill_with_the_id_has_the_old_ones_blocks_let_go_and_goes_on_f7() -> None:
    world, producer, consumer, prefill, load = landed()
    new = producer.begin(T)
    assert new is not None
    again(consumer, producer, load)
    world.advance(1.0)
    producer.finish(new)
    world.advance(0.1)
    check(
        world,
        """
        2.000 P: told vLLM that P.p3 may be freed
        2.000 P: producer t --rival_started--> allocated
        2.000 C: consumer t --allocated_again--> allocated
        2.000 C: consumer t --peer_met--> registering
        2.002 C: told vLLM that C.c4 failed (forgotten)
        2.002 C: consumer t --rank_failed--> failed (forgotten)
        3.000 P: producer t --prefill_finished--> prefilled
        """,
        since=2.0,
    )
    assert (prefill.state, new.state) == ("over", "finished")
    world.everything_ends()


def test_another_consumer_with_the_id_waits_for_another_prefill_f7() -> None:
    """As if nothing had been kept; the old request is computed where it is."""
    world, producer, consumer, _, load = landed()
    other = world.add_consumer("D")
    other.allocate(T, producer)
    world.advance(0.1)
    again(consumer, producer, load)
    world.advance(0.1)
    check(
        world,
        """
        2.000 D: consumer t --blocks_allocated--> allocated
        2.002 D: consumer t --peer_met--> registering
        2.003 P: told vLLM that P.p3 may be freed
        2.003 P: producer t --registered_rival--> held
        2.004 D: consumer t --accepted--> registered
        2.100 C: consumer t --allocated_again--> allocated
        2.100 C: consumer t --peer_met--> registering
        2.102 C: told vLLM that C.c4 failed (forgotten)
        2.102 C: consumer t --rank_failed--> failed (forgotten)
        """,
        since=2.0,
    )
    world.everything_ends()


def test_another_request_with_the_id_does_not_get_what_is_kept_f7() -> None:
    """It may be of another prompt. What is kept stays for the request that it is kept for."""
    world, producer, consumer, _, load = landed()
    consumer.allocate(T, producer)
    world.advance(0.1)
    again(consumer, producer, load)
    world.advance(0.1)
    check(
        world,
        """
        2.000 C: consumer t --blocks_allocated--> allocated
        2.000 C: consumer t --peer_met--> registering
        2.002 C: told vLLM that C.c5 failed (forgotten)
        2.002 C: consumer t --rank_failed--> failed (forgotten)
        2.100 C: consumer t --allocated_again--> allocated
        2.100 C: consumer t --peer_met--> registering
        2.101 P: producer t --registered_anew--> transferring
        2.102 C: consumer t --accepted--> transferring
        2.103 P: producer t --write_done--> kept
        2.104 C: told vLLM that C.c4 has its KV
        2.104 C: consumer t --done--> received
        """,
        since=2.0,
    )
    world.everything_ends()


# -- the blocks come back --------------------------------------------------------------------------


def test_the_end_of_the_request_is_told_until_it_is_answered_f5() -> None:
    world, _, consumer, prefill, load = landed()
    world.network.lose(lambda frame: isinstance(frame.notice, Cancel))
    consumer.finish(load)
    world.advance(1.0)
    check(
        world,
        """
        2.000 C: consumer t --request_ended--> releasing
        2.251 P: told vLLM that P.p3 may be freed
        2.251 P: producer t --cancel_asked--> sent
        2.252 C: consumer t --rank_failed--> released
        """,
        since=2.0,
    )
    assert prefill.state == "over"
    world.everything_ends()


def test_an_abort_while_it_is_written_once_more_ends_everything_f2() -> None:
    world, producer, consumer, _, load = landed()
    second = again(consumer, producer, load)
    world.advance(0.0015)
    consumer.abort(second)
    world.advance(0.1)
    check(
        world,
        """
        2.000 C: consumer t --allocated_again--> allocated
        2.000 C: consumer t --peer_met--> registering
        2.001 P: producer t --registered_anew--> transferring
        2.002 C: consumer t --load_aborted--> draining (aborted)
        2.002 P: producer t --cancel_asked--> draining (cancelled)
        2.003 P: told vLLM that P.p3 may be freed
        2.003 P: producer t --write_done--> failed (cancelled)
        2.004 C: told vLLM that C.c4 failed (aborted)
        2.004 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=2.0,
    )
    world.everything_ends()


def test_an_abort_before_it_is_registered_again_lets_go_of_what_is_kept_f2() -> None:
    world, producer, consumer, prefill, load = landed()
    world.advance(5.0)
    second = again(consumer, producer, load)
    consumer.abort(second)
    world.advance(0.1)
    check(
        world,
        """
        7.000 C: consumer t --allocated_again--> allocated
        7.000 C: told vLLM that C.c4 failed (aborted)
        7.000 C: consumer t --load_aborted--> failed (aborted)
        7.001 P: told vLLM that P.p3 may be freed
        7.001 P: producer t --cancel_asked--> sent
        """,
        since=2.0,
    )
    assert prefill.state == "over"
    world.everything_ends()


def test_a_consumer_that_is_gone_delays_nobody_for_longer_than_is_kept_l1() -> None:
    world, _, consumer, _, _ = landed()
    world.faults.rejects = NEVER
    consumer.crash()
    world.advance(KEEP_S)
    check(
        world,
        """
        11.012 P: told vLLM that P.p3 may be freed
        11.012 P: producer t --expired--> sent
        """,
        since=2.0,
    )
    world.everything_ends()


def test_a_router_that_releases_a_transfer_has_its_blocks_let_go_f18() -> None:
    world, producer, consumer, _, load = landed()
    producer.release(T)
    world.advance(0.1)
    again(consumer, producer, load)
    world.advance(0.1)
    check(
        world,
        """
        2.000 P: told vLLM that P.p3 may be freed
        2.000 P: producer t --release_asked--> sent
        2.100 C: consumer t --allocated_again--> allocated
        2.100 C: consumer t --peer_met--> registering
        2.102 C: told vLLM that C.c4 failed (forgotten)
        2.102 C: consumer t --rank_failed--> failed (forgotten)
        """,
        since=2.0,
    )
    world.everything_ends()


def test_nothing_is_kept_by_a_producer_that_shuts_down_f21() -> None:
    world, producer, *_ = landed()
    producer.nodes[0].take(ev.Closing())
    world.advance(0.1)
    check(
        world,
        """
        2.000 P: told vLLM that P.p3 may be freed
        2.000 P: producer t --closing--> sent
        """,
        since=2.0,
    )
    world.everything_ends()


def test_a_consumer_that_shuts_down_lets_go_of_what_is_kept_f21() -> None:
    world, _, consumer, *_ = landed()
    consumer.node.take(ev.Closing())
    world.advance(0.1)
    check(
        world,
        """
        2.001 P: told vLLM that P.p3 may be freed
        2.001 P: producer t --cancel_asked--> sent
        """,
        since=2.0,
    )
    world.everything_ends()


def test_a_lost_cancel_of_an_ended_request_is_no_cancel_of_a_later_one_f7() -> None:
    """The id is used again before the end of the first request is heard."""
    world, producer, consumer, _, load = landed()
    late: list[Frame] = []

    def keep(frame: Frame) -> bool:
        if isinstance(frame.notice, Cancel):
            late.append(frame)
        return isinstance(frame.notice, Cancel)

    world.network.lose_all(keep)
    consumer.finish(load)
    world.advance(0.1)
    world.network.heal()
    new = producer.begin(T)
    assert new is not None
    producer.nodes[0].take(late[0])
    world.advance(0.1)
    check(
        world,
        """
        2.000 C: consumer t --request_ended--> releasing
        2.100 P: told vLLM that P.p3 may be freed
        2.100 P: producer t --rival_started--> allocated
        2.101 C: consumer t --rank_failed--> released
        """,
        since=2.0,
    )
    world.everything_ends()
