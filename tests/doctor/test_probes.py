"""What the probes read, of made-up file systems and of this machine."""

import sys
from pathlib import Path

from kvflow import __version__
from kvflow.doctor import probes
from kvflow.doctor.facts import UNLIMITED, Rdma


def written(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_a_machine_without_rdma_has_no_devices(tmp_path: Path) -> None:
    assert probes.rdma(tmp_path) == Rdma()


def test_rdma_devices_are_read_with_their_ports(tmp_path: Path) -> None:
    for name, driver in (("mlx5_0", "mlx5_core"), ("rdmap0", "efa")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        device = f"sys/class/infiniband/{name}"
        written(tmp_path, f"{device}/ports/1/state", "4: ACTIVE\n")
        written(tmp_path, f"{device}/ports/1/link_layer", "Ethernet\n")
        written(tmp_path, f"{device}/ports/1/rate", "100 Gb/sec (4X EDR)\n")
        (tmp_path / device / "device").mkdir()
        (tmp_path / device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    types = "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types"
    for index, text in ((0, "IB/RoCE v1\n"), (1, "RoCE v2\n"), (2, "RoCE v2\n"), (10, "")):
        written(tmp_path, f"{types}/{index}", text)
    written(tmp_path, "dev/infiniband/uverbs0", "")
    written(tmp_path, "dev/infiniband/rdma_cm", "")
    found = probes.rdma(tmp_path)
    card, efa = found.devices
    assert (card.name, card.driver, efa.driver) == ("mlx5_0", "mlx5_core", "efa")
    assert efa.is_efa
    assert not card.is_efa
    (port,) = card.ports
    assert (port.number, port.state, port.link_layer) == (1, "4: ACTIVE", "Ethernet")
    assert port.rate == "100 Gb/sec (4X EDR)"
    assert port.gid_types == ("IB/RoCE v1", "RoCE v2")
    assert port.is_active
    assert found.verbs == {"uverbs0": True}


def test_the_gpu_driver_and_its_modules_are_read(tmp_path: Path) -> None:
    assert probes.gpu(tmp_path).driver == ""
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86\nGCC version: 12\n"
    written(tmp_path, "proc/driver/nvidia/version", version)
    written(tmp_path, "proc/modules", "nvidia_peermem 16384 0 - Live 0x0\ngdrdrv 1 0 - Live 0x0\n")
    found = probes.gpu(tmp_path)
    assert found.driver == "NVIDIA UNIX Open Kernel Module for x86_64  570.86"
    assert found.is_open_driver
    assert found.modules == {"nvidia_peermem", "gdrdrv"}


def test_limits_are_read(tmp_path: Path) -> None:
    bare = probes.limits(tmp_path)
    assert bare.shm_bytes is None
    assert not bare.may_lock
    (tmp_path / "dev/shm").mkdir(parents=True)
    written(tmp_path, "proc/self/status", "Name:\tpython\nCapEff:\t0000000000004000\n")
    found = probes.limits(tmp_path)
    assert found.may_lock
    assert found.shm_bytes is not None
    assert found.memlock_bytes > 0 or found.memlock_bytes == UNLIMITED


def test_packages_are_found_with_what_kvflow_wants_of_them() -> None:
    found = probes.packages()
    assert found.python == sys.version.split()[0]
    assert found.installed["kvflow"] == __version__
    assert found.wanted["transitions"] == "==0.9.3"
    assert found.wanted["vllm"] == "<0.34,>=0.32"
    assert found.wanted["nixl"] == "==1.5.1"
    assert "transitions" in found.required
    assert "nixl" not in found.required
