"""How far vLLM is with each prompt that is computed for a consumer: what may be written already.

vLLM's scheduler says before a step which tokens the step computes, and into which blocks. When a
worker has made the step, that is complete: the events made here travel with the step's other news
and are handed over at its end (`wait_for_save`).

Rules: work per step is in proportion to the requests that the step computes, whatever else is live;
a stretch ends with a block, except at the end of the prompt, and is told only if it is worth a
write of its own.

Known limit: models with states are not streamed. Their state is good at the end only, and the
attention layers beside it are a small part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflow.connector.groups import Group, has_state
from kvflow.core.events import PrefillAdvanced, PrefillStarted
from kvflow.ids import RequestId
from kvflow.settings import Settings

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """One prompt that vLLM computes, or will.

    tokens  how many it has.
    blocks  ids per cache group of vLLM's, in token order.
    told    so many tokens have been said to be complete.
    """

    prefill: PrefillStarted
    tokens: int
    blocks: list[list[int]] = field(default_factory=list)
    told: int = 0


class Progress:
    """The prompts of one engine that are being computed for consumers."""

    def __init__(self, groups: Sequence[Group], settings: Settings) -> None:
        self._groups = groups
        self._streams = settings.stream == "on" and not has_state(groups)
        self._unit = max((group.block_tokens for group in groups), default=1)
        token_bytes = sum(group.token_bytes for group in groups)
        self._least = -(-settings.stream_bytes_min // token_bytes) if token_bytes else 1
        self._prompts: dict[RequestId, _Prompt] = {}

    def begin(self, prefill: PrefillStarted, tokens: int) -> None:
        """vLLM has taken a prompt of so many tokens. Once more is a no-op."""
        if self._streams and prefill.request_id not in self._prompts:
            self._prompts[prefill.request_id] = _Prompt(prefill=prefill, tokens=tokens)

    def end(self, request_id: RequestId) -> bool:
        """The request is over; whether something of it was said to be complete."""
        prompt = self._prompts.pop(request_id, None)
        return prompt is not None and prompt.told > 0

    def preempted(self, request_id: RequestId) -> None:
        """Its blocks are gone; vLLM will compute it again."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            prompt.told = 0
            prompt.blocks.clear()

    def of_step(self, output: "SchedulerOutput") -> tuple[PrefillAdvanced, ...]:
        """What is complete once the workers have made this step."""
        if not self._prompts:
            return ()
        return tuple(self._advanced(output))

    def _advanced(self, output: "SchedulerOutput") -> Iterator[PrefillAdvanced]:
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if prompt := self._prompts.get(RequestId(new.req_id)):
                prompt.blocks = [list(ids) for ids in new.block_ids]
                yield from self._told(new.req_id, prompt, new.num_computed_tokens, scheduled)
        cached = output.scheduled_cached_reqs
        for id_, ids_added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if prompt := self._prompts.get(RequestId(id_)):
                if id_ in cached.resumed_req_ids:
                    prompt.blocks = []
                for group, ids in enumerate(ids_added or ()):
                    if group == len(prompt.blocks):
                        prompt.blocks.append([])
                    prompt.blocks[group].extend(ids)
                yield from self._told(id_, prompt, computed, scheduled)

    def _told(
        self, id_: str, prompt: _Prompt, computed: int, scheduled: dict[str, int]
    ) -> Iterator[PrefillAdvanced]:
        """The event, if there is enough to tell."""
        tokens = computed + scheduled[id_]
        if tokens < prompt.tokens:
            tokens -= tokens % self._unit
            is_worth_it = tokens - prompt.told >= self._least
        else:
            tokens = prompt.tokens
            is_worth_it = tokens > prompt.told
        if not is_worth_it:
            return
        prompt.told = tokens
        yield PrefillAdvanced(
            transfer_id=prompt.prefill.transfer_id,
            request_id=prompt.prefill.request_id,
            prompt=prompt.prefill.prompt,
            blocks=tuple(
                tuple(group.to_offer(prompt.blocks[group.index])) for group in self._groups
            ),
            tokens=tokens,
        )
