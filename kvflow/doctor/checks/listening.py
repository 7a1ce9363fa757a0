"""The side channel of an engine to be started here, and the way to others."""

from collections.abc import Iterator

from kvflow.doctor.facts import Reach, Reached, SideChannel
from kvflow.doctor.findings import Finding, breaks, note, ok, warning
from kvflow.doctor.network import HOST_KEY, PORT_KEY, is_any, is_local

_HOSTS_SHOWN = 4


def check(channel: SideChannel, *, listens: bool, remote_peers: bool) -> Iterator[Finding]:
    """The address that consumers are told, and whether it can be listened on."""
    where = f"{channel.host or '(empty)'}:{channel.port}"
    if not listens:
        yield ok(
            f"kv_role is kv_consumer: no side channel listens, whatever {HOST_KEY} says.",
            "A pure consumer asks, and is never asked.",
        )
        return
    yield _source(channel, where)
    yield from _host(channel, remote_peers=remote_peers)
    yield from _port(channel, where)


def reached(each: Reached) -> Finding:
    """A peer's side channel, from here."""
    address, detail = each.address, f" ({each.detail})" if each.detail else ""
    match each.reach:
        case Reach.CONNECTED:
            return ok(f"{address} takes connections.", "The peer's side channel is reached.")
        case Reach.REFUSED:
            return breaks(
                f"{address} refuses connections{detail}.",
                "The machine answers, so no firewall drops packets: nothing listens on this port "
                "at this address. A side channel listens once its engine has started, only at its "
                f"{HOST_KEY}, and not at all for kv_role kv_consumer.",
                f"See that the engine is up, and set its {HOST_KEY} to an address of its machine "
                f"and {PORT_KEY} to {address.port}.",
            )
        case Reach.TIMED_OUT:
            return breaks(
                f"{address} does not answer{detail}.",
                "Packets are dropped on the way: a firewall, a security group, a network policy, "
                "or a wrong address. A machine without a listener would refuse.",
                f"Let TCP port {address.port} through from here, and whatever ports UCX uses for "
                "TCP (all, or UCX_TCP_PORT_RANGE).",
            )
        case Reach.UNRESOLVED:
            return breaks(
                f"The name {address.host} does not resolve here{detail}.",
                "A consumer is told this name by the router or the producer, and resolves it on "
                "its own machine.",
                "Use an IP address, or a name that all machines resolve.",
            )
        case Reach.UNREACHABLE:
            return breaks(
                f"{address} cannot be reached{detail}.",
                "There is no route to it from here.",
                "Compare the networks of both machines (ip route get ADDRESS).",
            )


def _source(channel: SideChannel, where: str) -> Finding:
    given = {
        "option": "as given by --side-channel",
        "environment": f"by {HOST_KEY} and {PORT_KEY}",
        "default": f"vLLM's default: neither {HOST_KEY} nor {PORT_KEY} is set",
    }[channel.source]
    return ok(
        f"An engine here would listen at {where} ({given}).",
        "Consumers are told this address, and connect to it before their first load.",
    )


def _host(channel: SideChannel, *, remote_peers: bool) -> Iterator[Finding]:
    host = channel.host
    to_do = f"{HOST_KEY}={channel.outgoing or 'an address of this machine that peers reach'}"
    if is_local(host) or is_any(host):
        yield _own_only(host, to_do, remote_peers=remote_peers)
    elif not channel.addresses:
        yield breaks(
            f"The host name {host} does not resolve on this machine.",
            "The engine cannot listen there, and ends at start.",
            to_do,
        )
    elif not channel.is_own:
        yield breaks(
            f"{host} ({', '.join(channel.addresses[:_HOSTS_SHOWN])}) is no address of this "
            "machine.",
            "The engine cannot listen there, and ends at start.",
            to_do,
        )
    elif all(map(is_local, channel.addresses)):
        yield _own_only(
            f"{host} ({', '.join(channel.addresses)})", to_do, remote_peers=remote_peers
        )


def _own_only(host: str, to_do: str, *, remote_peers: bool) -> Finding:
    what = "an address for listening, at which nobody is" if is_any(host) else "loopback"
    found = f"The side channel's host is {host or '(empty)'}: {what}."
    if remote_peers:
        return breaks(
            found,
            "Engines and routers on other machines are told to connect there, reach themselves or "
            "nobody, and every load from here fails.",
            to_do,
        )
    if is_any(host):
        return warning(
            found,
            "It is told to consumers as it is; on one machine a connection to it happens to reach "
            "the engine, from any other it does not. It also listens on every network.",
            to_do,
        )
    return note(
        found,
        "That is right as long as all engines and the router are on this machine; nobody else "
        "reaches it.",
        f"Nothing, or, with engines on other machines: {to_do}",
    )


def _port(channel: SideChannel, where: str) -> Iterator[Finding]:
    if not channel.port.isdecimal() or not 1 <= int(channel.port) <= 65535:
        yield breaks(
            f"{PORT_KEY} is {channel.port!r}.",
            "It is no port, and the engine ends at start.",
            f"{PORT_KEY}=5600, or any number from 1 to 65535.",
        )
        return
    if channel.serves:
        yield note(
            f"At {where} the side channel of engine {channel.serves} answers already.",
            "An engine of kvflow is running here; a second one needs a port of its own (with data "
            "parallelism each engine takes the next one).",
            f"Nothing for the running engine; {PORT_KEY}={int(channel.port) + 1} or so for a "
            "second.",
        )
    elif channel.taken:
        holder = f" by {channel.holder}" if channel.holder else ""
        yield breaks(
            f"{where} cannot be listened on: {channel.taken}{holder}; what holds it is no side "
            "channel of kvflow, or has another key.",
            "An engine that is to listen there ends at start.",
            f"End what holds it, or set {PORT_KEY} to a free port (producers may differ).",
        )
    first, last = channel.ephemeral or (0, 0)
    if first <= int(channel.port) <= last:
        yield warning(
            f"Port {channel.port} lies among those that this system gives to outgoing connections "
            f"({first} to {last}).",
            "Now and then some connection has it just when an engine starts, which then ends.",
            f"{PORT_KEY} below {first}, or reserve it: sysctl "
            f"net.ipv4.ip_local_reserved_ports={channel.port}",
        )
