"""Scenarios as transcripts: what is refused, and what fails at one rank only.

Each line is `time worker: what happened`. The first word after a name says which machine moved.
"""

import pytest

from kvflow.core import Reason
from kvflow.testing.prompts import OTHER_PROMPT
from kvflow.testing.scenes import T, acquainted, both_legs, prefilled
from kvflow.testing.transcript import check


def test_two_prefills_with_one_transfer_id_are_both_refused_f7() -> None:
    world, producer, consumer = acquainted()
    first, _ = both_legs(producer, consumer)
    second = producer.begin(T)
    assert second
    world.advance(0.01)
    producer.finish(first)
    producer.finish(second)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --rival_started--> failed (ambiguous)
        1.011 C: told vLLM that C.c4 failed (ambiguous)
        1.011 C: consumer t --rank_failed--> failed (ambiguous)
        1.020 P: told vLLM that P.p3 may be freed
        1.020 P: told vLLM that P.p5 may be freed
        """,
        since=1.0,
    )
    world.everything_ends()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("prefill_first", [False, True])
def test_a_load_gets_the_kv_of_its_own_prompt_or_none_f7_s6(
    prefill_first: bool, reads: bool
) -> None:
    """The other request with this id has not come yet, and nothing but its prompt tells them apart.

    With one, and with several ranks; from the first word on, and after it.
    """
    for ranks in (1, 2):
        world, producer, consumer = acquainted(ranks)
        load = None
        if not prefill_first:
            load = consumer.allocate(T, producer, prompt=OTHER_PROMPT, reads=reads)
            world.advance(0.1)
        prefilled(producer)
        world.advance(0.1)
        if prefill_first:
            load = consumer.allocate(T, producer, prompt=OTHER_PROMPT, reads=reads)
            world.advance(0.1)
        assert load is not None
        assert (load.state, load.reason) == ("failed", Reason.AMBIGUOUS)
        world.everything_ends()


def test_two_loads_with_one_transfer_id_are_both_refused_f7() -> None:
    world, producer, consumer = acquainted()
    both_legs(producer, consumer)
    consumer.allocate(T, producer)
    world.advance(0.1)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 C: consumer t --rival_allocated--> draining (ambiguous)
        1.010 C: told vLLM that C.c5 failed (ambiguous)
        1.010 C: consumer t --load_refused--> failed (ambiguous)
        1.011 P: producer t --cancel_asked--> failed (cancelled)
        1.012 C: told vLLM that C.c4 failed (ambiguous)
        1.012 C: consumer t --rank_failed--> failed (ambiguous)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_two_consumers_with_one_transfer_id_are_both_refused_f7() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    world.add_consumer("D").allocate(T, producer)
    world.advance(0.09)
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
        1.010 D: consumer t --blocks_allocated--> allocated
        1.012 D: consumer t --peer_met--> registering
        1.013 P: producer t --registered_rival--> failed (ambiguous)
        1.014 C: told vLLM that C.c4 failed (ambiguous)
        1.014 C: consumer t --rank_failed--> failed (ambiguous)
        1.014 D: told vLLM that D.c5 failed (ambiguous)
        1.014 D: consumer t --rank_failed--> failed (ambiguous)
        1.100 P: told vLLM that P.p3 may be freed
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_failed_write_fails_the_load_and_stops_the_other_rank_f4() -> None:
    world, producer, consumer = acquainted(ranks=2)
    world.faults.slow_slices = 1.0
    prefill, _ = both_legs(producer, consumer)
    producer.finish(prefill)
    world.network.cut_data(producer.nodes[0].agent, consumer.node.agent)
    world.advance(1.5)
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
        1.244 P.0: producer t --write_failed--> prefilled
        1.245 C: consumer t --rank_failed--> draining (write_failed)
        1.246 P.1: producer t --cancel_asked--> draining (cancelled)
        1.246 P.0: told vLLM that P.p3 may be freed
        1.246 P.0: producer t --cancel_asked--> failed (cancelled)
        1.464 P.1: told vLLM that P.p3 may be freed
        1.464 P.1: producer t --write_done--> failed (cancelled)
        1.465 C: told vLLM that C.c4 failed (write_failed)
        1.465 C: consumer t --rank_failed--> failed (write_failed)
        """,
        since=1.0,
    )
    world.everything_ends()
