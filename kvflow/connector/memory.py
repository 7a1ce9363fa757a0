"""vLLM's KV caches and configuration as regions and facts; what is not supported, by name."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvflow.errors import ConfigurationError
from kvflow.layout import Facts, Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_supported(config: "VllmConfig", caches: KVCacheConfig) -> None:
    """Raise `ConfigurationError` at start for what this version cannot move."""
    parallel = config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigurationError(name, getattr(parallel, name), "1; kvflow moves no part of it")
    if parallel.pipeline_parallel_size > 1:
        raise ConfigurationError(
            "pipeline_parallel_size", parallel.pipeline_parallel_size, "1 in this version"
        )
    kinds = [type(group.kv_cache_spec).__name__ for group in caches.kv_cache_groups]
    if kinds != [FullAttentionSpec.__name__]:
        raise ConfigurationError(
            "KV cache groups", kinds, f"one {FullAttentionSpec.__name__} in this version"
        )
    if config.speculative_config is not None:
        raise ConfigurationError(
            "speculative_config", config.speculative_config.method, "none in this version"
        )


def prompt_tokens_max(config: "VllmConfig") -> int:
    """Tokens of the longest prompt that vLLM takes: room for one token of output is left."""
    return int(config.model_config.max_model_len) - 1


def regions_of(caches: dict[str, torch.Tensor], config: KVCacheConfig) -> tuple[Region, ...]:
    """One region per attention layer, in the order of their names.

    Each cache is one tensor per layer whose first dimension is the block. Raises
    `ConfigurationError` for a cache that is not equal contiguous pages.
    """
    group = config.kv_cache_groups[0]
    regions = []
    for layer in sorted(set(group.layer_names) & caches.keys()):
        cache = caches[layer]
        page_bytes = group.kv_cache_spec.page_size_bytes
        if cache.shape[0] != config.num_blocks:
            raise ConfigurationError(
                f"KV cache of {layer}",
                tuple(cache.shape),
                f"{config.num_blocks} blocks first; kernel blocks that differ from vLLM's blocks "
                "are not supported in this version",
            )
        if not cache[0].is_contiguous() or cache[0].nbytes != page_bytes:
            raise ConfigurationError(
                f"KV cache of {layer}",
                (tuple(cache.shape), tuple(cache.stride())),
                f"contiguous pages of {page_bytes} bytes",
            )
        regions.append(
            Region(
                layer=layer,
                group=0,
                base=cache.data_ptr(),
                block_bytes=page_bytes,
                stride_bytes=cache.stride(0) * cache.element_size(),
                blocks=config.num_blocks,
                memory="DRAM" if cache.device.type == "cpu" else "VRAM",
                device=max(cache.get_device(), 0),
            )
        )
    if not regions:
        raise ConfigurationError("KV caches", sorted(caches), "at least one attention layer")
    return tuple(regions)


def facts_of(
    config: "VllmConfig", caches: dict[str, torch.Tensor], kv_config: KVCacheConfig
) -> Facts:
    """What a peer must agree with."""
    model = config.model_config
    cache = next(iter(caches.values()))
    shape = (
        f"{'/'.join(model.architectures)} layers={model.get_total_num_hidden_layers()} "
        f"kv_heads={model.get_total_num_kv_heads()} head_size={model.get_head_size()} "
        f"vocab={model.get_vocab_size()}"
    )
    return Facts(
        model=shape,
        kv_dtype=str(cache.dtype),
        block_sizes=tuple(group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups),
        group_kinds=tuple(type(g.kv_cache_spec).__name__ for g in kv_config.kv_cache_groups),
        tp_size=config.parallel_config.tensor_parallel_size,
        pp_size=config.parallel_config.pipeline_parallel_size,
        kv_layout=f"page {tuple(cache.shape[1:])} strides {tuple(cache.stride()[1:])}",
    )
