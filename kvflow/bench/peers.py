"""What a benchmark changes in an engine when its Python starts, and nowhere else.

vLLM's own NIXL connectors are set up for machines with many cores. Two of their engines on two
cores starve each other, and a comparison with them would flatter kvflow. The *steps* below take
that away without touching an installed file: a directory with a `sitecustomize.py` of ours is put
on the engine's PYTHONPATH, and `KVFLOW_BENCH_AT_START` names the steps.

Every step prints a line into the engine's log once it is in force, and `in_force` reads them there:
what is reported of a set-up is what happened, not what was asked for.

Known limit: Python runs one `sitecustomize` only; that of the environment, if it has one, is not
run in these engines.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ENVIRONMENT = "KVFLOW_BENCH_AT_START"
NO_PROGRESS_THREAD = "no-progress-thread"
NO_PINNING = "no-pinning"
QUIET_QUEUE = "quiet-queue"

MEANINGS: Mapping[str, str] = {
    NO_PROGRESS_THREAD: "NIXL agents have no progress thread (it spins) and strict locks",
    NO_PINNING: "the worker's main thread is not pinned to the last core",
    QUIET_QUEUE: "vLLM's message queue sleeps for 100 us where it would spin",
}
"""What each step is for a reader of the results."""

EVEN: tuple[str, ...] = (NO_PROGRESS_THREAD, NO_PINNING)
"""The steps that let vLLM's own NIXL connectors share a few cores, as kvflow does by itself."""

_NIXL_MODULES = frozenset({"nixl_cu12._api", "nixl_cu13._api", "nixl_rocm._api"})
_QUEUE_SLEEP_S = 100e-6
_MARK = "kvflow bench, at start: "
_START_MODULE = """\
from kvflow.bench.peers import run_steps

run_steps()
"""


def start_environment(steps: Sequence[str], directory: Path) -> dict[str, str]:
    """Writes the start module into `directory`; the variable that names the steps."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(_START_MODULE, encoding="utf-8")
    return {ENVIRONMENT: ",".join(steps)}


def in_force(log: Path) -> tuple[str, ...]:
    """The steps that an engine's log says were in force, in the order of `MEANINGS`."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return tuple(step for step in MEANINGS if f"{_MARK}{step}\n" in text)


def run_steps(names: Iterable[str] | None = None) -> None:
    """Takes the steps that are named, by default in the environment."""
    if names is None:
        names = os.environ.get(ENVIRONMENT, "").split(",")
    for name in filter(None, names):
        _STEPS[name]()


def _no_progress_thread() -> None:
    """Waits for NIXL's module: importing it here would come before vLLM has set up UCX."""
    sys.meta_path.insert(0, _OnImport(_NIXL_MODULES, _change_agents))


def _change_agents(api: Any) -> None:
    given = api.nixl_agent_config.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given(self, *args, **kwargs)
        self.enable_pthread = False
        self.sync_mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        _say(NO_PROGRESS_THREAD)

    api.nixl_agent_config.__init__ = init


def _no_pinning() -> None:
    def stay(pid: int, mask: Iterable[int]) -> None:
        _say(NO_PINNING)

    os.sched_setaffinity = stay


def _quiet_queue() -> None:
    def sleep_instead() -> None:
        time.sleep(_QUEUE_SLEEP_S)

    os.sched_yield = sleep_instead
    _say(QUIET_QUEUE)


_STEPS: Mapping[str, Callable[[], None]] = {
    NO_PROGRESS_THREAD: _no_progress_thread,
    NO_PINNING: _no_pinning,
    QUIET_QUEUE: _quiet_queue,
}


def _say(step: str) -> None:
    sys.stderr.write(f"{_MARK}{step}\n")  # one call: workers share the log
    sys.stderr.flush()


class _OnImport(importlib.abc.MetaPathFinder):
    """Lets `change` have some modules right after they are loaded."""

    def __init__(self, names: frozenset[str], change: Callable[[Any], None]) -> None:
        self._names = names
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._change)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, change: Callable[[Any], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)
