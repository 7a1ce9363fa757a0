"""`kvflow bench core`: structure and arithmetic, on tiny sizes; no time is asserted."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvflow.bench import core_report
from kvflow.bench.core import BLOCKS, SIDES, Cost, Memory, Soak, Watched, cost, memory, soak
from kvflow.bench.core_report import Results, as_dict, goals
from kvflow.cli import app


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "core", *arguments])


@pytest.mark.parametrize("make", SIDES)
def test_a_transfer_begins_ends_and_aborts_on_either_side(make: type) -> None:
    watched = Watched(make)
    side = watched.side
    for number in (1, 2, 3):
        watched.take(side.begin(number, 4))
    assert side.engine.live == 3
    watched.take(side.end(1))
    watched.take(side.abort(2))
    assert side.engine.live == 1
    watched.take(side.renewals([3], watched.now))
    assert side.engine.live == 1
    assert watched.events > 7
    assert watched.spent_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", SIDES)
def test_costs_are_counted_with_so_many_live(make: type) -> None:
    found = cost(make, live=5, transfers=7, rounds=2)
    assert (found.side, found.live) == (make.name, 5)  # type: ignore[attr-defined]
    assert found.transfer_s >= 2 * found.event_s > 0
    assert found.question_s > 0
    assert found.renewal_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", SIDES)
def test_block_ids_are_a_part_of_the_memory(make: type) -> None:
    found = memory(make, live=50)
    assert found.bytes - found.bytes_without_ids > 8 * BLOCKS
    assert found.bytes_without_ids > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", SIDES)
def test_a_soak_leaves_nothing(make: type) -> None:
    found = soak(make, transfers=60, live=4)
    assert found.records_left == 0
    assert found.aborted == (60 - 4) // 3
    assert found.forgotten_bytes < found.end_bytes


def results(hooks: bool) -> Results:
    from kvflow.bench.core_hooks import HookTimes

    times = [
        HookTimes(
            role="decode", live=live, wall_s=tuple(wall / 1e6 for wall in walls), cpu_s=(1e-6,)
        )
        for live, walls in ((10, range(1, 101)), (256, range(101, 201)))
    ]
    return Results(
        costs=[Cost(side="a", live=1, event_s=1.0, transfer_s=2.0, question_s=3.0, renewal_s=4.0)],
        memories=[Memory(side="a", live=9, bytes=3000.0, bytes_without_ids=1000.0)],
        soaks=[
            Soak(
                side="a",
                transfers=9,
                aborted=3,
                halfway_bytes=100,
                end_bytes=102,
                forgotten_bytes=0,
                records_left=0,
            )
        ],
        hooks=times if hooks else None,
    )


def test_goals() -> None:
    found = [(round(goal.figure, 6), goal.most, goal.is_met) for goal in goals(results(True))]
    assert found == [
        (3000.0, 2048, False),
        (1.02, 1.05, True),
        (200.0, 200.0, True),
        (2.0, 1.3, False),
        (1.0, 200.0, True),
        (1.0, 1.3, True),
    ]


@pytest.mark.slow
def test_without_vllm_the_hooks_are_left_out_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(live: int, steps: int) -> None:
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr(core_report, "hooks", missing)
    path = tmp_path / "results.json"
    result = invoke("--quick", "--live", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "left out, since vLLM is not installed here" in result.output
    written = json.loads(path.read_text())
    assert written["hooks"] is None
    assert [(each["side"], each["live"]) for each in written["costs"]] == [
        ("producer", 2),
        ("consumer", 2),
    ]
    assert len(written["soaks"]) == len(written["memories"]) == 2


def test_the_json_has_quantiles() -> None:
    (first, second) = as_dict(results(True))["hooks"]
    assert (first["live"], first["p50_wall_s"], first["max_wall_s"]) == (10, 51e-6, 100e-6)
    assert second["p99_wall_s"] == 200e-6
    assert as_dict(results(False))["hooks"] is None


@pytest.mark.parametrize("arguments", [("--live", "0"), ("--live", "10,x")])
def test_a_bad_option_is_named(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "--live" in result.output


def test_help_names_the_options() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for option in ("--live", "--quick", "--json"):
        assert option in result.output


def test_the_halves_get_a_request_in_and_one_out_in_each_step() -> None:
    pytest.importorskip("vllm", reason="the halves import vLLM")
    from kvflow.bench.core_hooks import hooks

    found = hooks(live=3, steps=20)
    assert [(each.role, each.live) for each in found] == [("prefill", 3), ("decode", 3)]
    for each in found:
        assert len(each.wall_s) == len(each.cpu_s) == 20
        assert list(each.wall_s) == sorted(each.wall_s)
