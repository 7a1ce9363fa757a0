"""Results for people, and for scripts."""

import dataclasses
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from kvflow.doctor.examine import Check, Facts, Result
from kvflow.doctor.facts import Nixl
from kvflow.doctor.findings import NOTHING, Finding, Severity

_WIDTH = 100
_MARKS = {Severity.OK: "✓", Severity.NOTE: "-", Severity.WARNING: "!", Severity.BREAKS: "✗"}
_PLAIN_MARKS = {
    Severity.OK: "ok    ",
    Severity.NOTE: "note  ",
    Severity.WARNING: "WARN  ",
    Severity.BREAKS: "BREAKS",
}
_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.BREAKS: "bold red",
}


def begin(check: Check) -> None:
    """Progress, on standard error."""
    typer.echo(f"kvflow doctor: {check.name} ...", err=True)


def status(results: Sequence[Result]) -> int:
    """The exit status: 1 if something breaks serving."""
    return 1 if counts(results)[Severity.BREAKS] else 0


def counts(results: Sequence[Result]) -> Counter[Severity]:
    return Counter(finding.severity for result in results for finding in result.findings)


def print_report(results: Sequence[Result]) -> None:
    """Grouped by check; what is in order takes one line, all else says why and what to set."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    fancy = sys.stdout.isatty() and is_unicode and "NO_COLOR" not in os.environ
    console = Console(highlight=False, soft_wrap=True, no_color=not fancy, markup=False)
    width = min(console.width, _WIDTH) if fancy else _WIDTH
    for result in results:
        if result.findings:
            console.print(Text(result.check.name, style="bold" if fancy else ""))
        for finding in result.findings:
            mark = (_MARKS if fancy else _PLAIN_MARKS)[finding.severity]
            first, *rest = _lines(finding, width - len(mark) - 3)
            style = _STYLES[finding.severity] if fancy else ""
            console.print(Text.assemble("  ", (mark, style), " ", first))
            for line in rest:
                console.print(Text(" " * (len(mark) + 3) + line))
    console.print(Text(summary(results), style="bold" if fancy else ""))


def summary(results: Sequence[Result]) -> str:
    """One line."""
    found = counts(results)
    broken, warned, noted = (
        found[each] for each in (Severity.BREAKS, Severity.WARNING, Severity.NOTE)
    )
    numbers = (
        f"{broken} break{'s' if broken == 1 else ''} serving, "
        f"{warned} warning{'' if warned == 1 else 's'}, "
        f"{noted} note{'' if noted == 1 else 's'}, {found[Severity.OK]} in order"
    )
    if found[Severity.BREAKS]:
        return f"Not ready: {numbers}."
    return f"Ready{', with warnings' if found[Severity.WARNING] else ''}: {numbers}."


def print_json(results: Sequence[Result], facts: Facts) -> None:
    typer.echo(json.dumps(as_dict(results, facts), indent=2))


def as_dict(results: Sequence[Result], facts: Facts) -> dict[str, Any]:
    """What `--json` prints. `measured`: seconds and bytes, where something was measured."""
    found = counts(results)
    return {
        "ready": not found[Severity.BREAKS],
        "counts": {severity.value: found[severity] for severity in Severity},
        "checks": [
            {
                "name": result.check.name,
                "looks_at": result.check.looks_at,
                "findings": [
                    {**dataclasses.asdict(finding), "severity": finding.severity.value}
                    for finding in result.findings
                ],
            }
            for result in results
        ],
        "nixl": _nixl(vars(facts).get("nixl")),
    }


def _nixl(nixl: Nixl | None) -> dict[str, Any] | None:
    return None if nixl is None else dataclasses.asdict(nixl)


def _lines(finding: Finding, width: int) -> Iterator[str]:
    yield from _wrapped("", finding.found, width)
    if finding.severity is Severity.OK:
        return
    yield from _wrapped("why: ", finding.why, width)
    if finding.to_do != NOTHING:
        yield from _wrapped("set: ", finding.to_do, width)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
