"""Modelled vLLM engines: a producer with some worker ranks, a consumer with one or some.

They do what vLLM's scheduler does: allocate blocks, compute, finish, preempt, abort, free, and
reuse what was freed at once, so that a late write or read is seen.
"""

from typing import TYPE_CHECKING

from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.ledger import Block
from kvflow.core.notices import Blocks, Offer
from kvflow.core.producer import prefill_name
from kvflow.ids import ATTEMPT_STRIDE, Address, AgentName, Rank, RequestId, TransferId
from kvflow.testing import invariants
from kvflow.testing.driver import Node, Tag
from kvflow.testing.faults import Fault
from kvflow.testing.prompts import Load, Pool, Prefill
from kvflow.testing.sizes import BLOCK_TOKENS, blocks_of, complete_blocks, tokens_of

if TYPE_CHECKING:
    from kvflow.testing.world import World


READ_POLL_S = 0.01


class Producer:
    """A prefill engine: one scheduler, several worker ranks at one address."""

    def __init__(
        self, world: "World", name: str, ranks: int, blocks: int, prompt_tokens_max: int | None
    ) -> None:
        self.world = world
        self.name = name
        self.address = Address(name, 5600)
        self.ranks = tuple(Rank(0, tp) for tp in range(ranks))
        self._blocks = blocks
        self._prompt_tokens_max = prompt_tokens_max
        self._starts = 0
        self.alive = False
        self.answers: dict[TransferId, Offer] = {}  # routers remember them beyond a restart
        self.start()

    def start(self) -> None:
        """A fresh process: new incarnation, empty memory."""
        self._starts += 1
        self.alive = True
        self.engine_id = f"{self.name}-{self._starts}"
        self.pool = Pool(self._blocks)
        self.prefills: dict[RequestId, Prefill] = {}
        self.stalled = False
        self.nodes = [
            self.world.start_node(
                f"{self.engine_id}-{rank}", rank, len(self.ranks), self._prompt_tokens_max
            )
            for rank in self.ranks
        ]

    def crash(self) -> None:
        self.alive = False
        for node in self.nodes:
            self.world.kill(node)

    # -- what vLLM does --------------------------------------------------------------------------

    def refuses(self, transfer_id: TransferId) -> bool:
        """Whether its API server finds the prompt too long; its engine never hears of it."""
        most = self._prompt_tokens_max
        return most is not None and tokens_of(transfer_id) > most

    def begin(self, transfer_id: TransferId) -> Prefill | None:
        """Start computing a prompt, if there are blocks for it."""
        blocks = self.pool.take(blocks_of(transfer_id))
        if blocks is None:
            return None
        request_id = RequestId(f"{self.name}.p{self.world.next_number()}")
        prefill = Prefill(request_id=request_id, transfer_id=transfer_id, blocks=blocks)
        self.prefills[request_id] = prefill
        self._tell(ev.PrefillStarted(transfer_id=transfer_id, request_id=request_id))
        return prefill

    def resume(self, prefill: Prefill) -> None:
        """Compute a preempted prompt again."""
        blocks = self.pool.take(blocks_of(prefill.transfer_id))
        if blocks is not None:
            prefill.blocks = blocks
            prefill.state = "running"
            self._tell(
                ev.PrefillStarted(transfer_id=prefill.transfer_id, request_id=prefill.request_id)
            )

    def repeat(self, prefill: Prefill) -> None:
        """Say once more that the prompt is computed, as for a second chunk of it."""
        self._tell(
            ev.PrefillStarted(transfer_id=prefill.transfer_id, request_id=prefill.request_id)
        )

    def advance(self, prefill: Prefill, tokens: int) -> None:
        """Compute some more of the prompt, at most to its end."""
        self._compute(prefill, min(prefill.computed + tokens, tokens_of(prefill.transfer_id)))
        self._tell(
            ev.PrefillAdvanced(
                transfer_id=prefill.transfer_id,
                request_id=prefill.request_id,
                blocks=prefill.blocks,
                tokens=prefill.computed,
            )
        )

    def _compute(self, prefill: Prefill, tokens: int) -> None:
        """The KV of the tokens up to this one is in memory."""
        prefill.computed = tokens
        complete = complete_blocks(prefill.transfer_id, tokens)
        for node in self.nodes:
            for group, ids in enumerate(prefill.blocks):
                for position, block in enumerate(ids[: complete[group]]):
                    node.memory[(group, block), node.rank] = Tag(
                        transfer_id=prefill.transfer_id,
                        request_id=prefill.request_id,
                        group=group,
                        position=position,
                    )

    def finish(self, prefill: Prefill) -> None:
        self._compute(prefill, tokens_of(prefill.transfer_id))
        prefill.state = "finished"
        prefill.held_by = {node.agent for node in self.nodes}
        self.answers[prefill.transfer_id] = Offer(
            blocks=prefill.blocks,
            tokens=tokens_of(prefill.transfer_id),
            prefill=prefill_name(prefill.request_id),
        )
        self._tell(
            ev.PrefillFinished(
                transfer_id=prefill.transfer_id,
                request_id=prefill.request_id,
                blocks=prefill.blocks,
                tokens=tokens_of(prefill.transfer_id),
            )
        )

    def preempt(self, prefill: Prefill) -> None:
        prefill.state = "preempted"
        self._take_away(prefill)
        self._tell(
            ev.PrefillPreempted(transfer_id=prefill.transfer_id, request_id=prefill.request_id)
        )

    def abort(self, prefill: Prefill) -> None:
        if prefill.state == "running":
            self._take_away(prefill)
        prefill.state = "over"
        self._tell(
            ev.PrefillAborted(transfer_id=prefill.transfer_id, request_id=prefill.request_id)
        )

    def release(self, transfer_id: TransferId) -> None:
        """A router says, through the side channel, that nobody will fetch this transfer."""
        self._tell(ev.ReleaseAsked(transfer_id=transfer_id))

    def step(self, *, queued: bool) -> None:
        """vLLM's scheduler takes a step; `queued` prompts have found no blocks in it."""
        running = any(prefill.state == "running" for prefill in self.prefills.values())
        stalled = queued and not running
        if stalled != self.stalled:
            self.stalled = stalled
            self._tell(ev.PrefillsStalled() if stalled else ev.PrefillsResumed())

    def offer_of(self, transfer_id: TransferId) -> Offer | None:
        """What the answer to the latest prefill leg of this id said, however long ago."""
        offer = self.answers.get(transfer_id)
        finished = [each.request_id for each in self.prefills.values() if each.held_by]
        if offer and offer.prefill not in map(prefill_name, finished):
            self.world.strike(Fault.OFFER_STALE, f"{transfer_id} at {self.name}")
        return offer

    def report_sent(self, node: Node, request_id: RequestId) -> None:
        """One worker lets go of its part: its memory is scribbled over at once."""
        prefill = self.prefills.get(request_id)
        invariants.prefill_is_awaited(prefill, node, request_id)
        assert prefill is not None
        blocks = invariants.flat(prefill.blocks)
        invariants.nothing_reads_from(self.world, node, blocks)
        for block in blocks:
            node.memory.pop((block, node.rank), None)
        prefill.held_by.discard(node.agent)
        if not prefill.held_by:
            prefill.state = "over"
            self._free(prefill)

    def _take_away(self, prefill: Prefill) -> None:
        """Scribbled over at once: what a slice reads from now on must not count.

        They are used again when no slice reads them: a real worker waits for that.
        """
        for node in self.nodes:
            for block in invariants.flat(prefill.blocks):
                node.memory.pop((block, node.rank), None)
        self._give_when_unread(self.pool, prefill.blocks, {node.agent for node in self.nodes})
        prefill.computed = 0
        prefill.blocks = ()

    def _give_when_unread(self, pool: Pool, blocks: Blocks, workers: set[AgentName]) -> None:
        taken = set(invariants.flat(blocks))
        if any(each.sender in workers and taken & set(each.source) for each in self.world.slices):
            self.world.later(READ_POLL_S, lambda: self._give_when_unread(pool, blocks, workers))
        else:
            pool.give(blocks)

    def _free(self, prefill: Prefill) -> None:
        self.pool.give(prefill.blocks)
        prefill.blocks = ()

    def _tell(self, event: ev.Event) -> None:
        for node in self.nodes:
            node.take(event)


