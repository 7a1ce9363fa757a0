"""What is asked of the network: names, ports, side channels, engines. Nothing here judges."""

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import httpx

from kvflow.doctor.facts import OpenAi, Reach, Reached, Side, SideChannel
from kvflow.errors import KVFlowError
from kvflow.ids import Address
from kvflow.io import side_channel
from kvflow.io.seal import Seal

DEFAULT = Address("localhost", 5600)
"""vLLM's."""
HOST_KEY, PORT_KEY = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_ENGINE_ID = "kvflow-doctor"
_DOCUMENTATION = ("192.0.2.1", 9)
"""An address that nobody has; nothing is sent there."""


def is_local(host: str) -> bool:
    """Whether only this machine can reach `host`: a loopback name or address."""
    return host == "localhost" or _is(host, "is_loopback")


def is_any(host: str) -> bool:
    """Whether `host` is the address that stands for all of a machine's ("0.0.0.0")."""
    return host == "" or _is(host, "is_unspecified")


def listening(
    given: Address | None, environment: Mapping[str, str], seal: Seal, timeout_s: float
) -> SideChannel:
    """Where an engine would listen, and whether it could."""
    if given is not None:
        source, host, port = "option", given.host, str(given.port)
    else:
        source = "environment" if {HOST_KEY, PORT_KEY} & environment.keys() else "default"
        host = environment.get(HOST_KEY, DEFAULT.host)
        port = environment.get(PORT_KEY, str(DEFAULT.port))
    number = int(port) if port.isdecimal() and 1 <= int(port) <= 65535 else None
    addresses = _resolved(host)
    is_own = bool(addresses) and "" in _bind_errors(host, 0)
    errors = _bind_errors(host, number) if is_own and number else []
    taken = next(filter(None, errors), "")
    serves = ""
    if taken and number:
        try:
            met = side_channel.meet(Address(host, number), _ENGINE_ID, timeout_s, seal)
            serves = asyncio.run(met).engine_id
        except KVFlowError:
            serves = ""
    return SideChannel(
        source=source,
        host=host,
        port=port,
        addresses=addresses,
        is_own=is_own,
        taken=taken,
        holder=_holder(number) if taken and number else "",
        serves=serves,
        outgoing=_outgoing(),
        ephemeral=_ephemeral(),
    )


def reach(address: Address, timeout_s: float) -> Reached:
    """Open a TCP connection, and close it."""
    try:
        with socket.create_connection(address, timeout_s):
            return Reached(address=address, reach=Reach.CONNECTED)
    except (socket.gaierror, UnicodeError) as error:
        what, detail = Reach.UNRESOLVED, str(error)
    except ConnectionRefusedError as error:
        what, detail = Reach.REFUSED, str(error)
    except TimeoutError as error:
        what, detail = Reach.TIMED_OUT, str(error)
    except OSError as error:
        what, detail = Reach.UNREACHABLE, str(error)
    return Reached(address=address, reach=what, detail=detail)


def meet(name: str, address: Address, seal: Seal, timeout_s: float) -> Side:
    """Ask a running engine who its workers are, as a consumer would."""
    reached = reach(address, timeout_s)
    if reached.reach is not Reach.CONNECTED:
        return Side(name=name, where=str(address), reached=reached, error=reached.detail)
    try:
        reply = asyncio.run(side_channel.meet(address, _ENGINE_ID, timeout_s, seal))
    except KVFlowError as error:
        return Side(name=name, where=str(address), reached=reached, error=str(error))
    return Side(
        name=name,
        where=str(address),
        engine_id=reply.engine_id,
        ranks=reply.ranks,
        reached=reached,
    )


def engine(url: str, timeout_s: float) -> OpenAi:
    """An engine's HTTP port: its version and its models."""
    try:
        with httpx.Client(base_url=url, timeout=timeout_s) as client:
            told = client.get("/version")
            models = client.get("/v1/models")
        version = str(told.json()["version"]) if told.is_success else ""
        names = [str(each["id"]) for each in models.json()["data"]] if models.is_success else []
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return OpenAi(url=url, error=str(error) or type(error).__name__)
    except (ValueError, KeyError, TypeError) as error:
        return OpenAi(url=url, status=told.status_code, error=f"answers nonsense: {error!r}")
    return OpenAi(url=url, status=told.status_code, version=version, models=tuple(names))


def _is(host: str, what: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), what))
    except ValueError:
        return False


def _resolved(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def _bind_errors(host: str, port: int) -> list[str]:
    """For each of the host's addresses, why an engine could not listen there; "" if it could."""
    errors = []
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            trial = socket.socket(family, kind, protocol)
        except OSError:
            continue  # no such family here; asyncio passes over it as well
        with trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                trial.bind(address)
                trial.listen(1)
            except OSError as error:
                errors.append(os.strerror(error.errno or errno.EIO))
            else:
                errors.append("")
    return errors


def _holder(port: int) -> str:
    """The process that listens on a port; "" if it cannot be told (needs psutil, and the right)."""
    try:
        import psutil
    except ImportError:
        return ""
    try:
        for each in psutil.net_connections(kind="tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                words = psutil.Process(each.pid).cmdline()
                return f"process {each.pid} ({' '.join(words)[:80]})"
    except (psutil.Error, OSError):
        return ""
    return ""


def _outgoing() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(_DOCUMENTATION)
        except OSError:
            return ""
        return str(trial.getsockname()[0])


def _ephemeral() -> tuple[int, int] | None:
    try:
        words = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(words[0]), int(words[1])
