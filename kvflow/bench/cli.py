"""The `kvflow bench` commands; each imports what it runs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from kvflow.bench import micro_cli

bench_app = typer.Typer(
    name="bench",
    help="Measure kvflow, and vLLM's own connectors beside it, on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@bench_app.callback()
def bench() -> None:
    """Measure kvflow, and vLLM's own connectors beside it, on this machine."""


_Quick = Annotated[
    bool,
    typer.Option("--quick", help="Under 15 minutes on two cores: 1 repeat, 2 rates, 2 lengths."),
]
_Connectors = Annotated[
    str | None,
    typer.Option(
        help="Out of kvflow-streamed, kvflow-push, kvflow-pull, upstream-push, upstream-pull "
        "(default: all)."
    ),
]
_Rates = Annotated[
    str | None, typer.Option(help="Requests per second, such as 1,2.5 (default: 1,2,3).")
]
_Lengths = Annotated[str | None, typer.Option(help="Tokens of a prompt (default: 512,1024,2048).")]
_Requests = Annotated[
    int | None,
    typer.Option(min=1, help="Per connector, rate, length and repeat (default: 24)."),
]
_OutputTokens = Annotated[int, typer.Option(min=2, help="Tokens that each request asks for.")]
_Repeats = Annotated[
    int | None,
    typer.Option(min=1, help="Rounds through all connectors, each with new pairs (default: 3)."),
]
_Seed = Annotated[int, typer.Option(help="Decides arrivals and prompts.")]
_Model = Annotated[
    str | None,
    typer.Option(help="A Hugging Face name or a directory (default: a tiny model, made here)."),
]
_TensorParallelSize = Annotated[int, typer.Option(min=1, help="Of each engine.")]
_MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Longest chunk of a prompt (default: 512 on a CPU, else vLLM's choice)."
    ),
]
_SequentialToo = Annotated[
    bool,
    typer.Option(
        "--sequential-too", help="Measure kvflow's pushes with decode after prefill as well."
    ),
]
_EvenPeers = Annotated[
    bool | None,
    typer.Option(
        "--even-peers/--no-even-peers",
        help="Run vLLM's own connectors without spinning progress thread and pinning "
        "(default: on a CPU only).",
    ),
]
_ProducerDevices = Annotated[
    str | None,
    typer.Option(
        help="CUDA devices of the prefill engine, such as 0-7 (default: the first ones). "
        "Both engines run on this machine; pairs over two machines are not supported."
    ),
]
_ConsumerDevices = Annotated[
    str | None, typer.Option(help="The same for the decode engine (default: the next ones).")
]
_EngineArg = Annotated[
    list[str] | None,
    typer.Option(help="Passed on to both engines, such as --engine-arg=--block-size=64."),
]
_JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write everything, per request too, there.")
]
_PngPath = Annotated[
    Path | None,
    typer.Option("--png", help="Draw TTFT and TPOT there (needs the extra `bench`: matplotlib)."),
]
_Out = Annotated[
    Path | None, typer.Option(help="Where engine logs and traces go (default: a new one).")
]


@bench_app.command()
def serve(
    quick: _Quick = False,
    connectors: _Connectors = None,
    rates: _Rates = None,
    lengths: _Lengths = None,
    requests: _Requests = None,
    output_tokens: _OutputTokens = 16,
    repeats: _Repeats = None,
    seed: _Seed = 1,
    model: _Model = None,
    tensor_parallel_size: _TensorParallelSize = 1,
    max_num_batched_tokens: _MaxNumBatchedTokens = None,
    sequential_too: _SequentialToo = False,
    even_peers: _EvenPeers = None,
    producer_devices: _ProducerDevices = None,
    consumer_devices: _ConsumerDevices = None,
    engine_arg: _EngineArg = None,
    json_path: _JsonPath = None,
    png_path: _PngPath = None,
    out: _Out = None,
) -> None:
    """Serve one prefill and one decode engine under load, with each connector in turn.

    All connectors meet the same prompts at the same times; every token is compared with a run of
    one engine alone. Ends with 1 if a request failed or was not right, or a pair did not run.
    """
    from kvflow.bench import serve_options
    from kvflow.bench.serve import serve as run_serve
    from kvflow.bench.serve_connectors import KEYS

    extent = serve_options.QUICK if quick else serve_options.FULL
    try:
        options = serve_options.ServeOptions(
            connectors=KEYS if connectors is None else serve_options.connectors(connectors, KEYS),
            rates=extent.rates if rates is None else serve_options.rates(rates),
            lengths=extent.lengths if lengths is None else serve_options.lengths(lengths),
            requests=requests or extent.requests,
            output_tokens=output_tokens,
            repeats=repeats or extent.repeats,
            seed=seed,
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            max_num_batched_tokens=max_num_batched_tokens,
            sequential_too=sequential_too,
            even_peers=even_peers,
            producer_devices=serve_options.devices("--producer-devices", producer_devices),
            consumer_devices=serve_options.devices("--consumer-devices", consumer_devices),
            engine_arguments=tuple(engine_arg or ()),
            json_path=json_path,
            png_path=png_path,
            out=out,
        )
        serve_options.check(options)
    except serve_options.OptionError as error:
        raise typer.BadParameter(error.problem, param_hint=error.option) from error
    raise typer.Exit(run_serve(options))


micro_cli.add_to(bench_app)
