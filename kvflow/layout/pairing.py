"""Two workers' regions -> the `Pairing` that plans between them, or why there can be none.

The idea: of each layer that both have, the owed part of one piece is a set of cells, given by
nested strides on both sides. Axes that are dense on both sides are folded away; what is left is
counted out as rows, and the rows of all layers are sorted and merged wherever they touch on both
sides. Whole equal blocks so become one row, a block of all layers one row as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd
from operator import attrgetter

import numpy as np

from kvflow.errors import IncompatiblePeersError
from kvflow.layout.plan import Bundle, Cut, GroupBlocks, Motion, Pairing, Pool
from kvflow.layout.region import Plane, Region
from kvflow.layout.runs import Columns, Int64s, Runs, merged

_SAME_IN_REGIONS = ("group", "encoding", "heads_total", "is_state")
_SAME_IN_PLANES = ("rows", "cell_bytes", "tile")
_NAMES_SHOWN = 4


def check_layers(consumer: Sequence[Region], producers: Iterable[Sequence[Region]]) -> None:
    """Raise `IncompatiblePeersError` unless `producers` together hold all of `consumer`'s heads.

    `producers`: the regions of each rank that writes to this consumer. A layer of which a part is
    missing is named.
    """
    there: dict[str, set[int]] = {}
    for regions in producers:
        for region in regions:
            there.setdefault(region.layer, set()).update(region.held)
    missing = [
        region.layer
        for region in consumer
        if not there.get(region.layer, set()).issuperset(region.held)
    ]
    if missing:
        raise IncompatiblePeersError(
            "layers", f"{len(consumer)} layers", f"{len(there)} layers, lacking {_some(missing)}"
        )


def check_pair(ours: Sequence[Region], theirs: Sequence[Region]) -> None:
    """Raise `IncompatiblePeersError`, naming the field, unless KV of shared layers can move.

    The same question from either end. A layer that only one side has is none of it: see
    `check_layers`.
    """
    for mine, other in _shared(ours, theirs):
        for field in _SAME_IN_REGIONS:
            _check_same(field, mine.layer, getattr(mine, field), getattr(other, field))
        planes, others = (sorted(region.planes, key=attrgetter("name")) for region in (mine, other))
        _check_same("planes", mine.layer, *([p.name for p in part] for part in (planes, others)))
        for plane, twin in zip(planes, others, strict=True):
            for field in _SAME_IN_PLANES:
                name = f"{field} of plane {plane.name}"
                _check_same(name, mine.layer, getattr(plane, field), getattr(twin, field))
            # Equal blocks move whole, so tokens may be permuted in them as they like.
            if mine.tokens != other.tokens and gcd(mine.tokens, other.tokens) % plane.tile:
                raise IncompatiblePeersError(
                    f"tokens per block of {mine.layer} (common parts must be whole tiles "
                    f"of {plane.tile})",
                    mine.tokens,
                    other.tokens,
                )


def pair(
    source: Sequence[Region],
    destination: Sequence[Region],
    owed_heads: Callable[[int], range],
) -> Pairing:
    """Everything about writing from `source` to `destination` that needs no block ids.

    `owed_heads(heads_total)`: indices of the heads that this source writes to this destination, of
    layers with so many in all; layers of which it owes none, or that only one side has, are left
    out. Raises `IncompatiblePeersError` as `check_pair` does, and when owed heads are not held.
    """
    check_pair(source, destination)
    layers: list[str] = []
    rows: dict[Motion, list[Columns]] = {}
    for ours, theirs in _shared(source, destination):
        heads = owed_heads(ours.heads_total)
        if not heads:
            continue
        for region in (ours, theirs):
            if heads.start not in region.held or heads[-1] not in region.held:
                raise IncompatiblePeersError(
                    f"heads of {ours.layer} (to move: {heads})", ours.held, theirs.held
                )
        layers.append(ours.layer)
        for motion, row in _rows(ours, theirs, heads):
            rows.setdefault(motion, []).append(row)
    bundles = [bundle for motion, parts in rows.items() for bundle in _bundles(motion, parts)]
    return Pairing(layers=tuple(layers), bundles=tuple(bundles))


def plan(
    source: Sequence[Region],
    destination: Sequence[Region],
    blocks: Sequence[tuple[Int64s, Int64s]],
) -> list[Runs]:
    """Runs that copy `blocks[group] = (source ids, destination ids)`, whole, of every layer.

    For callers that hold no `Pairing` and know of no tokens; both sides' blocks are equal.
    """
    counts = [0] * len(blocks)
    for region in source:
        counts[region.group] = region.cells * region.subblocks
    groups = [
        GroupBlocks(source=ours, destination=theirs, start=0, tokens=len(ours) * count)
        for (ours, theirs), count in zip(blocks, counts, strict=True)
    ]
    for ours, theirs in blocks:
        if len(ours) != len(theirs):
            raise ValueError(f"{len(ours)} blocks against {len(theirs)}")
    return pair(source, destination, range).plan(groups)


def _shared(ours: Sequence[Region], theirs: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Both sides' regions of the layers that both have, in our order."""
    mine, others = ({region.layer: region for region in side} for side in (ours, theirs))
    if len(mine) < len(ours) or len(others) < len(theirs):
        raise IncompatiblePeersError(
            "one region per layer",
            f"{len(ours)} regions of {len(mine)} layers",
            f"{len(theirs)} regions of {len(others)} layers",
        )
    return ((region, others[region.layer]) for region in ours if region.layer in others)


