"""What is planned for given blocks, and which blocks are refused."""

import importlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.layout import GroupBlocks, Int64s, Plane, Region, Runs, pair, slices
from kvflow.layout import plan as plan_blocks
from kvflow.layout.named import amx_planes, vec_planes

from .regions import BASE, cells, ids, moves, state

PLAN = importlib.import_module("kvflow.layout.plan")


def planned(
    source: list[Region], destination: list[Region], groups: list[GroupBlocks]
) -> list[Runs]:
    return pair(source, destination, range).plan(groups)


def rows(runs: Runs) -> list[tuple[int, int, int]]:
    columns = (runs.source.tolist(), runs.destination.tolist(), runs.length.tolist())
    return list(zip(*columns, strict=True))


# -- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_contiguous_ids_on_both_sides_are_one_run_per_layer_f19(order: str) -> None:
    ours = [cells("a", order=order), cells("b", order=order, base=BASE + 10_000)]
    (runs,) = planned(ours, ours, moves(np.arange(2, 9), np.arange(1, 8), 28))
    assert rows(runs) == [(BASE + 128, BASE + 64, 448), (BASE + 10_128, BASE + 10_064, 448)]


def test_blocks_of_all_layers_together_are_one_run_f19() -> None:
    """Cross-layer blocks: each layer's part of a block lies next to the next layer's."""
    ours = [
        replace(cells(layer, base=BASE + 64 * nth), stride_bytes=192)
        for nth, layer in enumerate("abc")
    ]
    (runs,) = planned(ours, ours, moves(ids(1, 2, 5), ids(4, 5, 6), 12))
    assert rows(runs) == [(BASE + 192, BASE + 768, 384), (BASE + 960, BASE + 1152, 192)]


def test_ids_that_go_down_on_both_sides_are_one_run_f19() -> None:
    (runs,) = planned([cells()], [cells()], moves(ids(3, 2, 1), ids(6, 5, 4), 12))
    assert rows(runs) == [(BASE + 64, BASE + 256, 192)]


def test_ids_contiguous_on_one_side_only_are_not_merged() -> None:
    (runs,) = planned([cells()], [cells()], moves(ids(1, 2, 3), ids(1, 3, 5), 12))
    assert len(runs) == 3


def test_heads_inside_tokens_and_outside_of_them_are_a_run_per_cell() -> None:
    (runs,) = planned([cells(order="nhd")], [cells(order="hnd")], moves(ids(1), ids(1), 4))
    assert runs.length.tolist() == [8] * 8
    assert runs.destination[:2].tolist() == [BASE + 64, BASE + 96]


def test_half_the_heads_of_blocks_with_heads_outside_are_a_run_per_block() -> None:
    half = replace(cells(heads=1), head_first=1, heads_total=2)
    (runs,) = pair([cells()], [half], lambda _: range(1, 2)).plan(moves(ids(1, 2), ids(1, 2), 8))
    assert rows(runs) == [(BASE + 96, BASE + 32, 32), (BASE + 160, BASE + 64, 32)]


def test_a_state_moves_whole_whatever_is_there_already_f15() -> None:
    groups = moves(ids(3), ids(5), 17, start=17)
    (runs,) = planned([state()], [state(base=BASE + 4)], groups)
    assert rows(runs) == [(BASE + 300, BASE + 504, 100)]


def test_each_pair_of_memories_has_its_own_runs_f14() -> None:
    gpu = replace(cells("b"), memory="VRAM", device=1)
    found = planned([cells("a"), cells("b")], [cells("a"), gpu], moves(ids(1), ids(1), 4))
    kinds = {(runs.destination_memory, runs.destination_device) for runs in found}
    assert kinds == {("DRAM", 0), ("VRAM", 1)}
    assert {(runs.source_memory, runs.source_device) for runs in found} == {("DRAM", 0)}
    assert [runs.bytes for runs in found] == [64, 64]


@pytest.mark.parametrize("start", [4, 5, 8])
def test_nothing_owed_is_no_runs_at_all_f8(start: int) -> None:
    assert planned([cells()], [cells()], moves(ids(), ids(), 4, start=start)) == []


