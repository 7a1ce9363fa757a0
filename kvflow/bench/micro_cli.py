"""`kvflow bench transfer` and `kvflow bench core`."""

from pathlib import Path
from typing import Annotated, get_args

import typer

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here as well.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few cases and rounds only.")]


def add_to(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(transfer)
    app.command()(core)


def transfer(
    layouts: Annotated[
        str | None, typer.Option(help="Memory layouts, separated by commas; see kvflow plan.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Tokens per block, separated by commas (16,32,64,128).")
    ] = None,
    counts: Annotated[
        str | None,
        typer.Option(help="Descriptors, that is blocks times 16 layers; multiples of 16."),
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Rounds (default 9).")] = None,
    quick: Quick = False,
    json_file: JsonFile = None,
) -> None:
    """Move KV between two processes by NIXL, beside other ways of moving the same blocks.

    No engine is started. Every layout is measured with the first block size, the first layout with
    all of them, with block ids one after the other and scattered. Ends with 1 where NIXL is
    missing.
    """
    from kvflow.bench import transfer_cases as of
    from kvflow.bench.transfer_report import bench
    from kvflow.planning.description import Layout

    named = layouts.split(",") if layouts else list(of.LAYOUTS[:: 2 if quick else 1])
    for name in named:
        if name not in get_args(Layout):
            known = ", ".join(get_args(Layout))
            raise typer.BadParameter(f"{name!r} is not one of {known}", param_hint="--layouts")
    by_default = ((16,), (16, 18_880)) if quick else (of.SIZES, of.COUNTS)
    block_sizes = _numbers("--sizes", sizes, 1) or by_default[0]
    descriptors = _numbers("--counts", counts, of.LAYERS) or by_default[1]
    made, left_out = of.cases(named, block_sizes, descriptors)  # type: ignore[arg-type]
    if not made:
        raise typer.BadParameter(
            f"each case would move more than {of.BYTES_MAX >> 20} MiB", param_hint="--counts"
        )
    raise typer.Exit(bench(made, left_out, repeats or (3 if quick else 9), json_file))


def core(
    live: Annotated[
        str | None, typer.Option(help="Live transfers, separated by commas (10,256,10000).")
    ] = None,
    quick: Quick = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the state machines and vLLM's hooks, without a network.

    Time per event and per transfer, memory per live transfer, and the time of each engine step in
    the connector's two halves; then many transfers with aborts, after which nothing may be left.
    """
    from kvflow.bench.core_report import bench

    counts = _numbers("--live", live, 1) or ((10, 256) if quick else (10, 256, 10_000))
    raise typer.Exit(bench(counts, quick=quick, path=json_file))


def _numbers(option: str, text: str | None, multiple: int) -> tuple[int, ...]:
    """Numbers separated by commas; none if there is no text."""
    if text is None:
        return ()
    numbers = []
    for word in text.split(","):
        number = int(word) if word.strip().isdecimal() else 0
        if number < 1 or number % multiple:
            wanted = "a positive number" if multiple == 1 else f"a positive multiple of {multiple}"
            raise typer.BadParameter(f"{word!r} is not {wanted}", param_hint=option)
        numbers.append(number)
    return tuple(numbers)
