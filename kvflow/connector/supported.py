"""What this version moves, family by family; all else is refused at start, with a sentence."""

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvflow.connector.groups import transferred
from kvflow.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec, MambaSpec)
_QUANTIZED = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


def check_supported(config: "VllmConfig", caches: KVCacheConfig) -> None:
    """Raise `ConfigurationError` at start for what this version cannot move."""
    parallel = config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigurationError(name, getattr(parallel, name), "1; kvflow moves no part of it")
    lookahead = config.num_prefill_lookahead_tokens
    if lookahead > 1:
        raise ConfigurationError(
            "num_speculative_tokens", lookahead, "drafters that look ahead by one token of a prompt"
        )
    for index in transferred(caches):
        group = caches.kv_cache_groups[index]
        if group.host_resident:
            raise ConfigurationError(f"cache group {index}", "in host memory", "the engine's pool")
        for spec in _specs(group.kv_cache_spec):
            _check_spec(f"cache group {index}", spec, config)


def prompt_tokens_max(config: "VllmConfig") -> int:
    """Tokens of the longest prompt that vLLM takes: room for one token of output is left."""
    return int(config.model_config.max_model_len) - 1


def excluded_layers(caches: KVCacheConfig) -> list[str]:
    """Layers that are not transferred: a drafter's, or what vLLM makes anew."""
    moved = set(transferred(caches))
    return sorted(
        layer
        for index, group in enumerate(caches.kv_cache_groups)
        if index not in moved
        for layer in group.layer_names
    )


def _specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _check_spec(name: str, spec: KVCacheSpec, config: "VllmConfig") -> None:
    kind = type(spec)
    if kind not in _KINDS:
        allowed = ", ".join(known.__name__ for known in _KINDS)
        raise ConfigurationError(f"KV cache of {name}", kind.__name__, f"one of {allowed}")
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "none":
            raise ConfigurationError(
                "mamba_cache_mode",
                spec.mamba_cache_mode,
                '"none" (vLLM chooses it without prefix caching: --no-enable-prefix-caching)',
            )
        return
    assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
    if spec.tokens_per_state != 1:
        raise ConfigurationError(f"tokens per state of {name}", spec.tokens_per_state, "1")
    if spec.kv_quant_mode not in _QUANTIZED:
        raise ConfigurationError(
            "kv_cache_dtype", config.cache_config.cache_dtype, "no scales inside of the cache"
        )
