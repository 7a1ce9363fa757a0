"""RDMA cards, and what keeps a process from using them."""

from collections.abc import Iterator

from kvflow.doctor.facts import UNLIMITED, Gpu, Limits, Rdma, RdmaDevice, RdmaPort
from kvflow.doctor.findings import Finding, breaks, note, ok, warning

_PEER_MODULES = frozenset({"nvidia_peermem", "nv_peer_mem"})
_COPY_MODULE = "gdrdrv"


def check(
    rdma: Rdma, limits: Limits, gpu: Gpu, backends: tuple[str, ...], *, remote_peers: bool
) -> Iterator[Finding]:
    """Devices, their files, locked memory, the way to GPU memory."""
    if not rdma.devices:
        yield _none(rdma, remote_peers=remote_peers)
        return
    for device in rdma.devices:
        yield _device(device)
    if not any(port.is_active for device in rdma.devices for port in device.ports):
        yield warning(
            "No port of any RDMA device is active.",
            "UCX and libfabric pass over such devices and fall back to TCP.",
            "Bring the links up: cables, the switch, for InfiniBand a subnet manager (ibstat).",
        )
    yield _verbs(rdma)
    yield _memlock(limits)
    if any(device.is_efa for device in rdma.devices):
        yield _efa(backends)
    if gpu.driver:
        yield _gpu(gpu)


def _none(rdma: Rdma, *, remote_peers: bool) -> Finding:
    verbs = f", though /dev/infiniband has {', '.join(rdma.verbs)}" if rdma.verbs else ""
    found = f"No RDMA device: /sys/class/infiniband is empty or not there{verbs}."
    why = "KV moves by shared memory within this machine, and by TCP to any other."
    if remote_peers:
        return warning(
            found,
            f"{why} TCP costs processor time on both sides, and time to first token.",
            "Use machines with RDMA; in a container, hand in /dev/infiniband and see that the "
            "network namespace has the devices (a device plugin, or host networking).",
        )
    return note(found, why, "Nothing, if all engines are on this machine.")


def _device(device: RdmaDevice) -> Finding:
    ports = "; ".join(map(_in_words, device.ports)) or "no port"
    found = f"{device.name}{f' ({device.driver})' if device.driver else ''}: {ports}."
    inactive = [port for port in device.ports if not port.is_active]
    if inactive or not device.ports:
        return note(
            found,
            "A port that is not active carries nothing; UCX passes over it.",
            f"If engines are to use it, bring the link up; else name the others in "
            f"UCX_NET_DEVICES, without {device.name}.",
        )
    ethernet = [port for port in device.ports if port.link_layer == "Ethernet"]
    if ethernet and not device.is_efa:
        if not any("v2" in gid for port in ethernet for gid in port.gid_types):
            return warning(
                found,
                "RoCE without a GID of RoCE v2 is not routed: peers in another subnet are not "
                "reached.",
                "Give the interface an IP address (RoCE v2 GIDs come from it), then set "
                "UCX_IB_GID_INDEX to the index of one (show_gids).",
            )
        return ok(
            found,
            "RoCE: UCX chooses a GID of RoCE v2 by itself; UCX_IB_GID_INDEX overrides it.",
        )
    return ok(found, "UCX can use it, and libfabric where it is an EFA.")


def _in_words(port: RdmaPort) -> str:
    state = port.state.partition(": ")[2] or port.state or "state unknown"
    gids = f", GIDs {' and '.join(port.gid_types)}" if port.gid_types else ""
    return f"port {port.number} {state}, {port.link_layer or 'link unknown'}, {port.rate}{gids}"


def _verbs(rdma: Rdma) -> Finding:
    closed = [name for name, may_open in rdma.verbs.items() if not may_open]
    if not rdma.verbs or closed:
        what = f"{', '.join(closed)} cannot be opened" if closed else "there is no uverbs file"
        return breaks(
            f"RDMA devices are there, but under /dev/infiniband {what}.",
            "Without these files no process can use the cards: UCX falls back to TCP and does not "
            "say so, or fails if UCX_TLS names no TCP.",
            "Hand /dev/infiniband to the container (docker --device=/dev/infiniband, in Kubernetes "
            "a device plugin), readable and writable for the engine's user.",
        )
    return ok(
        f"/dev/infiniband: {', '.join(rdma.verbs)}, readable and writable.",
        "A process needs these files to use the cards.",
    )


def _memlock(limits: Limits) -> Finding:
    if limits.memlock_bytes == UNLIMITED or limits.may_lock:
        what = "unlimited" if limits.memlock_bytes == UNLIMITED else in_bytes(limits.memlock_bytes)
        held = ", and CAP_IPC_LOCK is held" if limits.may_lock else ""
        return ok(
            f"Memory that may be locked (RLIMIT_MEMLOCK): {what}{held}.",
            "Registered memory is locked: a worker registers its whole KV pool.",
        )
    return breaks(
        f"At most {in_bytes(limits.memlock_bytes)} of memory may be locked (RLIMIT_MEMLOCK).",
        "Registered memory is locked, and a worker registers its whole KV pool: that fails "
        "(ibv_reg_mr: cannot allocate memory), and the engine ends at start.",
        "ulimit -l unlimited: docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity, or "
        "/etc/security/limits.conf; or give CAP_IPC_LOCK.",
    )


def _efa(backends: tuple[str, ...]) -> Finding:
    if "LIBFABRIC" in backends:
        return ok("An EFA is here, and LIBFABRIC is among the backends.", "That is its backend.")
    return warning(
        f"An EFA is here, and the backends are {', '.join(backends)}.",
        "NIXL drives EFA by its backend LIBFABRIC; UCX may fall back to TCP on it.",
        'Set "nixl_backends": ["LIBFABRIC"] in kv_connector_extra_config, FI_PROVIDER=efa and '
        "FI_EFA_USE_DEVICE_RDMA=1 (examples/deploy/efa.env); kvflow doctor --backend LIBFABRIC "
        "tries it.",
    )


def _gpu(gpu: Gpu) -> Finding:
    peer, copies = gpu.modules & _PEER_MODULES, _COPY_MODULE in gpu.modules
    found = (
        f"A GPU with {gpu.driver}; nvidia_peermem {'is' if peer else 'is not'} loaded, gdrdrv "
        f"{'is' if copies else 'is not'}."
    )
    if peer:
        return ok(found, "The card reads and writes GPU memory itself.")
    if gpu.is_open_driver:
        return note(
            found,
            "With the open driver and Linux 5.12 or newer the card reaches GPU memory by DMA-BUF; "
            "otherwise it needs nvidia_peermem, or each byte goes through host memory.",
            "If UCX's log shows that KV is copied through the host: modprobe nvidia_peermem.",
        )
    return warning(
        found,
        "Without it the card cannot reach GPU memory: each byte goes through host memory, several "
        "times slower.",
        "modprobe nvidia_peermem on the host (it comes with the driver); modprobe gdrdrv for "
        "small messages.",
    )


def in_bytes(count: int) -> str:
    """In the largest unit that leaves at least 1."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
