"""What `kvflow bench transfer` moves: pools as a layout has them, and block ids.

A *descriptor* here is what one block of one layer is: the unit in which block ids are given, of
which neighbours may be joined. The pool is that of a small model's shard (16 layers, one KV head of
64 elements, 2 bytes each), twice as large as what is moved.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvflow.ids import Rank
from kvflow.layout import GroupBlocks, Int64s, Region
from kvflow.planning.description import Engine, Group, Layout

LAYERS = 16
TOKEN_BYTES = 2 * 64 * 2
"""Of one layer: key and value of one head, 64 elements, 2 bytes each."""
BYTES_MAX = 320 * 2**20
"""A case that would move more is left out: two processes have a pool of twice that each."""
LAYOUTS: tuple[Layout, ...] = ("LBHNC", "NHD", "BLHNC", "cpu-vec")
SIZES = (16, 32, 64, 128)
COUNTS = (16, 256, 2_048, 18_880, 65_536)
_ALIGNMENT = 4096
_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to move. `descriptors` is a multiple of `LAYERS`."""

    layout: Layout
    block_size: int
    descriptors: int
    fragmented: bool

    @property
    def blocks(self) -> int:
        """Block ids that are moved."""
        return self.descriptors // LAYERS

    @property
    def pool_blocks(self) -> int:
        """Block 0 is vLLM's null block."""
        return 2 * self.blocks + 1

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def bytes(self) -> int:
        """That are moved, of all layers."""
        return self.tokens * LAYERS * TOKEN_BYTES

    @property
    def buffer_bytes(self) -> int:
        """Memory that the pool needs, wherever it begins."""
        return self.pool_blocks * self.block_size * LAYERS * TOKEN_BYTES + _ALIGNMENT

    @property
    def engine(self) -> Engine:
        return Engine(
            model="bench",
            dtype="bfloat16",
            layout=self.layout,
            block_size=self.block_size,
            pool_blocks=self.pool_blocks,
            kv_heads=1,
            head_size=64,
            groups=(Group(kind="full", layers=LAYERS),),
        )

    def regions(self, address: int) -> tuple[Region, ...]:
        """The pool in memory that begins at `address`."""
        base = -(-address // _ALIGNMENT) * _ALIGNMENT
        made = self.engine.caches[0].regions(Rank(0, 0), base)
        return tuple(dataclasses.replace(region, memory="DRAM") for region in made)

    def ids(self) -> tuple[Int64s, Int64s]:
        """Block ids on the producer's and on the consumer's side; the same at each call."""
        if not self.fragmented:
            together = np.arange(1, self.blocks + 1, dtype=np.int64)
            return together, together
        rng = np.random.default_rng(_SEED)
        source, destination = (
            1 + rng.permutation(self.pool_blocks - 1)[: self.blocks] for _ in range(2)
        )
        return source, destination

    def group(self) -> GroupBlocks:
        """The same as a plan wants it."""
        source, destination = self.ids()
        return GroupBlocks(source=source, destination=destination, start=0, tokens=self.tokens)

    def contents(
        self, memory: NDArray[np.uint8], regions: Sequence[Region], ids: Int64s
    ) -> Iterator[NDArray[np.uint8]]:
        """Layer by layer, the bytes of these blocks: (blocks, bytes of a block), as a copy."""
        for region in regions:
            first = region.base - memory.ctypes.data
            view = np.lib.stride_tricks.as_strided(
                memory[first:],
                (region.blocks, region.block_bytes),
                (region.stride_bytes, 1),
                writeable=False,
            )
            yield view[ids]


def cases(
    layouts: Sequence[Layout], sizes: Sequence[int], counts: Sequence[int]
) -> tuple[list[Case], list[Case]]:
    """The cases to measure, and those left out since they move more than `BYTES_MAX`.

    The first layout comes with every block size, the others with the first one.
    """
    made = [
        Case(layout=layout, block_size=size, descriptors=count, fragmented=fragmented)
        for layout in layouts
        for size in (sizes if layout == layouts[0] else sizes[:1])
        for count in counts
        for fragmented in (False, True)
    ]
    kept = [case for case in made if case.bytes <= BYTES_MAX]
    return kept, [case for case in made if case.bytes > BYTES_MAX]
