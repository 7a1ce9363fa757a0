"""Scenarios as transcripts: a consumer that reads the KV itself.

Each line is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.core.notices import Alive, Done, Failed, Fetched, Readable, Register
from kvflow.testing.network import Frame
from kvflow.testing.scenes import T, acquainted, prefilled, strangers
from kvflow.testing.transcript import check


def test_the_consumer_is_first_and_reads_when_the_prefill_ends() -> None:
    world, producer, consumer = strangers()
    prefill = producer.begin(T)
    assert prefill
    consumer.allocate(T, producer, reads=True)
    world.advance(0.1)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        0.000 P: producer t --prefill_started--> allocated
        0.000 C: consumer t --blocks_allocated--> allocated
        0.002 C: consumer t --peer_met--> expecting
        0.003 P: producer t --registered--> registered
        0.100 P: producer t --prefill_finished--> lent
        0.101 C: consumer t --readable--> reading
        0.105 P: told vLLM that P.p1 may be freed
        0.105 P: producer t --fetched--> sent
        0.106 C: told vLLM that C.c2 has its KV
        0.106 C: consumer t --done--> received
        """,
    )
    world.everything_ends()


def test_a_finished_prefill_is_read_at_once_while_its_producer_is_asked() -> None:
    world, producer, consumer = acquainted()
    prefilled(producer)
    world.advance(0.1)
    consumer.allocate(T, producer, reads=True)
    world.advance(0.1)
    check(
        world,
        """
        1.100 C: consumer t --blocks_allocated--> allocated
        1.100 C: consumer t --peer_met--> reading
        1.101 P: producer t --registered--> lent
        1.103 P: told vLLM that P.p3 may be freed
        1.103 P: producer t --fetched--> sent
        1.104 C: told vLLM that C.c4 has its KV
        1.104 C: consumer t --done--> received
        """,
        since=1.1,
    )
    world.everything_ends()


def test_every_rank_is_read_from_and_asked_s8() -> None:
    world, producer, consumer = acquainted(ranks=2)
    prefilled(producer)
    world.advance(0.1)
    consumer.allocate(T, producer, reads=True)
    world.advance(0.1)
    check(
        world,
        """
        1.100 C: consumer t --blocks_allocated--> allocated
        1.100 C: consumer t --peer_met--> reading
        1.101 P.0: producer t --registered--> lent
        1.101 P.1: producer t --registered--> lent
        1.103 P.0: told vLLM that P.p3 may be freed
        1.103 P.0: producer t --fetched--> sent
        1.103 P.1: told vLLM that P.p3 may be freed
        1.103 P.1: producer t --fetched--> sent
        1.104 C: told vLLM that C.c4 has its KV
        1.104 C: consumer t --done--> received
        """,
        since=1.1,
    )
    world.everything_ends()


def test_a_router_that_tells_of_an_earlier_prefill_costs_one_read_s8() -> None:
    world, producer, consumer = acquainted()
    prefilled(producer)
    producer.release(T)
    prefill = producer.begin(T)
    assert prefill
    consumer.allocate(T, producer, reads=True)
    world.advance(0.1)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 P: told vLLM that P.p3 may be freed
        1.000 P: producer t --release_asked--> failed (cancelled)
        1.000 P: producer t --rival_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> reading
        1.001 P: producer t --registered--> registered
        1.100 P: producer t --prefill_finished--> lent
        1.104 P: told vLLM that P.p4 may be freed
        1.104 P: producer t --fetched--> sent
        1.105 C: told vLLM that C.c5 has its KV
        1.105 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_what_the_producer_let_go_amid_the_read_does_not_count_though_its_word_is_lost_s8() -> None:
    world, producer, consumer = acquainted()
    world.faults.slow_slices = 1.0
    prefilled(producer)
    load = consumer.allocate(T, producer, reads=True)
    assert load
    world.advance(0.01)
    world.network.lose_all(lambda frame: isinstance(frame.notice, Failed | Alive))
    producer.release(T)
    world.advance(1.5)
    world.heal()
    world.advance(1.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> reading
        1.001 P: producer t --registered--> lent
        1.010 P: told vLLM that P.p3 may be freed
        1.010 P: producer t --release_asked--> failed (cancelled)
        2.515 C: told vLLM that C.c4 failed (cancelled)
        2.515 C: consumer t --rank_failed--> failed (cancelled)
        """,
        since=1.0,
    )
    assert load.state == "failed"
    world.everything_ends()


def test_lost_words_are_asked_for_again_f5() -> None:
    world, producer, consumer = acquainted()
    lost: list[str] = []

    def first_of_its_kind(frame: Frame) -> bool:
        kind = type(frame.notice)
        if kind not in (Register, Readable, Fetched, Done) or kind.__name__ in lost:
            return False
        lost.append(kind.__name__)
        return True

    world.network.lose_all(first_of_its_kind)
    prefilled(producer)
    consumer.allocate(T, producer, reads=True)
    world.advance(2.0)
    assert lost == ["Register", "Readable", "Fetched", "Done"]
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> reading
        1.251 P: producer t --registered--> lent
        1.753 P: told vLLM that P.p3 may be freed
        1.753 P: producer t --fetched--> sent
        2.002 C: told vLLM that C.c4 has its KV
        2.002 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_consumer_that_is_told_that_it_can_read_but_not_what_asks_f5() -> None:
    world, producer, consumer = acquainted()
    prefill = producer.begin(T)
    assert prefill
    consumer.allocate(T, producer, reads=True)
    world.advance(0.1)
    world.network.lose(lambda frame: isinstance(frame.notice, Readable))
    producer.finish(prefill)
    world.advance(0.5)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> expecting
        1.001 P: producer t --registered--> registered
        1.100 P: producer t --prefill_finished--> lent
        1.254 C: consumer t --readable--> reading
        1.257 P: told vLLM that P.p3 may be freed
        1.257 P: producer t --fetched--> sent
        1.258 C: told vLLM that C.c4 has its KV
        1.258 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_an_abort_waits_for_the_read_and_for_nobody_else_s2() -> None:
    world, producer, consumer = acquainted()
    world.faults.slow_slices = 1.0
    prefilled(producer)
    load = consumer.allocate(T, producer, reads=True)
    assert load
    world.advance(0.01)
    consumer.abort(load)
    world.advance(1.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> reading
        1.001 P: producer t --registered--> lent
        1.010 C: consumer t --load_aborted--> stopping (aborted)
        1.011 P: told vLLM that P.p3 may be freed
        1.011 P: producer t --cancel_asked--> failed (cancelled)
        1.383 C: told vLLM that C.c4 failed (aborted)
        1.383 C: consumer t --read_stopped--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_producer_that_is_lost_costs_no_fence_f1() -> None:
    world, producer, consumer = acquainted()
    producer.begin(T)
    load = consumer.allocate(T, producer, reads=True)
    assert load
    world.advance(0.01)
    producer.crash()
    world.faults.rejects = 0.0
    world.advance(5.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> expecting
        1.001 P: producer t --registered--> registered
        4.250 C: told vLLM that C.c4 failed (peer_lost)
        4.250 C: consumer t --peer_lost--> failed (peer_lost)
        """,
        since=1.0,
    )


