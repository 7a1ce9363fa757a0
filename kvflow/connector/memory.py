"""vLLM's KV caches and configuration as regions and facts; what is not supported, by name.

vLLM's caches are views (block, head, token, content) of one allocation per engine. On GPUs the
strides of the view say where a token's bytes are. The CPU kernels lay a head's page out in their
own way; `tests/connector/test_memory.py` finds the same by writing tokens with the kernels.

`float32`, or no AMX   the keys are transposed (a row of tokens per dimension), the values are not
`bfloat16` with AMX    keys in tiles of 16 tokens, values in strips of 16 dimensions, in which two
                       neighbouring tokens alternate
others                 unknown: a head's page moves whole, between equal block sizes
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvflow.connector.groups import layer_spec, transferred
from kvflow.errors import ConfigurationError
from kvflow.ids import Rank
from kvflow.layout import Facts, Plane, Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_AMX_TILE_TOKENS = 16
_AMX_STRIP_DIMS = 16
_ROWS_ISAS = frozenset({"vec", "vec16"})


def regions_of(
    caches: dict[str, torch.Tensor], config: "VllmConfig", kv_config: KVCacheConfig, rank: Rank
) -> tuple[Region, ...]:
    """One region per transferred layer that this worker holds, by group and name.

    Raises `ConfigurationError` for a cache that is not what vLLM is known to make.
    """
    regions = [
        _region(layer, index, spec, caches[layer], config, kv_config, rank)
        for index, layer, spec in _layers(kv_config)
        if layer in caches
    ]
    if not regions:
        raise ConfigurationError("KV caches", sorted(caches), "at least one transferred layer")
    return tuple(regions)


def facts_of(config: "VllmConfig", kv_config: KVCacheConfig) -> Facts:
    """What a peer must agree with."""
    model, parallel = config.model_config, config.parallel_config
    specs = [
        layer_spec(kv_config.kv_cache_groups[index].kv_cache_spec)
        for index in transferred(kv_config)
    ]
    shape = (
        f"{'/'.join(model.architectures)} layers={model.get_total_num_hidden_layers()} "
        f"kv_heads={model.get_total_num_kv_heads()} head_size={model.get_head_size()} "
        f"vocab={model.get_vocab_size()}"
    )
    dtypes = {str(spec.dtype) for spec in specs if isinstance(spec, AttentionSpec)}
    return Facts(
        model=shape,
        kv_dtype=" ".join(sorted(dtypes)) or "state",
        block_sizes=tuple(spec.block_size for spec in specs),
        group_kinds=tuple(_kind(spec) for spec in specs),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        kv_layout=str(kv_config.kv_cache_layout),
    )


def _kind(spec: KVCacheSpec) -> str:
    window = getattr(spec, "sliding_window", None)
    return f"{type(spec).__name__}({window})" if window else type(spec).__name__


def _layers(config: KVCacheConfig) -> Iterator[tuple[int, str, KVCacheSpec]]:
    """(place among the transferred groups, layer, its specification)."""
    for index, group_id in enumerate(transferred(config)):
        group = config.kv_cache_groups[group_id]
        spec = group.kv_cache_spec
        for layer in sorted(group.layer_names):
            own = spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            yield index, layer, own


def _region(
    layer: str,
    group: int,
    spec: KVCacheSpec,
    cache: torch.Tensor,
    config: "VllmConfig",
    kv_config: KVCacheConfig,
    rank: Rank,
) -> Region:
    subblocks, left = divmod(cache.shape[0], kv_config.num_blocks)
    if cache.dim() != 4 or left or not subblocks:
        raise ConfigurationError(
            f"KV cache of {layer}", tuple(cache.shape), f"(blocks, heads, tokens, content) with "
            f"{kv_config.num_blocks} blocks, or kernel blocks that divide them"
        )  # fmt: skip
    item = cache.element_size()
    block, head, token, _ = (stride * item for stride in cache.stride())
    _, heads, tokens, content = cache.shape
    state = isinstance(spec, MambaSpec)
    planes, encoding = _planes(spec, cache, config)
    total = _heads_total(layer, spec, heads, config)
    return Region(
        layer=layer,
        group=group,
        base=cache.data_ptr(),
        stride_bytes=block,
        block_bytes=(heads - 1) * head + (tokens - 1) * token + content * item,
        blocks=kv_config.num_blocks,
        tokens=0 if state else tokens,
        subblocks=subblocks,
        heads=heads,
        head_first=rank.tp * total // config.parallel_config.tensor_parallel_size,
        heads_total=total,
        planes=planes,
        encoding=encoding,
        memory="DRAM" if cache.device.type == "cpu" else "VRAM",
        device=max(cache.get_device(), 0),
    )


def _heads_total(layer: str, spec: KVCacheSpec, heads: int, config: "VllmConfig") -> int:
    """Heads of this layer in the whole engine; a state that is split counts one for each rank."""
    ranks: int = config.parallel_config.tensor_parallel_size
    if isinstance(spec, MambaSpec):
        return 1 if spec.tp_replicated else ranks
    if isinstance(spec, MLAAttentionSpec):
        return 1
    total: int = config.model_config.get_total_num_kv_heads()
    if ranks == 1:
        return heads
    if heads != max(total // ranks, 1):
        raise ConfigurationError(
            f"KV heads of {layer}", heads, f"{total} KV heads over {ranks} tensor-parallel ranks"
        )
    return total


def _planes(
    spec: KVCacheSpec, cache: torch.Tensor, config: "VllmConfig"
) -> tuple[tuple[Plane, ...], str]:
    """Where a head's bytes are in a block, and what they mean."""
    item = cache.element_size()
    _, head, token, _ = (stride * item for stride in cache.stride())
    tokens, content_bytes = cache.shape[2], cache.shape[3] * item
    whole = {"offset": 0, "head_stride": head, "rows": 1, "row_stride": content_bytes}
    if isinstance(spec, MambaSpec):
        shapes = " ".join(map(str, spec.shapes))
        dtypes = " ".join(map(str, spec.dtypes))
        encoding = f"{spec.mamba_type} {get_conv_state_layout()} {shapes} {dtypes}"
        cell = Plane(name="state", token_stride=token, cell_bytes=content_bytes, **whole)
        return (cell,), encoding
    dtype = str(cache.dtype).removeprefix("torch.")
    if isinstance(spec, MLAAttentionSpec):
        cell = Plane(name="latent", token_stride=token, cell_bytes=content_bytes, **whole)
        return (cell,), f"{dtype} {spec.cache_dtype_str}"
    assert isinstance(spec, AttentionSpec)
    if cache.device.type != "cpu":
        cell = Plane(name="kv", token_stride=token, cell_bytes=content_bytes, **whole)
        return (cell,), f"{dtype} K{spec.head_size} V{spec.head_size_v}"
    isa = _get_attn_isa(
        config.model_config.dtype, tokens, spec.head_size, config.cache_config.cache_dtype
    )
    if spec.head_size == spec.head_size_v and isa in _ROWS_ISAS and item > 1:
        return _row_planes(head, tokens, spec.head_size, item), f"{dtype} K in rows"
    if spec.head_size == spec.head_size_v and isa == "amx" and item == 2:
        return _amx_planes(head, tokens, spec.head_size, item), f"{dtype} AMX"
    page = Plane(name="page", token_stride=token, cell_bytes=content_bytes, tile=tokens, **whole)
    return (page,), f"{dtype} {isa} {tokens}x{spec.head_size}"