class Consumer:
    """A decode engine: one scheduler, one worker or several.

    `registers`: its setting `after_preemption`.
    """

    def __init__(self, world: "World", name: str, ranks: int, blocks: int, registers: bool) -> None:
        self.world = world
        self.name = name
        self.registers = registers
        self.ranks = tuple(Rank(0, tp) for tp in range(ranks))
        self._blocks = blocks
        self._starts = 0
        self.alive = False
        self.start()

    def start(self) -> None:
        """A fresh process: new incarnation, empty memory."""
        self._starts += 1
        self.alive = True
        self.pool = Pool(self._blocks)
        self.loads: dict[RequestId, Load] = {}
        self.attempts = 0
        name, ranks = f"{self.name}-{self._starts}", len(self.ranks)
        self.nodes = [
            self.world.start_node(name if ranks == 1 else f"{name}-{rank}", rank, ranks)
            for rank in self.ranks
        ]

    @property
    def node(self) -> Node:
        """Its worker, or the first."""
        return self.nodes[0]

    def crash(self) -> None:
        self.alive = False
        for node in self.nodes:
            self.world.kill(node)

    # -- what vLLM does --------------------------------------------------------------------------

    def allocate(
        self,
        transfer_id: TransferId,
        producer: Producer,
        *,
        skip: int = 0,
        surplus: int = 0,
        named: bool = False,
        engine_id: str | None = None,
        again: Load | None = None,
        reads: bool = False,
    ) -> Load | None:
        """Reserve blocks and wait for KV; `again` is a request that was preempted or has ended.

        skip       blocks that are cached here already.
        surplus    blocks too many, which no prefill can have.
        named      whether the router says which engine id it means.
        engine_id  the engine id that it says, if it is not the one that is up.
        reads      pull: from what the router has heard of the prefill, if anything.
        """
        wanted = blocks_of(transfer_id)
        skips = tuple(min(skip, count) for count in wanted)
        counts = tuple(
            count - skipped + surplus for count, skipped in zip(wanted, skips, strict=True)
        )
        blocks = self.pool.take(counts)
        if blocks is None:
            return None
        self.attempts += ATTEMPT_STRIDE
        number = self.world.next_number()
        preempted = again is not None and again.state == "preempted"
        load = Load(
            request_id=again.request_id if again else RequestId(f"{self.name}.c{number}"),
            transfer_id=transfer_id,
            attempt=self.attempts,
            ranks=producer.ranks,
            blocks=blocks,
            first=skips,
            producer=producer,
            sources=dict(again.sources) if again and preempted else {},
        )
        self.loads[load.request_id] = load
        self._scribble(blocks)
        self._tell(
            ev.BlocksAllocated(
                transfer_id=transfer_id,
                request_id=load.request_id,
                attempt=load.attempt,
                address=producer.address,
                engine_id=engine_id or (producer.engine_id if named else None),
                blocks=blocks,
                starts=tuple(BLOCK_TOKENS * skipped for skipped in skips),
                tokens=tokens_of(transfer_id) + BLOCK_TOKENS * surplus,
                keep=self.registers,
                again=preempted,
                reads=reads,
                offer=producer.offer_of(transfer_id) if reads and not preempted else None,
            )
        )
        return load

    def refuse(self, transfer_id: TransferId) -> Load | None:
        """Reserve blocks for a request whose parameters turn out to be bad."""
        blocks = self.pool.take((1, 1))
        if blocks is None:
            return None
        self.attempts += ATTEMPT_STRIDE
        request_id = RequestId(f"{self.name}.c{self.world.next_number()}")
        load = Load(
            request_id=request_id,
            transfer_id=transfer_id,
            attempt=self.attempts,
            ranks=(),
            blocks=blocks,
        )
        self.loads[request_id] = load
        self._tell(
            ev.LoadRefused(
                transfer_id=transfer_id,
                request_id=request_id,
                attempt=load.attempt,
                detail="remote_port is missing",
            )
        )
        return load

    def abort(self, load: Load) -> None:
        load.aborted = True
        if load.state == "loading" or not self.registers:
            self._tell(ev.LoadAborted(request_id=load.request_id))
        if load.state != "loading":
            self.finish(load)

    def finish(self, load: Load) -> None:
        """A request whose load was over has ended."""
        if load.state == "received":
            self.leave(load)
        load.state = "over"
        if self.registers:
            self._tell(ev.RequestEnded(request_id=load.request_id))

    def preempt(self, load: Load) -> None:
        """vLLM takes its blocks away; its KV is computed here, or asked for once more."""
        self.leave(load)
        if self.registers:
            load.state = "preempted"

    def leave(self, load: Load) -> None:
        """A received request goes without a word: its content was right to the end."""
        for node in self.nodes:
            invariants.content_is_right(node, load)
        load.state = "over"
        self.pool.give(load.blocks)

    def release(
        self, transfer_id: TransferId, producer: Producer, again: Load | None = None
    ) -> RequestId:
        """Everything is cached here: nothing has to be moved."""
        self.attempts += ATTEMPT_STRIDE
        number = self.world.next_number()
        request_id = again.request_id if again else RequestId(f"{self.name}.c{number}")
        self._tell(
            ev.ReleaseWanted(
                transfer_id=transfer_id,
                request_id=request_id,
                attempt=self.attempts,
                address=producer.address,
                engine_id=None,
            )
        )
        return request_id

    def report_received(self, node: Node, effect: ef.ReportReceived) -> None:
        load = self.loads.get(effect.request_id)
        invariants.load_is_awaited(load, node, effect.request_id)
        assert load is not None
        invariants.nothing_lands_in(self.world, node, invariants.flat(load.blocks))
        load.reason = load.reason or effect.reason or ""
        load.reported.add(node.agent)
        if effect.reason is None:
            invariants.content_is_right(node, load)
        if len(load.reported) < len(self.nodes):
            return
        if not load.reason:
            load.state = "received"
        else:
            load.state = "failed"
            self._scribble(load.blocks)
            self.pool.give(load.blocks)

    def _tell(self, event: ev.Event) -> None:
        for node in self.nodes:
            node.take(event)

    def _scribble(self, blocks: Blocks) -> None:
        mine: set[Block] = set(invariants.flat(blocks))
        for node in self.nodes:
            for key in [key for key in node.memory if key[0] in mine]:
                del node.memory[key]
