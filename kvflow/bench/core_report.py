"""What `kvflow bench core` prints, and its goals."""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from kvflow.bench.core import BLOCKS, SIDES, Cost, Memory, Soak, cost, memory, soak
from kvflow.bench.core_hooks import HookTimes, hooks, quantile

MEMORY_GOAL_BYTES = 2048
STEP_GOAL_S = 200e-6
STEP_GOAL_LIVE = 256
GROWTH_GOAL = 1.3
_MEMORY_LIVE_MAX = 1000
"""Memory is traced, which takes long; per transfer it does not depend on how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """`hooks` is None where vLLM is missing."""

    costs: list[Cost]
    memories: list[Memory]
    soaks: list[Soak]
    hooks: list[HookTimes] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure that should be at most `most`."""

    what: str
    figure: float
    most: float
    unit: str

    @property
    def is_met(self) -> bool:
        return self.figure <= self.most

    def __str__(self) -> str:
        verdict = "met" if self.is_met else "missed"
        return f"{self.what}: {self.figure:.4g} {self.unit} (at most {self.most:g}): {verdict}"


def bench(counts: Sequence[int], *, quick: bool, path: Path | None) -> int:
    """Measure and print; returns the exit status: 0, or 1 if something was left over."""
    turns = 200 if quick else 2000
    typer.echo(
        "The engine alone; microseconds, the best of three rounds. A renewal is per interval."
    )
    typer.echo(
        f"{'side':<10}{'live':>7}{'event':>9}{'events/s':>10}{'transfer':>10}{'questions':>11}"
        f"{'renewal per live':>18}"
    )
    costs = []
    for make in SIDES:
        for live in counts:
            costs.append(cost(make, live, turns))
            typer.echo(cost_line(costs[-1]))
    typer.echo(f"\nMemory per live transfer of {BLOCKS} blocks; bytes.")
    memories = [memory(make, min(max(counts), _MEMORY_LIVE_MAX)) for make in SIDES]
    for held in memories:
        ids = held.bytes - held.bytes_without_ids
        typer.echo(f"{held.side:<10}{held.bytes:>7.0f} of which {ids:.0f} for block ids")
    typer.echo("\nTransfers that come, go and are aborted; KiB that the engine holds.")
    soaks = [soak(make, 500 if quick else 5000) for make in SIDES]
    for each in soaks:
        typer.echo(soak_line(each))
    typer.echo("\nvLLM's hooks per engine step (one request comes, one ends); microseconds.")
    measured = _hooks(counts, turns)
    for times in measured or ():
        typer.echo(hook_line(times))
    results = Results(costs=costs, memories=memories, soaks=soaks, hooks=measured)
    typer.echo()
    for goal in goals(results):
        typer.echo(str(goal))
    if path is not None:
        path.write_text(json.dumps(as_dict(results), indent=2) + "\n", encoding="utf-8")
    return 1 if any(each.records_left for each in soaks) else 0


def _hooks(counts: Sequence[int], steps: int) -> list[HookTimes] | None:
    try:
        return [times for live in counts for times in hooks(live, steps)]
    except ImportError as error:
        typer.echo(f"left out, since vLLM is not installed here: {error}")
        return None


def cost_line(of: Cost) -> str:
    return (
        f"{of.side:<10}{of.live:>7}{1e6 * of.event_s:>9.1f}{1 / of.event_s:>10.0f}"
        f"{1e6 * of.transfer_s:>10.1f}{1e6 * of.question_s:>11.2f}{1e6 * of.renewal_s:>18.2f}"
    )


def soak_line(of: Soak) -> str:
    halfway, end, forgotten = (
        each / 1024 for each in (of.halfway_bytes, of.end_bytes, of.forgotten_bytes)
    )
    return (
        f"{of.side:<10}{of.transfers} transfers, {of.aborted} aborted: {halfway:.0f} half-way, "
        f"{end:.0f} at the end, {forgotten:.0f} when all is forgotten; "
        f"{of.records_left} records left"
    )


def hook_line(of: HookTimes) -> str:
    wall, cpu = (
        "".join(f"{1e6 * quantile(times, share):>8.0f}" for share in (0.5, 0.99, 1.0))
        for times in (of.wall_s, of.cpu_s)
    )
    return f"{of.role:<10}{of.live:>7}   p50, p99, most: wall{wall}   processor{cpu}"


def goals(results: Results) -> Iterator[Goal]:
    for held in results.memories:
        yield Goal(
            what=f"{held.side}, memory per live transfer",
            figure=held.bytes,
            most=MEMORY_GOAL_BYTES,
            unit="bytes",
        )
    for each in results.soaks:
        yield Goal(
            what=f"{each.side}, memory at the end of the soak to that half-way",
            figure=each.end_bytes / each.halfway_bytes,
            most=1.05,
            unit="x",
        )
    for clock in ("wall", "cpu"):
        p99 = {
            (times.role, times.live): quantile(getattr(times, f"{clock}_s"), 0.99)
            for times in results.hooks or ()
        }
        where = "on the wall" if clock == "wall" else "on a processor"
        for role in sorted({role for role, _ in p99}):
            lives = sorted(live for of, live in p99 if of == role)
            for live in lives:
                if live == STEP_GOAL_LIVE:
                    yield Goal(
                        what=f"{role}, p99 of the hooks in a step at {live} live, {where}",
                        figure=1e6 * p99[role, live],
                        most=1e6 * STEP_GOAL_S,
                        unit="us",
                    )
            if len(lives) > 1:
                yield Goal(
                    what=f"{role}, p99 at {lives[-1]} live to that at {lives[0]}, {where}",
                    figure=p99[role, lives[-1]] / p99[role, lives[0]],
                    most=GROWTH_GOAL,
                    unit="x",
                )


def as_dict(results: Results) -> dict[str, Any]:
    """What `--json` writes; seconds and bytes. Of the hooks, quantiles."""
    hook_times = None
    if results.hooks is not None:
        hook_times = [
            {
                "role": times.role,
                "live": times.live,
                **{
                    f"{name}_{clock}_s": quantile(getattr(times, f"{clock}_s"), share)
                    for clock in ("wall", "cpu")
                    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
                },
            }
            for times in results.hooks
        ]
    return {
        "version": 1,
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "costs": [asdict(each) for each in results.costs],
        "memories": [asdict(each) for each in results.memories],
        "soaks": [asdict(each) for each in results.soaks],
        "hooks": hook_times,
        "goals": [asdict(goal) | {"met": goal.is_met} for goal in goals(results)],
    }