@pytest.mark.parametrize(
    ("start", "tokens", "first", "count"),
    [(0, 16, 0, 4), (0, 1, 0, 1), (4, 16, 1, 3), (5, 9, 1, 2), (7, 8, 1, 1), (15, 16, 3, 1)],
)
def test_owed_tokens_are_rounded_outwards_to_common_parts_of_blocks_f8(
    start: int, tokens: int, first: int, count: int
) -> None:
    """Blocks of 8 and of 4 tokens: parts of 4, of 64 bytes for both heads together."""
    ours, theirs = cells(tokens=8, order="nhd"), cells(tokens=4, order="nhd")
    skipped = start // 4
    groups = moves(ids(5, 6), ids(1, 2, 3, 4)[skipped:], tokens, start=start)
    (runs,) = planned([ours], [theirs], groups)
    assert rows(runs) == [(BASE + 5 * 128 + 64 * first, BASE + 64 * (1 + first), 64 * count)]


def test_blocks_beyond_the_last_token_are_left_alone_f8_f16() -> None:
    (runs,) = planned([cells()], [cells()], moves(ids(1, 2, 9), ids(1, 2, 3, 4), 5))
    assert rows(runs) == [(BASE + 64, BASE + 64, 128)]


def test_blocks_freed_outside_of_a_window_are_not_read_f15() -> None:
    (runs,) = planned([cells()], [cells()], moves(ids(0, 0, 3), ids(7), 12, start=8))
    assert rows(runs) == [(BASE + 192, BASE + 448, 64)]


@pytest.mark.parametrize("planes", [vec_planes(16, 64, 4), amx_planes(16, 64, 4)])
def test_what_lies_inside_of_whole_equal_blocks_costs_nothing_f19(
    planes: tuple[Plane, ...],
) -> None:
    """Keys, values and heads of a block are one row, or scattered blocks would be many runs."""
    page = 2 * planes[0].head_stride
    ours = replace(
        cells(), tokens=16, planes=planes, stride_bytes=page, block_bytes=page, encoding="cpu"
    )
    pairing = pair([ours], [ours], range)
    assert [(bundle.length, len(bundle.source)) for bundle in pairing.bundles] == [(page, 1)]
    (runs,) = pairing.plan(moves(ids(3, 5, 7), ids(7, 5, 3), 48))
    assert runs.length.tolist() == [page] * 3


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_id_outside_its_pool_is_refused_f20(bad: int, side: str) -> None:
    (good,) = moves(ids(1, 2), ids(1, 2), 8)
    with pytest.raises(ValueError, match=f"group 0, {side}: a block id is outside 0..9"):
        planned([cells()], [cells()], [replace(good, **{side: ids(1, bad)})])


@pytest.mark.parametrize("side", ["source", "destination"])
def test_the_null_block_is_refused_where_something_is_owed_f15_f20(side: str) -> None:
    (good,) = moves(ids(1, 2), ids(1, 2), 8)
    with pytest.raises(ValueError, match=f"group 0, {side}: the null block"):
        planned([cells()], [cells()], [replace(good, **{side: ids(0, 2)})])
    with pytest.raises(ValueError, match=f"{side}: the null block"):
        planned([state()], [state()], [replace(*moves(ids(1), ids(1), 1), **{side: ids(0)})])


@pytest.mark.parametrize("side", ["source", "destination"])
def test_too_few_blocks_are_refused_f8(side: str) -> None:
    (good,) = moves(ids(1, 2, 3), ids(2, 3), 9, start=5)
    planned([cells()], [cells()], [good])
    short = replace(good, **{side: getattr(good, side)[:-1]})
    needed = {"source": "2 blocks where 3 are needed", "destination": "1 blocks where 2 are needed"}
    with pytest.raises(ValueError, match=f"group 0, {side}: {needed[side]}"):
        planned([cells()], [cells()], [short])


def test_more_tokens_than_anybody_has_blocks_for_cost_nothing_to_refuse_f20() -> None:
    with pytest.raises(ValueError, match="are needed"):
        planned([cells()], [cells()], moves(ids(1), ids(1), 2**60))


