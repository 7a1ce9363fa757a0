"""`kvflow states`: the machines as documents and pictures, and traces upon them."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvflow.core import TABLES, Table
from kvflow.errors import KVFlowError


class StatesFormat(enum.StrEnum):
    """How `kvflow states` prints."""

    MARKDOWN = "markdown"
    MERMAID = "mermaid"
    JSON = "json"
    SVG = "svg"


def states(
    more_traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE", help="More traces for --heat."),
    ] = None,
    output_format: Annotated[
        StatesFormat, typer.Option("--format", help="What to print.")
    ] = StatesFormat.MARKDOWN,
    machine: Annotated[
        str | None, typer.Option(help="Only this machine: producer, consumer or peer.")
    ] = None,
    heat: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TRACE",
            help="With --format svg: a file that KVFLOW_TRACE has written. Edges are as wide and "
            "as red as they were taken often, and times are medians in a state. May be repeated; "
            "more files may follow.",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write every generated document into this directory, as specs/ has them."
        ),
    ] = None,
) -> None:
    """Print the state machines, drawn from the tables that run.

    Where is time spent, and how do transfers end? Set KVFLOW_TRACE, then:

    kvflow states --format svg --machine producer --heat prefill-*.ndjson > producer.svg

    Ends with 2, and a sentence, if a trace cannot be read or has a line that is no row of a table.
    """
    tables = [table for table in TABLES if machine in (None, table.name)]
    if not tables:
        names = ", ".join(table.name for table in TABLES)
        raise typer.BadParameter(f"{machine!r} is not one of {names}", param_hint="--machine")
    if more_traces and not heat:
        raise _refused(f"{more_traces[0]}: traces are for --heat")
    if heat and (write is not None or output_format is not StatesFormat.SVG):
        raise _refused("--heat is for --format svg, without --write")
    if write is not None:
        _write(write)
        return
    typer.echo(_drawn(output_format, tables, [*(heat or []), *(more_traces or [])]), nl=False)


def _drawn(output_format: StatesFormat, tables: list[Table], traces: list[Path]) -> str:
    from kvflow.diagrams import svg
    from kvflow.diagrams.heat import heat_of
    from kvflow.observe import states as documents

    match output_format:
        case StatesFormat.JSON:
            return documents.as_json(tables)
        case StatesFormat.MARKDOWN:
            return documents.as_markdown(tables)
        case StatesFormat.MERMAID:
            return "\n".join(documents.as_mermaid(table) for table in tables)
        case StatesFormat.SVG:
            try:
                return svg.as_svg(tables, heat_of(traces) if traces else None)
            except KVFlowError as error:
                raise _refused(str(error)) from error


def _write(directory: Path) -> None:
    """Every document that is drawn from the code, into a directory such as specs/."""
    from kvflow.diagrams import svg
    from kvflow.observe import metrics, settings
    from kvflow.observe import states as documents

    texts = {
        "states.md": documents.as_markdown(),
        "settings.md": settings.as_markdown(),
        "metrics.md": metrics.as_markdown(),
    }
    for table in TABLES:
        texts[f"diagrams/{table.name}.mmd"] = documents.as_mermaid(table)
        texts[f"diagrams/{table.name}.svg"] = svg.as_svg([table])
    (directory / "diagrams").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")


def _refused(sentence: str) -> typer.Exit:
    typer.echo(f"kvflow states: {sentence}", err=True)
    return typer.Exit(2)
