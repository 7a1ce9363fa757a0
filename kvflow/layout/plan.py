"""Block ids of two sides -> byte runs to copy.

The idea: blocks at the same token position are paired first (by the caller), then each region
turns the pairs into (source, destination, length) rows, and rows that touch on both sides are
merged. All of it is numpy; no Python work per block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import IncompatiblePeersError
from kvflow.layout.region import Region

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Byte runs between one pair of memories.

    source, destination  absolute addresses, int64, one per run.
    length               bytes, int64, one per run.
    source_memory, source_device, destination_memory, destination_device
                         as in `Region`; the same for every run here.
    """

    source: Int64s
    destination: Int64s
    length: Int64s
    source_memory: str
    source_device: int
    destination_memory: str
    destination_device: int

    def __len__(self) -> int:
        return len(self.length)

    @property
    def bytes(self) -> int:
        return int(self.length.sum())

    def part(self, start: int, stop: int) -> "Runs":
        """Runs `start` (included) to `stop` (excluded)."""
        return Runs(
            source=self.source[start:stop],
            destination=self.destination[start:stop],
            length=self.length[start:stop],
            source_memory=self.source_memory,
            source_device=self.source_device,
            destination_memory=self.destination_memory,
            destination_device=self.destination_device,
        )


def check_pair(ours: Sequence[Region], theirs: Sequence[Region]) -> None:
    """Raise `IncompatiblePeersError`, naming the field, unless blocks fit on both sides."""
    names_ours = [(region.group, region.layer) for region in ours]
    names_theirs = [(region.group, region.layer) for region in theirs]
    if sorted(names_ours) != sorted(names_theirs):
        missing = sorted(set(names_ours) ^ set(names_theirs))
        raise IncompatiblePeersError(
            "layers", f"{len(ours)} layers", f"{len(theirs)} layers, differing in {missing[:4]}"
        )
    by_name = {(region.group, region.layer): region for region in theirs}
    for region in ours:
        other = by_name[(region.group, region.layer)]
        if region.block_bytes != other.block_bytes:
            raise IncompatiblePeersError(
                f"bytes per block of {region.layer}", region.block_bytes, other.block_bytes
            )


def plan(
    source: Sequence[Region],
    destination: Sequence[Region],
    blocks: Sequence[tuple[Int64s, Int64s]],
) -> list[Runs]:
    """Runs that copy `blocks[group] = (source ids, destination ids)` of every layer.

    The two id arrays of a group have the same length and are paired by position. Returns one
    `Runs` per pair of memories (one in all, on machines with one kind of memory). Raises
    `ValueError` for an id outside its pool or for arrays of different length.
    """
    by_name = {(region.group, region.layer): region for region in destination}
    parts: dict[tuple[str, int, str, int], list[tuple[Int64s, Int64s, Int64s]]] = {}
    for region in source:
        other = by_name[(region.group, region.layer)]
        ids, other_ids = blocks[region.group]
        _check_ids(ids, region)
        _check_ids(other_ids, other)
        if len(ids) != len(other_ids):
            raise ValueError(f"group {region.group}: {len(ids)} blocks against {len(other_ids)}")
        if not len(ids):
            continue
        key = (region.memory, region.device, other.memory, other.device)
        parts.setdefault(key, []).append(_region_runs(region, other, ids, other_ids))
    return [
        Runs(
            source=np.concatenate([part[0] for part in group]),
            destination=np.concatenate([part[1] for part in group]),
            length=np.concatenate([part[2] for part in group]),
            source_memory=key[0],
            source_device=key[1],
            destination_memory=key[2],
            destination_device=key[3],
        )
        for key, group in parts.items()
    ]


def slices(runs: Runs, bytes_max: int, runs_max: int) -> Iterator[Runs]:
    """Cut `runs` into pieces of at most `bytes_max` bytes and `runs_max` runs.

    A run longer than `bytes_max` is cut too, so the bound holds for every piece.
    """
    cut = _cut_long(runs, bytes_max)
    ends = np.cumsum(cut.length)
    start = 0
    while start < len(cut):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + bytes_max, side="right"))
        stop = min(max(stop, start + 1), start + runs_max)
        yield cut.part(start, stop)
        start = stop


def _check_ids(ids: Int64s, region: Region) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= region.blocks):
        raise ValueError(f"a block id of group {region.group} is outside 0..{region.blocks - 1}")


def _region_runs(
    region: Region, other: Region, ids: Int64s, other_ids: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """One region's rows, adjacent ones merged."""
    source = region.base + ids * region.stride_bytes
    destination = other.base + other_ids * other.stride_bytes
    size = region.block_bytes
    breaks = (np.diff(source) != size) | (np.diff(destination) != size)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(np.concatenate((starts, [len(ids)])))
    return source[starts], destination[starts], counts * size


def _cut_long(runs: Runs, bytes_max: int) -> Runs:
    if not len(runs) or int(runs.length.max()) <= bytes_max:
        return runs
    pieces = -(-runs.length // bytes_max)
    index = np.repeat(np.arange(len(runs)), pieces)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = nth * bytes_max
    return Runs(
        source=runs.source[index] + offset,
        destination=runs.destination[index] + offset,
        length=np.minimum(bytes_max, runs.length[index] - offset),
        source_memory=runs.source_memory,
        source_device=runs.source_device,
        destination_memory=runs.destination_memory,
        destination_device=runs.destination_device,
    )
