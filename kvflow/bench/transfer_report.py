"""What `kvflow bench transfer` prints, and its goals."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from kvflow.bench.transfer import BARE, COPY, KVFLOW, PREPARED, WAYS, Measured, run
from kvflow.bench.transfer_cases import BYTES_MAX, Case
from kvflow.errors import TransportError

_HEADER = (
    f"{'layout':<8}{'block':>6}{'ids':>7}{'descr.':>8}{'runs':>8}{'posts':>6}{'MB':>7}   "
    f"{'plan':>7}{'post':>8}{'copy':>8}{'=':>8}{'best':>8}{'until post':>12}   "
    f"{'prepared':>9}{'best':>8}{'bare':>8}{'memcpy':>8}   "
    f"{'/prep.':>7}{'cpu':>6}{'work/prep.':>11}{'cpu':>6}{'/bare':>7}{'cpu':>6}{'GB/s':>6}"
)
_NOTES = """\
Milliseconds, medians and bests over the rounds. kvflow: plan + post + copy = from block ids to the
last byte; until post: from the prefill's end to the first post (a thread's wake-up, the state
machine, planning). /prep., /bare: kvflow's "=" to that of prepared lists with index arrays (vLLM's
own way) and of the library alone with merged runs; work/prep.: the same without the copying inside
the library; cpu: each in processor time. GB/s: kvflow's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A ratio of kvflow's median to another way's that should be at most `most`.

    best  the same ratio of the two bests, and
    cpu   of the medians in processor time: a busy machine disturbs these less.
    """

    what: str
    way: str
    part: str
    most: float
    ratio: float
    best: float
    cpu: float

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.most

    def __str__(self) -> str:
        verdict = "met" if self.is_met else "missed"
        return (
            f"{self.what}: {self.ratio:.2f}x of {self.way} (at most {self.most:.2f}x): {verdict}; "
            f"bests {self.best:.2f}x, on a processor {self.cpu:.2f}x"
        )


def bench(cases: Sequence[Case], left_out: Sequence[Case], repeats: int, path: Path | None) -> int:
    """Measure and print; returns the exit status: 0, or 1 if it could not be measured."""
    measured = []
    typer.echo(_NOTES + "\n\n" + _HEADER)
    try:
        for each in run(cases, repeats):
            typer.echo(line(each))
            measured.append(each)
    except TransportError as error:
        typer.echo(str(error), err=True)
        return 1
    if left_out:
        typer.echo(
            f"left out, as each moves more than {BYTES_MAX >> 20} MiB: {len(left_out)} cases"
        )
    typer.echo()
    for goal in goals(measured):
        typer.echo(str(goal))
    if path is not None:
        path.write_text(json.dumps(as_dict(measured, repeats), indent=2) + "\n", encoding="utf-8")
    return 0


def line(of: Measured) -> str:
    case = of.case
    kvflow = "".join(
        f"{1e3 * of.median_s(KVFLOW, part):>{width}.2f}"
        for part, width in (("plan", 7), ("post", 8), ("copy", 8), ("calls", 8))
    )
    until_posted = 1e3 * of.median_s(KVFLOW, "until_posted")
    prepared, bare, copied = (1e3 * of.median_s(way) for way in (PREPARED, BARE, COPY))
    return (
        f"{case.layout:<8}{case.block_size:>6}{'frag.' if case.fragmented else 'cont.':>7}"
        f"{case.descriptors:>8}{of.runs:>8}{of.posts:>6}{case.bytes / 1e6:>7.1f}   "
        f"{kvflow}{1e3 * of.best_s(KVFLOW):>8.2f}{until_posted:>12.2f}   "
        f"{prepared:>9.2f}{1e3 * of.best_s(PREPARED):>8.2f}{bare:>8.2f}{copied:>8.2f}   "
        f"{of.ratio(PREPARED):>7.2f}{of.ratio(PREPARED, 'cpu_calls'):>6.2f}"
        f"{of.ratio(PREPARED, 'work'):>11.2f}{of.ratio(PREPARED, 'cpu_work'):>6.2f}"
        f"{of.ratio(BARE):>7.2f}{of.ratio(BARE, 'cpu_calls'):>6.2f}"
        f"{of.gbytes_per_s(KVFLOW):>6.2f}"
    )


def goals(measured: Iterable[Measured]) -> Iterator[Goal]:
    """Of the cases with 18,880 descriptors, by layout and block size."""
    for of in measured:
        case = of.case
        if case.descriptors != 18_880:
            continue
        ids, most = ("fragmented", 0.5) if case.fragmented else ("contiguous", 0.25)
        where = f"{case.layout}, blocks of {case.block_size}, 18,880 {ids}"
        wanted = [
            ("planning and posting", PREPARED, "calls", most),
            ("the same, no copying", PREPARED, "work", most),
        ]
        if not case.fragmented:
            wanted.append(("time per byte of large runs", BARE, "calls", 1 / 0.9))
        for what, way, part, bound in wanted:
            yield Goal(
                what=f"{where}, {what}",
                way=way,
                part=part,
                most=bound,
                ratio=of.ratio(way, part),
                best=of.best_s(KVFLOW, part) / of.best_s(way, part),
                cpu=of.ratio(way, f"cpu_{part}"),
            )


def as_dict(measured: Sequence[Measured], repeats: int) -> dict[str, Any]:
    """What `--json` writes; times in seconds."""
    return {
        "version": 1,
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "nixl": _nixl_version(),
        },
        "repeats": repeats,
        "cases": [_case(each) for each in measured],
        "goals": [
            {
                "what": goal.what,
                "way": goal.way,
                "part": goal.part,
                "most": goal.most,
                "ratio": goal.ratio,
                "best_ratio": goal.best,
                "cpu_ratio": goal.cpu,
                "met": goal.is_met,
            }
            for goal in goals(measured)
        ],
    }


def _case(of: Measured) -> dict[str, Any]:
    case = of.case
    parts = ("plan", "post", "copy", "until_posted", "calls", "work", "cpu_calls", "cpu_work")
    return {
        "layout": case.layout,
        "block_size": case.block_size,
        "fragmented": case.fragmented,
        "descriptors": case.descriptors,
        "bytes": case.bytes,
        "runs": of.runs,
        "posts": of.posts,
        "ways": {
            way: {
                "median_s": {part: of.median_s(way, part) for part in parts},
                "best_s": {part: of.best_s(way, part) for part in parts},
            }
            for way in WAYS
        },
        "ratios": {way: of.ratio(way) for way in WAYS},
        "work_ratios": {way: of.ratio(way, "work") for way in (PREPARED, BARE)},
    }


def _nixl_version() -> str:
    try:
        return importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
