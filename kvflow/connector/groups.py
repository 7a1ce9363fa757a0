"""The cache groups of an engine: which block ids of a request hold what, per family.

vLLM keeps block ids per cache group, in token order, with 0 for a block that it has freed again
(those that a sliding window has left behind). A state-space group has no tokens to address: one
block holds a request's whole state, which is good after exactly so many tokens as were computed.

Rules: only what vLLM needs to go on is loaded; of a window, that is its tail. A prompt of a model
with states is loaded up to its last token, exclusively, and the producer computes no further: vLLM
computes the last prompt token again in the decode engine, and a state can take it only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One transferred cache group.

    index           its place among all of vLLM's groups.
    block_tokens    tokens per block; 0 for a state.
    window_tokens   a sliding window's size; None for full attention and for states.
    scratch_blocks  trailing blocks of a state that hold speculation only.
    token_bytes     of one token in one worker, all layers of the group; 0 for a state.
    """

    index: int
    block_tokens: int
    window_tokens: int | None = None
    scratch_blocks: int = 0
    token_bytes: int = 0

    @property
    def is_state(self) -> bool:
        return self.block_tokens == 0

    def to_load(self, ids: Sequence[int], computed: int, tokens: int) -> tuple[int, list[int]]:
        """Of a request's blocks, those to be written: (first token, ids from its block on).

        Tokens before `computed` are here; those from `tokens` on are nobody's yet.
        """
        if self.is_state:
            return 0, [self._state(ids)]
        start = computed
        if self.window_tokens is not None:
            start = max(start, tokens - self.window_tokens + 1)
        first, stop = start // self.block_tokens, -(-tokens // self.block_tokens)
        while first < stop and not ids[first]:
            first += 1
        start = min(max(start, first * self.block_tokens), tokens)
        return start, list(ids[first:stop])

    def to_offer(self, ids: Sequence[int]) -> list[int]:
        """Of a finished prefill's blocks, those that a consumer may be written from."""
        return [self._state(ids)] if self.is_state and ids else list(ids)

    def _state(self, ids: Sequence[int]) -> int:
        scratch = min(self.scratch_blocks, len(ids) - 1)
        return ids[len(ids) - scratch - 1]


def layer_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The specification of a group's layers, where vLLM keeps one for each of them."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def groups_of(config: KVCacheConfig) -> tuple[Group, ...]:
    """The groups that are transferred: not those of drafters, nor what vLLM keeps to itself."""
    return tuple(_group(index, config) for index in transferred(config))


def transferred(config: KVCacheConfig) -> tuple[int, ...]:
    """Indices of the groups that are transferred."""
    return tuple(
        index
        for index, group in enumerate(config.kv_cache_groups)
        if group.enable_kv_transfer and not group.is_eagle_group
    )


def has_state(groups: Sequence[Group]) -> bool:
    """Whether KV is good for an exact number of tokens only."""
    return any(group.is_state for group in groups)


def tokens_to_share(request: "Request", groups: Sequence[Group]) -> int:
    """Prompt tokens whose KV the decode engine loads."""
    tokens: int = request.num_prompt_tokens
    return tokens - 1 if has_state(groups) else tokens


def leave_last_token(request: "Request") -> None:
    """Make a prefill leg of a model with states compute all of its prompt but the last token.

    vLLM has no parameter for it, and its own connectors do the same; a prompt of one token stays
    as it is, and nothing of it is loaded.
    """
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None:
        return
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def _group(index: int, config: KVCacheConfig) -> Group:
    group = config.kv_cache_groups[index]
    spec = layer_spec(group.kv_cache_spec)
    if isinstance(spec, MambaSpec):
        return Group(index=index, block_tokens=0, scratch_blocks=spec.num_speculative_blocks)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return Group(
        index=index,
        block_tokens=spec.block_size,
        window_tokens=window,
        token_bytes=len(group.layer_names) * spec.page_size_bytes // spec.block_size,
    )
