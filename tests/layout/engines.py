"""Engines with real bytes, whose layouts are made by reshaping and transposing address tables.

Nothing here uses strides: a layer's cache is a table of byte addresses with the axes (kernel block,
head, row, token, byte) per plane, and a region's numbers are read off such tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvflow.ids import Rank
from kvflow.layout import GroupBlocks, Plane, Region, Runs, Side

BASE = 64
"""Address of the first byte of every memory."""
PERMUTED = {"amx": ("k", "v")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the layers of one cache group keep of a token, the same in both engines.

    family  "cells" (keys and values of a head lie together), "split", "vec" (keys transposed),
            "amx" (tiles), "latent" (one head that every rank holds), "state" (no tokens).
    heads   in all; of a split state: one per rank.
    size    elements of a head; element_bytes each.
    tile    tokens that are permuted among themselves in the keys of "amx".
    """

    family: str
    heads: int
    size: int
    element_bytes: int
    tile: int
    layers: tuple[str, ...]

    @property
    def planes(self) -> tuple[str, ...]:
        return {"cells": ("kv",), "latent": ("latent",), "state": ("conv", "ssm")}.get(
            self.family, ("k", "v")
        )

    @property
    def bytes(self) -> int:
        """Of one plane, one head, one token."""
        return self.size * self.element_bytes

    def rows(self, plane: str) -> int:
        transposed = {("vec", "k"): self.size, ("amx", "v"): self.size // 2}
        return transposed.get((self.family, plane), 1)

    def tile_of(self, plane: str) -> int:
        return {("amx", "k"): self.tile, ("amx", "v"): 2}.get((self.family, plane), 1)

    def table(self, page: np.ndarray, plane: str, tokens: int) -> np.ndarray:
        """Addresses (..., bytes of all tokens) -> (..., row, token, byte)."""
        outer = page.shape[:-1]
        rows, tile = self.rows(plane), self.tile_of(plane)
        cell = self.bytes // rows
        # Within a tile the tokens are interleaved byte by byte.
        tiles = page.reshape(*outer, rows, tokens // tile, cell, tile)
        return np.swapaxes(tiles, -1, -2).reshape(*outer, rows, tokens, cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one engine lays the layers of a group.

    order      axes from the outermost to the innermost: L layer, B kernel block, P plane, H head,
               and N token (unless the family says itself how tokens lie in a page).
    pads       bytes left free after each step of that axis.
    tokens     per kernel block; 0: a state.
    subblocks  kernel blocks per block id.
    pool       number of block ids.
    """

    order: str
    pads: tuple[int, ...]
    tokens: int
    subblocks: int
    pool: int

    def tables(
        self, kind: Kind, layers: int, heads: int, start: int
    ) -> tuple[dict[str, np.ndarray], int]:
        """Per plane: addresses (layer, kernel block, head, row, token, byte); and their end."""
        cells = self.tokens or 1
        inner = kind.bytes if "N" in self.order else kind.bytes * cells
        extents = {
            "L": layers,
            "B": self.pool * self.subblocks,
            "P": len(kind.planes),
            "H": heads,
            "N": cells,
        }
        steps = [inner]
        for axis, pad in zip(reversed(self.order), reversed(self.pads), strict=True):
            steps.append((steps[-1] + pad) * extents[axis])
        addresses = np.arange(start, start + steps[-1])
        for axis, step in zip(self.order, reversed(steps[:-1]), strict=True):
            outer = addresses.shape[:-1]
            addresses = addresses.reshape(*outer, extents[axis], -1)[..., :step]
        names = [*self.order, "C"]
        tables = {}
        for nth, plane in enumerate(kind.planes):
            if "N" in self.order:
                whole = addresses.transpose([names.index(axis) for axis in "LBHNPC"])
                tables[plane] = whole[:, :, :, None, :, nth]
            else:
                whole = addresses.transpose([names.index(axis) for axis in "LBHPC"])
                tables[plane] = kind.table(whole[:, :, :, nth], plane, cells)
        return tables, start + steps[-1]


@dataclass
class Worker:
    """One rank: its memory, its regions, and where every byte of every layer is."""

    rank: Rank
    memory: np.ndarray
    regions: list[Region]
    tables: dict[str, dict[str, np.ndarray]]
    written: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.written = np.zeros(len(self.memory), dtype=np.int64)

    def cells(self, layer: str, plane: str, head: int, place: tuple[int, int]) -> np.ndarray:
        """Addresses (row, byte) of a head held here, of a token at (kernel block, place)."""
        region = next(region for region in self.regions if region.layer == layer)
        return self.tables[layer][plane][place[0], head - region.head_first, :, place[1], :]


def heads_of(kind: Kind, tp_rank: int, tp_size: int) -> range:
    """As vLLM gives heads to ranks."""
    if kind.heads >= tp_size:
        each = kind.heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    head = tp_rank // (tp_size // kind.heads)
    return range(head, head + 1)


def region_of(
    kind: Kind, layout: Layout, layer: str, group: int, heads: range, tables: dict[str, np.ndarray]
) -> Region:
    """The numbers of a layer, read off its tables."""
    base = min(int(table[0].min()) for table in tables.values())
    end = max(int(table[0].max()) for table in tables.values()) + 1
    some = tables[kind.planes[0]]
    return Region(
        layer=layer,
        group=group,
        base=base,
        stride_bytes=int(some[1].min() - some[0].min()),
        block_bytes=end - base,
        blocks=layout.pool,
        tokens=layout.tokens,
        subblocks=layout.subblocks,
        heads=len(heads),
        head_first=heads.start,
        heads_total=kind.heads,
        planes=tuple(_plane(kind, name, table[0], base) for name, table in tables.items()),
        encoding=kind.family,
        memory="DRAM",
        device=0,
    )


def _plane(kind: Kind, name: str, block: np.ndarray, base: int) -> Plane:
    """`block`: addresses (head, row, token, byte) of kernel block 0."""
    tile = kind.tile_of(name)
    cell = block.shape[-1]
    tiles = block.reshape(*block.shape[:2], -1, tile * cell).min(axis=-1)

    def step(axis: int) -> int:
        first, *rest = np.moveaxis(tiles, axis, 0)
        return int(rest[0].min() - first.min()) if rest else tile * cell

    return Plane(
        name=name,
        offset=int(block.min()) - base,
        head_stride=step(0),
        rows=block.shape[1],
        row_stride=step(1),
        token_stride=step(2) // tile,
        cell_bytes=cell,
        tile=tile,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One engine: sizes, a layout per cache group, and the pipeline stage of each layer.

    shared  all groups have one pool and, layer by layer, the same memory.
    """

    side: Side
    layouts: tuple[Layout, ...]
    stages: dict[str, int]
    shared: bool

    def worker(self, kinds: Sequence[Kind], rank: Rank, rng: np.random.Generator) -> Worker:
        regions: list[Region] = []
        tables: dict[str, dict[str, np.ndarray]] = {}
        end = BASE
        for group, (kind, layout) in enumerate(zip(kinds, self.layouts, strict=True)):
            layers = [layer for layer in kind.layers if self.stages[layer] == rank.pp]
            heads = heads_of(kind, rank.tp, self.side.tp_size)
            start = BASE if self.shared else end
            if not layers:
                continue
            arena, stop = layout.tables(kind, len(layers), len(heads), start)
            end = max(end, stop)
            for nth, layer in enumerate(layers):
                tables[layer] = {plane: table[nth] for plane, table in arena.items()}
                regions.append(region_of(kind, layout, layer, group, heads, tables[layer]))
        memory = rng.integers(0, 256, end + BASE, dtype=np.uint8)
        return Worker(rank=rank, memory=memory, regions=regions, tables=tables)

    def workers(self, kinds: Sequence[Kind], rng: np.random.Generator) -> list[Worker]:
        return [
            self.worker(kinds, Rank(pp, tp), rng)
            for pp in range(self.side.pp_size)
            for tp in range(self.side.tp_size)
        ]


def place_of(layout: Layout, ids: Sequence[int], token: int) -> tuple[int, int]:
    """Kernel block and place in it of a token, when `ids` begin with token 0."""
    if not layout.tokens:
        return int(ids[0]), 0
    kernel, place = token // layout.tokens, token % layout.tokens
    return int(
        ids[kernel // layout.subblocks]
    ) * layout.subblocks + kernel % layout.subblocks, place


def perform(planned: Sequence[Runs], source: Worker, destination: Worker) -> None:
    """Copy, and count how often each byte is written."""
    for runs in planned:
        for at, to, length in zip(
            runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True
        ):
            destination.memory[to : to + length] = source.memory[at : at + length]
            destination.written[to : to + length] += 1


def blocks_of(
    source: Sequence[int], destination: Sequence[int], start: int, tokens: int
) -> GroupBlocks:
    return GroupBlocks(
        source=np.array(source, dtype=np.int64),
        destination=np.array(destination, dtype=np.int64),
        start=start,
        tokens=tokens,
    )
