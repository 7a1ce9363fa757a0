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
from collections import Counter
from collections.abc import Callable

from kvflow.core import Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.clocks import CLOCK_DRIFT_MAX
from kvflow.core.producer import NAME as PRODUCER
from kvflow.ids import Address, AgentName, Incarnation, Rank, RequestId
from kvflow.testing import invariants
from kvflow.testing.decode_engine import Consumer
from kvflow.testing.driver import Node, Slice, writes_to
from kvflow.testing.faults import Fault, Faults
from kvflow.testing.network import FAIR, Frame, Network, Weather
from kvflow.testing.prefill_engine import Producer

__all__ = ["Faults", "World"]

STEPS_MAX = 200_000
SOON_S = 0.0005


class World:
    """Everything there is.

    steps   messages and answers delivered, slices ended, deadlines expired.
    struck  how often each kind of fault struck.
    tells   whether `log` also gets a line of text for every fault and operation.
    log     what engines did, and lines of text, in order.
    """

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
        self.steps = 0
        self.struck: Counter[Fault] = Counter()
        self.tells = False
        self.network = Network(self.rng, weather, self.strike)
        self.faults = Faults()
        self.now = 0.0
        self.nodes: dict[AgentName, Node] = {}
        self.ranks: dict[AgentName, Rank] = {}  # of all that ever were
        self.producers: dict[Address, Producer] = {}
        self.consumers: dict[str, Consumer] = {}
        self.slices: dict[Slice, None] = {}  # in order of their posting
        self.log: list[tuple[float, AgentName, ef.Effect | str]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._numbers = itertools.count(1)
        self._arrived: dict[tuple[AgentName, AgentName], int] = {}

    # -- building --------------------------------------------------------------------------------

    def add_producer(
        self,
        name: str,
        *,
        ranks: int = 1,
        blocks: int = 60,
        prompt_tokens_max: int | None = None,
    ) -> Producer:
        producer = Producer(self, name, ranks, blocks, prompt_tokens_max)
        self.producers[producer.address] = producer
        return producer

    def add_consumer(
        self, name: str, *, ranks: int = 1, blocks: int = 60, registers: bool = False
    ) -> Consumer:
        self.consumers[name] = Consumer(self, name, ranks, blocks, registers)
        return self.consumers[name]

    def start_node(
        self, name: str, rank: Rank, ranks: int, prompt_tokens_max: int | None = None
    ) -> Node:
        agent = AgentName(name)
        if self.skewed:
            self.strike(Fault.CLOCK_SKEWED)
            self.strike(Fault.CLOCK_DRIFTS)
        node = Node(
            world=self,
            agent=agent,
            incarnation=Incarnation(f"i-{name}"),
            rank=rank,
            ranks=ranks,
            timings=self.timings,
            skew_s=self.rng.uniform(0.0, 1e5) if self.skewed else 0.0,
            rate=1 + self.rng.uniform(-0.4, 0.4) * CLOCK_DRIFT_MAX if self.skewed else 1.0,
            prompt_tokens_max=prompt_tokens_max,
        )
        self.nodes[agent] = node
        self.ranks[agent] = rank
        return node

    def kill(self, node: Node) -> None:
        node.alive = False
        del self.nodes[node.agent]

    def next_number(self) -> int:
        return next(self._numbers)

    # -- what is told ----------------------------------------------------------------------------

    def strike(self, fault: Fault, about: object = "") -> None:
        """A fault strikes: counted, and told if the world tells."""
        self.struck[fault] += 1
        if self.tells:
            self.say(f"{fault} {about}".rstrip())

    def say(self, text: str) -> None:
        """A line of the transcript, if the world tells."""
        if self.tells:
            self.log.append((self.now, AgentName(""), text))

    def _happens(self, chance: float) -> bool:
        """Without chance, nothing is drawn: what follows stays as it was without this fault."""
        return chance > 0 and self.rng.random() < chance

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
                self.steps += 1
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
        self.strike(Fault.PAUSED, f"{node.agent} for {seconds} s")
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
        for producer in self.producers.values():
            for node in producer.nodes if producer.alive else ():
                population = node.engine.records.population
                if population[PRODUCER, "kept"] or population[PRODUCER, "lent"]:
                    invariants.what_is_kept_is_held(node, producer)

    # -- what drivers ask for --------------------------------------------------------------------

    def send(self, sender: Node, frame: Frame) -> None:
        receiver = self.nodes.get(frame.receiver)
        if receiver is None:
            rejected = self.rng.random() < self.faults.rejects
            how = Fault.NOTICE_TO_DEAD_REJECTED if rejected else Fault.NOTICE_TO_DEAD_LOST
            self.strike(how, frame)
            if rejected:
                self._reject(sender, frame, "no such agent any more", is_dead=True)
        elif self._happens(self.faults.refuses):
            self.strike(Fault.NOTICE_REFUSED, frame)
            self._reject(sender, frame, "the transfer library reported an error")
        else:
            serial = next(self._serial)
            for delay_s in self.network.arrivals(frame):
                self.later(delay_s, lambda: self._deliver(receiver, frame, serial))

    def _reject(self, sender: Node, frame: Frame, detail: str, *, is_dead: bool = False) -> None:
        failed = ev.NoticeFailed(agent=frame.receiver, detail=detail, is_dead=is_dead)
        self.soon(lambda: sender.take(failed))

    def _deliver(self, receiver: Node, frame: Frame, serial: int) -> None:
        self.steps += 1
        pair = (frame.sender, frame.receiver)
        if serial < self._arrived.get(pair, -1):
            self.strike(Fault.NOTICE_REORDERED, frame)
        else:
            self._arrived[pair] = serial
        receiver.take(frame)

    def meet(self, node: Node, address: Address) -> None:
        """The question takes half of the time, the answer the other half."""
        slow = self.rng.random() < self.faults.meeting_slow
        takes_s = 0.002
        if slow:
            self.strike(Fault.MEETING_SLOW, f"{node.agent} asks {address}")
            takes_s = self.rng.uniform(0.001, 3 * self.timings.meet_deadline_s)
        self.later(takes_s / 2, lambda: self._ask_meeting(node, address, takes_s / 2))

    def _ask_meeting(self, node: Node, address: Address, back_s: float) -> None:
        answer = self._answer_meeting(node, address)

        def arrive() -> None:
            self.steps += 1
            if isinstance(answer, ev.MeetingSucceeded):
                gone = [agent for agent in answer.agents.values() if agent not in self.nodes]
                if gone:
                    self.strike(Fault.METADATA_STALE, f"{node.agent} is told of {gone[0]}")
            node.take(answer)

        self.later(back_s, arrive)

    def _answer_meeting(
        self, node: Node, address: Address
    ) -> ev.MeetingSucceeded | ev.MeetingFailed:
        producer = self.producers.get(address)
        if producer is None or not producer.alive or self._is_cut_off(node, producer):
            return ev.MeetingFailed(address=address, final=False, detail="connection refused")
        if self._happens(self.faults.meeting_fails):
            self.strike(Fault.MEETING_FAILED, f"{node.agent} asked {address}")
            return ev.MeetingFailed(address=address, final=False, detail="unreadable metadata")
        if self._happens(self.faults.incompatible):
            self.strike(Fault.MEETING_INCOMPATIBLE, f"{node.agent} asked {address}")
            return ev.MeetingFailed(address=address, final=True, detail="block sizes differ")
        return ev.MeetingSucceeded(
            address=address,
            engine_id=producer.engine_id,
            incarnation=producer.nodes[0].incarnation,
            agents={
                worker.rank: worker.agent
                for worker in producer.nodes
                if writes_to(worker.rank.tp, worker.ranks, node.rank.tp, node.ranks)
            },
        )

    def _is_cut_off(self, node: Node, producer: Producer) -> bool:
        return any(
            worker.paused or self.network.is_cut(node.agent, worker.agent)
            for worker in producer.nodes
        )

    def refuses_post(self, sender: Node) -> bool:
        """Whether the transfer library refuses to post a slice."""
        refused = self._happens(self.faults.post_fails)
        if refused:
            self.strike(Fault.POST_FAILED, f"at {sender.agent}")
        return refused

    def post(
        self,
        poster: Node,
        each: Slice,
        ended: Callable[[str], None],
        troubled: Callable[[str], None],
    ) -> None:
        """One slice starts; it lands or fails within `slice_max_s`.

        `troubled` is called when asking about it fails, while it goes on.
        """
        if not each.reads:
            invariants.slice_may_be_posted(poster, each)
        self.slices[each] = None
        slow = self.rng.random() < self.faults.slow_slices
        fails = self.rng.random() < self.faults.write_fails
        if slow:
            self.strike(Fault.SLICE_SLOW, f"of {each.part} by {poster.agent}")
        most_s = 0.99 * self.timings.slice_max_s if slow else 0.002
        takes_s = self.rng.uniform(0.001, most_s) if slow or fails else 0.001
        if self._happens(self.faults.poll_fails):
            self.strike(Fault.POLL_FAILED, f"of {each.part} by {poster.agent}")
            self.later(takes_s / 2, lambda: troubled("asking the transfer library failed"))
        self.later(takes_s, lambda: self._end_slice(poster, each, ended, fails))

    def _end_slice(
        self, poster: Node, each: Slice, ended: Callable[[str], None], fails: bool
    ) -> None:
        self.steps += 1
        self.slices.pop(each, None)
        other = self.nodes.get(each.sender if each.reads else each.receiver)
        sender, receiver = (other, poster) if each.reads else (poster, other)
        is_gone = each.reads and not poster.alive
        is_cut = not self.network.carries_data(each.sender, each.receiver)
        if sender is None or receiver is None or is_gone or is_cut:
            self.strike(Fault.SLICE_TO_DEAD, f"of {each.part} by {poster.agent}")
            fails = True
        elif fails:
            self.strike(Fault.SLICE_FAILED, f"of {each.part} by {poster.agent}")
            if self.rng.random() < 0.5:  # it may have landed all the same
                self._land(sender, receiver, each)
        else:
            self._land(sender, receiver, each)
        ended("the transfer library reported an error" if fails else "")

    def _land(self, sender: Node, receiver: Node, each: Slice) -> None:
        consumer = next(c for c in self.consumers.values() if receiver in c.nodes)
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
        next(c for c in self.consumers.values() if node in c.nodes).report_received(node, effect)

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
            + timings.fence_silent_s + timings.hold_max_s + timings.lease_s + timings.keep_sent_s
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
            invariants.pool_is_full(consumer)
        for producer in self.producers.values():
            invariants.pool_is_full(producer)
