"""Scenarios as transcripts: a producer that was quiet is asked who it is before it is used again.

Each line is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.testing.scenes import T, acquainted, both_legs
from kvflow.testing.transcript import check

ALL = ("producer", "consumer", "peer")
QUIET_S = 6.0
"""Longer than `verify_after_s`."""


def test_a_quiet_producer_that_is_the_same_is_used_without_being_dropped_f11() -> None:
    world, producer, consumer = acquainted()
    world.advance(QUIET_S)
    known = set(consumer.node.reachable)
    prefill, load = both_legs(producer, consumer)
    assert consumer.node.reachable == known
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        7.000 P: producer t --prefill_started--> allocated
        7.000 C: consumer t --blocks_allocated--> allocated
        7.000 C: peer P:5600 --peer_wanted--> meeting
        7.002 C: peer P:5600 --meeting_succeeded--> met
        7.002 C: consumer t --peer_met--> registering
        7.003 P: producer t --registered--> registered
        7.004 C: consumer t --accepted--> registered
        7.010 P: producer t --prefill_finished--> transferring
        7.013 P: told vLLM that P.p3 may be freed
        7.013 P: producer t --write_done--> sent
        7.014 C: told vLLM that C.c4 has its KV
        7.014 C: consumer t --done--> received
        """,
        since=1.0,
        machines=ALL,
    )
    assert load.state == "received"
    world.everything_ends()


def test_a_producer_restarted_while_quiet_is_used_at_once_f11() -> None:
    world, producer, consumer = acquainted(ranks=2)
    world.faults.rejects = 0.0
    producer.crash()
    producer.start()
    world.advance(QUIET_S)
    prefill, load = both_legs(producer, consumer)
    assert consumer.node.reachable == {node.agent for node in producer.nodes}
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        7.000 P#2.0: producer t --prefill_started--> allocated
        7.000 P#2.1: producer t --prefill_started--> allocated
        7.000 C: consumer t --blocks_allocated--> allocated
        7.000 C: peer P:5600 --peer_wanted--> meeting
        7.002 C: peer P:5600 --meeting_succeeded--> met
        7.002 C: consumer t --peer_met--> registering
        7.003 P#2.0: peer C-1 --introduced--> introduced
        7.003 P#2.0: producer t --registered--> registered
        7.003 P#2.1: peer C-1 --introduced--> introduced
        7.003 P#2.1: producer t --registered--> registered
        7.004 C: consumer t --accepted--> registered
        7.010 P#2.0: producer t --prefill_finished--> transferring
        7.010 P#2.1: producer t --prefill_finished--> transferring
        7.013 P#2.0: told vLLM that P.p3 may be freed
        7.013 P#2.0: producer t --write_done--> sent
        7.013 P#2.1: told vLLM that P.p3 may be freed
        7.013 P#2.1: producer t --write_done--> sent
        7.014 C: consumer t --done--> transferring
        7.014 C: told vLLM that C.c4 has its KV
        7.014 C: consumer t --done--> received
        """,
        since=1.0,
        machines=ALL,
    )
    assert load.state == "received"
    world.everything_ends()


def test_a_producer_that_died_while_quiet_fails_the_load_by_the_meetings_deadline_f10() -> None:
    world, producer, consumer = acquainted()
    producer.crash()
    world.advance(QUIET_S)
    load = consumer.allocate(T, producer)
    assert load is not None
    world.advance(0.1)
    assert consumer.node.reachable == set()
    world.advance(world.timings.meet_deadline_s)
    check(
        world,
        """
        7.000 C: consumer t --blocks_allocated--> allocated
        7.000 C: peer P:5600 --peer_wanted--> meeting
        7.002 C: peer P:5600 --meeting_failed--> backing_off
        7.202 C: peer P:5600 --expired--> meeting
        7.204 C: peer P:5600 --meeting_failed--> backing_off
        7.604 C: peer P:5600 --expired--> meeting
        7.606 C: peer P:5600 --meeting_failed--> backing_off
        8.406 C: peer P:5600 --expired--> meeting
        8.408 C: peer P:5600 --meeting_failed--> backing_off
        10.008 C: peer P:5600 --expired--> meeting
        10.010 C: peer P:5600 --meeting_failed--> backing_off
        12.000 C: told vLLM that C.c3 failed (unreachable)
        12.000 C: consumer t --expired--> failed (unreachable)
        """,
        since=1.0,
        machines=ALL,
    )
    assert load.state == "failed"
    world.everything_ends()


def test_a_producer_heard_a_moment_ago_is_not_asked_again() -> None:
    world, producer, consumer = acquainted()
    world.advance(world.timings.verify_after_s - 1.5)
    both_legs(producer, consumer)
    check(
        world,
        """
        4.500 P: producer t --prefill_started--> allocated
        4.500 C: consumer t --blocks_allocated--> allocated
        4.500 C: consumer t --peer_met--> registering
        4.501 P: producer t --registered--> registered
        4.502 C: consumer t --accepted--> registered
        """,
        since=1.0,
        machines=ALL,
    )
    world.everything_ends()
