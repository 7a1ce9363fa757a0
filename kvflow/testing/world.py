"""Several engines on one virtual clock: network, memory, drivers and vLLMs are modelled.

The idea: everything that will happen is a callback in one heap of times; `advance` works it off,
together with the engines' deadlines, in order of time. Nothing is random but what the seed says.

Assumptions that the model makes, and that real life must keep: a slice has landed or failed
`slice_max_s` after `may_write` was asked; clocks run at almost the same rate (`CLOCK_DRIFT_MAX`;
they may show different times); no notice travels for longer than `tombstone_s`.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvflow.core import Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.clocks import CLOCK_DRIFT_MAX
from kvflow.ids import Address, AgentName, Incarnation, Rank, RequestId
from kvflow.testing import invariants
from kvflow.testing.driver import Node, Slice
from kvflow.testing.engines import Consumer, Producer
from kvflow.testing.network import FAIR, Frame, Network, Weather

STEPS_MAX = 200_000
SOON_S = 0.0005


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong besides the network: probabilities.

    slow_slices    slices take up to `slice_max_s` instead of a millisecond.
    write_fails    a slice fails.
    rejects        a notice to a dead agent is rejected at once, instead of vanishing.
    meeting_slow   a meeting takes longer than its deadline.
    """

    slow_slices: float = 0.0
    write_fails: float = 0.0
    rejects: float = 0.5
    meeting_slow: float = 0.0


