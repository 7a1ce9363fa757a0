"""A modelled vLLM decode engine: it asks for the KV of prompts, and gives up their blocks.

Like the prefill engine it reuses what was freed at once, so that a late write or read is seen.
"""

from typing import TYPE_CHECKING

from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.ledger import Block
from kvflow.core.notices import Blocks
from kvflow.ids import (
    ATTEMPT_STRIDE,
    PromptDigest,
    Rank,
    RequestId,
    TransferId,
)
from kvflow.testing import invariants
from kvflow.testing.driver import Node
from kvflow.testing.prompts import PROMPT, Load, Pool
from kvflow.testing.sizes import BLOCK_TOKENS, blocks_of, tokens_of

if TYPE_CHECKING:
    from kvflow.testing.world import World


from kvflow.testing.prefill_engine import Producer


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
        prompt: PromptDigest = PROMPT,
    ) -> Load | None:
        """Reserve blocks and wait for KV; `again` is a request that was preempted or has ended.

        skip       blocks that are cached here already.
        surplus    blocks too many, which no prefill can have.
        named      whether the router says which engine id it means.
        engine_id  the engine id that it says, if it is not the one that is up.
        reads      pull: from what the router has heard of the prefill, if anything.
        prompt     of a request that is new.
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
            prompt=again.prompt if again else prompt,
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
                prompt=load.prompt,
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
