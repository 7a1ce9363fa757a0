"""vLLM's caches as regions: a token's bytes are where the planes say, by vLLM's kernels."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvflow.connector import memory
from kvflow.ids import Rank
from kvflow.layout import Region

BLOCKS, HEADS, DIMS = 3, 2, 64
LAYER = "model.layers.0.self_attn.attn"


def config(dtype: torch.dtype = torch.float32, ranks: int = 1, heads: int = HEADS) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, get_total_num_kv_heads=lambda: heads),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )


def kv_config(spec: Any, blocks: int = BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=[LAYER], kv_cache_spec=spec)],
        kv_cache_layout="LBHNC",
    )


def attention(tokens: int, dtype: torch.dtype, heads: int = HEADS, **more: Any) -> Any:
    return FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=DIMS, dtype=dtype, **more
    )


def region_of(cache: torch.Tensor, spec: Any, engine: Any, rank: Rank = Rank(0, 0)) -> Region:
    (region,) = memory.regions_of({LAYER: cache}, engine, kv_config(spec), rank)
    return region


def cells(region: Region, cache: torch.Tensor, plane: str, block: int, token: int) -> np.ndarray:
    """The bytes that the planes give to one token: (heads, bytes)."""
    memory_of = cache.view(torch.uint8).numpy().reshape(-1)
    of = next(each for each in region.planes if each.name == plane)
    start = region.base - cache.data_ptr() + block * region.stride_bytes + of.offset
    rows = [
        [
            memory_of[at : at + of.cell_bytes]
            for row in range(of.rows)
            for at in [
                start + head * of.head_stride + row * of.row_stride + token * of.token_stride
            ]
        ]
        for head in range(region.heads)
    ]
    return np.array([np.concatenate(each) for each in rows])


def kernels() -> list[tuple[torch.dtype, int]]:
    return [(dtype, n) for dtype in (torch.float32, torch.bfloat16) for n in (32, 64, 96)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tokens"), kernels(), ids=str)
def test_the_planes_say_where_vllms_kernels_write_a_token(dtype: torch.dtype, tokens: int) -> None:
    """Block by block, so that a tile's tokens are written together: the kernels may permute them
    inside of a tile, and a tile is what moves."""
    spec, engine = attention(tokens, dtype), config(dtype)
    cache = torch.zeros(BLOCKS, HEADS, tokens, 2 * DIMS, dtype=dtype)
    region = region_of(cache, spec, engine)
    isa = memory._get_attn_isa(dtype, tokens, DIMS, "auto")
    key_cache, value_cache = cache.view(BLOCKS, HEADS, 2 * tokens, -1).chunk(2, dim=2)
    for plane in region.planes:
        for first in range(0, tokens, plane.tile):
            cache.zero_()
            slots = torch.arange(tokens + first, tokens + first + plane.tile)
            ones = torch.ones(plane.tile, HEADS, DIMS, dtype=dtype)
            keys, values = (ones, 0 * ones) if plane.name == "k" else (0 * ones, ones)
            ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
            mine = np.concatenate(
                [
                    cells(region, cache, plane.name, 1, token)
                    for token in range(first, first + plane.tile)
                ]
            )
            written = int((cache.view(torch.uint8) != 0).sum())
            assert written == int((mine != 0).sum()) > 0


@pytest.mark.parametrize(("tokens", "other"), [(32, 64), (64, 32), (32, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cell_is_the_same_bytes_in_blocks_of_another_size(
    dtype: torch.dtype, tokens: int, other: int
) -> None:
    torch.manual_seed(1)
    count = 3 * tokens if tokens > other else 3 * other // 2
    keys, values = (torch.randn(count, HEADS, DIMS, dtype=dtype) for _ in range(2))
    found = []
    for size in (tokens, other):
        blocks = -(-count // size)
        cache = torch.zeros(blocks, HEADS, size, 2 * DIMS, dtype=dtype)
        halves = cache.view(blocks, HEADS, 2 * size, -1).chunk(2, dim=2)
        isa = memory._get_attn_isa(dtype, size, DIMS, "auto")
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(count), isa)
        (region,) = memory.regions_of(
            {LAYER: cache}, config(dtype), kv_config(attention(size, dtype), blocks), Rank(0, 0)
        )
        found.append(
            {
                (plane.name, token): cells(
                    region, cache, plane.name, *divmod(token, size)
                ).tobytes()
                for plane in region.planes
                for token in range(count)
            }
        )
    assert found[0] == found[1]


def test_kernel_blocks_are_subblocks_of_vllms_blocks() -> None:
    cache = torch.zeros(2 * BLOCKS, HEADS, 32, 2 * DIMS)
    region = region_of(cache, attention(64, torch.float32), config())
    assert (region.tokens, region.subblocks, region.blocks) == (32, 2, BLOCKS)
    assert region.span_bytes == cache.nbytes


@pytest.mark.parametrize(("ranks", "held"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1)])
def test_a_rank_holds_its_share_of_the_heads_or_a_copy(ranks: int, held: int) -> None:
    spec = attention(32, torch.float32, heads=held)
    cache = torch.zeros(BLOCKS, held, 32, 2 * DIMS)
    for tp in range(ranks):
        region = region_of(cache, spec, config(ranks=ranks, heads=8), Rank(0, tp))
        assert region.held == range(tp * 8 // ranks, tp * 8 // ranks + held)


def test_a_latent_is_one_head_that_every_rank_holds() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    cache = torch.zeros(BLOCKS, 1, 16, 576)
    region = region_of(cache, spec, config(ranks=8, heads=1), Rank(0, 5))
    assert (region.heads_total, region.held) == (1, range(1))
    assert region.planes[0].cell_bytes == region.planes[0].token_stride == 576 * 4


def test_a_state_is_moved_whole_without_its_padding() -> None:
    spec = MambaSpec(
        block_size=4096,
        shapes=((384, 3), (4, 64, 64)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=81920,
    )
    pool = torch.zeros(BLOCKS * 81920, dtype=torch.int8)
    cache = pool.as_strided((BLOCKS, 1, 1, 70144), (81920, 70144, 70144, 1))
    region = region_of(cache, spec, config(ranks=2), Rank(0, 1))
    assert (region.tokens, region.stride_bytes, region.block_bytes) == (0, 81920, 70144)
    assert (region.heads_total, region.held) == (2, range(1, 2))


def test_a_window_is_among_the_facts_and_its_planes_are_those_of_attention() -> None:
    full = attention(32, torch.float32)
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=HEADS, head_size=DIMS, dtype=torch.float32, sliding_window=128
    )
    cache = torch.zeros(BLOCKS, HEADS, 32, 2 * DIMS)
    assert region_of(cache, window, config()) == region_of(cache, full, config())
    assert (memory._kind(full), memory._kind(window)) == (
        "FullAttentionSpec",
        "SlidingWindowSpec(128)",
    )
