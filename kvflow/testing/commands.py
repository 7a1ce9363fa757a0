"""`kvflow simulate` and `kvflow replay`: tables for people, JSON for scripts, exit codes."""

import json
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvflow.testing import replay as replaying
from kvflow.testing import simulate as simulating
from kvflow.testing.faults import Fault
from kvflow.testing.replay import Report as Replayed
from kvflow.testing.rows import describe, every_row
from kvflow.testing.simulate import Report as Simulated
from kvflow.testing.simulate import Violation
from kvflow.tracing.lines import UnreadableTraceError

LIVE_SHOWN_MAX = 20
OK, BROKEN, UNREADABLE = 0, 1, 2


def simulate(seed: int | None, steps: int, *, swarm: bool, engines: int, as_json: bool) -> int:
    """Run the simulator, with its progress on standard error; returns the exit code."""
    if seed is None:
        seed = secrets.randbelow(2**32)
    show = _progress_bar if sys.stderr.isatty() else _progress_lines
    with show(seed, steps) as progress:
        report = simulating.simulate(seed, steps, swarm=swarm, engines=engines, progress=progress)
    if as_json:
        print(simulated_as_json(report))
    else:
        show_simulated(report, Console())
    return OK if report.violation is None else BROKEN


@contextmanager
def _progress_bar(seed: int, steps: int) -> Iterator[Callable[[int], None]]:
    with Progress(
        TextColumn(f"seed {seed}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=steps)
        yield lambda done: bar.update(task, completed=min(done, steps))


@contextmanager
def _progress_lines(seed: int, steps: int) -> Iterator[Callable[[int], None]]:
    """For logs: a line for every tenth of the steps."""
    tenths = 0

    def progress(done: int) -> None:
        nonlocal tenths
        if 10 * done // steps > tenths:
            tenths = 10 * done // steps
            print(f"seed {seed}: {done:,} of {steps:,} steps", file=sys.stderr, flush=True)

    yield progress


def replay(traces: Sequence[Path], *, as_json: bool) -> int:
    """Follow the traces; returns the exit code."""
    try:
        report = replaying.replay(traces)
    except UnreadableTraceError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    if as_json:
        print(replayed_as_json(report))
    else:
        show_replayed(report, Console())
    return OK if report.first is None else BROKEN


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column == "count" else "left")
    for row in rows:
        table.add_row(*(str(each) for each in row))
    return table


def _outcomes(counted: dict[tuple[str, str, str], int]) -> Table:
    ordered = sorted(counted.items(), key=lambda each: (each[0][:1], -each[1]))
    rows = [(*key, f"{count:,}") for key, count in ordered]
    return _table("Transfers", ("machine", "ended as", "reason", "count"), rows)


# -- kvflow simulate -------------------------------------------------------------------------------


def show_simulated(report: Simulated, console: Console) -> None:
    """Tables, and the minimal transcript if something was broken."""
    faults = sorted(Fault, key=lambda fault: -report.faults[fault])
    rows = [(fault.value, f"{report.faults[fault]:,}") for fault in faults]
    console.print(_table("Faults", ("kind", "count"), rows))
    console.print(_outcomes(report.outcomes))
    struck = sum(report.faults[fault] > 0 for fault in Fault)
    console.print(
        f"seed {report.seed}{', swarm' if report.swarm else ''}: {report.steps:,} steps "
        f"({report.operations:,} of them operations) in {report.phases:,} phases "
        f"of {report.worlds:,} worlds of {report.engines} engines; "
        f"{report.simulated_s / 3600:,.1f} simulated hours"
    )
    console.print(f"{struck} of {len(Fault)} kinds of fault struck")
    console.print(f"{len(report.rows)} of {len(every_row())} rows taken")
    if report.violation is None:
        console.print("no invariant was broken", style="green")
    else:
        _show_violation(report, report.violation, console)


def _show_violation(report: Simulated, violation: Violation, console: Console) -> None:
    left = len(violation.operations)
    console.print(f"\n{violation.invariant} is broken, seed {report.seed}", style="bold red")
    console.print(violation.said, markup=False, highlight=False)
    console.print(
        f"\nFound after {violation.found_in} operations in world {report.worlds}; the same is "
        f"broken by {left} of them ({violation.runs} runs to find out):\n"
    )
    console.print(violation.transcript, markup=False, highlight=False, soft_wrap=True)


def simulated_as_json(report: Simulated) -> str:
    violation = report.violation
    found: dict[str, Any] | None = None
    if violation is not None:
        found = {
            "invariant": violation.invariant,
            "said": violation.said,
            "found_in": violation.found_in,
            "runs": violation.runs,
            "operations": [[each.name, each.seed] for each in violation.operations],
            "transcript": violation.transcript.splitlines(),
        }
    return json.dumps(
        {
            "version": 1,
            "seed": report.seed,
            "swarm": report.swarm,
            "engines": report.engines,
            "steps": report.steps,
            "operations": report.operations,
            "phases": report.phases,
            "worlds": report.worlds,
            "simulated_s": round(report.simulated_s, 3),
            "faults": {fault.value: report.faults[fault] for fault in Fault},
            "outcomes": _outcomes_as_list(report.outcomes),
            "rows": {
                "taken": len(report.rows),
                "all": len(every_row()),
                "never": [describe(taken) for taken in report.rows_never_taken],
            },
            "violation": found,
        },
        indent=2,
    )


def _outcomes_as_list(counted: dict[tuple[str, str, str], int]) -> list[dict[str, object]]:
    return [
        {"machine": machine, "state": state, "reason": reason or None, "count": count}
        for (machine, state, reason), count in sorted(counted.items())
    ]


# -- kvflow replay ---------------------------------------------------------------------------------


def show_replayed(report: Replayed, console: Console) -> None:
    """The first line that cannot be, or what the traces say."""
    if report.first is not None:
        console.print(str(report.first), style="red", markup=False, soft_wrap=True)
        if more := len(report.broken) - 1:
            console.print(f"and {more} more lines that cannot be")
        return
    console.print(_outcomes(report.outcomes))
    console.print(
        f"{report.lines:,} lines of {report.records:,} records; {len(report.rows)} of "
        f"{report.rows_of_all} rows that change a state were taken"
    )
    console.print(
        f"{report.matched:,} received transfers match what was sent; "
        f"of {report.unmatched:,} the producer is not in these traces"
    )
    if report.live:
        console.print(f"still live at the end: {len(report.live)}")
        for line in report.live[:LIVE_SHOWN_MAX]:
            where = f"{line.place}: {line.engine} {line.rank} {line.machine} {line.id}"
            console.print(f"  {where} is {line.dest}", markup=False, soft_wrap=True)
    console.print("every line is a row of its table", style="green")


def replayed_as_json(report: Replayed) -> str:
    return json.dumps(
        {
            "version": 1,
            "lines": report.lines,
            "records": report.records,
            "rows": {"taken": len(report.rows), "all": report.rows_of_all},
            "outcomes": _outcomes_as_list(report.outcomes),
            "matched": report.matched,
            "unmatched": report.unmatched,
            "live": [
                {"place": line.place, "machine": line.machine, "id": line.id, "state": line.dest}
                for line in report.live
            ],
            "broken": [
                {
                    "place": each.line.place,
                    "line": str(each.line),
                    "said": each.said,
                    "rows": list(each.rows),
                }
                for each in report.broken
            ],
        },
        indent=2,
    )
