"""Whether NIXL works here, and what it really moves bytes by."""

from collections.abc import Iterator, Mapping

from kvflow.doctor import ucx
from kvflow.doctor.facts import Lane, Nixl, NixlPair, Rdma, Way
from kvflow.doctor.findings import Finding, breaks, note, ok, warning

_STAGES = {
    "start": "The process that was to try NIXL did not start",
    "agent": "No NIXL agent can be made",
    "peer": "Two NIXL agents on this machine cannot be made known to each other",
    "write": "A write from one NIXL agent to another on this machine failed",
    "bytes": "A write between two NIXL agents went wrong",
    "notify": "A notification between two NIXL agents on this machine failed",
    "measuring": "NIXL worked, but not while it was measured",
}
_RDMA_TLS = "UCX_TLS=rc,sm,self,cuda_copy,cuda_ipc"


def check(
    nixl: Nixl, rdma: Rdma, environment: Mapping[str, str], *, remote_peers: bool
) -> Iterator[Finding]:
    """The agent; the lanes within this machine; the lanes to others."""
    here = nixl.here
    if here.failed_at:
        yield _failed(here, nixl.backends)
        return
    yield _agent(nixl)
    if "UCX" not in nixl.backends:
        yield _without_ucx(nixl)
        return
    yield from _within(here)
    yield from _between(nixl, rdma, remote_peers=remote_peers)
    if "UCX_NET_DEVICES" in environment:
        yield _devices(environment["UCX_NET_DEVICES"], nixl)


def _failed(pair: NixlPair, backends: tuple[str, ...]) -> Finding:
    stage = _STAGES.get(pair.failed_at, f"NIXL failed at {pair.failed_at!r}")
    to_do = "An engine's log says more with UCX_LOG_LEVEL=debug NIXL_LOG_LEVEL=debug."
    if "cannot be imported" in pair.error:
        to_do = "pip install 'kvflow[nixl]'"
    elif pair.failed_at == "agent" and backends != ("UCX",):
        to_do = (
            f"Install what the plugins of {', '.join(backends)} need (LIBFABRIC: libfabric), or "
            'set "nixl_backends" to what works here; ["UCX"] is the default.'
        )
    elif pair.tls and pair.failed_at == "agent":
        to_do = (
            f"UCX_TLS={pair.tls} leaves UCX nothing that tells of a dead peer: unset it, or add "
            "tcp, or rc where there is an RDMA card."
        )
    return breaks(
        f"{stage}: {pair.error}.{_said(pair)}",
        "kvflow moves KV by NIXL and by nothing else; an engine would end at start, or fail every "
        "transfer.",
        to_do,
    )


def _said(pair: NixlPair) -> str:
    return f" The log says: {'; '.join(pair.complaints)}." if pair.complaints else ""


def _agent(nixl: Nixl) -> Finding:
    version = f" (UCX {nixl.here.ucx_version})" if nixl.here.ucx_version else ""
    return ok(
        f"A NIXL agent works with {', '.join(nixl.backends)}{version}; a write between two "
        f"processes brought the right bytes. This NIXL also brings "
        f"{_listed(set(nixl.here.plugins) - set(nixl.backends))}.",
        "What a worker does at start can be done here.",
    )


def _without_ucx(nixl: Nixl) -> Finding:
    return note(
        f"The backend is {', '.join(nixl.backends)}; which network it uses cannot be seen.",
        "Only UCX says which transports it has chosen.",
        "See the backend's own log (libfabric: FI_LOG_LEVEL=info).",
    )


def _within(pair: NixlPair) -> Iterator[Finding]:
    """Between two processes of this machine."""
    if not pair.data:
        yield note(
            f"UCX {pair.ucx_version or 'of an unknown version'} did not say which transports it "
            "uses.",
            "Whether it fell back to a slow one cannot be told.",
            "Look for the tables that UCX_LOG_LEVEL=info UCX_PROTO_INFO=y makes an engine print.",
        )
        return
    ways = _ways(pair.data)
    lanes = f"{_listed(pair.data)} ({_listed(ways)}), notifications by {_listed(pair.notices)}"
    found = f"Between two processes of this machine, host memory is written by {lanes}."
    if Way.TCP not in ways:
        yield ok(found, "Engines on one machine move KV without the network.")
    elif pair.tls:
        yield note(
            found,
            f"UCX_TLS={pair.tls} leaves it nothing better: it is meant, and slower than shared "
            "memory.",
            "If it is not meant, unset UCX_TLS, or add sm.",
        )
    else:
        yield warning(
            found,
            "UCX fell back to TCP within one machine, though UCX_TLS forbids it nothing: shared "
            "memory does not work between these processes.",
            "In containers, share the PID and IPC namespaces and allow ptrace (CAP_SYS_PTRACE), "
            "which process_vm_writev needs; elsewhere see kernel.yama.ptrace_scope.",
        )


