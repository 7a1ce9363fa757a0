"""An engine as a JSON file describes it -> facts, and regions at made-up addresses."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvflow.errors import KVFlowError
from kvflow.ids import Rank
from kvflow.layout import Facts, Plane, Region, Side
from kvflow.layout.named import ORDERS, amx_planes, cell_plane, strides, vec_planes
from kvflow.layout.topology import held
from kvflow.wire.messages import GROUPS_MAX, RANKS_MAX, REGIONS_MAX

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_CPU = {"cpu-vec": vec_planes, "cpu-amx": amx_planes}
_SPACING = 2**20
"""Bytes left between the memories of two groups, so that nothing of them touches."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=REGIONS_MAX)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
Layout = Literal[
    "NHD", "HND", "LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC", "cpu-vec", "cpu-amx"
]


class DescriptionError(KVFlowError):
    """A description that cannot be read, in a sentence that names the file and the place."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share block ids. What is left out is the engine's.

    kind         "full" or "sliding" attention, "mla" (one latent, in every rank), "state".
    layers       how many; spread evenly over the pipeline stages.
    window       tokens, of a sliding group.
    state_bytes  of one layer's state in one rank, of a state group.
    """

    kind: Literal["full", "sliding", "mla", "state"]
    layers: Layers
    window: Count | None = None
    state_bytes: Count | None = None
    block_size: Count | None = None
    kernel_block_size: Count | None = None
    kv_heads: Count | None = None
    head_size: Count | None = None


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine.

    layout             a name of `kvflow.layout.named`, or "cpu-vec", "cpu-amx".
    block_size         tokens per block id.
    kernel_block_size  tokens per block of the kernel, if that is another; divides block_size.
    pool_blocks        block ids 0 to pool_blocks - 1; id 0 is vLLM's null block.
    tp, pp             ranks along each axis.
    kv_heads           of the model, not of a rank.
    head_size          elements of a key of one head, or of a latent.
    """

    model: Annotated[str, msgspec.Meta(min_length=1)]
    dtype: Literal["float32", "bfloat16", "float16", "fp8"]
    layout: Layout
    block_size: Count
    pool_blocks: Annotated[int, msgspec.Meta(ge=2, le=2**24)]
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=GROUPS_MAX)]
    kernel_block_size: Count | None = None
    tp: Ranks = 1
    pp: Ranks = 1
    kv_heads: Count | None = None
    head_size: Count | None = None

    @property
    def side(self) -> Side:
        return Side(tp_size=self.tp, pp_size=self.pp)

    @property
    def ranks(self) -> list[Rank]:
        return [Rank(pp, tp) for pp in range(self.pp) for tp in range(self.tp)]

    @property
    def caches(self) -> tuple["Cache", ...]:
        """The groups with nothing left out."""
        return tuple(Cache(engine=self, number=nth) for nth in range(len(self.groups)))

    def facts(self) -> Facts:
        """As the engine would tell them to a peer."""
        shape = " ".join(cache.shape for cache in self.caches)
        return Facts(
            model=f"{self.model} {shape}",
            kv_dtype=self.dtype,
            block_sizes=tuple(cache.block_size for cache in self.caches),
            group_kinds=tuple(group.kind for group in self.groups),
            tp_size=self.tp,
            pp_size=self.pp,
            kv_layout=self.layout,
        )

    def regions(self, rank: Rank) -> list[Region]:
        """The regions of one rank. Raises `DescriptionError` if they cannot be."""
        regions: list[Region] = []
        base = _SPACING
        for cache in self.caches:
            try:
                made = list(cache.regions(rank, base))
            except ValueError as error:
                raise DescriptionError(f"{self.model}: {error}") from error
            base = max((each.base + each.span_bytes for each in made), default=base) + _SPACING
            regions += made
        return regions


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One cache group of an engine, with what the engine says of all of them."""

    engine: Engine
    number: int

    @property
    def group(self) -> Group:
        return self.engine.groups[self.number]

    @property
    def block_size(self) -> int:
        """Tokens per block id."""
        return self.group.block_size or self.engine.block_size

    @property
    def kernel_block_size(self) -> int:
        own = self.group.kernel_block_size or self.group.block_size
        return own or self.engine.kernel_block_size or self.engine.block_size

    @property
    def heads_total(self) -> int:
        match self.group.kind:
            case "mla":
                return 1
            case "state":
                return self.engine.tp
        return self.group.kv_heads or self.engine.kv_heads or 0

    @property
    def head_size(self) -> int:
        return self.group.head_size or self.engine.head_size or 0

    @property
    def shape(self) -> str:
        """What both engines must agree on, as one word."""
        group = self.group
        if group.kind == "state":
            return f"{group.layers}x{group.kind}"
        window = f"/{group.window}" if group.window else ""
        heads = "" if group.kind == "mla" else f"{self.heads_total}x"
        return f"{group.layers}x{group.kind}{window}({heads}{self.head_size})"

    def faults(self) -> Iterator[str]:
        """What is missing or makes no sense, each as a sentence."""
        group = self.group
        if (group.window is not None) != (group.kind == "sliding"):
            yield "window: a sliding group has one, and no other"
        if (group.state_bytes is not None) != (group.kind == "state"):
            yield "state_bytes: a state group has them, and no other"
        if group.kind != "state" and not self.head_size:
            yield "head_size: neither the group nor the engine says"
        if group.kind in ("full", "sliding"):
            if not self.heads_total:
                yield "kv_heads: neither the group nor the engine says"
            elif self.heads_total % self.engine.tp and self.engine.tp % self.heads_total:
                yield f"kv_heads: {self.heads_total} cannot be split over tp {self.engine.tp}"
        if self.block_size % self.kernel_block_size:
            yield (
                f"kernel_block_size: {self.kernel_block_size} does not divide "
                f"block_size {self.block_size}"
            )
        if self.engine.layout == "cpu-amx" and self.head_size % 16:
            yield f"head_size: {self.head_size} is not a multiple of 16, which cpu-amx needs"

    def regions(self, rank: Rank, base: int) -> Iterator[Region]:
        """The regions of this group in one rank, from address `base` on."""
        group, engine = self.group, self.engine
        layers = [
            f"{self.number}.{layer}"
            for layer in range(group.layers)
            if layer * engine.pp // group.layers == rank.pp
        ]
        if not layers:
            return
        heads = held(engine.side, rank.tp, self.heads_total)
        subblocks = 1 if group.kind == "state" else self.block_size // self.kernel_block_size
        tokens = 0 if group.kind == "state" else self.kernel_block_size
        planes, block, layer_bytes = self._planes(len(layers), len(heads), subblocks)
        for nth, layer in enumerate(layers):
            yield Region(
                layer=layer,
                group=self.number,
                base=base + nth * layer_bytes,
                stride_bytes=block,
                block_bytes=max(plane.end(len(heads), tokens or 1) for plane in planes),
                blocks=engine.pool_blocks,
                tokens=tokens,
                subblocks=subblocks,
                heads=len(heads),
                head_first=heads.start,
                heads_total=self.heads_total,
                planes=planes,
                encoding=f"{engine.dtype}/{engine.layout}" if self._is_cpu else engine.dtype,
                memory="DRAM" if self._is_cpu else "VRAM",
                device=0,
            )

    @property
    def _is_cpu(self) -> bool:
        return self.engine.layout in _CPU

    def _planes(
        self, layers: int, heads: int, subblocks: int
    ) -> tuple[tuple[Plane, ...], int, int]:
        """Planes, bytes from block to block, and from layer to layer."""
        element = _ELEMENT_BYTES[self.engine.dtype]
        blocks = self.engine.pool_blocks * subblocks
        kind, layout = self.group.kind, self.engine.layout
        if kind in ("full", "sliding") and layout in _CPU:
            planes = _CPU[layout](self.kernel_block_size, self.head_size, element)
            page = heads * planes[0].head_stride
            return planes, page, page * blocks
        if kind == "state":
            name, cell, tokens = "state", self.group.state_bytes or 0, 1
        else:
            name, cell, tokens = "kv", 2 * self.head_size * element, self.kernel_block_size
        if kind == "mla":
            name, cell = "latent", self.head_size * element
        order = ORDERS.get(layout, "LBNHC")
        step = strides(order, layers=layers, blocks=blocks, tokens=tokens, heads=heads, cell=cell)
        return (cell_plane(name, cell, step),), step.block, step.layer


def read(path: Path) -> Engine:
    """Raises `DescriptionError`."""
    try:
        engine = msgspec.json.decode(path.read_bytes(), type=Engine)
    except OSError as error:
        raise DescriptionError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise DescriptionError(f"{path}: {error}") from error
    if engine.tp * engine.pp > RANKS_MAX:
        raise DescriptionError(f"{path}: tp {engine.tp} times pp {engine.pp} is over {RANKS_MAX}")
    for cache in engine.caches:
        for fault in cache.faults():
            raise DescriptionError(f"{path}: groups[{cache.number}].{fault}")
    return engine
