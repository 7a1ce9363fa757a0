"""The seeded simulator: worlds in which everything goes wrong for a while, then heals and must end.

A world lives for a few phases. A phase is a safety phase of random operations, then all faults
stop, and everything must end within its deadlines and be forgotten. Worlds follow each other until
so many steps are done; the seed decides everything, so the same seed is the same run.

A step is one operation (of a vLLM, a router or the outside world) or one thing that happens by
itself: a notice or an answer delivered, a slice ended, a deadline expired.

Known limits: an engine is a producer or a consumer, never both; all blocks have one size.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from kvflow.core import effects as ef
from kvflow.core.reasons import Reason
from kvflow.errors import KVFlowError
from kvflow.testing.faults import Fault
from kvflow.testing.machines import TIMINGS
from kvflow.testing.operations import END, PHASE, Operation, Setting, do, next_operation
from kvflow.testing.rows import RowWatch, Taken, every_row
from kvflow.testing.transcript import transcript
from kvflow.testing.world import World

PHASES_MAX = 3
OPERATIONS_MIN, OPERATIONS_MAX = 40, 160
SHRINK_RUNS_MAX = 400
TRANSCRIPT_LINES_MAX = 200
REPEATS_MAX = 3
KEEPS_S = (0.0, 1.5, 15.0)
MACHINES = ("producer", "consumer", "peer")
BROKEN = (AssertionError, KVFlowError, LookupError, TypeError, ValueError, AttributeError)
"""What a run may raise: an invariant, or a bug that shows itself as an exception."""

Outcome = tuple[str, str, str]
"""(machine, state, reason) of a transfer that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What was broken, and the shortest way to it that was found.

    invariant   its id (`specs/invariants.md`), or the name of the exception.
    found_in    how many operations the world had had when it was found.
    operations  what is left after shrinking.
    runs        how many runs the shrinking took.
    """

    invariant: str
    said: str
    setting: Setting
    found_in: int
    operations: tuple[Operation, ...]
    transcript: str
    runs: int


@dataclass(slots=True, kw_only=True)
class Report:
    """What happened."""

    seed: int
    swarm: bool
    engines: int
    steps: int = 0
    operations: int = 0
    worlds: int = 0
    phases: int = 0
    simulated_s: float = 0.0
    faults: Counter[Fault] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    rows: Counter[Taken] = field(default_factory=Counter)
    violation: Violation | None = None

    @property
    def rows_never_taken(self) -> list[Taken]:
        return sorted(every_row() - self.rows.keys())


# -- one world -------------------------------------------------------------------------------------


class Run:
    """One world and what was done to it; stops at the first violation."""

    def __init__(self, setting: Setting, *, tells: bool = False) -> None:
        self.setting = setting
        self.chaos = setting.build()
        self.chaos.world.tells = tells
        self.done: list[Operation] = []
        self.error: Exception | None = None

    @property
    def world(self) -> World:
        return self.chaos.world

    @property
    def steps(self) -> int:
        return self.world.steps + len(self.done)

    @property
    def broken(self) -> str:
        """The id of the invariant that was broken, or nothing."""
        return invariant_of(self.error) if self.error else ""

    def do(self, operation: Operation) -> bool:
        """Whether all is well after it."""
        self.done.append(operation)
        try:
            do(self.chaos, operation, self.setting.swarm)
        except BROKEN as error:
            self.error = error
        return self.error is None

    def do_all(self, operations: Sequence[Operation]) -> "Run":
        for operation in operations:
            if not self.do(operation):
                break
        return self


def invariant_of(error: Exception) -> str:
    """Its id: named in the text, or known by the table's complaint, or the exception's name."""
    said = str(error)
    if named := re.match(r"([A-Z]\d|books)\b", said):
        return named[1]
    if "no guard held" in said or "is ambiguous" in said:
        return "T2"
    if re.match(r"(producer|consumer|peer): \w+ in \w+: ", said):
        return "T1"
    return type(error).__name__


# -- many worlds -----------------------------------------------------------------------------------


def simulate(
    seed: int,
    steps: int,
    *,
    swarm: bool = False,
    engines: int = 4,
    progress: Callable[[int], None] = lambda steps: None,
) -> Report:
    """Run worlds until so many steps are done, or an invariant is broken."""
    report = Report(seed=seed, swarm=swarm, engines=engines)
    rng = Random(seed)
    while report.steps < steps and report.violation is None:
        with RowWatch() as watch:
            run = _live(_setting(rng, swarm, engines), rng, report, steps)
        report.rows += watch.taken
        _add(report, run)
        if run.error is not None:
            report.violation = shrink(run.setting, run.done, run.broken)
        progress(report.steps)
    return report


def _setting(rng: Random, swarm: bool, engines: int) -> Setting:
    producers = max(engines // 2, 1)
    return Setting(
        seed=rng.getrandbits(32),
        ranks=rng.choice((1, 2, 2)),
        producers=producers,
        consumers=max(engines - producers, 1),
        blocks=rng.choice((10, 16, 24, 60)),
        registers=rng.random() < 0.7,
        swarm=swarm,
        prompt_tokens_max=rng.choice((None, None, 96)),
        timings=replace(TIMINGS, keep_sent_s=rng.choice(KEEPS_S)),
    )


def _live(setting: Setting, rng: Random, report: Report, steps: int) -> Run:
    run = Run(setting)
    for _ in range(rng.randint(1, PHASES_MAX)):
        rest = rng.randint(OPERATIONS_MIN, OPERATIONS_MAX)
        well = run.do(Operation(name=PHASE, seed=rng.getrandbits(32)))
        while well and rest and report.steps + run.steps < steps:
            well = run.do(next_operation(run.chaos, rng))
            rest -= 1
        if not (well and run.do(Operation(name=END, seed=0))):
            break
        report.phases += 1
        if report.steps + run.steps >= steps:
            break
    return run


def _add(report: Report, run: Run) -> None:
    report.worlds += 1
    report.steps += run.steps
    report.operations += len(run.done)
    report.simulated_s += run.world.now
    report.faults += run.world.struck
    for _, _, effect in run.world.log:
        if isinstance(effect, ef.Moved) and effect.spent_ms is not None:
            reason = effect.reason.value if isinstance(effect.reason, Reason) else ""
            report.outcomes[effect.machine, effect.dest, reason] += 1


# -- shrinking -------------------------------------------------------------------------------------


SMALLER: tuple[dict[str, int], ...] = (
    {"producers": 1},
    {"consumers": 1},
    {"ranks": 1},
    {"blocks": 60},
)
"""What may make a world easier to read."""


def shrink(setting: Setting, operations: Sequence[Operation], broken: str) -> Violation:
    """Leave out whatever the same invariant breaks without, greedily, in a bounded number of runs.

    First operations, large pieces, then smaller ones, from the end to the start, until none can be
    left out; then whatever makes the world smaller; then operations again.
    """
    kept, runs = _fewer(setting, list(operations), broken, SHRINK_RUNS_MAX)
    for change in SMALLER:
        smaller = replace(setting, **change)  # type: ignore[arg-type]
        run = Run(smaller).do_all(kept)
        runs += 1
        if run.broken == broken:
            setting, kept = smaller, run.done
    kept, more = _fewer(setting, kept, broken, SHRINK_RUNS_MAX)
    return _violation(setting, len(operations), kept, runs + more)


def _fewer(
    setting: Setting, kept: list[Operation], broken: str, runs_max: int
) -> tuple[list[Operation], int]:
    """The operations that are left, and how many runs that took."""
    runs, size = 0, max(len(kept) // 2, 1)
    while size:
        start, shorter = len(kept), False
        while start > 0 and runs < runs_max:
            start = max(start - size, 0)
            run = Run(setting).do_all(kept[:start] + kept[start + size :])
            runs += 1
            if run.broken == broken:
                kept, shorter = run.done, True
        again = shorter and runs < runs_max
        size = size // 2 if size > 1 else int(again)
    return kept, runs


def _violation(
    setting: Setting, found_in: int, operations: Sequence[Operation], runs: int
) -> Violation:
    """Run the script once more, and this time tell everything."""
    run = Run(setting, tells=True).do_all(operations)
    return Violation(
        invariant=run.broken,
        said=str(run.error),
        setting=setting,
        found_in=found_in,
        operations=tuple(run.done),
        transcript=_without_repeats(transcript(run.world, MACHINES)),
        runs=runs,
    )


def _without_repeats(text: str) -> str:
    """The end of a transcript, without what is said (but for the time) again and again."""
    said: Counter[str] = Counter()
    lines, repeats = [], 0
    for line in text.splitlines():
        words = line.partition(" ")[2]
        said[words] += 1
        if said[words] <= REPEATS_MAX:
            lines.append(line)
        else:
            repeats += 1
    if (left_out := len(lines) - TRANSCRIPT_LINES_MAX) > 0:
        lines = [f"... {left_out} lines", *lines[left_out:]]
    return "\n".join([*lines, f"... {repeats} repeats" if repeats else ""]).rstrip()
