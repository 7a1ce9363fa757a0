"""The layout's arithmetic against a slow, obvious copy of real bytes."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import IncompatiblePeersError
from kvflow.layout import Int64s, Region, Runs, check_pair, plan, slices

BASE = 1000


@dataclass
class Side:
    """One worker's memory: an array of bytes, and the regions in it."""

    regions: list[Region]
    memory: np.ndarray


@st.composite
def strides(draw: st.DrawFn, block_bytes: int) -> int:
    return block_bytes + draw(st.sampled_from([0, 0, 1, 8, block_bytes]))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Side, Side, list[tuple[Int64s, Int64s]]]:
    """Two sides with the same layers in their own layouts, and blocks to copy per group."""
    layers = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 2))
    sizes = [draw(st.integers(1, 6)) for _ in range(layers)]
    pools = [draw(st.integers(1, 12)) for _ in range(2)]
    sides = []
    for pool in pools:
        base, regions = BASE, []
        for layer, size in enumerate(sizes):
            region = Region(
                layer=f"layer.{layer}",
                group=layer % groups,
                base=base,
                block_bytes=size,
                stride_bytes=draw(strides(size)),
                blocks=pool,
                memory="DRAM",
                device=0,
            )
            regions.append(region)
            base += region.span_bytes + draw(st.integers(0, 5))
        memory = np.random.default_rng(pool).integers(0, 256, base, dtype=np.uint8)
        sides.append(Side(regions=draw(st.permutations(regions)), memory=memory))
    blocks = [_ids(draw, pools) for _ in range(groups)]
    return sides[0], sides[1], blocks


def _ids(draw: st.DrawFn, pools: list[int]) -> tuple[Int64s, Int64s]:
    count = draw(st.integers(0, min(pools)))
    picked = []
    for pool in pools:
        shuffled = draw(st.permutations(range(pool)) | st.just(range(pool)))
        start = draw(st.integers(0, pool - count))
        picked.append(np.array(list(shuffled)[start : start + count], dtype=np.int64))
    return picked[0], picked[1]


def copied_slowly(
    source: Side, destination: Side, blocks: list[tuple[Int64s, Int64s]]
) -> np.ndarray:
    """Byte by byte, block by block, layer by layer."""
    memory = destination.memory.copy()
    theirs = {region.layer: region for region in destination.regions}
    for ours in source.regions:
        other = theirs[ours.layer]
        for one, another in zip(*blocks[ours.group], strict=True):
            for byte in range(ours.block_bytes):
                to = other.base + int(another) * other.stride_bytes + byte
                memory[to] = source.memory[ours.base + int(one) * ours.stride_bytes + byte]
    return memory


def copied(source: Side, destination: Side, planned: list[Runs]) -> np.ndarray:
    memory = destination.memory.copy()
    for runs in planned:
        for at, to, length in zip(runs.source, runs.destination, runs.length, strict=True):
            memory[to : to + length] = source.memory[at : at + length]
    return memory


@given(pairs())
def test_the_planned_runs_copy_exactly_the_right_bytes_s6(
    case: tuple[Side, Side, list[tuple[Int64s, Int64s]]],
) -> None:
    source, destination, blocks = case
    planned = plan(source.regions, destination.regions, blocks)
    wanted = copied_slowly(source, destination, blocks)
    assert np.array_equal(copied(source, destination, planned), wanted)
    moved = sum(len(blocks[region.group][0]) * region.block_bytes for region in source.regions)
    assert sum(runs.bytes for runs in planned) == moved


@given(pairs(), st.integers(1, 9), st.integers(1, 4))
def test_slices_are_bounded_and_together_the_same_copy_f19(
    case: tuple[Side, Side, list[tuple[Int64s, Int64s]]], bytes_max: int, runs_max: int
) -> None:
    source, destination, blocks = case
    planned = plan(source.regions, destination.regions, blocks)
    pieces = [piece for runs in planned for piece in slices(runs, bytes_max, runs_max)]
    assert all(0 < len(piece) <= runs_max for piece in pieces)
    assert all(0 < piece.bytes <= bytes_max for piece in pieces)
    assert all((piece.length > 0).all() for piece in pieces)
    wanted = copied_slowly(source, destination, blocks)
    assert np.array_equal(copied(source, destination, pieces), wanted)


