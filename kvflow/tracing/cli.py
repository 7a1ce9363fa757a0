"""The `kvflow trace` commands; each imports what it runs when it runs."""

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvflow.tracing.parts import Part

if TYPE_CHECKING:
    from kvflow.tracing.figures import Analysis
    from kvflow.tracing.transfers import Transfer
    from kvflow.tracing.waterfall import Waterfall

trace_app = typer.Typer(
    name="trace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILES...",
        help="Files that KVFLOW_TRACE has written, of all engines and ranks together.",
        show_default=False,
    ),
]


class SortOption(enum.StrEnum):
    """By what `kvflow trace summary` sorts: the time to first token, the start, or one part."""

    TTFT = "ttft"
    START = "start"
    vars().update({part.name: part.value for part in Part})


@trace_app.callback()
def trace() -> None:
    """Read the traces that engines write under KVFLOW_TRACE: where each request's time went.

    Start every engine with KVFLOW_TRACE=/some/where/%p.ndjson, let requests pass, and give the
    files of all engines to one of these commands. The engines' clocks need not agree: how far they
    are apart is estimated from the messages that they sent each other. See specs/tracing.md.
    """


@trace_app.command()
def summary(
    files: _Files,
    limit: Annotated[
        int, typer.Option(min=0, help="Bars of so many requests; the tables are over all.")
    ] = 20,
    sort: Annotated[
        SortOption, typer.Option(help="Longest first by this; start: first one first.")
    ] = SortOption.TTFT,
    transfer: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show one transfer's lines of both sides."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Print where the time of each request went, and of all of them together.

    One bar for each request, from its arrival to its first token; its parts are the critical path
    and add up to that time. Then: how each part is spread, seconds in each state, endings, what
    had not ended, and how far the clocks are apart. Ends with 2 if a file is not a trace.
    """
    from rich.console import Console

    from kvflow.tracing import documents, terminal

    analysis = _analyse(files)
    if transfer is not None:
        found = _named(analysis, transfer)
        falls = [fall for fall in analysis.waterfalls if fall.request.transfer is found]
        if as_json:
            typer.echo(documents.transfer_as_json(found, falls))
        else:
            names = terminal.short_names(analysis.clocks.offsets)
            terminal.show_transfer(found, falls, names, Console())
        return
    shown = _shown(analysis, sort, limit)
    if as_json:
        typer.echo(documents.summary_as_json(analysis, shown))
    else:
        terminal.show_summary(analysis, shown, Console())


_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Where to write it (default: standard output)."),
]


@trace_app.command()
def perfetto(files: _Files, output: _Output = None) -> None:
    """Write Chrome trace events, to be opened at https://ui.perfetto.dev or in chrome://tracing.

    One process for each engine, one thread for each record with a slice for every state, others
    for WRITEs and READs, for vLLM's side and for the parts of the critical path; arrows for the
    REGISTER and the DONE; counters of live transfers by state.
    """
    from kvflow.tracing.perfetto import as_chrome_trace

    _write(as_chrome_trace(_analyse(files)), output)


@trace_app.command(name="html")
def page(files: _Files, output: _Output = None) -> None:
    """Write one HTML page that needs nothing else: a bar for each request, sorted and filtered.

    Its parts add up to the time to first token. A click on a request opens the lines of both
    engines; page.html#ID opens those of one transfer at once.
    """
    from kvflow.tracing.page import as_html

    _write(as_html(_analyse(files)).encode(), output)


def _write(content: bytes, output: Path | None) -> None:
    if output is None:
        typer.echo(content)
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        _refuse(f"{output}: cannot be written: {error.strerror}")


def _shown(analysis: "Analysis", by: SortOption, limit: int) -> "list[Waterfall]":
    """The first ones of those that got what they were for, then of the others."""
    from kvflow.tracing.waterfall import COUNTED

    falls = list(analysis.waterfalls)
    if by is SortOption.TTFT:
        falls.sort(key=lambda fall: -fall.span_us)
    elif by is not SortOption.START:
        part = Part(by.value)
        falls.sort(key=lambda fall: -fall.us(part))
    got = [fall for fall in falls if fall.outcome in COUNTED]
    rest = [fall for fall in falls if fall.outcome not in COUNTED]
    return got[:limit] + rest[:limit]


def _named(analysis: "Analysis", name: str) -> "Transfer":
    """The transfer with this id, or the only one whose id begins so."""
    exact = [t for t in analysis.transfers if t.id == name]
    found = exact or [t for t in analysis.transfers if name and t.id.startswith(name)]
    if len(found) > 1:
        _refuse(f"{len(found)} transfers begin with {name!r}")
    if not found:
        _refuse(f"no line of these traces is about the transfer {name!r}")
    return found[0]


def _analyse(files: list[Path]) -> "Analysis":
    """Ends with 2, and a sentence, if a file is not a trace."""
    from kvflow.tracing.figures import analyse
    from kvflow.tracing.lines import UnreadableTraceError

    try:
        analysis = analyse(files)
    except UnreadableTraceError as error:
        _refuse(str(error))
    for file in analysis.traces.torn():
        print(f"{file.path}: the last line is not finished; left out", file=sys.stderr)
    return analysis


def _refuse(said: str) -> NoReturn:
    typer.echo(f"kvflow trace: {said}", err=True)
    raise typer.Exit(2)
