"""Scenarios as transcripts: blocks that are kept for a preempted request come back.

The producer keeps for ten seconds what it has written, and the consumer registers again. Each line
is `time worker: what happened`. The first word after a name says which machine moved.
"""

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.core.notices import Cancel
from kvflow.testing.network import Frame
from kvflow.testing.scenes import T, again, landed
from kvflow.testing.transcript import check

KEEP_S = 10.0
KEEPS = Timings(keep_sent_s=KEEP_S)
ALWAYS = 1.0
NEVER = 0.0


# -- the blocks come back --------------------------------------------------------------------------


def test_the_end_of_the_request_is_told_until_it_is_answered_f5() -> None:
    world, _, consumer, prefill, load = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, producer, consumer, prefill, load = landed(KEEPS)
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
    world, _, consumer, _, _ = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
    world, producer, *_ = landed(KEEPS)
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
    world, _, consumer, *_ = landed(KEEPS)
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
    world, producer, consumer, _, load = landed(KEEPS)
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
