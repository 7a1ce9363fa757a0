"""`kvflow top` and `kvflow inspect`; each imports what it runs when it runs."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvflow.ids import Address
    from kvflow.live.client import Access

LIMIT_MAX = 1000
_NAME_CHARS_MAX = 512

_KeyFile = Annotated[
    str, typer.Option(help="As in the engines' settings, if they have one (shared_key_file).")
]
_Timeout = Annotated[float, typer.Option(min=0.001, help="An answer is awaited for so long.")]


def add_to(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(top)
    app.command()(inspect)


def top(
    engines: Annotated[
        list[str],
        typer.Argument(metavar="ENGINE...", help="HOST:PORT of side channels, producers or not."),
    ],
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many looks.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For scripts: one document per look, on one line.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=LIMIT_MAX, help="Transfers asked of each worker.")
    ] = 200,
    stuck_s: Annotated[
        float, typer.Option(min=0, help="In one state for so long: marked, as maybe stuck.")
    ] = 5.0,
    shared_key_file: _KeyFile = "",
    timeout_s: _Timeout = 5.0,
) -> None:
    """Watch live transfers: in which state each is, since when, and what it waits for.

    The engines need `inspect` set to true in kv_connector_extra_config. A side channel is at
    VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT (plus the data-parallel index), not at the API's port.
    `q` or Ctrl-C leaves. An engine that does not answer is shown as such. Ends with 2 if none did.

    The longest in its state comes first, and is marked after --stuck-s. `kvflow inspect` tells the
    rest of one transfer. What the columns mean: specs/live.md.
    """
    from kvflow.live.top import Options, run

    addresses = [_address(engine) for engine in engines]
    options = Options(
        interval_s=interval,
        count=1 if once else count,
        limit=limit,
        stuck_s=stuck_s,
        as_json=as_json,
    )
    raise typer.Exit(run(addresses, options, _access("top", shared_key_file, timeout_s)))


def inspect(
    engine: Annotated[str, typer.Argument(help="HOST:PORT of its side channel.")],
    transfer: Annotated[
        str,
        typer.Argument(help="A transfer id, or a vLLM request id, or how only one of them begins."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    shared_key_file: _KeyFile = "",
    timeout_s: _Timeout = 5.0,
) -> None:
    """Tell everything of one transfer: what it waits for, its deadlines, its last moves.

    All ranks of the engine are asked. The engine needs `inspect` set to true in
    kv_connector_extra_config. Ends with 1 if the engine knows no such transfer, or several, and
    with 2 if it does not answer or refuses.
    """
    import asyncio

    from kvflow.errors import KVFlowError
    from kvflow.live.account import account
    from kvflow.live.client import find
    from kvflow.live.documents import of_inspect
    from kvflow.live.words import printable

    address = _address(engine)
    if not 1 <= len(transfer) <= _NAME_CHARS_MAX:
        raise typer.BadParameter(f"1 to {_NAME_CHARS_MAX} characters", param_hint="TRANSFER")
    access = _access("inspect", shared_key_file, timeout_s)
    try:
        found = asyncio.run(find(address, transfer, access))
    except KVFlowError as error:
        typer.echo(f"kvflow inspect: {printable(str(error))}", err=True)
        raise typer.Exit(2) from error
    for silent in found.errors:
        typer.echo(f"kvflow inspect: {printable(silent)}", err=True)
    if len(found.transfers) != 1:
        typer.echo(f"kvflow inspect: {_not_one(address, transfer, found.transfers)}", err=True)
        raise typer.Exit(1)
    if as_json:
        typer.echo(of_inspect(address, found).decode(), nl=False)
    else:
        typer.echo(account(address, found), nl=False)


def _not_one(address: "Address", name: str, transfers: tuple[str, ...]) -> str:
    from kvflow.live.words import printable

    if not transfers:
        return f"{address} knows no transfer or request that is called {name!r}, or begins so"
    shown = ", ".join(map(printable, transfers[:4]))
    more = ", and more" if len(transfers) > 4 else ""
    return f"{name!r} is not one transfer at {address}: {shown}{more}"


def _address(engine: str) -> "Address":
    """HOST:PORT, as it is or with `http://` before it."""
    from kvflow.ids import Address

    given = engine.removeprefix("http://").rstrip("/")
    host, _, port = given.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535
    if not host or "/" in host or not is_port:
        raise typer.BadParameter(f"{engine!r} is not HOST:PORT", param_hint="ENGINE")
    return Address(host, int(port))


def _access(command: str, shared_key_file: str, timeout_s: float) -> "Access":
    from kvflow.errors import ConfigurationError
    from kvflow.io.seal import from_file
    from kvflow.live.client import Access

    try:
        return Access(timeout_s=timeout_s, seal=from_file(shared_key_file))
    except ConfigurationError as error:
        typer.echo(f"kvflow {command}: {error}", err=True)
        raise typer.Exit(2) from error
