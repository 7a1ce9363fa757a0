"""A plan for people, and for scripts."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvflow.errors import IncompatiblePeersError
from kvflow.layout import Int64s
from kvflow.planning.description import DescriptionError, Engine, read
from kvflow.planning.plan import Plan, Request, plan

_WIDTH = 100
_BAR = 24


def run(producer: Path, consumer: Path, request: Request, *, as_json: bool) -> int:
    """Print the plan; returns the exit status: 0, 1 (cannot be planned), 2 (bad description)."""
    try:
        engines = read(producer), read(consumer)
        made = plan(*engines, request)
    except DescriptionError as error:
        typer.echo(str(error), err=True)
        return 2
    except (IncompatiblePeersError, ValueError) as error:
        typer.echo(str(error), err=True)
        return 1
    if as_json:
        typer.echo(json.dumps(as_dict(*engines, request, made), indent=2))
    else:
        _print(*engines, request, made)
    return 0


def as_dict(producer: Engine, consumer: Engine, request: Request, made: Plan) -> dict[str, Any]:
    """What `--json` prints; bytes, but for `heads` (words) and ranks (as in logs)."""
    return {
        "producer": in_words(producer),
        "consumer": in_words(consumer),
        "tokens": request.tokens,
        "hit": request.hit,
        "fragmented": request.fragmented,
        "shares": [
            {
                "producer": str(share.producer),
                "consumer": str(share.consumer),
                "layers": share.layers,
                "heads": share.heads,
                **_counts(share.lengths),
            }
            for share in made.shares
        ],
        "total": _counts(made.lengths),
        "idle": [str(rank) for rank in made.idle],
        "histogram": [
            {
                "from": bucket.start,
                "below": bucket.stop,
                "runs": bucket.runs,
                "bytes": bucket.bytes,
            }
            for bucket in made.histogram()
        ],
    }


def in_words(engine: Engine) -> str:
    """An engine in a line."""
    kernel = engine.kernel_block_size
    parts = f", {kernel} in the kernel" if kernel else ""
    return (
        f"{engine.model}, TP {engine.tp}, PP {engine.pp}, {engine.layout}, {engine.dtype}, "
        f"blocks of {engine.block_size} tokens{parts}"
    )


def _counts(lengths: Int64s) -> dict[str, int]:
    if not len(lengths):
        return {"runs": 0, "bytes": 0, "smallest": 0, "median": 0, "largest": 0}
    return {
        "runs": len(lengths),
        "bytes": int(lengths.sum()),
        "smallest": int(lengths.min()),
        "median": int(np.median(lengths)),
        "largest": int(lengths.max()),
    }


def _print(producer: Engine, consumer: Engine, request: Request, made: Plan) -> None:
    console = Console(width=_WIDTH, highlight=False, record=True, file=io.StringIO())
    ids = "scattered" if request.fragmented else "consecutive"
    console.print(f"producer  {in_words(producer)}")
    console.print(f"consumer  {in_words(consumer)}")
    console.print(
        f"request   {request.tokens:,} tokens, {request.hit:,} of them there already, {ids} blocks"
    )
    console.print(_table(made))
    for line in _notes(made):
        console.print(line)
    if made.shares:
        console.print(_histogram(made))
    # Rich fills lines up; without that, what is printed can be quoted.
    for line in console.export_text().rstrip().splitlines():
        typer.echo(line.rstrip())


def _table(made: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("producer", "consumer", "heads"):
        table.add_column(name, no_wrap=True)
    for name in ("layers", "runs", "bytes", "smallest", "median", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    for share in made.shares:
        numbers = _counts(share.lengths).values()
        table.add_row(
            str(share.producer),
            str(share.consumer),
            share.heads,
            str(share.layers),
            *(f"{number:,}" for number in numbers),
        )
    table.add_section()
    numbers = _counts(made.lengths).values()
    table.add_row("all", "", "", "", *(f"{number:,}" for number in numbers))
    return table


def _notes(made: Plan) -> Iterator[str]:
    if not made.shares:
        yield "Nothing is written."
    elif made.idle:
        yield f"Producer ranks that write nothing: {', '.join(map(str, made.idle))}."


def _histogram(made: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run length", justify="right", no_wrap=True)
    for name in ("runs", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share of the bytes", no_wrap=True)
    total = int(made.lengths.sum())
    for bucket in made.histogram():
        bar = "#" * max(round(_BAR * bucket.bytes / total), 1)
        table.add_row(
            f"{_size(bucket.start)} to {_size(bucket.stop)}",
            f"{bucket.runs:,}",
            f"{bucket.bytes:,}",
            bar,
        )
    return table


def _size(count: int) -> str:
    """A power of two, in bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count // unit} {name}"
    return f"{count} B"
