"""Everything that vLLMs, networks and operators may do to a world, one step after another.

`Chaos` is what the Hypothesis test picks its rules from, and the seeded simulator its operations
(`kvflow.testing.operations`, `kvflow.testing.simulate`).

Rules: ids, engines and requests are picked by number, modulo what there is, so each number means
something; what finds no free blocks is queued, and tried again when `retry_queued` is called.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from kvflow.core import Timings
from kvflow.ids import PromptDigest, TransferId
from kvflow.testing.decode_engine import Consumer
from kvflow.testing.driver import Node
from kvflow.testing.faults import Fault
from kvflow.testing.machines import TIMINGS, Machines
from kvflow.testing.prefill_engine import Producer
from kvflow.testing.prompts import OTHER_PROMPT, PROMPT, Load, Prefill
from kvflow.testing.sizes import BLOCK_TOKENS

MOMENTS_S = (0.0006, 0.0015, 0.003, 0.01, 0.05, 0.2, 0.4)
WHILES_S = (0.8, 1.2, 2.6, 4.0, 8.0, 14.0, 70.0)
PAUSES_S = (0.4, 1.1, 3.0, 8.0, 25.0)
CHANCES = (0.0, 0.0, 0.1, 0.3, 0.7)
QUEUE_MAX = 16
"""More legs than these do not wait for blocks: the router sends them elsewhere."""

Leg = TypeVar("Leg", Prefill, Load)


def _prompt(pick: int, old: bool) -> PromptDigest:
    """A request that uses an old id may have another prompt."""
    return OTHER_PROMPT if old and pick % 3 == 0 else PROMPT


class Chaos(Machines):
    """Machines, and the requests that are sent to them.

    queued  legs that wait for blocks: the process that they were sent to, and how to try again.
    """

    def __init__(self, seed: int, ranks: int, timings: Timings = TIMINGS, **options: Any) -> None:
        """The options are those of `Machines`."""
        super().__init__(seed, ranks, timings, **options)
        self.ids: list[TransferId] = []
        self.queued: list[tuple[Node, Callable[[], object]]] = []

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

    def _id(self, pick: int, old: bool, unpaired: list[TransferId]) -> TransferId:
        """The id of a leg that has no counterpart yet, or one that was used, or a new one."""
        if old and self.ids:
            transfer_id = self.ids[-1 - pick % min(len(self.ids), 4)]
            self.world.strike(Fault.ID_REUSED, transfer_id)
            return transfer_id
        if unpaired and pick % 4:
            return unpaired[-1 - pick % len(unpaired)]
        self.ids.append(TransferId(f"t{len(self.ids)}"))
        return self.ids[-1]

    # -- legs, and the queue for those that find no blocks -----------------------------------------

    def _begin(
        self, producer: Producer, transfer_id: TransferId, prompt: PromptDigest = PROMPT
    ) -> Prefill | None:
        def begin() -> Prefill | None:
            live = [each for _, each in self.prefills("running", "finished", "preempted")]
            begun = producer.begin(transfer_id, prompt)
            if begun and any(each.transfer_id == transfer_id for each in live):
                self.world.strike(Fault.PREFILL_RIVAL, f"of {transfer_id} at {producer.name}")
            return begun

        self.world.say(f"{producer.name} is asked to prefill {transfer_id}")
        if producer.refuses(transfer_id):
            self.world.strike(Fault.PROMPT_TOO_LONG, f"{transfer_id} at {producer.name}")
            return None
        return self._or_queue(producer.nodes[0], begin, Fault.PRODUCER_OUT_OF_BLOCKS)

    def _load(
        self, consumer: Consumer, producer: Producer, transfer_id: TransferId, **how: Any
    ) -> Load | None:
        def load() -> Load | None:
            again: Load | None = how.get("again")
            if again and (again.aborted or consumer.loads.get(again.request_id) is not again):
                return again  # meanwhile its client has gone, or it was sent once more
            others = [each for _, each in self.loads("loading")]
            begun = consumer.allocate(transfer_id, producer, **how)
            if begun and any(each.transfer_id == transfer_id for each in others):
                self.world.strike(Fault.LOAD_RIVAL, f"of {transfer_id} at {consumer.name}")
            return begun

        said = " ".join(f"{key}={value}" for key, value in how.items() if key != "again" and value)
        asked = f"{consumer.name} is asked to decode {transfer_id} from {producer.name} {said}"
        self.world.say(asked.rstrip())
        return self._or_queue(consumer.node, load, Fault.CONSUMER_OUT_OF_BLOCKS)

    def _or_queue(self, process: Node, leg: Callable[[], Leg | None], full: Fault) -> Leg | None:
        begun = leg()
        if begun is None:
            self.world.strike(full, f"at {process.agent}")
            if len(self.queued) < QUEUE_MAX:
                self.queued.append((process, leg))
        return begun

    def retry_queued(self) -> None:
        """Blocks may be free by now; what was sent to a process that is gone is gone with it."""
        waiting, self.queued = self.queued, []
        for process, leg in waiting:
            if process.alive and leg() is None:
                self.queued.append((process, leg))
        for producer in self.producers:
            if producer.alive:
                producer.step(queued=any(each in producer.nodes for each, _ in self.queued))

    def end(self) -> None:
        """Clients lose patience; all faults stop, and everything must end and be forgotten."""
        self.queued.clear()
        self.retry_queued()
        self.world.say("all faults stop; everything must end")
        self.world.everything_ends()

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
            transfer_id = self._id(pick, old, self._asked_for())
            self._begin(producer, transfer_id, _prompt(pick, old))

    def finish_prefill(self, pick: int) -> None:
        if found := self.prefills("running"):
            producer, prefill = found[pick % len(found)]
            self.world.say(f"{producer.name} has computed {prefill.transfer_id}")
            producer.finish(prefill)

    def advance_prefill(self, pick: int, tokens: int) -> None:
        if found := self.prefills("running"):
            producer, prefill = found[pick % len(found)]
            self.world.say(f"{producer.name} has computed more of {prefill.transfer_id}")
            producer.advance(prefill, tokens)

    def allocate_prefill_again(self, pick: int) -> None:
        """vLLM says more than once that it computes a prompt."""
        if found := self.prefills("running"):
            producer, prefill = found[pick % len(found)]
            self.world.strike(Fault.PREFILL_TOLD_TWICE, f"{prefill.transfer_id} at {producer.name}")
            producer.repeat(prefill)

    def preempt_prefill(self, pick: int) -> None:
        if found := self.prefills("running"):
            producer, prefill = found[pick % len(found)]
            self.world.strike(Fault.PREFILL_PREEMPTED, f"{prefill.transfer_id} at {producer.name}")
            producer.preempt(prefill)

    def resume_prefill(self, pick: int) -> None:
        if found := self.prefills("preempted"):
            producer, prefill = found[pick % len(found)]
            producer.resume(prefill)

    def abort_prefill(self, pick: int) -> None:
        if found := self.prefills("running", "preempted"):
            producer, prefill = found[pick % len(found)]
            self.world.strike(Fault.PREFILL_ABORTED, f"{prefill.transfer_id} at {producer.name}")
            producer.abort(prefill)

    # -- consumers -------------------------------------------------------------------------------

    def allocate(
        self,
        who: int,
        where: int,
        pick: int,
        old: bool,
        skip: int,
        surplus: int,
        named: bool,
        reads: bool = False,
    ) -> None:
        consumer, producer = self._consumer(who), self._producer(where)
        if consumer.alive:
            transfer_id = self._id(pick, old, self._on_offer())
            if surplus:
                self.world.strike(Fault.MISMATCH, transfer_id)
            how = {"skip": skip, "surplus": surplus, "named": named, "reads": reads}
            self._load(consumer, producer, transfer_id, prompt=_prompt(pick, old), **how)

    def allocate_by_old_name(self, where: int, pick: int) -> None:
        """The router names the engine id of an earlier start, or one that never was."""
        consumer, producer = self.consumers[0], self._producer(where)
        if consumer.alive:
            transfer_id = self._id(pick, False, self._on_offer())
            self.world.strike(Fault.ENGINE_ID_STALE, transfer_id)
            self._load(consumer, producer, transfer_id, engine_id=f"{producer.name}-0")

    def refuse_load(self, who: int, pick: int) -> None:
        consumer = self._consumer(who)
        if consumer.alive:
            transfer_id = self._id(pick, False, self._on_offer())
            self.world.strike(Fault.LOAD_REFUSED, f"of {transfer_id} at {consumer.name}")
            consumer.refuse(transfer_id)

    def dispatch_both_legs(
        self,
        where: int,
        old: bool,
        first: bool,
        then_s: float,
        steps: int = 0,
        reads: bool = False,
    ) -> None:
        """What a router does: both legs at once, or the consumer's after the prefill.

        steps  of vLLM, of a block of tokens each, before the prompt is computed to its end.
        """
        consumer, producer = self.consumers[0], self._producer(where)
        transfer_id = self._id(0, old, [])
        if consumer.alive and first:
            self._load(consumer, producer, transfer_id, reads=reads)
        if producer.alive:
            prefill = self._begin(producer, transfer_id)
            self.world.advance(then_s)
            for _ in range(steps):
                if prefill and prefill.state == "running" and producer.alive:
                    producer.advance(prefill, BLOCK_TOKENS)
                self.world.advance(then_s)
            if prefill and prefill.state == "running" and producer.alive:
                producer.finish(prefill)
        if consumer.alive and not first:
            self._load(consumer, producer, transfer_id, reads=reads)
        self.world.advance(then_s)

    def abort_load(self, pick: int) -> None:
        if found := self.loads("loading", "received", "preempted"):
            consumer, load = found[pick % len(found)]
            self.world.strike(Fault.LOAD_ABORTED, f"{load.request_id} of {load.transfer_id}")
            consumer.abort(load)

    def finish_decode(self, pick: int) -> None:
        if found := self.loads("received"):
            consumer, load = found[pick % len(found)]
            self.world.say(f"{load.request_id} has been decoded")
            consumer.finish(load)

    def finish_recomputed(self, pick: int) -> None:
        """A request whose load failed was computed where it is decoded, and has ended."""
        if found := self.loads("failed"):
            consumer, load = found[pick % len(found)]
            if not load.aborted:
                self.world.say(f"{load.request_id} has been decoded without a load")
                consumer.finish(load)

    def preempt_load(self, pick: int, skip: int, reused: bool, reads: bool = False) -> None:
        """The same parameters, hence the same producer.

        skip    blocks that are still cached.
        reused  the id has been used for another prefill since, as a router must not.
        """
        if found := self.loads("received"):
            consumer, load = found[pick % len(found)]
            self.world.strike(Fault.LOAD_PREEMPTED, f"{load.request_id} of {load.transfer_id}")
            if reused and load.producer and load.producer.alive:
                self.world.strike(Fault.ID_REUSED, load.transfer_id)
                prefill = self._begin(load.producer, load.transfer_id)
                if prefill and skip:
                    load.producer.finish(prefill)
            consumer.preempt(load)
            if load.state == "preempted" and load.producer:
                how = {"skip": skip, "again": load, "reads": reads}
                self._load(consumer, load.producer, load.transfer_id, **how)

    def load_again(self, where: int, pick: int, same: bool, reads: bool = False) -> None:
        """After a preemption or a failure: the same request, a new attempt, new blocks."""
        found = self.loads("received", "failed", "over")
        if not found:
            return
        consumer, load = found[pick % len(found)]
        if load.state == "received":
            consumer.leave(load)
        if not load.aborted:
            transfer_id = load.transfer_id if same else self._id(pick, False, self._on_offer())
            self.world.strike(Fault.LOAD_AGAIN, load.request_id)
            self._load(consumer, self._producer(where), transfer_id, again=load, reads=reads)

    def release(self, where: int, pick: int, old: bool, again: bool) -> None:
        """All is cached, for a new request or for one that loaded before."""
        consumer = self.consumers[0]
        if consumer.alive:
            ended = [load for _, load in self.loads("failed", "over") if not load.aborted]
            ended = [load for load in ended if load.request_id in consumer.loads]
            load = ended[pick % len(ended)] if again and ended else None
            transfer_id = self._id(pick, old, self._on_offer())
            self.world.strike(Fault.RELEASE_ONLY, f"of {transfer_id} at {consumer.name}")
            consumer.release(transfer_id, self._producer(where), again=load)

    def release_by_router(self, where: int, pick: int) -> None:
        """A router tells the producer itself that nobody will fetch a transfer."""
        producer = self._producer(where)
        if producer.alive and self.ids:
            transfer_id = self.ids[-1 - pick % min(len(self.ids), 4)]
            self.world.strike(Fault.RELEASED_BY_ROUTER, f"{transfer_id} at {producer.name}")
            producer.release(transfer_id)
