"""Byte runs: what is copied from where to where, merged and cut.

All of it is numpy; no Python work per run.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Columns = tuple[Int64s, Int64s, Int64s]
"""Sources, destinations and lengths of runs."""


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
        return int(np.add.reduce(self.length))

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


def merged(source: Int64s, destination: Int64s, length: Int64s) -> Columns:
    """The same copy in as few runs as there can be, in the order of their sources.

    The runs' sources do not overlap, so whatever can be joined lies side by side once sorted.
    """
    if (source[1:] < source[:-1]).any():
        order = np.argsort(source, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
    ends = source[:-1] + length[:-1], destination[:-1] + length[:-1]
    begins = np.ones(len(source), dtype=np.bool_)
    begins[1:] = (ends[0] != source[1:]) | (ends[1] != destination[1:])
    starts = np.flatnonzero(begins)
    if len(starts) == len(source):
        return source, destination, length
    return source[starts], destination[starts], np.add.reduceat(length, starts)


def slices(runs: Runs, bytes_max: int, runs_max: int) -> list[Runs]:
    """Cut `runs` into pieces of at most `bytes_max` bytes and `runs_max` runs.

    A run longer than `bytes_max` is cut too, so the bound holds for every piece. All pieces are
    made at once: between two posts, with the bytes of one through the processor's caches, each step
    would cost several times as much.
    """
    cut = _cut_long(runs, bytes_max)
    ends = np.cumsum(cut.length)
    pieces = []
    start = before = 0
    while start < len(cut):
        stop = int(ends.searchsorted(before + bytes_max, side="right"))
        stop = min(max(stop, start + 1), start + runs_max)
        pieces.append(cut.part(start, stop))
        start, before = stop, int(ends[stop - 1])
    return pieces


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
