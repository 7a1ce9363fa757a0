"""Processor time from a made-up `/proc`, and vLLM's counters from a made-up `/metrics`."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvflow.bench import serve_meters
from kvflow.bench.serve_pair import moved

from .results import request

TICKS = os.sysconf("SC_CLK_TCK")


def process(proc: Path, pid: int, parent: int, *ticks: int, name: str = "python") -> None:
    """`ticks`: utime, stime, cutime, cstime."""
    (proc / str(pid)).mkdir(parents=True)
    before = " ".join(["0"] * 9)
    times = " ".join(map(str, ticks))
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} {before} {times} 20 0\n")


def test_a_trees_time_is_that_of_the_process_and_all_its_descendants(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 100, 20, 3, 0)
    process(tmp_path, 11, 10, 1000, 0, 0, 0, name="worker (1) x")
    process(tmp_path, 12, 11, 10000, 0, 0, 0)
    process(tmp_path, 20, 1, 7, 7, 7, 7)
    (tmp_path / "30").mkdir()  # it has ended between two looks
    assert serve_meters.tree_cpu_s(10, tmp_path) == pytest.approx(11123 / TICKS)
    assert serve_meters.tree_cpu_s(99, tmp_path) == 0


def test_the_time_of_a_real_child_is_seen() -> None:
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", busy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert serve_meters.tree_cpu_s(child.pid) >= 0.15
        child.kill()


def test_the_machines_time_leaves_out_idle_and_waiting(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 10 30 99999 88888 4 6 0 0 0\ncpu0 1 1 1 1 1 1 1\n")
    assert serve_meters.machine_cpu_s(tmp_path) == pytest.approx(150 / TICKS)
    assert serve_meters.machine_cpu_s() > time.process_time()


METRICS = """\
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="1024.0"} 0.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 3000.0
vllm:nixl_bytes_transferred_sum{engine="1",model_name="m"} 1000.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 2.0
vllm:nixl_num_descriptors_sum{engine="0",model_name="m"} 80.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 1.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 512.0
vllm:generation_tokens_total{engine="0"} 5.0
"""


def test_counters_about_transfers_are_read_and_added_up() -> None:
    assert serve_meters.read_counters(METRICS) == {
        "vllm:nixl_bytes_transferred_sum": 4000.0,
        "vllm:nixl_bytes_transferred_count": 2.0,
        "vllm:nixl_num_descriptors_sum": 80.0,
        "vllm:nixl_num_failed_transfers_total": 1.0,
        serve_meters.COMPUTED: 7.0,
    }


def test_what_has_moved_is_per_answered_request() -> None:
    risen = {
        "producer": {"vllm:nixl_bytes_transferred_sum": 4000.0},
        "consumer": {"vllm:nixl_num_descriptors_sum": 80.0},
    }
    answered = [request(1, 1.0), request(2, 2.0), request(3, None, error="no")]
    assert moved(answered, risen) == (2000.0, 40.0)
    assert moved(answered, {"producer": {}, "consumer": {}}) == (None, None)
    assert moved(answered[2:], risen) == (None, None)
    traced = [request(n, 1.0, kv_bytes=100 * n, kv_descriptors=n) for n in (1, 3)]
    assert moved(traced, risen) == (200.0, 2.0)


def test_a_counter_that_is_new_began_at_zero() -> None:
    assert serve_meters.risen({"a": 1.0}, {"a": 4.0, "b": 2.0}) == {"a": 3.0, "b": 2.0}


def test_the_machine_and_the_versions_are_told() -> None:
    assert serve_meters.machine()["cores"] == len(os.sched_getaffinity(0))
    assert serve_meters.versions()["python"] == sys.version.split()[0]
