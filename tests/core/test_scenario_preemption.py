"""Scenarios as transcripts: a request is preempted after its KV has landed.

The producer keeps for ten seconds what it has written, and the consumer registers again. Each line
is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.core import Timings
from kvflow.core.notices import Register
from kvflow.testing.scenes import T, again, landed
from kvflow.testing.transcript import check

KEEP_S = 10.0
KEEPS = Timings(keep_sent_s=KEEP_S)
ALWAYS = 1.0
NEVER = 0.0


# -- the edge --------------------------------------------------------------------------------------


def test_a_preempted_request_gets_its_kv_once_more_f9() -> None:
    world, producer, consumer, prefill, load = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS, ranks=2)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, *_, prefill, _ = landed(KEEPS, registers=False)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, producer, consumer, prefill, load = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
