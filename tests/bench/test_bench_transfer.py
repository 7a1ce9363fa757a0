"""`kvflow bench transfer`: what it moves, how it reckons, and that it moves the right bytes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvflow.bench.transfer import BARE, COPY, KVFLOW, PREPARED, WAYS, Measured, in_turn, run
from kvflow.bench.transfer_cases import BYTES_MAX, LAYERS, LAYOUTS, Case, cases
from kvflow.bench.transfer_report import as_dict, goals, line
from kvflow.bench.transfer_ways import Times, copy
from kvflow.cli import app
from kvflow.planning.description import Layout

SMALL = Case(layout="LBHNC", block_size=16, descriptors=3 * LAYERS, fragmented=True)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "transfer", *arguments])


# -- what is moved -------------------------------------------------------------------------------


def test_every_layout_is_measured_and_the_first_with_every_block_size() -> None:
    made, left_out = cases(LAYOUTS, (16, 32), (16, 256))
    assert left_out == []
    assert len(made) == len(set(made)) == (2 + len(LAYOUTS) - 1) * 2 * 2
    assert {case.block_size for case in made if case.layout != LAYOUTS[0]} == {16}


def test_cases_that_move_too_much_are_told_apart() -> None:
    made, left_out = cases(LAYOUTS[:1], (16, 128), (16, 65_536))
    assert made
    assert left_out
    assert max(case.bytes for case in made) <= BYTES_MAX < min(case.bytes for case in left_out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fragmented", [False, True])
def test_ids_are_distinct_and_the_pool_lies_in_its_buffer(layout: Layout, fragmented: bool) -> None:
    case = Case(layout=layout, block_size=32, descriptors=5 * LAYERS, fragmented=fragmented)
    for ids in case.ids():
        assert len(set(ids.tolist())) == case.blocks == 5
        assert ids.min() >= 1
        assert ids.max() < case.pool_blocks
    address = 4097
    regions = case.regions(address)
    assert len(regions) == LAYERS
    assert min(region.base for region in regions) >= address
    ends = [region.base + region.span_bytes for region in regions]
    assert max(ends) <= address + case.buffer_bytes
    assert case.bytes == sum(region.block_bytes for region in regions) * case.blocks


def test_contents_are_the_bytes_of_the_blocks_layer_by_layer() -> None:
    memory = np.zeros(SMALL.buffer_bytes, dtype=np.uint8)
    regions = SMALL.regions(memory.ctypes.data)
    ids = SMALL.ids()[0]
    third = regions[2]
    start = third.base - memory.ctypes.data + int(ids[1]) * third.stride_bytes
    memory[start : start + third.block_bytes] = 7
    layers = list(SMALL.contents(memory, regions, ids))
    assert [int(layer.sum()) for layer in layers] == [
        7 * third.block_bytes if nth == 2 else 0 for nth in range(LAYERS)
    ]
    assert (layers[2][1] == 7).all()


# -- how it reckons ------------------------------------------------------------------------------


def of(case: Case, **times: list[Times]) -> Measured:
    names = {"kvflow": KVFLOW, "prepared": PREPARED, "bare": BARE, "copied": COPY}
    return Measured(
        case=case, runs=48, posts=2, times={names[name]: each for name, each in times.items()}
    )


def measured(case: Case = SMALL) -> Measured:
    return of(
        case,
        kvflow=[
            Times(plan=1.0, post=2.0, copy=3.0, until_posted=4.0, cpu_work=0.5, cpu_copy=0.5),
            Times(plan=1.0, post=2.0, copy=9.0, until_posted=5.0, cpu_work=0.5, cpu_copy=0.5),
            Times(plan=1.0, post=1.0, copy=1.0, until_posted=9.0),
        ],
        prepared=[Times(plan=1.0, post=3.0, copy=8.0, cpu_work=1.0, cpu_copy=3.0)],
        bare=[Times(plan=0.0, post=1.0, copy=4.0, cpu_work=1.0, cpu_copy=3.0)],
        copied=[Times(plan=0.0, post=0.0, copy=2.0)],
    )


def test_medians_bests_and_ratios() -> None:
    each = measured()
    assert each.median_s(KVFLOW) == 6.0
    assert each.best_s(KVFLOW) == 3.0
    assert each.median_s(KVFLOW, "work") == 3.0
    assert each.median_s(KVFLOW, "until_posted") == 5.0
    assert each.ratio(PREPARED) == 0.5
    assert each.ratio(PREPARED, "work") == 0.75
    assert each.gbytes_per_s(KVFLOW) == SMALL.bytes / 6.0 / 1e9


def test_the_other_ways_take_turns_and_kvflow_ends_the_round() -> None:
    rounds = [in_turn(number) for number in range(4)]
    assert [each[0] for each in rounds] == [PREPARED, BARE, COPY, PREPARED]
    assert all(each[-1] == KVFLOW and sorted(each) == sorted(WAYS) for each in rounds)


def test_goals_are_those_of_18880_descriptors() -> None:
    fragmented, contiguous = (
        Case(layout="LBHNC", block_size=16, descriptors=18_880, fragmented=each)
        for each in (True, False)
    )
    found = list(goals([measured(), measured(fragmented), measured(contiguous)]))
    assert [(goal.way, goal.part, goal.ratio, goal.is_met) for goal in found] == [
        (PREPARED, "calls", 0.5, True),
        (PREPARED, "work", 0.75, False),
        (PREPARED, "calls", 0.5, False),
        (PREPARED, "work", 0.75, False),
        (BARE, "calls", 1.2, False),
    ]
    assert str(found[0]).endswith(
        "0.50x of prepared lists (at most 0.50x): met; bests 0.25x, on a processor 0.25x"
    )


def test_a_line_and_the_json_show_every_way() -> None:
    words = line(measured()).split()
    assert words[:6] == ["LBHNC", "16", "frag.", "48", "48", "2"]
    written = json.loads(json.dumps(as_dict([measured()], 3)))
    (case,) = written["cases"]
    assert set(case["ways"]) == set(WAYS)
    assert case["ways"][KVFLOW]["median_s"]["calls"] == 6.0
    assert case["ratios"][BARE] == 1.2
    assert written["repeats"] == 3


def test_a_copy_copies() -> None:
    memory = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, dtype=np.uint8)
    times = copy(target, memory, 32)
    assert (target[:32] == memory[:32]).all()
    assert not target[32:].any()
    assert times.calls == times.copy > 0


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--counts", "17"), "multiple of 16"),
        (("--sizes", "16,none"), "positive"),
        (("--layouts", "LBHNC,XYZ"), "XYZ"),
        (("--counts", "16000000"), "320 MiB"),
        (("--repeats", "0"), "repeats"),
    ],
)
def test_a_bad_option_is_named(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_help_names_the_options() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for option in ("--quick", "--sizes", "--counts", "--repeats", "--json"):
        assert option in result.output


def test_without_nixl_it_ends_with_1_and_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    monkeypatch.setitem(sys.modules, "nixl", None)
    result = invoke("--quick", "--counts", "16")
    assert result.exit_code == 1
    assert result.stderr.startswith("NIXL cannot be imported")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.nixl
def test_every_way_moves_the_right_bytes() -> None:
    """`measure` itself compares what arrived, for each of them."""
    wanted = [
        SMALL,
        Case(layout="BLHNC", block_size=32, descriptors=2 * LAYERS, fragmented=True),
        Case(layout="cpu-vec", block_size=16, descriptors=4 * LAYERS, fragmented=False),
    ]
    found = list(run(wanted, repeats=2))
    assert [each.case for each in found] == wanted
    assert [each.runs for each in found] == [48, 2, 16]
    for each in found:
        assert {name: len(times) for name, times in each.times.items()} == dict.fromkeys(WAYS, 2)
        assert each.median_s(KVFLOW, "copy") > 0


@pytest.mark.nixl
def test_the_command_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    result = invoke("--layouts", "LBHNC", "--counts", "16", "--sizes", "16", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert len(json.loads(path.read_text())["cases"]) == 2
