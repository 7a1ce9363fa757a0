"""What is read of this machine. Nothing here judges.

`root` is where the file system begins, so that a made-up machine can be read as well.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvflow import __version__
from kvflow.doctor.facts import (
    UNLIMITED,
    Gpu,
    Limits,
    Packages,
    Rdma,
    RdmaDevice,
    RdmaPort,
)

ROOT = Path("/")
_EXTRAS = ("", "nixl", "vllm")
"""Whose packages matter to an engine."""
_LOOKED_AT = ("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm", "torch", "psutil")
_CAP_IPC_LOCK = 14


def packages() -> Packages:
    """Versions, without importing what they are of."""
    try:
        lines = importlib.metadata.requires("kvflow") or []
        python_wanted = importlib.metadata.metadata("kvflow")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        lines, python_wanted = [], ""
    wanted: dict[str, str] = {}
    required: list[str] = []
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        for extra in _EXTRAS:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted.setdefault(name, str(requirement.specifier))
                if not extra:
                    required.append(name)
                break
    vllm = _distribution_of("vllm")
    names = dict.fromkeys([*wanted, *_LOOKED_AT, *([vllm] if vllm else [])])
    installed = {name: found for name in names if (found := _version(name))}
    return Packages(
        python=platform.python_version(),
        python_wanted=python_wanted,
        installed={"kvflow": __version__, **installed},
        wanted=wanted,
        required=tuple(required),
        vllm=vllm,
    )


def rdma(root: Path = ROOT) -> Rdma:
    """RDMA devices as the kernel shows them."""
    devices = [_device(path) for path in _entries(root / "sys/class/infiniband")]
    verbs = {
        path.name: os.access(path, os.R_OK | os.W_OK)
        for path in _entries(root / "dev/infiniband")
        if path.name.startswith("uverbs")
    }
    return Rdma(devices=tuple(devices), verbs=verbs)


def limits(root: Path = ROOT) -> Limits:
    """Of this process, and so of what is started like it."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = root / "dev/shm"
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    return Limits(
        memlock_bytes=_limit(memlock),
        may_lock=_has_capability(root, _CAP_IPC_LOCK),
        open_files=_limit(files),
        open_files_hard=_limit(files_hard),
        shm_bytes=usage.total if usage else None,
        shm_free_bytes=usage.free if usage else None,
    )


def gpu(root: Path = ROOT) -> Gpu:
    """NVIDIA's driver and the modules that let an RDMA card reach GPU memory."""
    lines = _text(root / "proc/driver/nvidia/version").splitlines()
    modules = (line.split()[0] for line in _text(root / "proc/modules").splitlines() if line)
    driver = lines[0].partition(":")[2].strip() if lines else ""
    return Gpu(
        driver=driver,
        is_open_driver="Open Kernel Module" in driver,
        modules=frozenset(modules),
    )


def _distribution_of(module: str) -> str:
    """The distribution that brings a top-level module, under whatever name; "" for none."""
    if _version(module):
        return module
    return next(iter(importlib.metadata.packages_distributions().get(module, [])), "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _device(path: Path) -> RdmaDevice:
    driver = path / "device/driver"
    ports = [_port(each) for each in _entries(path / "ports")]
    return RdmaDevice(
        name=path.name,
        driver=driver.resolve().name if driver.exists() else "",
        ports=tuple(ports),
    )


def _port(path: Path) -> RdmaPort:
    return RdmaPort(
        number=int(path.name) if path.name.isdecimal() else 0,
        state=_text(path / "state").strip(),
        link_layer=_text(path / "link_layer").strip(),
        rate=_text(path / "rate").strip(),
        gid_types=tuple(dict.fromkeys(_gid_types(path / "gid_attrs/types"))),
    )


def _gid_types(path: Path) -> Iterator[str]:
    """In the order of their indices; an index without a GID cannot be read."""
    for each in sorted(_entries(path), key=lambda entry: (len(entry.name), entry.name)):
        text = _text(each).strip()
        if text:
            yield text


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _has_capability(root: Path, number: int) -> bool:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
