"""Regions: registered pieces of KV memory, and the algebra that says where a token's bytes lie.

A region is one layer's cache in one worker. vLLM addresses it by block ids; a block holds a fixed
number of tokens (or one opaque state). What a layer keeps of a token is cut into *planes* (the
keys, the values, a latent): in each, byte 0 of (block, head, row, token) is at

    base + block * stride_bytes
         + offset + head * head_stride + row * row_stride + token * token_stride

and `cell_bytes` bytes follow that belong together. Every layout that vLLM's kernels use is a choice
of these strides: which axis lies inside which is a matter of their sizes alone.

A kernel may permute tokens among themselves (`tile`): then a cell is not one token's, but a whole
tile of cells holds exactly a tile's tokens, so only whole tiles may move.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PLANES_MAX = 8
"""Planes of one region; the layouts that are known have at most two."""
_ADDRESSES = 2**63
"""Addresses are computed in int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One part of every head's cells; offsets and strides are in bytes.

    name          "k", "v", "kv", "latent", "state"; pairs the planes of two regions.
    offset        of (head 0, row 0, token 0) from the start of a block.
    head_stride   from one head to the next; heads are counted from the first one held here.
    rows          parts into which a token's bytes are spread (1: they lie together).
    row_stride    from one row to the next.
    token_stride  from one token of a block to the next.
    cell_bytes    bytes of one (head, row, token).
    tile          tokens that are permuted among themselves; 1: none.
    """

    name: str
    offset: int
    head_stride: int
    rows: int
    row_stride: int
    token_stride: int
    cell_bytes: int
    tile: int = 1

    def end(self, heads: int, cells: int) -> int:
        """Bytes from a block's start to the end of its last cell; `cells` as in `Region.cells`."""
        last = (heads - 1) * self.head_stride + (self.rows - 1) * self.row_stride
        return self.offset + last + (cells - 1) * self.token_stride + self.cell_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One layer's blocks in one worker. Raises `ValueError` (a sentence) if it makes no sense.

    layer         vLLM's name of the layer; pairs regions of two engines; one region per layer.
    group         index of the KV cache group whose block ids address this region.
    base          address of block 0.
    stride_bytes  from one kernel block to the next; may be less than `block_bytes` where the
                  blocks of several heads or layers are interleaved.
    block_bytes   from a kernel block's start to the end of its last cell.
    blocks        number of block ids in the pool; valid ids are 0 <= id < blocks.
    tokens        tokens per kernel block; 0: a state, which has no positions and moves whole.
    subblocks     kernel blocks per block id: id b is kernel blocks b * subblocks and following.
    heads         heads held here, `head_first` the index of the first, of `heads_total` in all.
                  Fewer than the engine has tensor-parallel ranks: they are replicated. A latent
                  that every rank holds is one head of one. A state that is split over the ranks is
                  one head per rank.
    encoding      what the bytes of a cell mean ("float32", "bfloat16/amx"); must agree.
    memory        "DRAM" or "VRAM", as NIXL names it.
    device        device number; 0 for DRAM.
    """

    layer: str
    group: int
    base: int
    stride_bytes: int
    block_bytes: int
    blocks: int
    tokens: int
    subblocks: int = 1
    heads: int = 1
    head_first: int = 0
    heads_total: int = 1
    planes: tuple[Plane, ...]
    encoding: str
    memory: str
    device: int

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ValueError(f"region of {self.layer}: {fault}")

    @classmethod
    def pages(
        cls,
        *,
        layer: str,
        group: int,
        base: int,
        block_bytes: int,
        stride_bytes: int,
        blocks: int,
        memory: str,
        device: int,
        tokens: int = 1,
        encoding: str = "opaque",
    ) -> "Region":
        """A region of contiguous blocks about whose inside nothing is known.

        Only whole blocks can move, and only between equal blocks. `block_bytes` must be a multiple
        of `tokens`.
        """
        if tokens < 1 or block_bytes % tokens:
            raise ValueError(f"region of {layer}: {block_bytes} bytes are not {tokens} tokens")
        cell = block_bytes // tokens
        page = Plane(
            name="page",
            offset=0,
            head_stride=block_bytes,
            rows=1,
            row_stride=block_bytes,
            token_stride=cell,
            cell_bytes=cell,
            tile=tokens,
        )
        return cls(
            layer=layer,
            group=group,
            base=base,
            stride_bytes=stride_bytes,
            block_bytes=block_bytes,
            blocks=blocks,
            tokens=tokens,
            planes=(page,),
            encoding=encoding,
            memory=memory,
            device=device,
        )

    @property
    def is_state(self) -> bool:
        """Whether a block is one opaque state, without token positions."""
        return self.tokens == 0

    @property
    def cells(self) -> int:
        """Tokens of a kernel block as planes count them: a state is one."""
        return self.tokens or 1

    @property
    def span_bytes(self) -> int:
        """Bytes from block 0 to the end of the last block."""
        return (self.blocks * self.subblocks - 1) * self.stride_bytes + self.block_bytes

    @property
    def held(self) -> range:
        """Indices of the heads that are held here."""
        return range(self.head_first, self.head_first + self.heads)

    def _faults(self) -> Iterator[str]:
        positive = ("base", "block_bytes", "stride_bytes", "blocks", "subblocks", "heads")
        for name in positive:
            if getattr(self, name) <= 0:
                yield f"{name} must be positive"
        for name in ("group", "tokens", "head_first", "device"):
            if getattr(self, name) < 0:
                yield f"{name} must not be negative"
        if self.head_first + self.heads > self.heads_total:
            yield f"heads {self.held} are not among {self.heads_total}"
        if self.is_state and self.subblocks > 1:
            yield "a state has no subblocks"
        if self.base + self.span_bytes >= _ADDRESSES:
            yield "it ends beyond the last address"
        names = [plane.name for plane in self.planes]
        if not 1 <= len(names) <= PLANES_MAX or len(set(names)) < len(names):
            yield f"planes {names} must be 1 to {PLANES_MAX}, each with a name of its own"
        for plane in self.planes:
            for fault in self._plane_faults(plane):
                yield f"plane {plane.name}: {fault}"

    def _plane_faults(self, plane: Plane) -> Iterator[str]:
        if min(plane.rows, plane.cell_bytes, plane.tile) <= 0:
            yield "rows, cell_bytes and tile must be positive"
        strides = (plane.head_stride, plane.row_stride, plane.token_stride)
        if min(plane.offset, *strides) < 0:
            yield "offset and strides must not be negative"
        end = plane.end(self.heads, self.cells)
        if end > self.block_bytes:
            yield f"its cells end at byte {end}, the block at {self.block_bytes}"
        reach = plane.cell_bytes
        axes = [
            *zip((self.heads, plane.rows, self.cells), strides, strict=True),
            (self.blocks * self.subblocks, self.stride_bytes),
        ]
        for count, stride in sorted(axes, key=lambda axis: axis[1]):
            if count > 1 and stride < reach:
                yield f"cells overlap: a stride of {stride} bytes is below the {reach} it must span"
            reach += (count - 1) * stride
