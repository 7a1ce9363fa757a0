"""`kvflow doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvflow.doctor.examine import Check
    from kvflow.doctor.facts import Side
    from kvflow.ids import Address


SideChannelOption = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT at which an engine here would listen (default: "
        "VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, as vLLM reads them)."
    ),
]
Remote = Annotated[
    bool, typer.Option("--remote-peers", help="Engines on other machines take part.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option(help="HOST:PORT of a side channel to reach from here; may be repeated."),
]
Producer = Annotated[
    str | None, typer.Option(help="HOST:PORT of a running producer's side channel.")
]
Consumer = Annotated[
    str | None, typer.Option(help="HOST:PORT of a running consumer's, if it listens (kv_both).")
]
ProducerFile = Annotated[
    Path | None, typer.Option(help="JSON file that describes a producer, as for kvflow plan.")
]
ConsumerFile = Annotated[Path | None, typer.Option(help="The same for a consumer.")]
Engines = Annotated[
    list[str] | None, typer.Option(help="URL of an engine's OpenAI port; may be repeated.")
]
KvConfig = Annotated[
    str | None, typer.Option(help="What vLLM is given by that name: JSON, or @FILE.")
]
Backends = Annotated[
    list[str] | None,
    typer.Option(help="NIXL backend (default: those of --kv-transfer-config, else UCX)."),
]
KeyFile = Annotated[str, typer.Option(help="As in the engines' settings, if they have one.")]
NoTransfer = Annotated[bool, typer.Option("--no-transfer", help="Do not measure a transfer.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        help="A check to make, instead of all: versions, transports, rdma, memory, config, "
        "side-channel, peers, engines, pair, transfer; may be repeated."
    ),
]
Timeout = Annotated[float, typer.Option(min=0.1, max=60, help="For each connection.")]
Json = Annotated[bool, typer.Option("--json", help="For scripts.")]


def doctor(
    side_channel: SideChannelOption = None,
    remote_peers: Remote = False,
    peer: Peers = None,
    producer: Producer = None,
    consumer: Consumer = None,
    producer_config: ProducerFile = None,
    consumer_config: ConsumerFile = None,
    engine: Engines = None,
    kv_transfer_config: KvConfig = None,
    backend: Backends = None,
    shared_key_file: KeyFile = "",
    no_transfer: NoTransfer = False,
    only: Only = None,
    timeout_s: Timeout = 3.0,
    as_json: Json = False,
) -> None:
    """Check this machine, or a pair of engines, before traffic does.

    Run it in the environment and with the environment variables of the engine that is to be
    started. Each finding says what was found, why it matters and what to set. Ends with 1 if
    something breaks serving, with 2 for bad arguments, else with 0.

    A pair that runs: --producer 10.0.0.1:5600 --consumer 10.0.0.2:5600. A pair on paper:
    --producer-config A.json --consumer-config B.json (see examples/layouts).
    """
    from kvflow.doctor import report
    from kvflow.doctor.checks import config
    from kvflow.doctor.examine import Facts, examine
    from kvflow.doctor.facts import Asked
    from kvflow.doctor.network import is_local

    listed = [_address("--peer", each) for each in peer or ()]
    ends = _given("--producer", producer), _given("--consumer", consumer)
    decoded = _config(kv_transfer_config)
    others = [*listed, *(end for end in ends if end is not None)]
    asked = Asked(
        side_channel=_given("--side-channel", side_channel),
        remote_peers=remote_peers or not all(is_local(each.host) for each in others),
        peers=tuple(listed),
        producer=ends[0],
        consumer=ends[1],
        described=_described(producer_config, consumer_config, is_running=any(ends)),
        engines=tuple(_url(each) for each in engine or ()),
        kv_config=decoded,
        backends=tuple(backend or ()) or config.backends(decoded),
        transfer=not no_transfer,
        seal=_seal(shared_key_file),
        timeout_s=timeout_s,
    )
    checks, facts = _chosen(only), Facts(asked)
    results = examine(facts, checks, report.begin)
    if as_json:
        report.print_json(results, facts)
    else:
        report.print_report(results)
    raise typer.Exit(report.status(results))


def _chosen(names: list[str] | None) -> "tuple[Check, ...]":
    from kvflow.doctor.examine import CHECKS

    known = [check.name for check in CHECKS]
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(known)}", param_hint="--only"
            )
    return tuple(check for check in CHECKS if not names or check.name in names)


def _given(option: str, text: str | None) -> "Address | None":
    return None if text is None else _address(option, text)


def _address(option: str, text: str) -> "Address":
    from kvflow.ids import Address

    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT", param_hint=option)
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{text!r} is not http://HOST:PORT", param_hint="--engine")
    return text.rstrip("/")


def _config(text: str | None) -> dict[str, Any] | None:
    import json

    if text is None:
        return None
    hint = "--kv-transfer-config"
    try:
        read = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
        decoded = json.loads(read)
    except OSError as error:
        raise typer.BadParameter(f"{text[1:]}: {error.strerror}", param_hint=hint) from error
    except ValueError as error:
        raise typer.BadParameter(f"that is no JSON: {error}", param_hint=hint) from error
    if not isinstance(decoded, dict):
        raise typer.BadParameter("that is no JSON object", param_hint=hint)
    return decoded


def _seal(path: str) -> Any:
    from kvflow.errors import ConfigurationError
    from kvflow.io import seal

    try:
        return seal.from_file(path)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint="--shared-key-file") from error


def _described(
    producer: Path | None, consumer: Path | None, *, is_running: bool
) -> "tuple[Side, Side] | None":
    from kvflow.doctor.described import side
    from kvflow.planning.description import DescriptionError

    if producer is None and consumer is None:
        return None
    if producer is None or consumer is None:
        raise typer.BadParameter("one needs the other", param_hint="--producer-config")
    if is_running:
        raise typer.BadParameter(
            "a description names layers in its own way, so it is compared with a description, not "
            "with --producer or --consumer",
            param_hint="--producer-config",
        )
    try:
        return side("producer", producer), side("consumer", consumer)
    except DescriptionError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