def test_a_negative_start_is_refused_f20() -> None:
    with pytest.raises(ValueError, match="group 0: start -1 is negative"):
        planned([cells()], [cells()], moves(ids(1), ids(1), 4, start=-1))


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (2, 1), (1, 2), (0, 0)])
def test_a_state_has_exactly_one_block_on_each_side_f15(counts: tuple[int, int]) -> None:
    source, destination = (ids(*range(1, count + 1)) for count in counts)
    with pytest.raises(ValueError, match="group 0 is a state: one block on each side, not"):
        planned([state()], [state()], moves(source, destination, 1))


def test_a_group_without_blocks_is_refused_f20() -> None:
    with pytest.raises(ValueError, match="no blocks of group 1 among those of 1 groups"):
        planned([cells(group=1)], [cells(group=1)], moves(ids(1), ids(1), 4))


def test_a_plan_of_more_runs_than_the_limit_is_refused_f19(monkeypatch: pytest.MonkeyPatch) -> None:
    pairing = pair([cells(order="nhd")], [cells()], range)
    groups = moves(ids(1, 3), ids(1, 3), 8)
    monkeypatch.setattr(PLAN, "RUNS_MAX", 16)
    assert sum(len(runs) for runs in pairing.plan(groups)) == 16
    monkeypatch.setattr(PLAN, "RUNS_MAX", 15)
    with pytest.raises(ValueError, match="a plan may have 15 runs, and this one needs more"):
        pairing.plan(groups)


def test_many_scattered_runs_are_not_sorted_and_still_the_same_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairing = pair([cells(order="nhd")], [cells()], range)
    groups = moves(ids(5, 1, 3), ids(2, 9, 4), 12)
    (few,) = pairing.plan(groups)
    monkeypatch.setattr(PLAN, "_SORTED_RUNS_MAX", 1)
    (many,) = pairing.plan(groups)
    assert sorted(rows(many)) == rows(few)


# -- slices --------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=20),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_slices_are_bounded_and_together_the_same_copy_f19(
    spans: list[tuple[int, int]], bytes_max: int, runs_max: int
) -> None:
    length = np.array([size for size, _ in spans])
    starts = np.cumsum([size + gap for size, gap in spans]) - length
    runs = Runs(
        source=starts,
        destination=starts[::-1] + 1000,
        length=length,
        source_memory="DRAM",
        source_device=0,
        destination_memory="VRAM",
        destination_device=1,
    )
    pieces = list(slices(runs, bytes_max, runs_max))
    assert all(0 < len(piece) <= runs_max for piece in pieces)
    assert all(0 < piece.bytes <= bytes_max for piece in pieces)
    assert all((piece.length > 0).all() for piece in pieces)
    assert sorted(itertools.chain(*map(copied, pieces))) == sorted(copied(runs))
    assert {(piece.source_memory, piece.destination_device) for piece in pieces} == {("DRAM", 1)}


def copied(runs: Runs) -> list[tuple[int, int]]:
    """(source, destination) of every byte."""
    return [(at + nth, to + nth) for at, to, size in rows(runs) for nth in range(size)]


def test_a_run_longer_than_a_slice_is_cut_f19() -> None:
    (runs,) = planned([cells()], [cells()], moves(ids(1, 2), ids(1, 2), 8))
    pieces = list(slices(runs, 100, 100))
    assert [piece.bytes for piece in pieces] == [100, 28]
    starts = [int(piece.source[0]) for piece in pieces]
    assert starts == [BASE + 64, BASE + 164]


# -- whole blocks, paired ------------------------------------------------------------------------


def paired(source: Int64s, destination: Int64s) -> list[Runs]:
    return plan_blocks([cells()], [cells()], [(source, destination)])


def test_blocks_that_are_paired_already_are_moved_whole() -> None:
    (runs,) = paired(ids(1, 4), ids(2, 3))
    assert rows(runs) == [(BASE + 64, BASE + 128, 64), (BASE + 256, BASE + 192, 64)]
    with pytest.raises(ValueError, match="3 blocks against 2"):
        paired(ids(1, 2, 3), ids(1, 2))
