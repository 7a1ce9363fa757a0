"""Some engines on one network, and everything that may befall them.

Rules: engines and workers are picked by number, modulo what there is: each number means something.
"""

from kvflow.core import Timings
from kvflow.core import events as ev
from kvflow.ids import AgentName
from kvflow.testing.decode_engine import Consumer
from kvflow.testing.faults import Fault, Faults
from kvflow.testing.network import Weather
from kvflow.testing.prefill_engine import Producer
from kvflow.testing.world import World

# Shorter than the defaults where only the bound matters, so that a world ends in milliseconds.
TIMINGS = Timings(
    lease_s=6.0,
    lease_contended_s=1.5,
    hold_max_s=9.0,
    prefill_max_s=40.0,
    load_deadline_s=20.0,
    stop_deadline_s=8.0,
    write_drain_s=2.0,
    tombstone_s=12.0,
    peer_idle_s=30.0,
)
PICKS = 12


class Machines:
    """Some producers, some consumers. The first of each are used most: ids meet there.

    The first consumer registers again after a preemption if it `registers`, the next one if not,
    and so on; every second one has two ranks.

    off  what a swarm phase has turned off (`kvflow.testing.faults.SWARM`).
    """

    def __init__(
        self,
        seed: int,
        ranks: int,
        timings: Timings = TIMINGS,
        *,
        producers: int = 2,
        consumers: int = 2,
        blocks: int = 60,
        prompt_tokens_max: int | None = None,
        registers: bool = True,
    ) -> None:
        self.world = World(seed, timings)
        self.producers = [
            self.world.add_producer(
                f"P{n}", ranks=ranks, blocks=blocks, prompt_tokens_max=prompt_tokens_max
            )
            for n in range(producers)
        ]
        self.consumers = [
            self.world.add_consumer(
                f"C{n}", ranks=1 + n % 2, blocks=blocks, registers=registers ^ bool(n % 2)
            )
            for n in range(consumers)
        ]
        self.world.faults = Faults(slow_slices=0.6)
        self.off: frozenset[str] = frozenset()

    @property
    def engines(self) -> list[Producer | Consumer]:
        return [*self.producers, *self.consumers]

    def _producer(self, pick: int) -> Producer:
        others = len(self.producers) - 1
        return self.producers[1 + pick // 6 % others if others and pick % 6 == 5 else 0]

    def _consumer(self, pick: int) -> Consumer:
        others = len(self.consumers) - 1
        return self.consumers[1 + pick // 6 % others if others and pick % 6 == 5 else 0]

    # -- faults ----------------------------------------------------------------------------------

    def change_weather(self, loss: float, double: float, straggle: float) -> None:
        self.world.network.weather = Weather(
            loss=0.0 if "loss" in self.off else loss,
            double=0.0 if "double" in self.off else double,
            straggle=0.0 if "straggle" in self.off else straggle,
            delay_s=0.02,
            straggle_s=6.0,
        )

    def change_faults(
        self, slow: float, fails: float, meeting_slow: float, **others: float
    ) -> None:
        faults = Faults(slow_slices=slow, write_fails=fails, meeting_slow=meeting_slow, **others)
        self.world.faults = faults.without(self.off)

    def heal(self) -> None:
        self.world.say("all faults stop")
        self.world.heal()

    def _pair(self, one: int, other: int) -> tuple[AgentName, AgentName]:
        producer = self.producers[one % len(self.producers)]
        consumer = self.consumers[other % len(self.consumers)]
        worker = producer.nodes[one // len(self.producers) % len(producer.nodes)]
        nodes = consumer.nodes
        return worker.agent, nodes[other // len(self.consumers) % len(nodes)].agent

    def partition(self, one: int, other: int, data: bool) -> None:
        worker, consumer = self._pair(one, other)
        kind = Fault.PARTITION_WITH_DATA if data else Fault.PARTITION
        self.world.strike(kind, f"between {worker} and {consumer}")
        self.world.network.cut(worker, consumer, data=data)

    def partition_one_way(self, one: int, other: int, to_consumer: bool) -> None:
        worker, consumer = self._pair(one, other)
        pair = (worker, consumer) if to_consumer else (consumer, worker)
        self.world.strike(Fault.PARTITION_ONE_WAY, f"from {pair[0]} to {pair[1]}")
        self.world.network.cut_one_way(*pair)

    def pause(self, pick: int, seconds: float) -> None:
        nodes = list(self.world.nodes.values())
        if nodes:
            self.world.pause(nodes[pick % len(nodes)], seconds)

    def crash(self, pick: int) -> None:
        """One time in three."""
        if pick < PICKS // 3:
            self.crash_engine(pick)

    def crash_engine(self, pick: int) -> None:
        engine = self.engines[pick % len(self.engines)]
        if engine.alive:
            is_producer = isinstance(engine, Producer)
            kind = Fault.PRODUCER_CRASHED if is_producer else Fault.CONSUMER_CRASHED
            self.world.strike(kind, engine.name)
            engine.crash()

    def restart(self) -> None:
        for engine in self.engines:
            if not engine.alive:
                self.world.strike(Fault.RESTARTED, engine.name)
                engine.start()
                return

    def close(self, pick: int) -> None:
        """One time in three."""
        if pick < PICKS // 3:
            self.close_worker(pick)

    def close_worker(self, pick: int) -> None:
        """One worker is told that it will be gone."""
        nodes = list(self.world.nodes.values())
        if nodes:
            node = nodes[pick % len(nodes)]
            self.world.strike(Fault.CLOSING, node.agent)
            node.take(ev.Closing())

    def shut_down(self, pick: int, after_s: float) -> None:
        """SIGTERM: every worker of an engine is told, and after a while the process is gone."""
        engine = self.engines[pick % len(self.engines)]
        if not engine.alive:
            return
        nodes = engine.nodes
        self.world.strike(Fault.SHUT_DOWN, engine.name)
        for node in nodes:
            node.take(ev.Closing())

        def be_gone() -> None:
            if nodes[0].alive:
                self.world.say(f"{engine.name} is gone")
                engine.crash()

        self.world.later(after_s, be_gone)

    def pass_time(self, seconds: float) -> None:
        self.world.advance(seconds)
