"""Block ids of two sides -> byte runs to copy, by templates that a `Pairing` keeps.

The idea: the tokens of a group are cut at fixed positions into *pieces* that lie inside one block
on both sides. Where a piece's bytes are depends on block ids only through two numbers a side, its
block and its place in the block, so everything else was computed when the peers met: rows (source
address, destination address, length), merged wherever two of them touch on both sides. Rows that
move alike from piece to piece form a *bundle*: which pieces join into one run is found out once,
and holds for every row of it.

No Python work per block, row or run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvflow.layout.runs import Columns, Int64s, Runs, merged

RUNS_MAX = 2**24
"""Runs of one plan, at 24 bytes each. Layouts that need more of them have next to nothing alike."""
_SORTED_RUNS_MAX = 2**14
"""Up to so many runs are sorted to join neighbours of different bundles. More than that come from
scattered blocks, where such neighbours are accidents that are not worth the milliseconds."""

Memories = tuple[str, int, str, int]
"""Memory and device of the source, memory and device of the destination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlocks:
    """The blocks of one cache group between which a transfer moves KV.

    source       block ids from token 0 on. Id 0 is vLLM's null block: nothing is there (freed, say,
                 since it is outside of a sliding window).
    destination  block ids from the block that holds token `start` on.
    start        the first token that the destination lacks; what lies before is there already.
    tokens       where the owed tokens end (excluded). Nothing is owed if it is not above `start`.
    moved        what lies before this token was moved earlier, and is not owed any more.

    More blocks than needed may be given; they are left alone. Of a state group both lists hold
    exactly one id, and `start` and `tokens` mean nothing.
    """

    source: Int64s
    destination: Int64s
    start: int
    tokens: int
    moved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where pieces lie on one side, in the order of tokens: kernel block, and place in it."""

    block: Int64s
    place: Int64s

    def addresses(self, stride: int, step: int) -> Int64s:
        """Of each piece, from the address of block 0, place 0 on."""
        return self.block * stride + self.place * step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """How the block ids of a group address one side: the fields of `Region`, a state as 1 token."""

    blocks: int
    subblocks: int
    tokens: int

    def places(
        self, name: str, ids: Int64s, begin: int, pieces: range, piece_tokens: int
    ) -> Places:
        """Where `pieces` lie; `ids` begin with token `begin`. `name` is for `ValueError`s."""
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.blocks):
            raise ValueError(f"{name}: a block id is outside 0..{self.blocks - 1}")
        block_tokens = self.tokens * self.subblocks
        skipped = begin // block_tokens
        needed = -(-pieces.stop * piece_tokens // block_tokens) - skipped if pieces else 0
        if len(ids) < needed:
            raise ValueError(f"{name}: {len(ids)} blocks where {needed} are needed")
        numbers = np.arange(pieces.start, pieces.stop, dtype=np.int64)
        kernel_block, place = np.divmod(numbers, self.tokens // piece_tokens)
        nth, part = np.divmod(kernel_block, self.subblocks)
        owners = ids[nth - skipped]
        if not owners.all():
            raise ValueError(f"{name}: the null block (0) is among the blocks that are owed")
        return Places(block=owners * self.subblocks + part, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a group's tokens are cut into pieces of `tokens`; regions that agree in it share it."""

    group: int
    is_state: bool
    tokens: int
    source: Pool
    destination: Pool

    def places(self, groups: Sequence[GroupBlocks]) -> tuple[Places, Places]:
        """The owed pieces, on both sides. Raises `ValueError`, in a sentence."""
        if self.group >= len(groups):
            raise ValueError(f"no blocks of group {self.group} among those of {len(groups)} groups")
        blocks = groups[self.group]
        start, tokens = (0, 1) if self.is_state else (blocks.start, blocks.tokens)
        owed = 0 if self.is_state else max(start, blocks.moved)
        counts = len(blocks.source), len(blocks.destination)
        if self.is_state and counts != (1, 1):
            raise ValueError(
                f"group {self.group} is a state: one block on each side, not {counts[0]} and "
                f"{counts[1]}"
            )
        if start < 0:
            raise ValueError(f"group {self.group}: start {start} is negative")
        # Both ends are rounded outwards to whole pieces: what is moved too much lies in blocks of
        # this request, and is either what the destination holds already or nobody's.
        stop = -(-tokens // self.tokens) if tokens > owed else 0
        pieces = range(owed // self.tokens, stop)
        name = f"group {self.group}"
        source = self.source.places(f"{name}, source", blocks.source, 0, pieces, self.tokens)
        return source, self.destination.places(
            f"{name}, destination", blocks.destination, start, pieces, self.tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """How rows move from piece to piece; rows of one motion may be merged.

    source_stride, source_step   bytes from kernel block to kernel block, from place to place;
    destination_stride, destination_step
                                 the same there.
    """

    memories: Memories
    cut: Cut
    source_stride: int
    source_step: int
    destination_stride: int
    destination_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Rows of one motion, all of `length` bytes; their addresses for block 0, place 0."""

    motion: Motion
    length: int
    source: Int64s
    destination: Int64s

    def joined(self, source: Places, destination: Places) -> Columns:
        """The runs of a row at address 0: pieces that touch on both sides are one."""
        motion = self.motion
        return merged(
            source.addresses(motion.source_stride, motion.source_step),
            destination.addresses(motion.destination_stride, motion.destination_step),
            np.full(len(source.block), self.length),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """What one rank writes to another, for any block ids. Made by `pair`, once per peer.

    layers   names of the layers of which something is written, in the source's order.
    bundles  the templates.
    """

    layers: tuple[str, ...]
    bundles: tuple[Bundle, ...]

    def plan(self, groups: Sequence[GroupBlocks]) -> list[Runs]:
        """Runs that copy what is owed of `groups[region.group]`, for every region.

        Returns one `Runs` per pair of memories (one in all, on machines with one kind of memory),
        none if nothing is owed. The owed tokens are rounded outwards to whole pieces: bytes before
        `start` in its block are written once more as they are, and bytes after the last token in
        its block are nobody's.

        Raises `ValueError`, in a sentence: an id is outside its pool, the null block is owed, there
        are too few blocks, or the plan has more than `RUNS_MAX` runs.
        """
        places = {cut: cut.places(groups) for cut in {bundle.motion.cut for bundle in self.bundles}}
        parts: dict[Memories, list[tuple[Bundle, Columns]]] = {}
        total = 0
        for bundle in self.bundles:
            joined = bundle.joined(*places[bundle.motion.cut])
            if len(joined[0]):
                total += len(bundle.source) * len(joined[0])
                parts.setdefault(bundle.motion.memories, []).append((bundle, joined))
            if total > RUNS_MAX:
                raise ValueError(f"a plan may have {RUNS_MAX:,} runs, and this one needs more")
        return [_as_runs(memories, part) for memories, part in parts.items()]


def _as_runs(memories: Memories, parts: list[tuple[Bundle, Columns]]) -> Runs:
    """Every row of every bundle, at each of the addresses where it is to be."""
    total = sum(len(bundle.source) * len(length) for bundle, (_, _, length) in parts)
    source, destination, length = (np.empty(total, dtype=np.int64) for _ in range(3))
    start = 0
    for bundle, (sources, destinations, lengths) in parts:
        shape = len(bundle.source), len(lengths)
        stop = start + shape[0] * shape[1]
        np.add.outer(bundle.source, sources, out=source[start:stop].reshape(shape))
        np.add.outer(bundle.destination, destinations, out=destination[start:stop].reshape(shape))
        length[start:stop].reshape(shape)[:] = lengths
        start = stop
    if total <= _SORTED_RUNS_MAX:
        source, destination, length = merged(source, destination, length)
    return Runs(
        source=source,
        destination=destination,
        length=length,
        source_memory=memories[0],
        source_device=memories[1],
        destination_memory=memories[2],
        destination_device=memories[3],
    )