def _row_planes(head: int, tokens: int, dims: int, item: int) -> tuple[Plane, Plane]:
    """Keys: of each dimension, all tokens of the block; then values: of each token, all of it."""
    keys = Plane(
        name="k",
        offset=0,
        head_stride=head,
        rows=dims,
        row_stride=tokens * item,
        token_stride=item,
        cell_bytes=item,
    )
    values = Plane(
        name="v",
        offset=tokens * dims * item,
        head_stride=head,
        rows=1,
        row_stride=dims * item,
        token_stride=dims * item,
        cell_bytes=dims * item,
    )
    return keys, values


def _amx_planes(head: int, tokens: int, dims: int, item: int) -> tuple[Plane, Plane]:
    """Keys: tiles of 16 tokens; then values: strips of 16 dimensions, tokens in pairs."""
    keys = Plane(
        name="k",
        offset=0,
        head_stride=head,
        rows=1,
        row_stride=dims * item,
        token_stride=dims * item,
        cell_bytes=dims * item,
        tile=_AMX_TILE_TOKENS,
    )
    values = Plane(
        name="v",
        offset=tokens * dims * item,
        head_stride=head,
        rows=dims // _AMX_STRIP_DIMS,
        row_stride=tokens * _AMX_STRIP_DIMS * item,
        token_stride=_AMX_STRIP_DIMS * item,
        cell_bytes=_AMX_STRIP_DIMS * item,
        tile=2,
    )
    return keys, values
