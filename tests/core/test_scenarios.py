"""Scenarios as transcripts: how a transfer goes when all is well, or when messages are lost.

Each line is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.core.notices import Accepted, Cancel, Done, Failed, Register
from kvflow.testing.network import Frame, Weather
from kvflow.testing.scenes import T, acquainted, both_legs, prefilled, strangers
from kvflow.testing.transcript import check


def test_the_consumer_is_first_and_the_write_starts_when_the_prefill_ends() -> None:
    world, producer, consumer = strangers()
    prefill, _ = both_legs(producer, consumer)
    world.advance(0.09)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        0.000 P: producer t --prefill_started--> allocated
        0.000 C: consumer t --blocks_allocated--> allocated
        0.002 C: consumer t --peer_met--> registering
        0.003 P: producer t --registered--> registered
        0.004 C: consumer t --accepted--> registered
        0.100 P: producer t --prefill_finished--> transferring
        0.102 P: told vLLM that P.p1 may be freed
        0.102 P: producer t --write_done--> sent
        0.103 C: told vLLM that C.c2 has its KV
        0.103 C: consumer t --done--> received
        """,
    )
    world.everything_ends()


def test_the_prefill_is_first_and_the_write_starts_with_the_registration() -> None:
    world, producer, consumer = acquainted()
    prefill = producer.begin(T)
    assert prefill
    world.advance(0.1)
    producer.finish(prefill)
    world.advance(0.1)
    consumer.allocate(T, producer)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.100 P: producer t --prefill_finished--> prefilled
        1.200 C: consumer t --blocks_allocated--> allocated
        1.200 C: consumer t --peer_met--> registering
        1.201 P: producer t --registered--> transferring
        1.202 C: consumer t --accepted--> transferring
        1.203 P: told vLLM that P.p3 may be freed
        1.203 P: producer t --write_done--> sent
        1.204 C: told vLLM that C.c4 has its KV
        1.204 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_at_first_contact_the_write_waits_until_the_producers_clock_is_known_s2() -> None:
    """The first registration names no time; it is sent again, with one, when it is answered."""
    world, producer, consumer = strangers()
    prefilled(producer)
    consumer.allocate(T, producer)
    world.advance(0.1)
    check(
        world,
        """
        0.000 P: producer t --prefill_started--> allocated
        0.000 P: producer t --prefill_finished--> prefilled
        0.000 C: consumer t --blocks_allocated--> allocated
        0.002 C: consumer t --peer_met--> registering
        0.003 P: producer t --registered--> transferring
        0.004 C: consumer t --accepted--> transferring
        0.007 P: told vLLM that P.p1 may be freed
        0.007 P: producer t --write_done--> sent
        0.009 C: told vLLM that C.c2 has its KV
        0.009 C: consumer t --done--> received
        """,
    )
    world.everything_ends()


def test_a_duplicate_done_of_rank_0_does_not_stand_in_for_rank_1_f5() -> None:
    world, producer, consumer = acquainted(ranks=2)
    prefill, _ = both_legs(producer, consumer)
    world.network.weather = Weather(double=1.0, delay_s=0.001)

    def is_done_of_rank_1(frame: Frame) -> bool:
        return isinstance(frame.notice, Done) and frame.sender.endswith("tp1")

    world.network.lose_all(is_done_of_rank_1)
    producer.finish(prefill)
    world.advance(0.1)
    world.network.heal()
    world.advance(0.3)
    check(
        world,
        """
        1.000 P.0: producer t --prefill_started--> allocated
        1.000 P.1: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P.0: producer t --registered--> registered
        1.001 P.1: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P.0: producer t --prefill_finished--> transferring
        1.010 P.1: producer t --prefill_finished--> transferring
        1.012 P.0: told vLLM that P.p3 may be freed
        1.012 P.0: producer t --write_done--> sent
        1.012 P.1: told vLLM that P.p3 may be freed
        1.012 P.1: producer t --write_done--> sent
        1.013 C: consumer t --done--> transferring
        1.252 C: told vLLM that C.c4 has its KV
        1.252 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_lost_accepted_is_made_up_for_by_sending_the_registration_again_f5() -> None:
    world, producer, consumer = strangers()
    world.network.lose(lambda frame: isinstance(frame.notice, Accepted))
    prefill, _ = both_legs(producer, consumer)
    world.advance(0.5)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        0.000 P: producer t --prefill_started--> allocated
        0.000 C: consumer t --blocks_allocated--> allocated
        0.002 C: consumer t --peer_met--> registering
        0.003 P: producer t --registered--> registered
        0.254 C: consumer t --accepted--> registered
        0.510 P: producer t --prefill_finished--> transferring
        0.512 P: told vLLM that P.p1 may be freed
        0.512 P: producer t --write_done--> sent
        0.513 C: told vLLM that C.c2 has its KV
        0.513 C: consumer t --done--> received
        """,
    )
    world.everything_ends()


def test_a_lost_done_is_made_up_for_by_the_next_renewal_f5() -> None:
    world, producer, consumer = strangers()
    world.network.lose(lambda frame: isinstance(frame.notice, Done))
    prefill, _ = both_legs(producer, consumer)
    producer.finish(prefill)
    world.advance(0.5)
    check(
        world,
        """
        0.000 P: producer t --prefill_started--> allocated
        0.000 C: consumer t --blocks_allocated--> allocated
        0.002 C: consumer t --peer_met--> registering
        0.003 P: producer t --registered--> registered
        0.004 C: consumer t --accepted--> registered
        0.010 P: producer t --prefill_finished--> transferring
        0.013 P: told vLLM that P.p1 may be freed
        0.013 P: producer t --write_done--> sent
        0.254 C: told vLLM that C.c2 has its KV
        0.254 C: consumer t --done--> received
        """,
    )
    world.everything_ends()


def test_a_lost_failed_is_made_up_for_by_the_next_renewal_f1() -> None:
    world, producer, consumer = acquainted()
    world.network.lose(lambda frame: isinstance(frame.notice, Failed))
    prefill, _ = both_legs(producer, consumer)
    producer.abort(prefill)
    world.advance(0.5)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_aborted--> failed (aborted)
        1.252 C: told vLLM that C.c4 failed (aborted)
        1.252 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_lost_cancel_is_sent_again_f2() -> None:
    world, producer, consumer = acquainted()
    world.network.lose(lambda frame: isinstance(frame.notice, Cancel))
    _, load = both_legs(producer, consumer)
    consumer.abort(load)
    world.advance(0.5)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 C: consumer t --load_aborted--> draining (aborted)
        1.261 P: producer t --cancel_asked--> failed (cancelled)
        1.262 C: told vLLM that C.c4 failed (aborted)
        1.262 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_registration_that_comes_after_its_cancel_is_refused_f2() -> None:
    world, producer, consumer = acquainted()
    late: list[Frame] = []

    def keep(frame: Frame) -> bool:
        if isinstance(frame.notice, Register):
            late.append(frame)
        return isinstance(frame.notice, Register)

    world.network.lose_all(keep)
    prefill, load = both_legs(producer, consumer)
    consumer.abort(load)
    world.advance(0.09)
    producer.finish(prefill)
    producer.nodes[0].take(late[0])
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.010 C: consumer t --load_aborted--> draining (aborted)
        1.011 P: producer t --cancel_asked--> failed (cancelled)
        1.012 C: told vLLM that C.c4 failed (aborted)
        1.012 C: consumer t --rank_failed--> failed (aborted)
        1.100 P: told vLLM that P.p3 may be freed
        """,
        since=1.0,
    )
    world.everything_ends()
