"""Scenarios as transcripts: a WRITE fails, and the consumer registers once more.

Each line is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.core.notices import Failed, Register
from kvflow.ids import ATTEMPT_STRIDE
from kvflow.testing.decode_engine import Consumer
from kvflow.testing.network import Frame
from kvflow.testing.prefill_engine import Producer
from kvflow.testing.scenes import acquainted, both_legs
from kvflow.testing.transcript import check
from kvflow.testing.world import World

ALWAYS = 1.0
NEVER = 0.0


def test_a_write_that_fails_once_is_done_at_the_second_attempt_f4() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    world.faults.post_fails = ALWAYS
    producer.finish(prefill)
    world.faults.post_fails = NEVER
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.010 P: producer t --write_failed--> prefilled
        1.011 C: consumer t --rank_failed--> registering
        1.012 P: producer t --registered--> transferring
        1.013 C: consumer t --accepted--> transferring
        1.015 P: told vLLM that P.p3 may be freed
        1.015 P: producer t --write_done--> sent
        1.016 C: told vLLM that C.c4 has its KV
        1.016 C: consumer t --done--> received
        """,
        since=1.0,
    )
    assert load.state == "received"
    world.everything_ends()


def test_only_the_rank_that_failed_is_asked_again_f4() -> None:
    world, producer, consumer = acquainted(ranks=2)
    prefill, _ = both_legs(producer, consumer)
    world.pause(producer.nodes[0], 0.05)
    producer.finish(prefill)
    world.advance(0.01)
    world.faults.post_fails = ALWAYS
    world.advance(0.0405)
    world.faults.post_fails = NEVER
    world.advance(0.1)
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
        1.010 P.1: producer t --prefill_finished--> transferring
        1.012 P.1: told vLLM that P.p3 may be freed
        1.012 P.1: producer t --write_done--> sent
        1.013 C: consumer t --done--> transferring
        1.060 P.0: producer t --prefill_finished--> transferring
        1.060 P.0: producer t --write_failed--> prefilled
        1.061 C: consumer t --rank_failed--> registering
        1.062 P.0: producer t --registered--> transferring
        1.063 C: consumer t --accepted--> transferring
        1.065 P.0: told vLLM that P.p3 may be freed
        1.065 P.0: producer t --write_done--> sent
        1.066 C: told vLLM that C.c4 has its KV
        1.066 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_write_that_fails_twice_fails_the_load_f4() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    world.faults.post_fails = ALWAYS
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.010 P: producer t --write_failed--> prefilled
        1.011 C: consumer t --rank_failed--> registering
        1.012 P: producer t --registered--> transferring
        1.013 P: told vLLM that P.p3 may be freed
        1.013 P: producer t --write_failed--> failed (write_failed)
        1.013 C: consumer t --accepted--> transferring
        1.014 C: told vLLM that C.c4 failed (write_failed)
        1.014 C: consumer t --rank_failed--> failed (write_failed)
        """,
        since=1.0,
    )
    world.everything_ends()


def with_timings(timings: Timings) -> tuple[World, Producer, Consumer]:
    world = World(skewed=False, timings=timings)
    return world, world.add_producer("P"), world.add_consumer("C")


def test_without_retries_the_first_failure_is_the_last_f4() -> None:
    world, producer, consumer = with_timings(Timings(retries_max=0))
    prefill, _ = both_legs(producer, consumer)
    world.faults.post_fails = ALWAYS
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
        0.010 P: producer t --prefill_finished--> transferring
        0.011 P: told vLLM that P.p1 may be freed
        0.011 P: producer t --write_failed--> failed (write_failed)
        0.011 C: told vLLM that C.c2 failed (write_failed)
        0.011 C: consumer t --rank_failed--> failed (write_failed)
        """,
    )
    world.everything_ends()


