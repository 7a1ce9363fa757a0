"""Hypothesis over two producers with several ranks, two consumers, and everything that goes wrong.

Safety (S1 to S7) is checked by the world after each thing that happens; liveness (L1) at the end.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.ids import TransferId
from kvflow.testing.driver import Node
from kvflow.testing.engines import Consumer, Load, Prefill, Producer
from kvflow.testing.network import Weather
from kvflow.testing.rows import RowWatch
from kvflow.testing.world import Faults, World

# Shorter than the defaults where only the bound matters, so that an example takes milliseconds.
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
PICK = st.integers(0, 11)
OLD = st.integers(0, 3).map(lambda number: number == 0)
MOMENTS = st.sampled_from([0.0006, 0.0015, 0.003, 0.01, 0.05, 0.2, 0.4])
SECONDS = st.sampled_from([0.8, 1.2, 2.6, 4.0, 8.0, 14.0, 70.0])
PAUSES = st.sampled_from([0.4, 1.1, 3.0, 8.0, 25.0])
CHANCE = st.sampled_from([0.0, 0.0, 0.1, 0.3, 0.7])


class TwoEnginesAndMore(RuleBasedStateMachine):
    """What vLLMs, networks and operators may do, in any order."""

    @initialize(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 2))
    def build(self, seed: int, ranks: int) -> None:
        self.watch = RowWatch().__enter__()
        self.world = World(seed, TIMINGS)
        self.producers = [self.world.add_producer(f"P{n}", ranks=ranks) for n in range(2)]
        self.consumers = [self.world.add_consumer(f"C{n}") for n in range(2)]
        self.world.faults = Faults(slow_slices=0.6)
        self.ids: list[TransferId] = []

    def _id(self, pick: int, old: bool, unpaired: list[TransferId]) -> TransferId:
        """The id of a leg that has no counterpart yet, or one that was used, or a new one."""
        if old and self.ids:
            return self.ids[-1 - pick % min(len(self.ids), 4)]
        if unpaired and pick % 4:
            return unpaired[-1 - pick % len(unpaired)]
        self.ids.append(TransferId(f"t{len(self.ids)}"))
        return self.ids[-1]

    def _asked_for(self) -> list[TransferId]:
        prefilled = {prefill.transfer_id for _, prefill in self._prefills("running", "finished")}
        wanted = [load.transfer_id for _, load in self._loads("loading")]
        return [transfer_id for transfer_id in wanted if transfer_id not in prefilled]

    def _on_offer(self) -> list[TransferId]:
        wanted = {load.transfer_id for _, load in self._loads("loading")}
        found = [prefill.transfer_id for _, prefill in self._prefills("running", "finished")]
        return [transfer_id for transfer_id in found if transfer_id not in wanted]

    # -- producers -------------------------------------------------------------------------------

    def _prefills(self, *states: str) -> list[tuple[Producer, Prefill]]:
        return [
            (producer, prefill)
            for producer in self.producers
            if producer.alive
            for prefill in producer.prefills.values()
            if prefill.state in states
        ]

    @rule(which=st.integers(0, 5), pick=PICK, old=OLD)
    def begin_prefill(self, which: int, pick: int, old: bool) -> None:
        producer = self.producers[which == 5]
        if producer.alive:
            producer.begin(self._id(pick, old, self._asked_for()))

    @precondition(lambda self: self._prefills("running"))
    @rule(pick=PICK)
    def finish_prefill(self, pick: int) -> None:
        found = self._prefills("running")
        producer, prefill = found[pick % len(found)]
        producer.finish(prefill)

    @precondition(lambda self: self._prefills("running"))
    @rule(pick=PICK)
    def preempt_prefill(self, pick: int) -> None:
        found = self._prefills("running")
        producer, prefill = found[pick % len(found)]
        producer.preempt(prefill)

    @precondition(lambda self: self._prefills("preempted"))
    @rule(pick=PICK)
    def resume_prefill(self, pick: int) -> None:
        found = self._prefills("preempted")
        producer, prefill = found[pick % len(found)]
        producer.resume(prefill)

    @precondition(lambda self: self._prefills("running", "preempted"))
    @rule(pick=PICK)
    def abort_prefill(self, pick: int) -> None:
        found = self._prefills("running", "preempted")
        producer, prefill = found[pick % len(found)]
        producer.abort(prefill)

    # -- consumers -------------------------------------------------------------------------------

    def _loads(self, *states: str) -> list[tuple[Consumer, Load]]:
        return [
            (consumer, load)
            for consumer in self.consumers
            if consumer.alive
            for load in consumer.loads.values()
            if load.state in states
        ]

    @rule(
        which=st.integers(0, 5),
        where=st.integers(0, 5),
        pick=PICK,
        old=OLD,
        skip=st.integers(0, 2),
        surplus=st.sampled_from([0, 0, 0, 0, 1]),
        named=st.booleans(),
    )
    def allocate(
        self,
        which: int,
        where: int,
        pick: int,
        old: bool,
        skip: int,
        surplus: int,
        named: bool,
    ) -> None:
        consumer, producer = self.consumers[which == 5], self.producers[where == 5]
        if consumer.alive:
            transfer_id = self._id(pick, old, self._on_offer())
            consumer.allocate(transfer_id, producer, skip=skip, surplus=surplus, named=named)

    @rule(where=st.integers(0, 5), old=OLD, first=st.booleans(), then=MOMENTS)
    def dispatch_both_legs(self, where: int, old: bool, first: bool, then: float) -> None:
        consumer, producer = self.consumers[0], self.producers[where == 5]
        transfer_id = self._id(0, old, [])
        if consumer.alive and first:
            consumer.allocate(transfer_id, producer)
        if producer.alive:
            prefill = producer.begin(transfer_id)
            self.world.advance(then)
            if prefill and prefill.state == "running" and producer.alive:
                producer.finish(prefill)
        if consumer.alive and not first:
            consumer.allocate(transfer_id, producer)
        self.world.advance(then)

    @precondition(lambda self: self._loads("loading", "received"))
    @rule(pick=PICK)
    def abort_load(self, pick: int) -> None:
        found = self._loads("loading", "received")
        consumer, load = found[pick % len(found)]
        consumer.abort(load)

    @precondition(lambda self: self._loads("received"))
    @rule(pick=PICK)
    def finish_decode(self, pick: int) -> None:
        found = self._loads("received")
        consumer, load = found[pick % len(found)]
        consumer.leave(load)

    @precondition(lambda self: self._loads("received", "failed", "over"))
    @rule(pick=PICK, same=st.booleans())
    def load_again(self, pick: int, same: bool) -> None:
        """After a preemption or a failure: the same request, a new attempt, new blocks."""
        found = self._loads("received", "failed", "over")
        consumer, load = found[pick % len(found)]
        if load.state == "received":
            consumer.leave(load)
        if not load.aborted:
            producer = self.producers[pick % 2]
            transfer_id = load.transfer_id if same else self._id(pick, False, self._on_offer())
            consumer.allocate(transfer_id, producer, again=load)

    @rule(pick=PICK, old=OLD)
    def release(self, pick: int, old: bool) -> None:
        if self.consumers[0].alive:
            transfer_id = self._id(pick, old, self._on_offer())
            self.consumers[0].release(transfer_id, self.producers[pick == 5])

    # -- faults ----------------------------------------------------------------------------------

    def _nodes(self) -> list[Node]:
        return list(self.world.nodes.values())

    @rule(loss=CHANCE, double=CHANCE, straggle=CHANCE)
    def change_weather(self, loss: float, double: float, straggle: float) -> None:
        self.world.network.weather = Weather(
            loss=loss, double=double, straggle=straggle, delay_s=0.02, straggle_s=6.0
        )

    @rule(slow=CHANCE, fails=st.sampled_from([0.0, 0.0, 0.2]), meeting_slow=CHANCE)
    def change_faults(self, slow: float, fails: float, meeting_slow: float) -> None:
        self.world.faults = Faults(slow_slices=slow, write_fails=fails, meeting_slow=meeting_slow)

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(one=PICK, other=PICK, data=st.booleans())
    def partition(self, one: int, other: int, data: bool) -> None:
        producer, consumer = self.producers[one % 2], self.consumers[other % 2]
        worker = producer.nodes[one % len(producer.nodes)]
        self.world.network.cut(worker.agent, consumer.node.agent, data=data)

    @precondition(lambda self: self.world.nodes)
    @rule(pick=PICK, seconds=PAUSES)
    def pause(self, pick: int, seconds: float) -> None:
        nodes = self._nodes()
        self.world.pause(nodes[pick % len(nodes)], seconds)

    @rule(pick=PICK)
    def crash(self, pick: int) -> None:
        engine = [*self.producers, *self.consumers][pick % 4]
        if engine.alive and pick < 4:
            engine.crash()

    @precondition(lambda self: not all(each.alive for each in [*self.producers, *self.consumers]))
    @rule()
    def restart(self) -> None:
        dead = [each for each in [*self.producers, *self.consumers] if not each.alive]
        dead[0].start()

    @precondition(lambda self: self.world.nodes)
    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        nodes = self._nodes()
        if pick < 4:
            nodes[pick % len(nodes)].take(ev.Closing())

    @rule(seconds=SECONDS)
    def let_time_pass(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(seconds=MOMENTS)
    def let_a_moment_pass(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(seconds=MOMENTS)
    def let_another_moment_pass(self, seconds: float) -> None:
        self.world.advance(seconds)

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.everything_ends()
        finally:
            if hasattr(self, "watch"):
                self.watch.__exit__(None, None, None)


TestTwoEnginesAndMore = TwoEnginesAndMore.TestCase
TestTwoEnginesAndMore.settings = settings(max_examples=150, stateful_step_count=40)
