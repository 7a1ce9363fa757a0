"""Regions of named layouts, for tests that say what they expect."""

from dataclasses import replace

import numpy as np

from kvflow.layout import GroupBlocks, Int64s, Plane, Region

BASE = 2**20


def cells(
    layer: str = "a",
    *,
    order: str = "hnd",
    tokens: int = 4,
    heads: int = 2,
    cell_bytes: int = 8,
    base: int = BASE,
    blocks: int = 10,
    group: int = 0,
) -> Region:
    """Keys and values of a head together: heads outside of tokens ("hnd"), or inside ("nhd")."""
    page = tokens * heads * cell_bytes
    by_head = order == "hnd"
    plane = Plane(
        name="kv",
        offset=0,
        head_stride=tokens * cell_bytes if by_head else cell_bytes,
        rows=1,
        row_stride=cell_bytes,
        token_stride=cell_bytes if by_head else heads * cell_bytes,
        cell_bytes=cell_bytes,
    )
    return Region(
        layer=layer,
        group=group,
        base=base,
        stride_bytes=page,
        block_bytes=page,
        blocks=blocks,
        tokens=tokens,
        heads=heads,
        heads_total=heads,
        planes=(plane,),
        encoding="float32",
        memory="DRAM",
        device=0,
    )


def state(layer: str = "s", *, cell_bytes: int = 100, base: int = BASE) -> Region:
    """One opaque state per block."""
    plane = replace(cells().planes[0], name="state", cell_bytes=cell_bytes)
    return replace(
        cells(layer, base=base),
        tokens=0,
        heads=1,
        heads_total=1,
        stride_bytes=cell_bytes,
        block_bytes=cell_bytes,
        planes=(plane,),
    )


def with_plane(region: Region, **changes: object) -> Region:
    """The first plane changed."""
    plane, *others = region.planes
    return replace(region, planes=(replace(plane, **changes), *others))


def ids(*numbers: int) -> Int64s:
    return np.array(numbers, dtype=np.int64)


def moves(source: Int64s, destination: Int64s, tokens: int, *, start: int = 0) -> list[GroupBlocks]:
    """Of one group."""
    return [GroupBlocks(source=source, destination=destination, start=start, tokens=tokens)]
