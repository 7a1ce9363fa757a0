"""Everything that vLLMs, networks and operators may do to a world, one step after another.

`Chaos` is what the Hypothesis test picks its rules from, and a seeded simulator of its own:

    python -m kvflow.testing.chaos 0 1000        # seeds 0 to 999; prints those that fail

Ids, engines and requests are picked by number, modulo what there is: each number means something.
"""

import random
import sys
from collections.abc import Callable

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.errors import KVFlowError
from kvflow.ids import TransferId
from kvflow.testing.engines import Consumer, Load, Prefill, Producer
from kvflow.testing.network import Weather
from kvflow.testing.world import Faults, World

# Shorter than the defaults where only the bound matters, so that a world ends in milliseconds.
TIMINGS = Timings(
    lease_s=6.0,
    hold_max_s=9.0,
    prefill_max_s=40.0,
    load_deadline_s=20.0,
    stop_deadline_s=8.0,
    write_drain_s=2.0,
    tombstone_s=12.0,
    peer_idle_s=30.0,
)
MOMENTS_S = (0.0006, 0.0015, 0.003, 0.01, 0.05, 0.2, 0.4)
WHILES_S = (0.8, 1.2, 2.6, 4.0, 8.0, 14.0, 70.0)
PAUSES_S = (0.4, 1.1, 3.0, 8.0, 25.0)
CHANCES = (0.0, 0.0, 0.1, 0.3, 0.7)
PICKS = 12


