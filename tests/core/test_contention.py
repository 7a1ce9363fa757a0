"""Two full pools whose requests wait for each other: unclaimed prefills give way.

The producer's blocks are held by finished prefills whose decode legs wait in the consumer's queue
for blocks; those are held by loads whose prefill legs wait in the producer's queue.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvflow.core import Reason, Timings
from kvflow.core import events as ev
from kvflow.ids import TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import C2, Bench, T
from kvflow.testing.decode_engine import Consumer
from kvflow.testing.prefill_engine import Producer
from kvflow.testing.producer_ways import p_prefilled, write_failed
from kvflow.testing.prompts import Load, Prefill
from kvflow.testing.sizes import blocks_of
from kvflow.testing.world import World

PATIENCE_S = Timings().lease_contended_s
OTHER = TransferId("other")


def stalled(bench: Bench) -> None:
    p_prefilled(bench)
    bench.take(ev.PrefillsStalled())


def another_waits(bench: Bench) -> None:
    bench.hear(C2, b.register(of=OTHER))


# -- by hand -------------------------------------------------------------------------------------


def test_an_unclaimed_prefill_gives_way_when_vllm_is_stuck_and_another_is_waited_for_f17() -> None:
    bench = Bench()
    stalled(bench)
    another_waits(bench)
    bench.wait(0.9 * PATIENCE_S)
    assert bench.produced == "prefilled"
    bench.wait(0.1 * PATIENCE_S)
    assert bench.produced == "failed"
    assert bench.engine.records.producers[T].reason is Reason.EXPIRED
    assert bench.engine.ledger.empty


def nobody_waits(bench: Bench) -> None:
    stalled(bench)


def vllm_goes_on(bench: Bench) -> None:
    stalled(bench)
    another_waits(bench)
    bench.wait(0.9 * PATIENCE_S)
    bench.take(ev.PrefillsResumed())


def vllm_is_only_slow(bench: Bench) -> None:
    p_prefilled(bench)
    another_waits(bench)


def it_stalls_now_and_then(bench: Bench) -> None:
    p_prefilled(bench)
    another_waits(bench)
    for _ in range(4):
        bench.take(ev.PrefillsStalled())
        bench.wait(0.4 * PATIENCE_S)
        bench.take(ev.PrefillsResumed())


def the_other_has_not_waited_long(bench: Bench) -> None:
    stalled(bench)
    bench.wait(0.9 * PATIENCE_S)
    another_waits(bench)


@pytest.mark.parametrize(
    "way",
    [
        nobody_waits,
        vllm_goes_on,
        vllm_is_only_slow,
        it_stalls_now_and_then,
        the_other_has_not_waited_long,
    ],
)
def test_otherwise_it_is_kept_for_its_lease(way: Callable[[Bench], None]) -> None:
    bench = Bench()
    way(bench)
    bench.wait(0.9 * PATIENCE_S)
    assert bench.produced == "prefilled"


def test_a_wait_that_began_during_the_stall_is_as_long_as_any_f17() -> None:
    bench = Bench()
    the_other_has_not_waited_long(bench)
    bench.wait(PATIENCE_S)
    assert bench.produced == "failed"


def test_a_prefill_that_is_kept_for_a_retry_does_not_give_way_at_once() -> None:
    """It was being written a moment ago, and its consumer is about to register again."""
    bench = Bench(Timings(retry_hold_s=2 * PATIENCE_S))
    stalled(bench)
    another_waits(bench)
    bench.hear(C2, b.register())
    bench.wait(0.9 * PATIENCE_S)
    bench.take(write_failed(5))
    bench.wait(0.2 * PATIENCE_S)
    assert bench.produced == "prefilled"


# -- two engines ---------------------------------------------------------------------------------

NAMES = [TransferId(f"t{number}") for number in range(8)]
TICK_S = 0.05


@dataclass
class Queues:
    """Two vLLMs that serve their queues first come, first served, each prompt in a tick."""

    world: World
    producer: Producer
    consumer: Consumer
    prefill_legs: list[TransferId]
    decode_legs: list[TransferId]
    running: list[Prefill] = field(default_factory=list)
    loads: dict[TransferId, Load] = field(default_factory=dict)
    ended_at: dict[TransferId, float] = field(default_factory=dict)

    def tick(self) -> None:
        for prefill in self.running:
            self.producer.finish(prefill)
        self.running.clear()
        while self.prefill_legs and (begun := self.producer.begin(self.prefill_legs[0])):
            self.running.append(begun)
            del self.prefill_legs[0]
        self.producer.step(queued=bool(self.prefill_legs))
        while self.decode_legs and (
            load := self.consumer.allocate(self.decode_legs[0], self.producer)
        ):
            self.loads[self.decode_legs.pop(0)] = load
        self.world.advance(TICK_S)
        for name, load in self.loads.items():
            if load.state != "loading" and name not in self.ended_at:
                self.ended_at[name] = self.world.now
                if load.state == "received":
                    self.consumer.leave(load)

    def run(self) -> None:
        while len(self.ended_at) < len(NAMES):
            assert self.world.now < Timings().load_deadline_s
            self.tick()

    @property
    def failed(self) -> set[TransferId]:
        return {name for name, load in self.loads.items() if load.reason}


def queues(orders: tuple[list[TransferId], list[TransferId]], timings: Timings) -> Queues:
    """Pools for two or three of the prompts."""
    blocks = max(blocks_of(name)[0] for name in NAMES) * 2
    world = World(skewed=False, timings=timings)
    producer = world.add_producer("P", ranks=2, blocks=blocks)
    consumer = world.add_consumer("C", blocks=blocks)
    return Queues(world, producer, consumer, *map(list, orders))


OPPOSITE = (NAMES[::-1], NAMES)


def test_requests_in_opposite_orders_stall_for_contended_leases_only_f17() -> None:
    """One for each pool full of prompts that is in front of the first that is waited for."""
    stuck = queues(OPPOSITE, Timings())
    stuck.run()
    assert min(stuck.ended_at.values()) > PATIENCE_S
    assert max(stuck.ended_at.values()) < 3 * PATIENCE_S < Timings().lease_s
    assert {load.reason for load in stuck.loads.values()} == {"", "expired"}
    stuck.tick()
    stuck.world.everything_ends()


def test_without_it_they_stall_for_a_lease_and_no_fewer_fail_f17() -> None:
    timings = Timings()
    stuck, unaided = queues(OPPOSITE, timings), queues(OPPOSITE, Timings(lease_contended_s=9e3))
    for each in (stuck, unaided):
        each.run()
    assert min(unaided.ended_at.values()) > timings.lease_s
    assert 0 < len(stuck.failed) <= len(unaided.failed)


@pytest.mark.parametrize("shift", [0, 1])
def test_in_nearly_the_same_order_nothing_stalls_and_nothing_fails(shift: int) -> None:
    near = queues((NAMES[shift:] + NAMES[:shift], NAMES), Timings())
    near.run()
    assert not near.failed
    assert max(near.ended_at.values()) < PATIENCE_S