def test_a_lost_word_of_the_failure_is_made_up_for_by_the_next_renewal_f5() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    world.network.lose(lambda frame: isinstance(frame.notice, Failed))
    world.faults.post_fails = ALWAYS
    producer.finish(prefill)
    world.faults.post_fails = NEVER
    world.advance(0.5)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.010 P: producer t --write_failed--> prefilled
        1.252 C: consumer t --rank_failed--> registering
        1.253 P: producer t --registered--> transferring
        1.254 C: consumer t --accepted--> transferring
        1.255 P: told vLLM that P.p3 may be freed
        1.255 P: producer t --write_done--> sent
        1.256 C: told vLLM that C.c4 has its KV
        1.256 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_blocks_kept_for_a_retry_that_never_comes_go_back_f3() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    world.faults.rejects = NEVER
    world.faults.post_fails = ALWAYS
    producer.finish(prefill)
    consumer.crash()
    world.advance(6.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.010 P: producer t --write_failed--> prefilled
        6.011 P: told vLLM that P.p3 may be freed
        6.011 P: producer t --expired--> failed (expired)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_retry_that_comes_too_late_is_told_so_f4() -> None:
    world, producer, consumer = with_timings(Timings(retry_hold_s=1.0))
    prefill, _ = both_legs(producer, consumer)

    def is_retry(frame: Frame) -> bool:
        retried = isinstance(frame.notice, Register) and frame.notice.attempt % ATTEMPT_STRIDE
        return bool(retried)

    world.network.lose_all(is_retry)
    world.faults.post_fails = ALWAYS
    producer.finish(prefill)
    world.advance(1.5)
    world.network.heal()
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
        0.011 P: producer t --write_failed--> prefilled
        0.011 C: consumer t --rank_failed--> registering
        1.010 P: told vLLM that P.p1 may be freed
        1.010 P: producer t --expired--> failed (expired)
        1.514 C: told vLLM that C.c2 failed (expired)
        1.514 C: consumer t --rank_failed--> failed (expired)
        """,
    )
    world.everything_ends()


def test_an_abort_that_crosses_the_failure_releases_the_blocks_at_once_f2() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    world.faults.post_fails = ALWAYS
    producer.finish(prefill)
    consumer.abort(load)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.010 C: consumer t --load_aborted--> draining (aborted)
        1.010 P: producer t --write_failed--> prefilled
        1.011 P: told vLLM that P.p3 may be freed
        1.011 P: producer t --cancel_asked--> failed (cancelled)
        1.011 C: told vLLM that C.c4 failed (aborted)
        1.011 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_write_that_fails_during_a_shutdown_is_not_kept_for_a_retry_f21() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    world.faults.write_fails = ALWAYS
    producer.finish(prefill)
    producer.nodes[0].take(ev.Closing())
    world.advance(0.1)
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
        1.012 P: producer t --write_failed--> failed (write_failed)
        1.013 C: consumer t --rank_failed--> registering
        1.015 C: told vLLM that C.c4 failed (write_failed)
        1.015 C: consumer t --rank_failed--> failed (write_failed)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_consumer_that_shuts_down_after_a_failure_gives_the_retry_up_f21() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    world.faults.post_fails = ALWAYS
    producer.finish(prefill)
    world.faults.post_fails = NEVER
    world.faults.slow_slices = ALWAYS
    world.advance(0.005)
    consumer.node.take(ev.Closing())
    world.advance(0.002)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.010 P: producer t --write_failed--> prefilled
        1.011 C: consumer t --rank_failed--> registering
        1.012 P: producer t --registered--> transferring
        1.013 C: consumer t --accepted--> transferring
        1.015 C: consumer t --closing--> draining (shutdown)
        1.016 P: producer t --cancel_asked--> draining (cancelled)
        """,
        since=1.0,
    )
    assert (prefill.state, load.state) == ("finished", "loading")
    world.advance(world.timings.slice_max_s)
    assert (prefill.state, load.state, load.reason) == ("over", "failed", "shutdown")
    world.everything_ends()
