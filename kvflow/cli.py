"""The `kvflow` command."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvflow import __version__
from kvflow.bench.cli import bench_app
from kvflow.diagrams.cli import states
from kvflow.doctor.cli import doctor
from kvflow.live import cli as live_cli
from kvflow.tracing.cli import trace_app

app = typer.Typer(
    name="kvflow",
    help="KV transfer for vLLM's split prefill and decode: every request a state machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
live_cli.add_to(app)
app.command()(doctor)
app.add_typer(trace_app, name="trace")


class DispatchOption(enum.StrEnum):
    """How `kvflow demo` sends the two legs."""

    CONCURRENT = "concurrent"
    SEQUENTIAL = "sequential"
    BOTH = "both"


class ModeOption(enum.StrEnum):
    """The consumer's setting `mode`."""

    PUSH = "push"
    PULL = "pull"
    AUTO = "auto"


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app.command()(states)


@app.command()
def settings(
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Print every key of kv_connector_extra_config with its default and meaning."""
    from kvflow.observe import settings as documents

    typer.echo(documents.as_json() if as_json else documents.as_markdown(), nl=False)


@app.command()
def release(
    producer: Annotated[str, typer.Argument(help="HOST:PORT of the producer's side channel.")],
    transfer_id: Annotated[str, typer.Argument(help="The transfer that nobody will fetch.")],
    shared_key_file: Annotated[
        str, typer.Option(help="As in the engines' settings, if they have one.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="Give up after this.")] = 5.0,
) -> None:
    """Let a producer's blocks go, as a router does when there will be no decode leg."""
    import asyncio

    from kvflow.errors import KVFlowError
    from kvflow.ids import Address, TransferId, is_transfer_id
    from kvflow.io import seal, side_channel

    host, _, port = producer.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise typer.BadParameter(f"{producer!r} is not HOST:PORT", param_hint="PRODUCER")
    if not is_transfer_id(transfer_id):
        raise typer.BadParameter(f"{transfer_id!r} is no transfer id", param_hint="TRANSFER_ID")
    address = Address(host, int(port))
    try:
        key = seal.from_file(shared_key_file)
        asyncio.run(side_channel.release(address, TransferId(transfer_id), timeout_s, key))
    except KVFlowError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{address} lets {transfer_id} go")


@app.command()
def simulate(
    seed: Annotated[
        int | None, typer.Option(help="Decides everything (default: a fresh one, printed).")
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Go on for so many steps. A step is one operation (of a vLLM, a router or the "
            "outside world), or one thing that happens by itself: a notice or an answer "
            "delivered, a slice of a write ended, a deadline expired.",
        ),
    ] = 100_000,
    swarm: Annotated[
        bool, typer.Option("--swarm", help="Each phase turns a random half of the faults off.")
    ] = False,
    engines: Annotated[
        int, typer.Option(min=2, max=64, help="Half of them producers, half consumers.")
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Run the core through modelled worlds in which everything goes wrong; check all invariants.

    Ends with 1 and a minimal transcript if an invariant was broken.
    """
    from kvflow.testing.commands import simulate as run_simulation

    raise typer.Exit(run_simulation(seed, steps, swarm=swarm, engines=engines, as_json=as_json))


@app.command()
def replay(
    traces: Annotated[list[Path], typer.Argument(help="Files that KVFLOW_TRACE has written.")],
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Check that every line of real engines' traces is a row of the tables.

    Ends with 1 and the first line that is not; with 2 if a file is not a trace. Traces of both
    sides, given together, are also checked against each other.
    """
    from kvflow.testing.commands import replay as run_replay

    raise typer.Exit(run_replay(traces, as_json=as_json))


@app.command()
def plan(
    producer: Annotated[Path, typer.Option(help="JSON file that describes the engine.")],
    consumer: Annotated[Path, typer.Option(help="The same for the other engine.")],
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt.")] = 4096,
    hit: Annotated[int, typer.Option(min=0, help="Of them, there already.")] = 0,
    fragmented: Annotated[
        bool, typer.Option("--fragmented", help="Block ids are scattered over the pools.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Print which rank would write what to whom for one request, in how many runs.

    The engines are descriptions (see examples/layouts); nothing is started. Ends with 1 if KV
    cannot move between them, with 2 if a description cannot be read.
    """
    from kvflow.planning.plan import Request
    from kvflow.planning.report import run

    if hit > tokens:
        raise typer.BadParameter(f"{hit} of {tokens} tokens", param_hint="--hit")
    request = Request(tokens=tokens, hit=hit, fragmented=fragmented)
    raise typer.Exit(run(producer, consumer, request, as_json=as_json))


@app.command()
def route(
    prefill: Annotated[
        list[str] | None, typer.Option(help="URL of a prefill engine; may be repeated.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="URL of a decode engine; may be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings; options override it.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen.")] = None,
    port: Annotated[int | None, typer.Option(help="Where to listen; 0: a free one.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="push (both legs at once), pull (decode after prefill) or auto."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON lines.")] = False,
) -> None:
    """Route OpenAI requests to prefill and decode engines.

    Each engine is met first: a producer says where its side channel is, a consumer is tried with
    KV of a producer. Ends with 2, and a sentence, if an engine cannot be used or the settings are
    wrong.
    All settings are in specs/routers.md.
    """
    from kvflow.errors import ConfigurationError

    try:
        from kvflow.router import config as settings_of_router
        from kvflow.router import server
    except ModuleNotFoundError as error:
        typer.echo(f"kvflow route: {error.name} is missing: pip install 'kvflow[router]'", err=True)
        raise typer.Exit(2) from error
    given = {"prefill": prefill, "decode": decode, "host": host, "port": port, "mode": mode}
    told = {key: value for key, value in given.items() if value is not None}
    try:
        settings_given = settings_of_router.configure(config, told)
    except ConfigurationError as error:
        typer.echo(f"kvflow route: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(server.run(settings_given, as_json=as_json))


@app.command()
def demo(
    dispatch: Annotated[
        DispatchOption,
        typer.Option(help="Both legs at once, decode after prefill, or one after the other."),
    ] = DispatchOption.BOTH,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on standard output.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the engines up and print curl commands.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Where traces and engine logs go (default: a new one).")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per dispatch order.")] = 8,
    by_name: Annotated[
        bool,
        typer.Option("--by-name", help="Load the connector by its name, not its module path."),
    ] = False,
    mode: Annotated[
        ModeOption, typer.Option(help="Who moves the KV: the producer (push) or the consumer.")
    ] = ModeOption.PUSH,
    model_directory: Annotated[
        Path | None, typer.Option(help="Where the tiny model is made (default: the user's cache).")
    ] = None,
    router: Annotated[
        bool,
        typer.Option(
            "--router",
            help="60 chats through the router instead, with two producers of which one is killed.",
        ),
    ] = False,
) -> None:
    """Start a prefill and a decode engine, move KV from one to the other, compare tokens."""
    from kvflow.demo.requests import Dispatch
    from kvflow.demo.run import DemoOptions
    from kvflow.demo.run import demo as run_demo

    both = dispatch is DispatchOption.BOTH
    orders = tuple(Dispatch) if both else (Dispatch(dispatch.value),)
    options = DemoOptions(
        dispatch=orders,
        as_json=as_json,
        keep=keep,
        trace=trace,
        requests=requests,
        by_name=by_name,
        mode=mode.value,
        model_directory=model_directory,
        router=router,
    )
    raise typer.Exit(run_demo(options))


def main() -> None:
    """Entry point."""
    app()
