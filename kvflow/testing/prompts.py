"""What modelled vLLM engines know of their requests, and their pools of blocks."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflow.core.notices import Blocks
from kvflow.ids import AgentName, PromptDigest, Rank, RequestId, TransferId
from kvflow.testing.driver import Node, writes_to
from kvflow.testing.sizes import GROUPS

if TYPE_CHECKING:
    from kvflow.testing.prefill_engine import Producer


PROMPT, OTHER_PROMPT = PromptDigest(b"a prompt"), PromptDigest(b"another")
"""There are as many prompts of each length: two that differ, for requests that use one id."""


class Pool:
    """Free block ids per group; what was freed last is given out first."""

    def __init__(self, blocks: int) -> None:
        self._free = [list(range(blocks)) for _ in range(GROUPS)]
        self.blocks = blocks

    def take(self, counts: tuple[int, ...]) -> Blocks | None:
        if any(count > len(free) for count, free in zip(counts, self._free, strict=True)):
            return None
        return tuple(
            tuple(free.pop() for _ in range(count))
            for count, free in zip(counts, self._free, strict=True)
        )

    def give(self, blocks: Blocks) -> None:
        for ids, free in zip(blocks, self._free, strict=True):
            free.extend(ids)

    @property
    def full(self) -> bool:
        return all(len(free) == self.blocks for free in self._free)


@dataclass(slots=True, kw_only=True)
class Prefill:
    """One request in a producer.

    held_by   workers that have not reported it yet.
    computed  tokens whose KV is complete.
    """

    request_id: RequestId
    transfer_id: TransferId
    prompt: PromptDigest = PROMPT
    state: str = "running"
    blocks: Blocks = ()
    computed: int = 0
    held_by: set[AgentName] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Load:
    """One request in a consumer, as vLLM sees it: loading, received, preempted, failed, over.

    first     position of each group's first block.
    reported  the workers that have reported it; vLLM goes on when all have.
    producer  the one that it loads from, if its parameters name one.
    sources   by worker: the prefill whose KV it had, or must have once more. It need not be the
              same one for all (specs/decisions/0010-parts.md).
    """

    request_id: RequestId
    transfer_id: TransferId
    attempt: int
    ranks: tuple[Rank, ...]
    prompt: PromptDigest = PROMPT
    blocks: Blocks = ()
    first: tuple[int, ...] = ()
    state: str = "loading"
    reason: str = ""
    aborted: bool = False
    reported: set[AgentName] = field(default_factory=set)
    producer: "Producer | None" = field(default=None, repr=False)
    sources: dict[AgentName, str] = field(default_factory=dict)

    @property
    def given_back(self) -> bool:
        return self.state in ("preempted", "failed", "over")

    def writers(self, node: Node) -> list[Rank]:
        """The producer's ranks that write to this worker."""
        return [
            rank
            for rank in self.ranks
            if writes_to(rank.tp, len(self.ranks), node.rank.tp, node.ranks)
        ]