class World:
    """Everything there is."""

    def __init__(
        self,
        seed: int = 0,
        timings: Timings | None = None,
        weather: Weather = FAIR,
        *,
        skewed: bool = True,
    ) -> None:
        self.skewed = skewed
        self.rng = random.Random(seed)
        self.timings = timings or Timings()
        self.network = Network(self.rng, weather)
        self.faults = Faults()
        self.now = 0.0
        self.nodes: dict[AgentName, Node] = {}
        self.producers: dict[Address, Producer] = {}
        self.consumers: dict[str, Consumer] = {}
        self.slices: set[Slice] = set()
        self.log: list[tuple[float, AgentName, ef.Effect]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._numbers = itertools.count(1)

    # -- building --------------------------------------------------------------------------------

    def add_producer(self, name: str, *, ranks: int = 1, blocks: int = 60) -> Producer:
        producer = Producer(self, name, ranks, blocks)
        self.producers[producer.address] = producer
        return producer

    def add_consumer(self, name: str, *, blocks: int = 60) -> Consumer:
        self.consumers[name] = Consumer(self, name, blocks)
        return self.consumers[name]

    def start_node(self, name: str, rank: Rank) -> Node:
        agent = AgentName(name)
        node = Node(
            world=self,
            agent=agent,
            incarnation=Incarnation(f"i-{name}"),
            rank=rank,
            timings=self.timings,
            skew_s=self.rng.uniform(0.0, 1e5) if self.skewed else 0.0,
            rate=1 + self.rng.uniform(-0.4, 0.4) * CLOCK_DRIFT_MAX if self.skewed else 1.0,
        )
        self.nodes[agent] = node
        return node

    def kill(self, node: Node) -> None:
        node.alive = False
        del self.nodes[node.agent]

    def next_number(self) -> int:
        return next(self._numbers)

    # -- time ------------------------------------------------------------------------------------

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._serial), callback))

    def soon(self, callback: Callable[[], None]) -> None:
        self.later(SOON_S, callback)

    def advance(self, seconds: float) -> None:
        """Let so much time pass; check what must always hold after each thing that happens."""
        until = self.now + seconds
        for _ in range(STEPS_MAX):
            at, node = self._next_deadline()
            due = self._due[0][0] if self._due else None
            if due is not None and due <= at and due <= until:
                self.now = max(self.now, due)
                heapq.heappop(self._due)[2]()
            elif node is not None and at <= until:
                self.now = max(self.now, at)
                node.expire()
            else:
                self.now = until
                self.check()
                return
            self.check()
        raise invariants.InvariantBrokenError(f"L1: {STEPS_MAX} steps within {seconds} s")

    def _next_deadline(self) -> tuple[float, Node | None]:
        first: tuple[float, Node | None] = (float("inf"), None)
        for node in self.nodes.values():
            at = node.next_deadline
            if at is not None and not node.paused and at < first[0]:
                first = (at, node)
        return first

    def pause(self, node: Node, seconds: float) -> None:
        """SIGSTOP, SIGCONT: nothing runs in this process meanwhile, but its posted slices go on."""
        node.paused_until = max(node.paused_until, self.now + seconds)
        deadlines_first = self.rng.random() < 0.5

        def wake() -> None:
            if node.alive and not node.paused:
                node.wake(deadlines_first=deadlines_first)

        self.later(node.paused_until - self.now, wake)

    def check(self) -> None:
        """What must hold between any two things that happen."""
        for node in self.nodes.values():
            if node.changed:
                node.changed = False
                invariants.blocks_have_one_owner(node)
                invariants.books_agree(node)

    # -- what drivers ask for --------------------------------------------------------------------

    def send(self, sender: Node, frame: Frame) -> None:
        receiver = self.nodes.get(frame.receiver)
        if receiver is None:
            if self.rng.random() < self.faults.rejects:
                failed = ev.NoticeFailed(agent=frame.receiver, detail="no such agent any more")
                self.soon(lambda: sender.take(failed))
            return
        for delay_s in self.network.arrivals(frame):
            self.later(delay_s, lambda: receiver.take(frame))

    def meet(self, node: Node, address: Address) -> None:
        slow = self.rng.random() < self.faults.meeting_slow
        takes_s = self.rng.uniform(0.001, 3 * self.timings.meet_deadline_s) if slow else 0.002
        self.later(takes_s, lambda: self._answer_meeting(node, address))

    def _answer_meeting(self, node: Node, address: Address) -> None:
        producer = self.producers.get(address)
        if producer is None or not producer.alive or self._is_cut_off(node, producer):
            node.take(ev.MeetingFailed(address=address, final=False, detail="connection refused"))
            return
        met = ev.MeetingSucceeded(
            address=address,
            engine_id=producer.engine_id,
            incarnation=producer.nodes[0].incarnation,
            agents={worker.rank: worker.agent for worker in producer.nodes},
        )
        node.take(met)

    def _is_cut_off(self, node: Node, producer: Producer) -> bool:
        return any(
            worker.paused or self.network.is_cut(node.agent, worker.agent)
            for worker in producer.nodes
        )

    def post(self, sender: Node, each: Slice, ended: Callable[[str], None]) -> None:
        """One slice starts; it lands or fails within `slice_max_s`."""
        invariants.slice_may_be_posted(sender, each)
        self.slices.add(each)
        slow = self.rng.random() < self.faults.slow_slices
        fails = self.rng.random() < self.faults.write_fails
        most_s = 0.99 * self.timings.slice_max_s if slow else 0.002
        takes_s = self.rng.uniform(0.001, most_s) if slow or fails else 0.001
        self.later(takes_s, lambda: self._end_slice(sender, each, ended, fails))

    def _end_slice(
        self, sender: Node, each: Slice, ended: Callable[[str], None], fails: bool
    ) -> None:
        self.slices.discard(each)
        receiver = self.nodes.get(each.receiver)
        if receiver is None or not self.network.carries_data(sender.agent, each.receiver):
            fails = True
        elif not fails:
            self._land(sender, receiver, each)
        ended("the transfer library reported an error" if fails else "")

    def _land(self, sender: Node, receiver: Node, each: Slice) -> None:
        consumer = next(c for c in self.consumers.values() if c.node is receiver)
        invariants.slice_may_land(receiver, each, consumer.loads.values())
        for source, destination in zip(each.source, each.destination, strict=True):
            tag = sender.memory.get((source, sender.rank))
            if tag is None:
                receiver.memory.pop((destination, sender.rank), None)
            else:
                receiver.memory[destination, sender.rank] = tag

    def report_sent(self, node: Node, request_id: RequestId) -> None:
        self.log.append((self.now, node.agent, ef.ReportSent(request_id=request_id)))
        producer = next(p for p in self.producers.values() if node in p.nodes)
        producer.report_sent(node, request_id)

    def report_received(self, node: Node, effect: ef.ReportReceived) -> None:
        self.log.append((self.now, node.agent, effect))
        next(c for c in self.consumers.values() if c.node is node).report_received(node, effect)

    def note(self, node: Node, effect: ef.Moved | ef.Ignored) -> None:
        self.log.append((self.now, node.agent, effect))

    # -- the end ---------------------------------------------------------------------------------

    def heal(self) -> None:
        """All faults stop."""
        self.network.heal()
        self.faults = Faults(rejects=self.faults.rejects)

    def everything_ends(self) -> None:
        """L1: heal, let vLLM finish what it computes, and see everything end and be forgotten."""
        self.heal()
        self._wake_all()
        for producer in self.producers.values():
            for prefill in list(producer.prefills.values()):
                if producer.alive and prefill.state == "running":
                    producer.finish(prefill)
                elif producer.alive and prefill.state == "preempted":
                    producer.abort(prefill)
        timings = self.timings
        self.advance(
            timings.load_deadline_s + timings.stop_deadline_s + 2 * timings.cancel_deadline_s
            + timings.fence_s + timings.hold_max_s + timings.lease_s
        )  # fmt: skip
        for node in self.nodes.values():
            invariants.everything_ended(node)
        self._leave_all()
        self.advance(2 * timings.tombstone_s + 6 * timings.peer_idle_s)
        for node in self.nodes.values():
            invariants.tables_are_empty(node)

    def _wake_all(self) -> None:
        longest = max((n.paused_until for n in self.nodes.values()), default=self.now)
        self.advance(max(longest - self.now, 0.0))

    def _leave_all(self) -> None:
        for consumer in self.consumers.values():
            for load in consumer.loads.values() if consumer.alive else ():
                if load.state == "received":
                    consumer.leave(load)
            assert not consumer.alive or consumer.pool.full, f"{consumer.name} lost blocks"
        for producer in self.producers.values():
            assert not producer.alive or producer.pool.full, f"{producer.name} lost blocks"
