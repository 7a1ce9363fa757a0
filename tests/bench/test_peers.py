"""What is changed in an engine when its Python starts: in real interpreters, with a stand-in for
NIXL's Python package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvflow.bench import peers
from kvflow.demo.engines import import_path

STAND_IN = """\
import enum

class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = 1

class nixl_agent_config:
    def __init__(self, enable_prog_thread=True, num_threads=0, sync_mode=None):
        self.enable_pthread = enable_prog_thread
        self.num_threads = num_threads
        self.sync_mode = sync_mode
"""

USE_OF_IT = """\
import sys
assert "nixl_cu12" not in sys.modules
from nixl_cu12._api import nixl_agent_config
config = nixl_agent_config(num_threads=4)
print(config.enable_pthread, config.num_threads, config.sync_mode)
"""


def started(tmp_path: Path, steps: tuple[str, ...], code: str) -> tuple[str, Path]:
    """What `code` prints in an interpreter that is started so, and its log."""
    package = tmp_path / "stand_in" / "nixl_cu12"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_api.py").write_text(STAND_IN)
    modules = tmp_path / "at_start"
    environment = {
        **os.environ,
        **peers.start_environment(steps, modules),
        "PYTHONPATH": import_path(modules, package.parent),
    }
    log = tmp_path / "engine.log"
    with log.open("wb") as errors:
        ran = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=60,
            check=True,
        )
    return ran.stdout.strip(), log


def test_nixl_agents_get_strict_locks_and_no_progress_thread(tmp_path: Path) -> None:
    printed, log = started(tmp_path, (peers.NO_PROGRESS_THREAD,), USE_OF_IT)
    assert printed == "False 4 nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT"
    assert peers.in_force(log) == (peers.NO_PROGRESS_THREAD,)


def test_without_the_step_they_are_as_they_were(tmp_path: Path) -> None:
    printed, log = started(tmp_path, (), USE_OF_IT)
    assert printed == "True 4 None"
    assert peers.in_force(log) == ()


def test_a_process_is_not_pinned(tmp_path: Path) -> None:
    code = """\
import os
before = os.sched_getaffinity(0)
os.sched_setaffinity(0, [max(before)])
print(os.sched_getaffinity(0) == before)
"""
    printed, log = started(tmp_path, (peers.NO_PINNING,), code)
    assert printed == "True"
    assert peers.in_force(log) == (peers.NO_PINNING,)


def test_a_step_is_reported_only_once_it_is_in_force(tmp_path: Path) -> None:
    _, log = started(tmp_path, peers.EVEN, "")
    assert peers.in_force(log) == ()


def test_the_queue_sleeps_instead_of_spinning(tmp_path: Path) -> None:
    code = """\
import os, time
began = time.monotonic()
os.sched_yield()
print(time.monotonic() - began >= 100e-6)
"""
    printed, log = started(tmp_path, (peers.QUIET_QUEUE,), code)
    assert printed == "True"
    assert peers.in_force(log) == (peers.QUIET_QUEUE,)


def test_every_step_has_a_meaning_and_no_other_name_is_taken() -> None:
    assert set(peers.EVEN) <= set(peers.MEANINGS)
    with pytest.raises(KeyError):
        peers.run_steps(["no-such-step"])
