"""Which regions can exchange KV, and in which words the others are refused."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvflow.errors import IncompatiblePeersError
from kvflow.layout import Facts, Plane, Region, check_compatible, check_layers, check_pair, pair

from .regions import cells, state, with_plane

TILED = with_plane(cells(tokens=8), tile=4)
V = Plane(name="v", offset=0, head_stride=32, rows=1, row_stride=8, token_stride=8, cell_bytes=8)
FACTS = Facts(
    model="tiny",
    kv_dtype="float32",
    block_sizes=(16,),
    group_kinds=("FullAttentionSpec",),
    tp_size=4,
    pp_size=2,
    kv_layout="NHD",
)


def refusal(ours: Sequence[Region], theirs: Sequence[Region]) -> IncompatiblePeersError:
    """Both ends refuse, with each other's values."""
    with pytest.raises(IncompatiblePeersError) as raised:
        check_pair(ours, theirs)
    with pytest.raises(IncompatiblePeersError) as mirrored:
        check_pair(theirs, ours)
    assert mirrored.value.field == raised.value.field
    assert (mirrored.value.ours, mirrored.value.theirs) == (raised.value.theirs, raised.value.ours)
    with pytest.raises(IncompatiblePeersError):
        pair(ours, theirs, range)
    return raised.value


@pytest.mark.parametrize(
    ("ours", "theirs", "field", "values"),
    [
        (cells(), cells(group=1), "group of a", (0, 1)),
        (cells(), replace(cells(), encoding="bfloat16"), "encoding of a", ("float32", "bfloat16")),
        (cells(), replace(cells(), heads_total=4), "heads_total of a", (2, 4)),
        (replace(cells(), tokens=0), cells(), "is_state of a", (True, False)),
        (cells(), with_plane(cells(), name="k"), "planes of a", (["kv"], ["k"])),
        (
            cells(),
            replace(cells(), planes=(*cells().planes, V)),
            "planes of a",
            (["kv"], ["kv", "v"]),
        ),
        (cells(), cells(cell_bytes=16), "cell_bytes of plane kv of a", (8, 16)),
        (TILED, with_plane(TILED, tile=2), "tile of plane kv of a", (4, 2)),
        (state(), state(cell_bytes=104), "cell_bytes of plane state of s", (100, 104)),
        (
            cells(),
            with_plane(cells(), rows=2, row_stride=4, cell_bytes=4),
            "rows of plane kv of a",
            (1, 2),
        ),
        (
            TILED,
            with_plane(cells(tokens=6), tile=4),
            "tokens per block of a (common parts must be whole tiles of 4)",
            (8, 6),
        ),
    ],
)
def test_regions_that_cannot_exchange_kv_are_refused_by_name_f14(
    ours: Region, theirs: Region, field: str, values: tuple[object, object]
) -> None:
    error = refusal([ours], [theirs])
    assert error.field == field
    assert (error.ours, error.theirs) == values


def test_states_that_are_split_over_other_ranks_are_refused_by_name_f14() -> None:
    """A split state counts one head per rank, so other sizes show as another number of heads."""
    two = replace(state(), heads_total=2)
    assert refusal([two], [replace(state(), heads_total=4)]).field == "heads_total of s"


def test_a_layer_that_is_there_twice_is_refused_f14() -> None:
    assert refusal([cells(), cells()], [cells()]).field == "one region per layer"


@pytest.mark.parametrize(
    "theirs",
    [
        cells(order="nhd"),
        cells(tokens=16),
        cells(tokens=6, blocks=99),
        replace(cells(), subblocks=2),
        replace(cells(), stride_bytes=1000, block_bytes=900, base=7),
        replace(cells(), memory="VRAM", device=3),
    ],
)
def test_where_bytes_lie_may_differ_f14(theirs: Region) -> None:
    check_pair([cells()], [theirs])
    assert pair([cells()], [theirs], range).layers == ("a",)


def test_tiles_do_not_matter_between_equal_blocks() -> None:
    odd = with_plane(cells(tokens=6), tile=4)
    check_pair([odd], [odd])
    check_pair([TILED], [with_plane(cells(tokens=4), tile=4)])


def test_layers_of_one_side_only_are_left_out_f14() -> None:
    pairing = pair([cells("a"), cells("b")], [cells("b"), cells("c")], range)
    assert pairing.layers == ("b",)


def test_layers_of_which_nothing_is_owed_are_left_out_f14() -> None:
    latent = cells("latent", heads=1)
    regions = [latent, cells("a")]
    pairing = pair(regions, regions, lambda heads: range(0 if heads == 1 else heads))
    assert pairing.layers == ("a",)
    nothing = pair(regions, regions, lambda heads: range(0))
    assert (nothing.layers, nothing.plan([])) == ((), [])


@pytest.mark.parametrize("heads", [range(2), range(2, 4), range(1, 3), range(4)])
def test_owed_heads_that_are_not_held_are_refused_by_name_f14(heads: range) -> None:
    """A peer whose regions say something else than its sizes would get too little, unnoticed."""
    ours = replace(cells(), heads_total=4)
    theirs = replace(cells(), head_first=2, heads_total=4)
    with pytest.raises(IncompatiblePeersError, match=r"heads of a .to move: range") as raised:
        pair([ours], [theirs], lambda _: heads)
    assert (raised.value.ours, raised.value.theirs) == (range(2), range(2, 4))


# -- layers --------------------------------------------------------------------------------------


def test_layers_of_several_stages_are_enough_together_f14() -> None:
    check_layers([cells("a"), cells("b")], [[cells("a")], [cells("c"), cells("b")]])


def test_missing_layers_are_refused_by_name_f14() -> None:
    mine = [cells(layer) for layer in "abcdefg"]
    with pytest.raises(IncompatiblePeersError) as raised:
        check_layers(mine, [[cells("a")], [cells("c")]])
    assert raised.value.field == "layers"
    assert raised.value.ours == "7 layers"
    assert raised.value.theirs == "2 layers, lacking b, d, e, f, ..."


def test_a_layer_with_a_missing_head_is_a_missing_layer_f14() -> None:
    half = replace(cells(), heads=1, heads_total=2)
    other = replace(half, head_first=1)
    check_layers([cells()], [[half], [other]])
    with pytest.raises(IncompatiblePeersError, match="lacking a"):
        check_layers([cells()], [[half], [half]])


# -- facts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "large"}, "model"),
        ({"kv_dtype": "bfloat16"}, "KV cache dtype"),
        ({"group_kinds": ("MambaSpec",)}, "kinds of cache groups"),
        ({"tp_size": 3}, "tensor-parallel size"),
        ({"pp_size": 3}, "pipeline-parallel size"),
    ],
)
def test_facts_that_must_agree_are_named_with_both_values_f10_f14(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(IncompatiblePeersError) as raised:
        check_compatible(FACTS, replace(FACTS, **changes))
    assert raised.value.field == field
    (name,) = changes
    assert (raised.value.ours, raised.value.theirs) == (getattr(FACTS, name), changes[name])


def test_facts_may_differ_where_the_layout_bridges_them_f14() -> None:
    other = replace(FACTS, block_sizes=(64,), tp_size=8, pp_size=1, kv_layout="HND")
    check_compatible(FACTS, other)
    check_compatible(other, FACTS)
