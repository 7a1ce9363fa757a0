"""A consumer that says nothing while its transfers are live: sent something, so that death shows.

In the scenarios each line is `time worker: what happened`.
"""

import pytest

from kvflow.core import Timings
from kvflow.core.notices import Probe
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, P0, Bench
from kvflow.testing.engines import Prefill
from kvflow.testing.scenes import T, acquainted, both_legs
from kvflow.testing.transcript import check
from kvflow.testing.ways import WAYS, Script

PERIOD_S = Timings().probe_silent_s
IN_USE = ("held", "registered", "transferring", "draining")
ALL = ("producer", "consumer", "peer")


def probes(bench: Bench) -> int:
    return sum(isinstance(notice, Probe) for notice in bench.sent(C1))


# -- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [way for state in IN_USE for way in WAYS["producer"][state]], ids=lambda w: w.__name__
)
def test_a_silent_consumer_is_probed_in_every_state_that_waits_for_it_f1(way: Script) -> None:
    bench = Bench()
    way(bench)
    bench.wait(PERIOD_S)
    assert probes(bench) == 1
    bench.wait(3 * PERIOD_S)
    assert probes(bench) == 4


@pytest.mark.parametrize("state", ["allocated", "preempted", "prefilled", "sent", "failed"])
def test_nobody_is_probed_whom_nothing_waits_for(state: str) -> None:
    for way in WAYS["producer"][state]:
        bench = Bench()
        way(bench)
        bench.wait(10 * PERIOD_S)
        assert probes(bench) == 0


def test_a_consumer_that_renews_is_not_probed() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register())
    for _ in range(50):
        bench.wait(2 * Timings().renew_interval_s)
        bench.hear(C1, b.renew())
    assert probes(bench) == 0


def test_a_consumer_that_was_known_for_long_is_probed_for_its_next_transfer_too() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register(), b.cancel())
    bench.wait(Timings().peer_idle_s / 2)
    assert probes(bench) == 0
    bench.hear(C1, b.register(6))
    bench.wait(PERIOD_S)
    assert probes(bench) == 1
    bench.hear(C1, b.renew(6))
    bench.wait(0.9 * PERIOD_S)
    assert probes(bench) == 1


def test_a_probe_is_no_answer_and_concerns_nobody_f1() -> None:
    """A producer that hears nothing and can be heard is as good as a silent one."""
    bench = Bench()
    bench.hear(P0, Probe())
    bench.take(b.allocated())
    bench.meet(ranks=1)
    bench.hear(P0, b.accepted())
    timings = bench.engine.timings
    for _ in range(timings.renew_misses_max + 1):
        bench.hear(P0, Probe())
        bench.wait(timings.renew_interval_s)
    assert bench.consumed == "fencing"


# -- in a world ----------------------------------------------------------------------------------


def blocks_come_back(prefill: Prefill) -> bool:
    return prefill.state == "over"


def test_a_consumer_that_dies_while_its_write_is_paused_is_found_and_the_blocks_come_back() -> None:
    world, producer, consumer = acquainted()
    world.faults.rejects = 1.0
    prefill, _ = both_legs(producer, consumer)
    world.network.cut(consumer.node.agent, producer.nodes[0].agent, data=False)
    world.advance(1.1 * Timings().write_lease_s)
    producer.finish(prefill)
    world.advance(0.1)
    consumer.crash()
    world.advance(2 * PERIOD_S)
    assert blocks_come_back(prefill)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        2.110 P: producer t --prefill_finished--> transferring
        3.002 P: producer t --peer_lost--> draining (peer_lost)
        3.002 P: told vLLM that P.p3 may be freed
        3.002 P: producer t --write_stopped--> failed (peer_lost)
        """,
        since=1.0,
        machines=ALL,
    )
    world.everything_ends()


def test_a_consumer_that_dies_while_it_waits_for_its_prefill_is_found() -> None:
    world, producer, consumer = acquainted(ranks=2)
    world.faults.rejects = 1.0
    prefill, _ = both_legs(producer, consumer)
    consumer.crash()
    world.advance(2 * PERIOD_S)
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
        2.002 P.0: producer t --peer_lost--> failed (peer_lost)
        2.002 P.1: producer t --peer_lost--> failed (peer_lost)
        """,
        since=1.0,
        machines=ALL,
    )
    producer.finish(prefill)
    assert blocks_come_back(prefill)
    world.everything_ends()


def test_a_consumer_whose_death_the_library_does_not_see_is_found_with_its_lease() -> None:
    world, producer, consumer = acquainted()
    world.faults.rejects = 0.0
    prefill, _ = both_legs(producer, consumer)
    consumer.crash()
    world.advance(Timings().lease_s - 1)
    assert producer.nodes[0].engine.records.producers[T].state == "registered"
    world.advance(1)
    producer.finish(prefill)
    assert blocks_come_back(prefill)
    world.everything_ends()


def test_a_consumer_that_cannot_be_heard_loses_its_producer_in_spite_of_probes_f1() -> None:
    world, producer, consumer = acquainted()
    _, load = both_legs(producer, consumer)
    world.network.cut_one_way(consumer.node.agent, producer.nodes[0].agent)
    world.advance(Timings().loss_report_s)
    assert (load.state, load.reason) == ("failed", "peer_lost")
    world.everything_ends()


def test_a_consumer_that_was_stopped_for_a_while_goes_on_where_it_was() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    world.pause(consumer.node, 3 * PERIOD_S)
    world.advance(2 * PERIOD_S)
    producer.finish(prefill)
    world.advance(PERIOD_S)
    assert not blocks_come_back(prefill)
    world.advance(0.1)
    assert blocks_come_back(prefill)
    assert load.state == "received"
    world.everything_ends()