def _check_same(field: str, layer: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise IncompatiblePeersError(f"{field} of {layer}", ours, theirs)


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _rows(source: Region, destination: Region, heads: range) -> Iterator[tuple[Motion, Columns]]:
    """The rows of one piece of one layer, plane by plane, and how they move."""
    tokens = gcd(source.cells, destination.cells)
    cut = Cut(
        group=source.group,
        is_state=source.is_state,
        tokens=tokens,
        source=Pool(blocks=source.blocks, subblocks=source.subblocks, tokens=source.cells),
        destination=Pool(
            blocks=destination.blocks, subblocks=destination.subblocks, tokens=destination.cells
        ),
    )
    twins = {plane.name: plane for plane in destination.planes}
    for plane in source.planes:
        twin = twins[plane.name]
        motion = Motion(
            memories=(source.memory, source.device, destination.memory, destination.device),
            cut=cut,
            source_stride=source.stride_bytes,
            source_step=_step(plane, source.cells, tokens),
            destination_stride=destination.stride_bytes,
            destination_step=_step(twin, destination.cells, tokens),
        )
        axes = [
            (tokens, plane.token_stride, twin.token_stride),
            (plane.rows, plane.row_stride, twin.row_stride),
            (len(heads), plane.head_stride, twin.head_stride),
        ]
        starts, ends, length = _unfolded(axes, plane.cell_bytes)
        yield (
            motion,
            (
                starts + _first(source, plane, heads),
                ends + _first(destination, twin, heads),
                np.full(len(starts), length),
            ),
        )


def _step(plane: Plane, block_tokens: int, piece_tokens: int) -> int:
    """Bytes from one piece of a block to the next; 0, for all planes alike, if there is one."""
    return piece_tokens * plane.token_stride if block_tokens > piece_tokens else 0


def _first(region: Region, plane: Plane, heads: range) -> int:
    """Address of the first owed cell in block 0."""
    return region.base + plane.offset + (heads.start - region.head_first) * plane.head_stride


def _unfolded(axes: list[tuple[int, int, int]], length: int) -> tuple[Int64s, Int64s, int]:
    """Offsets of the rows that nested (count, source stride, destination stride) axes give.

    An axis along which rows of `length` bytes lie side by side on both sides makes them longer.
    """
    rest = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1])
    while rest and rest[0][1:] == (length, length):
        length *= rest.pop(0)[0]
    starts = np.zeros(1, dtype=np.int64)
    ends = np.zeros(1, dtype=np.int64)
    for count, source_stride, destination_stride in rest:
        nth = np.arange(count)
        starts = np.add.outer(nth * source_stride, starts).ravel()
        ends = np.add.outer(nth * destination_stride, ends).ravel()
    return starts, ends, length


def _bundles(motion: Motion, parts: list[Columns]) -> Iterator[Bundle]:
    """Rows of one motion, merged, by their length."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    source, destination, lengths = merged(*columns)
    for length in np.unique(lengths):
        chosen = lengths == length
        yield Bundle(
            motion=motion,
            length=int(length),
            source=source[chosen],
            destination=destination[chosen],
        )
