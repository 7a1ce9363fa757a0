"""Scenarios as transcripts: aborts, losses, preemption, and what expires.

Each line is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.ids import TransferId
from kvflow.testing.scenes import T, acquainted, both_legs, prefilled
from kvflow.testing.transcript import check

ALL = ("producer", "consumer", "peer")


def test_an_abort_while_transferring_keeps_the_blocks_until_the_last_slice_landed_f2() -> None:
    world, producer, consumer = acquainted()
    world.faults.slow_slices = 1.0
    prefill, load = both_legs(producer, consumer)
    producer.finish(prefill)
    world.advance(0.1)
    consumer.abort(load)
    world.advance(1.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_finished--> transferring
        1.110 C: consumer t --load_aborted--> draining (aborted)
        1.111 P: producer t --cancel_asked--> draining (cancelled)
        1.344 P: told vLLM that P.p3 may be freed
        1.344 P: producer t --write_stopped--> failed (cancelled)
        1.345 C: told vLLM that C.c4 failed (aborted)
        1.345 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_dead_producer_is_noticed_and_its_loads_failed_within_5_s_f1() -> None:
    """The transfer library says so when the next renewal is sent."""
    world, producer, consumer = acquainted(ranks=2)
    _, load = both_legs(producer, consumer)
    world.faults.rejects = 1.0
    producer.crash()
    died = world.now
    world.advance(5.0)
    assert load.state == "failed"
    assert max(at for at, _, _ in world.log) - died < 5.0
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
        1.250 C: consumer t --peer_lost--> draining (peer_lost)
        1.250 C: consumer t --peer_lost--> fencing (peer_lost)
        1.250 C: peer P:5600 --gone--> backing_off
        2.750 C: told vLLM that C.c4 failed (peer_lost)
        2.750 C: consumer t --expired--> failed (peer_lost)
        """,
        since=1.0,
        machines=ALL,
    )
    world.everything_ends()


def test_a_producer_that_is_only_silent_gets_a_longer_fence_s2() -> None:
    """It may be stopped in the middle of a slice, and finish it when it goes on."""
    world, producer, consumer = acquainted()
    _, load = both_legs(producer, consumer)
    world.faults.rejects = 0.0
    producer.crash()
    died = world.now
    world.advance(5.0)
    assert load.state == "loading"
    world.advance(world.timings.loss_report_s)
    assert load.state == "failed"
    assert max(at for at, _, _ in world.log) - died <= world.timings.loss_report_s
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        4.250 C: consumer t --peer_lost--> fencing (peer_lost)
        4.250 C: peer P:5600 --gone--> backing_off
        14.250 C: told vLLM that C.c4 failed (peer_lost)
        14.250 C: consumer t --expired--> failed (peer_lost)
        """,
        since=1.0,
        machines=ALL,
    )
    world.everything_ends()


def test_a_restarted_producer_is_another_peer_f11() -> None:
    world, producer, consumer = acquainted()
    both_legs(producer, consumer)
    world.faults.rejects = 0.0
    producer.crash()
    producer.start()
    world.advance(4.0)
    prefill, _ = both_legs(producer, consumer, TransferId("next"))
    producer.finish(prefill)
    world.advance(10.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        4.250 C: consumer t --peer_lost--> fencing (peer_lost)
        4.250 C: peer P:5600 --gone--> backing_off
        5.010 P#2: producer next --prefill_started--> allocated
        5.010 C: consumer next --blocks_allocated--> allocated
        5.010 C: peer P:5600 --peer_wanted--> meeting
        5.012 C: peer P:5600 --meeting_succeeded--> met
        5.012 C: consumer next --peer_met--> registering
        5.013 P#2: peer C-1 --introduced--> introduced
        5.013 P#2: producer next --registered--> registered
        5.014 C: consumer next --accepted--> registered
        5.020 P#2: producer next --prefill_finished--> transferring
        5.024 P#2: told vLLM that P.p5 may be freed
        5.024 P#2: producer next --write_done--> sent
        5.025 C: told vLLM that C.c6 has its KV
        5.025 C: consumer next --done--> received
        14.250 C: told vLLM that C.c4 failed (peer_lost)
        14.250 C: consumer t --expired--> failed (peer_lost)
        """,
        since=1.0,
        machines=ALL,
    )
    world.everything_ends()


