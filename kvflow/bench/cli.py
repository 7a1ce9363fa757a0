"""`kvflow bench`: the benchmarks' commands."""

import typer

from kvflow.bench import micro_cli

bench_app = typer.Typer(
    help="Measure kvflow on this machine.", no_args_is_help=True, add_completion=False
)
micro_cli.add_to(bench_app)