@given(pairs())
def test_no_two_neighbouring_runs_of_a_layer_could_have_been_one_f19(
    case: tuple[Side, Side, list[tuple[Int64s, Int64s]]],
) -> None:
    source, destination, blocks = case
    for region in source.regions:
        other = next(each for each in destination.regions if each.layer == region.layer)
        for runs in plan([region], [other], blocks):
            ends = runs.source + runs.length, runs.destination + runs.length
            for nth in range(len(runs) - 1):
                touch = (
                    ends[0][nth] == runs.source[nth + 1],
                    ends[1][nth] == runs.destination[nth + 1],
                )
                assert touch != (True, True)


def region(layer: str = "a", group: int = 0, blocks: int = 10, size: int = 4) -> Region:
    return Region(
        layer=layer,
        group=group,
        base=BASE,
        block_bytes=size,
        stride_bytes=size,
        blocks=blocks,
        memory="DRAM",
        device=0,
    )


def ids(*numbers: int) -> Int64s:
    return np.array(numbers, dtype=np.int64)


def test_contiguous_ids_on_both_sides_are_one_run_per_layer_f19() -> None:
    (runs,) = plan([region()], [region()], [(np.arange(2, 9), np.arange(1, 8))])
    assert (len(runs), runs.bytes) == (1, 28)


def test_ids_that_go_down_are_not_merged() -> None:
    (runs,) = plan([region()], [region()], [(ids(3, 2, 1), ids(3, 2, 1))])
    assert len(runs) == 3


def test_ids_contiguous_on_one_side_only_are_not_merged() -> None:
    (runs,) = plan([region()], [region()], [(ids(1, 2, 3), ids(1, 3, 5))])
    assert len(runs) == 3


def test_nothing_to_copy_is_no_runs_at_all_f8() -> None:
    assert plan([region()], [region()], [(ids(), ids())]) == []


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
@pytest.mark.parametrize("side", [0, 1])
def test_an_id_outside_its_pool_is_refused_f20(bad: int, side: int) -> None:
    blocks = [ids(1, 2), ids(1, 2)]
    blocks[side] = ids(1, bad)
    with pytest.raises(ValueError, match="outside"):
        plan([region()], [region()], [(blocks[0], blocks[1])])


def test_blocks_of_different_number_are_refused_f8() -> None:
    with pytest.raises(ValueError, match="3 blocks against 2"):
        plan([region()], [region()], [(ids(1, 2, 3), ids(1, 2))])


def test_each_pair_of_memories_has_its_own_runs_f14() -> None:
    ours = [region("a"), region("b")]
    theirs = [region("a"), region("b")]
    gpu = Region(
        layer="b",
        group=0,
        base=BASE,
        block_bytes=4,
        stride_bytes=4,
        blocks=10,
        memory="VRAM",
        device=1,
    )
    planned = plan(ours, [theirs[0], gpu], [(ids(1), ids(1))])
    kinds = {(runs.destination_memory, runs.destination_device) for runs in planned}
    assert kinds == {("DRAM", 0), ("VRAM", 1)}


def test_a_run_longer_than_a_slice_is_cut_f19() -> None:
    (runs,) = plan([region(size=10)], [region(size=10)], [(ids(0, 1), ids(0, 1))])
    pieces = list(slices(runs, 7, 100))
    assert [piece.bytes for piece in pieces] == [7, 7, 6]
    starts = [int(piece.source[0]) for piece in pieces]
    assert [after - before for before, after in itertools.pairwise(starts)] == [7, 7]


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ([region("a")], "layers"),
        ([region("a"), region("c")], "layers"),
        ([region("a"), region("b", group=1)], "layers"),
        ([region("a"), region("b", size=8)], "bytes per block of b"),
    ],
)
def test_sides_that_cannot_exchange_blocks_are_refused_by_name_f14(
    theirs: list[Region], field: str
) -> None:
    with pytest.raises(IncompatiblePeersError) as raised:
        check_pair([region("a"), region("b")], theirs)
    assert raised.value.field == field


def test_sides_that_differ_in_order_stride_and_pool_can_exchange_blocks_f14() -> None:
    wide = Region(
        layer="a",
        group=0,
        base=BASE,
        block_bytes=4,
        stride_bytes=64,
        blocks=3,
        memory="VRAM",
        device=0,
    )
    check_pair([region("a"), region("b")], [region("b"), wide])


@pytest.mark.parametrize("bad", ["base", "block_bytes", "blocks", "stride_bytes", "group"])
def test_a_region_that_makes_no_sense_is_refused(bad: str) -> None:
    good = {"group": 0, "base": 1, "block_bytes": 4, "stride_bytes": 4, "blocks": 1, "device": 0}
    with pytest.raises(ValueError, match="region of a"):
        Region(layer="a", memory="DRAM", **{**good, bad: -1})