def test_a_prefill_that_is_preempted_is_read_when_it_is_computed_again_f9() -> None:
    world, producer, consumer = acquainted()
    prefill = producer.begin(T)
    assert prefill
    consumer.allocate(T, producer, reads=True)
    world.advance(0.01)
    producer.advance(prefill, 16)
    producer.preempt(prefill)
    world.advance(0.09)
    producer.resume(prefill)
    producer.finish(prefill)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> expecting
        1.001 P: producer t --registered--> registered
        1.010 P: producer t --prefill_preempted--> held
        1.100 P: producer t --prefill_started--> registered
        1.100 P: producer t --prefill_finished--> lent
        1.101 C: consumer t --readable--> reading
        1.104 P: told vLLM that P.p3 may be freed
        1.104 P: producer t --fetched--> sent
        1.105 C: told vLLM that C.c4 has its KV
        1.105 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_what_was_read_is_kept_and_read_once_more_after_a_preemption() -> None:
    world, producer, consumer = acquainted(timings=Timings(keep_sent_s=10.0), registers=True)
    prefilled(producer)
    load = consumer.allocate(T, producer, reads=True)
    assert load
    world.advance(0.1)
    consumer.preempt(load)
    consumer.allocate(T, producer, reads=True, again=load)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> reading
        1.001 P: producer t --registered--> lent
        1.003 P: producer t --fetched--> kept
        1.004 C: told vLLM that C.c4 has its KV
        1.004 C: consumer t --done--> received
        1.100 C: consumer t --allocated_again--> allocated
        1.100 C: consumer t --peer_met--> expecting
        1.101 P: producer t --registered_anew--> lent
        1.102 C: consumer t --readable--> reading
        1.105 P: producer t --fetched--> kept
        1.106 C: told vLLM that C.c4 has its KV
        1.106 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_second_prefill_with_the_id_ends_the_read_of_the_first_f7() -> None:
    world, producer, consumer = acquainted()
    world.faults.slow_slices = 1.0
    prefilled(producer)
    consumer.allocate(T, producer, reads=True)
    world.advance(0.01)
    producer.begin(T)
    world.advance(1.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> reading
        1.001 P: producer t --registered--> lent
        1.010 P: told vLLM that P.p3 may be freed
        1.010 P: producer t --rival_started--> failed (ambiguous)
        1.011 C: consumer t --rank_failed--> stopping (ambiguous)
        1.383 C: told vLLM that C.c4 failed (ambiguous)
        1.383 C: consumer t --read_stopped--> failed (ambiguous)
        """,
        since=1.0,
    )


def test_a_consumer_that_shuts_down_while_it_reads_tells_its_producer_f21() -> None:
    world, producer, consumer = acquainted()
    world.faults.slow_slices = 1.0
    prefilled(producer)
    consumer.allocate(T, producer, reads=True)
    world.advance(0.01)
    consumer.node.take(ev.Closing())
    world.advance(1.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 P: producer t --prefill_finished--> prefilled
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> reading
        1.001 P: producer t --registered--> lent
        1.010 C: consumer t --closing--> stopping (shutdown)
        1.011 P: told vLLM that P.p3 may be freed
        1.011 P: producer t --cancel_asked--> failed (cancelled)
        1.383 C: told vLLM that C.c4 failed (shutdown)
        1.383 C: consumer t --read_stopped--> failed (shutdown)
        """,
        since=1.0,
    )
