"""Whatever becomes of the processes that try NIXL, there is an answer, and none is left."""

import os
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvflow.doctor import nixl_probe
from kvflow.doctor.facts import NixlPair
from kvflow.doctor.nixl_pair import Leader, Order
from kvflow.errors import TransportError
from kvflow.settings import Settings

ORDER = Order(backends=("UCX",), bytes=2**20, run_bytes=2**14, seconds=1.0, measure=False)
SAY = "import json, os, signal, sys, time\nresults = open(sys.argv[2], 'a', buffering=1)\n"


def ran(
    directory: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit_s: float = 30.0
) -> NixlPair:
    """With a leader that does something else."""
    (directory / "stand_in_leader.py").write_text(SAY + code, encoding="utf-8")
    monkeypatch.setattr(nixl_probe, "MODULE", "stand_in_leader")
    monkeypatch.setattr(nixl_probe, "_LIMIT_S", limit_s)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(directory)}
    environment |= {"UCX_TLS": "tcp", "UCX_LOG_FILE": str(directory / "elsewhere")}
    return nixl_probe.run(ORDER, environment)


def test_a_process_that_dies_is_named_with_its_signal_and_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'print(\'{"at": "write"}\', file=results)\nos.kill(os.getpid(), signal.SIGSEGV)'
    pair = ran(tmp_path, monkeypatch, code)
    assert (pair.failed_at, pair.error) == ("write", "the process was ended by SIGSEGV")
    assert pair.tls == "tcp"


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(os.path.join(os.environ['PYTHONPATH'], 'child'), 'w').write(str(child.pid))\n"
        'print(\'{"at": "peer"}\', file=results)\ntime.sleep(60)'
    )
    pair = ran(tmp_path, monkeypatch, code, 5.0)
    assert (pair.failed_at, pair.error) == ("peer", "it had not ended after 5 s")
    child = int((tmp_path / "child").read_text(encoding="ascii"))
    deadline = time.monotonic() + 10.0
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_a_process_that_does_not_begin_gives_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ran(tmp_path, monkeypatch, "raise ImportError('half a module')")
    assert pair.failed_at == "start"
    assert pair.error == "the process ended with status 1: ImportError: half a module"


def test_a_process_that_ends_early_without_a_word_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ran(tmp_path, monkeypatch, 'print(\'{"at": "agent"}\', file=results)')
    assert (pair.failed_at, pair.error) == ("agent", "the process ended without a word")


def test_a_log_file_of_ucx_does_not_hide_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "print('UCX  ERROR ' + str(os.environ.get('UCX_LOG_FILE')) + os.environ['UCX_LOG_LEVEL'])\n"
        'print(\'{"at": ""}\', file=results)'
    )
    pair = ran(tmp_path, monkeypatch, code)
    assert pair.failed_at == ""
    assert pair.complaints == ("Noneinfo",)


# -- the leader ----------------------------------------------------------------------------------


class Follower:
    """Says that its memory has this checksum."""

    def __init__(self, checksum: int) -> None:
        self.checksum = checksum

    def ask(self, do: str) -> dict[str, int]:
        assert do == "checksum"
        return {"checksum": self.checksum}


def test_other_bytes_than_were_written_are_an_error() -> None:
    leader = Leader(ORDER, lambda **_: None)
    wanted = np.arange(256, dtype=np.uint8).reshape(16, 16)
    leader._check(Follower(zlib.crc32(wanted.tobytes())), wanted)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="other bytes"):
        leader._check(Follower(0), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_scattered", [False, True])
def test_what_is_measured_is_all_of_the_memory_in_slices_as_kvflow_makes_them(
    is_scattered: bool,
) -> None:
    order = msgspec.structs.replace(ORDER, bytes=64 * 2**20)
    leader, base = Leader(order, lambda **_: None), 2**40
    blocks = np.random.default_rng(1).permutation(order.bytes // order.run_bytes)
    posts = leader._scattered(base, blocks) if is_scattered else leader._large(base)
    assert all(len(runs) <= Settings().post_runs_max for runs in posts)
    assert all(runs.bytes <= Settings().post_bytes_max for runs in posts)
    for side in ("source", "destination"):
        starts = np.concatenate([getattr(runs, side) for runs in posts])
        lengths = np.concatenate([runs.length for runs in posts])
        order_of = np.argsort(starts)
        ends = starts[order_of] + lengths[order_of]
        assert (ends[:-1] == starts[order_of][1:]).all()
        assert ends[-1] - starts.min() == order.bytes
    assert {int(length) for runs in posts for length in runs.length} == {
        order.run_bytes if is_scattered else Settings().post_bytes_max
    }


def is_running(pid: int) -> bool:
    """A process that has ended and was not waited for is not running."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