def _between(nixl: Nixl, rdma: Rdma, *, remote_peers: bool) -> Iterator[Finding]:
    """To an engine on another machine."""
    pair = nixl.elsewhere or nixl.here
    tls = nixl.here.tls
    if nixl.elsewhere is None and Way.SHARED in _ways(nixl.here.data):
        found = f"UCX_TLS={tls} allows nothing but shared memory."
        why = "No engine on another machine can be reached."
        to_do = f"Unset UCX_TLS, or set {_RDMA_TLS}, or add tcp."
        yield (breaks if remote_peers else note)(found, why, to_do)
        return
    if pair.failed_at:
        found = f"Without shared memory (UCX_TLS={pair.tls}) NIXL fails: {pair.error}.{_said(pair)}"
        why = "An engine on another machine cannot be reached."
        to_do = "Unset UCX_TLS, or add rc where there is an RDMA card, else tcp."
        yield (breaks if remote_peers else warning)(found, why, to_do)
        return
    ways, lanes = _ways(pair.data), [lane for lane in pair.data if lane.device != "lo"]
    found = f"To another machine, host memory would be written by {_listed(lanes or pair.data)}"
    if Way.RDMA in ways:
        yield ok(f"{found} ({_listed(ways)}).", "RDMA carries the KV.")
    elif Way.TCP in ways:
        yield _tcp(f"{found} (TCP): no RDMA.", tls, rdma, remote_peers=remote_peers)
    elif ways:
        yield note(
            f"{found} ({_listed(ways)}).",
            "What these transports are is not known to this version of kvflow.",
            "See UCX's documentation for them.",
        )


def _tcp(found: str, tls: str | None, rdma: Rdma, *, remote_peers: bool) -> Finding:
    named = (tls or "").split(",")
    if "tcp" in named:
        return note(
            found,
            f"UCX_TLS={tls} says so: it is meant. Each byte costs both machines processor time, "
            "and time to first token.",
            f"If it is not meant, set {_RDMA_TLS} where there is an RDMA card.",
        )
    why = (
        "UCX takes TCP where it finds no RDMA device that it can use, and does not say so. Each "
        "byte then costs both machines processor time, and time to first token."
    )
    if rdma.devices:
        names = ", ".join(device.name for device in rdma.devices)
        return warning(
            found,
            f"There are RDMA devices ({names}). {why}",
            f"See the findings on RDMA devices; set {_RDMA_TLS}, so that UCX fails with a reason "
            "instead of falling back.",
        )
    if remote_peers:
        return warning(
            found,
            why,
            "Use machines with RDMA (and give containers /dev/infiniband), or set UCX_TLS=tcp,sm,"
            "self to say that TCP is meant.",
        )
    return note(
        found,
        f"This machine has no RDMA device. {why}",
        "Nothing, if all engines are on this machine; with others, use machines with RDMA.",
    )


def _devices(value: str, nixl: Nixl) -> Finding:
    pair = nixl.elsewhere or nixl.here
    wanted = value.split(",")
    used = [lane.device for lane in pair.data]
    found = f"UCX_NET_DEVICES={value}; UCX uses {_listed(used)} of it."
    if value == "all" or set(used) & set(wanted):
        return ok(found, "UCX uses what it was told to use.")
    return warning(
        found,
        "None of the devices that it names is in use: a name is wrong, or a port is down.",
        "Compare with the findings on RDMA devices; a device is named NAME:PORT, as mlx5_0:1.",
    )


def _ways(lanes: tuple[Lane, ...]) -> list[Way]:
    return list(dict.fromkeys(ucx.way(lane) for lane in lanes))


def _listed(things: object) -> str:
    """Words with commas; in their order, if they have one."""
    assert isinstance(things, list | tuple | set)
    words = [str(thing) for thing in things]
    return ", ".join(sorted(words) if isinstance(things, set) else words) or "nothing"