class Chaos:
    """Two producers, two consumers. `P1` and `C1` are used less often: ids meet in `P0`, `C0`."""

    def __init__(self, seed: int, ranks: int, timings: Timings = TIMINGS) -> None:
        self.world = World(seed, timings)
        self.producers = [self.world.add_producer(f"P{n}", ranks=ranks) for n in range(2)]
        self.consumers = [self.world.add_consumer(f"C{n}") for n in range(2)]
        self.world.faults = Faults(slow_slices=0.6)
        self.ids: list[TransferId] = []

    @property
    def engines(self) -> list[Producer | Consumer]:
        return [*self.producers, *self.consumers]

    # -- what there is ---------------------------------------------------------------------------

    def prefills(self, *states: str) -> list[tuple[Producer, Prefill]]:
        return [
            (producer, prefill)
            for producer in self.producers
            if producer.alive
            for prefill in producer.prefills.values()
            if prefill.state in states
        ]

    def loads(self, *states: str) -> list[tuple[Consumer, Load]]:
        return [
            (consumer, load)
            for consumer in self.consumers
            if consumer.alive
            for load in consumer.loads.values()
            if load.state in states
        ]

    def _producer(self, pick: int) -> Producer:
        return self.producers[pick % 6 == 5]

    def _consumer(self, pick: int) -> Consumer:
        return self.consumers[pick % 6 == 5]

    def _id(self, pick: int, old: bool, unpaired: list[TransferId]) -> TransferId:
        """The id of a leg that has no counterpart yet, or one that was used, or a new one."""
        if old and self.ids:
            return self.ids[-1 - pick % min(len(self.ids), 4)]
        if unpaired and pick % 4:
            return unpaired[-1 - pick % len(unpaired)]
        self.ids.append(TransferId(f"t{len(self.ids)}"))
        return self.ids[-1]

    def _asked_for(self) -> list[TransferId]:
        prefilled = {prefill.transfer_id for _, prefill in self.prefills("running", "finished")}
        wanted = [load.transfer_id for _, load in self.loads("loading")]
        return [transfer_id for transfer_id in wanted if transfer_id not in prefilled]

    def _on_offer(self) -> list[TransferId]:
        wanted = {load.transfer_id for _, load in self.loads("loading")}
        found = [prefill.transfer_id for _, prefill in self.prefills("running", "finished")]
        return [transfer_id for transfer_id in found if transfer_id not in wanted]

    # -- producers -------------------------------------------------------------------------------

    def begin_prefill(self, where: int, pick: int, old: bool) -> None:
        producer = self._producer(where)
        if producer.alive:
            producer.begin(self._id(pick, old, self._asked_for()))

    def finish_prefill(self, pick: int) -> None:
        if found := self.prefills("running"):
            producer, prefill = found[pick % len(found)]
            producer.finish(prefill)

    def allocate_prefill_again(self, pick: int) -> None:
        """vLLM says more than once that it computes a prompt."""
        if found := self.prefills("running"):
            producer, prefill = found[pick % len(found)]
            producer.repeat(prefill)

    def preempt_prefill(self, pick: int) -> None:
        if found := self.prefills("running"):
            producer, prefill = found[pick % len(found)]
            producer.preempt(prefill)

    def resume_prefill(self, pick: int) -> None:
        if found := self.prefills("preempted"):
            producer, prefill = found[pick % len(found)]
            producer.resume(prefill)

    def abort_prefill(self, pick: int) -> None:
        if found := self.prefills("running", "preempted"):
            producer, prefill = found[pick % len(found)]
            producer.abort(prefill)

    # -- consumers -------------------------------------------------------------------------------

    def allocate(
        self, who: int, where: int, pick: int, old: bool, skip: int, surplus: int, named: bool
    ) -> None:
        consumer, producer = self._consumer(who), self._producer(where)
        if consumer.alive:
            transfer_id = self._id(pick, old, self._on_offer())
            consumer.allocate(transfer_id, producer, skip=skip, surplus=surplus, named=named)

    def dispatch_both_legs(self, where: int, old: bool, first: bool, then_s: float) -> None:
        """What a router does: both legs at once, or the consumer's after the prefill."""
        consumer, producer = self.consumers[0], self._producer(where)
        transfer_id = self._id(0, old, [])
        if consumer.alive and first:
            consumer.allocate(transfer_id, producer)
        if producer.alive:
            prefill = producer.begin(transfer_id)
            self.world.advance(then_s)
            if prefill and prefill.state == "running" and producer.alive:
                producer.finish(prefill)
        if consumer.alive and not first:
            consumer.allocate(transfer_id, producer)
        self.world.advance(then_s)

    def abort_load(self, pick: int) -> None:
        if found := self.loads("loading", "received"):
            consumer, load = found[pick % len(found)]
            consumer.abort(load)

    def finish_decode(self, pick: int) -> None:
        if found := self.loads("received"):
            consumer, load = found[pick % len(found)]
            consumer.leave(load)

    def load_again(self, where: int, pick: int, same: bool) -> None:
        """After a preemption or a failure: the same request, a new attempt, new blocks."""
        found = self.loads("received", "failed", "over")
        if not found:
            return
        consumer, load = found[pick % len(found)]
        if load.state == "received":
            consumer.leave(load)
        if not load.aborted:
            transfer_id = load.transfer_id if same else self._id(pick, False, self._on_offer())
            consumer.allocate(transfer_id, self._producer(where), again=load)

    def release(self, where: int, pick: int, old: bool, again: bool) -> None:
        """All is cached, for a new request or for one that loaded before."""
        consumer = self.consumers[0]
        if consumer.alive:
            ended = [load for _, load in self.loads("failed", "over") if not load.aborted]
            ended = [load for load in ended if load.request_id in consumer.loads]
            load = ended[pick % len(ended)] if again and ended else None
            transfer_id = self._id(pick, old, self._on_offer())
            consumer.release(transfer_id, self._producer(where), again=load)

    # -- faults ----------------------------------------------------------------------------------

    def change_weather(self, loss: float, double: float, straggle: float) -> None:
        self.world.network.weather = Weather(
            loss=loss, double=double, straggle=straggle, delay_s=0.02, straggle_s=6.0
        )

    def change_faults(self, slow: float, fails: float, meeting_slow: float) -> None:
        self.world.faults = Faults(slow_slices=slow, write_fails=fails, meeting_slow=meeting_slow)

    def heal(self) -> None:
        self.world.heal()

    def partition(self, one: int, other: int, data: bool) -> None:
        producer, consumer = self.producers[one % 2], self.consumers[other % 2]
        worker = producer.nodes[one // 2 % len(producer.nodes)]
        self.world.network.cut(worker.agent, consumer.node.agent, data=data)

    def pause(self, pick: int, seconds: float) -> None:
        nodes = list(self.world.nodes.values())
        if nodes:
            self.world.pause(nodes[pick % len(nodes)], seconds)

    def crash(self, pick: int) -> None:
        engine = self.engines[pick % 4]
        if engine.alive and pick < 4:
            engine.crash()

    def restart(self) -> None:
        for engine in self.engines:
            if not engine.alive:
                engine.start()
                return

    def close(self, pick: int) -> None:
        nodes = list(self.world.nodes.values())
        if nodes and pick < 4:
            nodes[pick % len(nodes)].take(ev.Closing())

    def pass_time(self, seconds: float) -> None:
        self.world.advance(seconds)


# -- the simulator ---------------------------------------------------------------------------------

ODDS: dict[str, float] = {
    "a_moment": 20.0,
    "a_while": 3.0,
    "begin_prefill": 4.0,
    "finish_prefill": 6.0,
    "allocate_prefill_again": 1.0,
    "preempt_prefill": 2.0,
    "resume_prefill": 2.0,
    "abort_prefill": 1.5,
    "allocate": 6.0,
    "dispatch_both_legs": 5.0,
    "abort_load": 1.5,
    "finish_decode": 1.0,
    "load_again": 2.0,
    "release": 1.0,
    "change_weather": 1.0,
    "change_faults": 0.5,
    "heal": 1.0,
    "partition": 1.0,
    "pause": 1.0,
    "crash": 0.7,
    "restart": 3.0,
    "close": 0.3,
}


class Simulator:
    """One seed: a safety phase of random steps, then everything heals and must end."""

    def __init__(self, seed: int, steps: int) -> None:
        self.rng = random.Random(seed)
        self.steps = steps
        self.chaos = Chaos(seed, ranks=self.rng.choice([1, 2, 2]))
        self.old = self.rng.choice([0.02, 0.1, 0.3])
        self.odds = dict(ODDS)
        for fault in ("crash", "pause", "close"):
            self.odds[fault] *= self.rng.choice([0.1, 1.0])
        self.odds["heal"] *= self.rng.choice([1.0, 5.0])

    def run(self) -> World:
        names, odds = list(self.odds), list(self.odds.values())
        for _ in range(self.steps):
            self._step(self.rng.choices(names, odds)[0])
        self.chaos.world.everything_ends()
        return self.chaos.world

    def _step(self, name: str) -> None:
        rng, chaos = self.rng, self.chaos
        pick, where, old = rng.randrange(PICKS), rng.randrange(PICKS), rng.random() < self.old
        yes = rng.random() < 0.5
        steps: dict[str, Callable[[], None]] = {
            "a_moment": lambda: chaos.pass_time(rng.choice(MOMENTS_S)),
            "a_while": lambda: chaos.pass_time(rng.choice(WHILES_S[: rng.choice([3, 3, 7])])),
            "begin_prefill": lambda: chaos.begin_prefill(where, pick, old),
            "allocate": lambda: chaos.allocate(
                rng.randrange(PICKS), where, pick, old, pick % 3, rng.random() < 0.1, yes
            ),
            "dispatch_both_legs": lambda: chaos.dispatch_both_legs(
                where, old, yes, rng.choice(MOMENTS_S)
            ),
            "load_again": lambda: chaos.load_again(where, pick, yes),
            "release": lambda: chaos.release(where, pick, old, yes),
            "change_weather": lambda: chaos.change_weather(*rng.choices(CHANCES, k=3)),
            "change_faults": lambda: chaos.change_faults(
                rng.choice([0.0, 0.1, 0.3, 0.9]), rng.choice([0, 0, 0, 0.2]), rng.choice(CHANCES)
            ),
            "heal": chaos.heal,
            "partition": lambda: chaos.partition(where, pick, yes),
            "pause": lambda: chaos.pause(pick, rng.choice(PAUSES_S)),
            "restart": chaos.restart,
        }
        if name in steps:
            steps[name]()
        else:
            getattr(chaos, name)(pick)


def main(first: int, last: int, steps: int = 150) -> int:
    """Run seeds; print those that fail, and what fails."""
    from kvflow.testing.rows import RowWatch, every_row

    failed = 0
    with RowWatch() as watch:
        for seed in range(first, last):
            try:
                Simulator(seed, steps).run()
            except (AssertionError, KVFlowError, KeyError) as error:
                failed += 1
                print(f"seed {seed}: {type(error).__name__}: {error}")
    print(f"{last - first} seeds, {failed} failed, {len(watch.taken)} of {len(every_row())} rows")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(*(int(argument) for argument in sys.argv[1:]))))
