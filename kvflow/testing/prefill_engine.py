"""A modelled vLLM prefill engine: it computes prompts, keeps finished ones, and frees them.

It does what vLLM's scheduler does: allocate blocks, compute, finish, preempt, abort, free, and
reuse what was freed at once, so that a late write or read is seen.
"""

from typing import TYPE_CHECKING

from kvflow.core import events as ev
from kvflow.core.notices import Blocks, Offer
from kvflow.core.producer import prefill_name
from kvflow.ids import (
    Address,
    AgentName,
    PromptDigest,
    Rank,
    RequestId,
    TransferId,
)
from kvflow.testing import invariants
from kvflow.testing.driver import Node, Tag
from kvflow.testing.faults import Fault
from kvflow.testing.prompts import PROMPT, Pool, Prefill
from kvflow.testing.sizes import blocks_of, complete_blocks, tokens_of

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

    def begin(self, transfer_id: TransferId, prompt: PromptDigest = PROMPT) -> Prefill | None:
        """Start computing a prompt, if there are blocks for it."""
        blocks = self.pool.take(blocks_of(transfer_id))
        if blocks is None:
            return None
        request_id = RequestId(f"{self.name}.p{self.world.next_number()}")
        prefill = Prefill(
            request_id=request_id, transfer_id=transfer_id, prompt=prompt, blocks=blocks
        )
        self.prefills[request_id] = prefill
        self._started(prefill)
        return prefill

    def _started(self, prefill: Prefill) -> None:
        self._tell(
            ev.PrefillStarted(
                transfer_id=prefill.transfer_id,
                request_id=prefill.request_id,
                prompt=prefill.prompt,
            )
        )

    def resume(self, prefill: Prefill) -> None:
        """Compute a preempted prompt again."""
        blocks = self.pool.take(blocks_of(prefill.transfer_id))
        if blocks is not None:
            prefill.blocks = blocks
            prefill.state = "running"
            self._started(prefill)

    def repeat(self, prefill: Prefill) -> None:
        """Say once more that the prompt is computed, as for a second chunk of it."""
        self._started(prefill)

    def advance(self, prefill: Prefill, tokens: int) -> None:
        """Compute some more of the prompt, at most to its end."""
        self._compute(prefill, min(prefill.computed + tokens, tokens_of(prefill.transfer_id)))
        self._tell(
            ev.PrefillAdvanced(
                transfer_id=prefill.transfer_id,
                request_id=prefill.request_id,
                blocks=prefill.blocks,
                tokens=prefill.computed,
                prompt=prefill.prompt,
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
                        prompt=prefill.prompt,
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
                prompt=prefill.prompt,
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