def test_a_restarted_producer_is_met_at_once_when_the_router_names_its_engine_id_f11() -> None:
    world, producer, consumer = acquainted()
    producer.crash()
    producer.start()
    consumer.allocate(T, producer, named=True)
    prefill = producer.begin(T)
    assert prefill
    world.advance(0.01)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: peer P:5600 --outdated--> meeting
        1.000 P#2: producer t --prefill_started--> allocated
        1.002 C: peer P:5600 --meeting_succeeded--> met
        1.002 C: consumer t --peer_met--> registering
        1.003 P#2: peer C-1 --introduced--> introduced
        1.003 P#2: producer t --registered--> registered
        1.004 C: consumer t --accepted--> registered
        1.010 P#2: producer t --prefill_finished--> transferring
        1.012 P#2: told vLLM that P.p4 may be freed
        1.012 P#2: producer t --write_done--> sent
        1.013 C: told vLLM that C.c3 has its KV
        1.013 C: consumer t --done--> received
        """,
        since=1.0,
        machines=ALL,
    )
    world.everything_ends()


def test_an_aborted_prefill_fails_the_load_at_once_f1() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    producer.abort(prefill)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_aborted--> failed (aborted)
        1.011 C: told vLLM that C.c4 failed (aborted)
        1.011 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_registration_without_a_prefill_expires_f1() -> None:
    world, producer, consumer = acquainted()
    consumer.allocate(T, producer)
    world.advance(125.0)
    check(
        world,
        """
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> held
        1.002 C: consumer t --accepted--> registered
        31.001 P: producer t --expired--> failed (expired)
        31.002 C: told vLLM that C.c3 failed (expired)
        31.002 C: consumer t --rank_failed--> failed (expired)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_prefill_that_nobody_claims_expires_f3() -> None:
    world, producer, consumer = acquainted()
    prefilled(producer)
    world.advance(35.0)
    consumer.allocate(T, producer)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        31.000 P: told vLLM that P.p3 may be freed
        31.000 P: producer t --expired--> failed (expired)
        36.000 C: consumer t --blocks_allocated--> allocated
        36.002 C: consumer t --peer_met--> registering
        36.004 C: told vLLM that C.c4 failed (expired)
        36.004 C: consumer t --rank_failed--> failed (expired)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_preempted_prefill_keeps_its_registration_f9() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    producer.preempt(prefill)
    world.advance(0.1)
    producer.resume(prefill)
    world.advance(0.1)
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
        1.010 P: producer t --prefill_preempted--> held
        1.110 P: producer t --prefill_started--> registered
        1.210 P: producer t --prefill_finished--> transferring
        1.212 P: told vLLM that P.p3 may be freed
        1.212 P: producer t --write_done--> sent
        1.213 C: told vLLM that C.c4 has its KV
        1.213 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_load_that_is_wanted_a_second_time_after_it_landed_is_refused_at_once_f9() -> None:
    """The producer gave the KV away: waiting for it again would wait for ever."""
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    producer.finish(prefill)
    world.advance(0.1)
    consumer.leave(load)
    consumer.allocate(T, producer, again=load)
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
        1.012 P: producer t --write_done--> sent
        1.013 C: told vLLM that C.c4 has its KV
        1.013 C: consumer t --done--> received
        1.110 C: consumer t --blocks_allocated--> allocated
        1.110 C: consumer t --peer_met--> registering
        1.112 C: told vLLM that C.c4 failed (forgotten)
        1.112 C: consumer t --rank_failed--> failed (forgotten)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_everything_cached_at_the_consumer_releases_the_prefill_at_once_f8() -> None:
    world, producer, consumer = acquainted()
    prefilled(producer)
    consumer.release(T, producer)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 C: consumer t --release_wanted--> releasing (released)
        1.001 P: told vLLM that P.p3 may be freed
        1.001 P: producer t --cancel_asked--> failed (cancelled)
        1.002 C: consumer t --rank_failed--> released (released)
        """,
        since=1.0,
    )
    world.everything_ends()
