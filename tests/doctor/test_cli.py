"""`kvflow doctor` in a process of its own: exit statuses, sentences, real side channels."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvflow.doctor.examine import CHECKS

from .side_channels import engine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
LAYOUTS = ROOT / "examples" / "layouts"
COMMAND = "from kvflow.cli import main; main()"
WAIT_S = 120.0


def doctor(
    *arguments: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VLLM_", "UCX_", "FORCE_COLOR"))
    }
    return subprocess.run(
        [python, "-c", COMMAND, "doctor", *arguments],
        env={**kept, "PYTHONPATH": str(ROOT), **(environment or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def document(ran: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def found(document: Mapping[str, Any], check: str, severity: str) -> list[dict[str, str]]:
    (named,) = [each for each in document["checks"] if each["name"] == check]
    return [each for each in named["findings"] if each["severity"] == severity]


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--side-channel", "nowhere"), "'nowhere' is not HOST:PORT"),
        (("--peer", "host:0"), "'host:0' is not HOST:PORT"),
        (("--engine", "host:8000"), "'host:8000' is not http://HOST:PORT"),
        (("--only", "everything"), "'everything' is not one of versions, transports"),
        (("--kv-transfer-config", "{"), "that is no JSON"),
        (("--kv-transfer-config", "[]"), "that is no JSON object"),
        (("--kv-transfer-config", "@/no/such/file"), "/no/such/file: No such file"),
        (("--producer-config", "/no/such/file"), "one needs the other"),
        (("--shared-key-file", "/no/such/file"), "a readable file with a key"),
        (
            ("--producer-config", "/no/such/a", "--consumer-config", "/no/such/b"),
            "/no/such/a: No such file",
        ),
    ],
)
def test_a_bad_argument_is_a_sentence_and_status_2(
    arguments: tuple[str, ...], sentence: str
) -> None:
    ran = doctor(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    # The frame around it is as wide as the terminal, and breaks lines.
    assert sentence in " ".join(ran.stderr.replace("│", " ").split())


def test_the_help_names_every_check() -> None:
    ran = doctor("--help", environment={"COLUMNS": "200"})
    assert ran.returncode == 0
    for check in CHECKS:
        assert check.name in ran.stdout


# -- this machine --------------------------------------------------------------------------------


def test_localhost_with_a_remote_peer_is_status_1_and_a_sentence() -> None:
    ran = doctor("--only", "side-channel", "--remote-peers")
    assert ran.returncode == 1
    assert "BREAKS The side channel's host is localhost: loopback." in ran.stdout
    assert "set: VLLM_NIXL_SIDE_CHANNEL_HOST=" in ran.stdout
    assert "kvflow doctor: side-channel ..." in ran.stderr


def test_localhost_without_one_is_status_0() -> None:
    assert doctor("--only", "side-channel", "--side-channel", "localhost:5999").returncode == 0


def test_a_peer_elsewhere_makes_peers_remote() -> None:
    options = ("--only", "side-channel", "--json", "--timeout-s", "0.2")
    ran = doctor(*options, "--peer", "192.0.2.9:5600")
    assert ran.returncode == 1
    assert "localhost" in found(document(ran), "side-channel", "breaks")[0]["found"]


def test_the_environment_is_read_as_vllm_reads_it() -> None:
    port = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "x"}
    ran = doctor("--only", "side-channel", environment=port)
    assert ran.returncode == 1
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT is 'x'." in ran.stdout


def test_a_config_is_checked_and_its_role_heeded(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    text = {"kv_connector": "KVFlowConnector", "kv_role": "kv_consumer"}
    config.write_text(json.dumps(text), encoding="utf-8")
    options = ("--only", "config", "--only", "side-channel", "--remote-peers")
    ran = doctor(*options, "--kv-transfer-config", f"@{config}")
    assert ran.returncode == 0
    assert "no side channel listens" in ran.stdout
    text["kv_role"] = "kv_decode"
    ran = doctor(*options, "--kv-transfer-config", json.dumps(text), "--json")
    assert ran.returncode == 1
    assert found(document(ran), "config", "breaks")[0]["found"] == "kv_role is 'kv_decode'."


# -- pairs ---------------------------------------------------------------------------------------


def test_a_wrong_block_size_between_running_engines_is_status_1_with_both_values() -> None:
    with ExitStack() as stack:
        producer = stack.enter_context(engine("a", tokens=16))
        consumer = stack.enter_context(engine("b", tokens=32))
        options = ("--only", "pair", "--producer", str(producer))
        ran = doctor(*options, "--consumer", str(consumer))
        alone = doctor(*options)
    assert ran.returncode == 1
    sentence = " ".join(ran.stdout.split())
    assert "is 16 at the producer and 32 at the consumer." in sentence
    assert alone.returncode == 0


def test_the_same_of_two_descriptions(tmp_path: Path) -> None:
    files = []
    for name, block_size in (("a", 16), ("b", 24)):
        described = json.loads((LAYOUTS / "qwen3-32b-tp4.json").read_text(encoding="utf-8"))
        described |= {"layout": "cpu-amx", "block_size": block_size}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(described), encoding="utf-8")
        files.append(str(path))
    options = ("--only", "pair", "--producer-config", files[0], "--consumer-config")
    ran = doctor(*options, files[1])
    assert ran.returncode == 1
    sentence = " ".join(ran.stdout.split())
    assert "is 16 at the producer and 24 at the consumer." in sentence
    assert "--block-size" in sentence
    assert doctor(*options, files[0]).returncode == 0


# -- NIXL ----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment")
def test_without_nixl_it_says_so_and_how_to_install_it(tmp_path: Path) -> None:
    # The same packages but NIXL's, for the interpreter that the environment was made with.
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lstrip("._").startswith("nixl"):
            (tmp_path / path.name).symlink_to(path)
    base: str = sys._base_executable  # type: ignore[attr-defined]
    here = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    ran = doctor(
        "--json",
        "--only",
        "versions",
        "--only",
        "transports",
        "--only",
        "transfer",
        python=base,
        environment=here,
    )
    assert ran.returncode == 1, ran.stderr
    (broken,) = found(document(ran), "versions", "breaks")
    assert broken["found"] == "NIXL is not installed."
    assert broken["to_do"] == "pip install 'kvflow[nixl]'"
    assert document(ran)["counts"]["breaks"] == 1


@pytest.mark.nixl
def test_this_machine_is_found_to_have_shared_memory_and_no_rdma() -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("this machine has RDMA devices")
    ran = doctor("--json", "--only", "transports", "--only", "rdma", "--only", "transfer")
    told = document(ran)
    assert ran.returncode == 0, ran.stdout
    here, elsewhere = told["nixl"]["here"], told["nixl"]["elsewhere"]
    assert "UCX" in here["plugins"]
    assert here["failed_at"] == elsewhere["failed_at"] == ""
    said = " ".join(each["found"] for each in found(told, "transports", "ok"))
    assert "a write between two processes brought the right bytes" in said
    assert "(shared memory)" in said
    (between,) = found(told, "transports", "note")
    assert "(TCP): no RDMA." in between["found"]
    assert "No RDMA device" in found(told, "rdma", "note")[0]["found"]
    for pair in (here, elsewhere):
        assert pair["measured"]["large_s"] > 0
        assert pair["measured"]["round_trips"] > 10


@pytest.mark.nixl
def test_tcp_alone_is_seen_and_known_to_be_meant() -> None:
    options = ("--json", "--no-transfer", "--only", "transports", "--only", "transfer")
    ran = doctor(*options, environment={"UCX_TLS": "tcp"})
    told = document(ran)
    assert ran.returncode == 0, ran.stdout
    assert {lane["transport"] for lane in told["nixl"]["here"]["data"]} == {"tcp"}
    assert told["nixl"]["elsewhere"] is None
    notes = found(told, "transports", "note")
    assert any("it is meant" in each["why"] for each in notes)
    assert found(told, "transfer", "ok") == []


@pytest.mark.nixl
def test_shared_memory_alone_makes_no_agent_and_ucx_says_why() -> None:
    options = ("--json", "--no-transfer", "--only", "transports")
    ran = doctor(*options, environment={"UCX_TLS": "sm,self"})
    assert ran.returncode == 1
    (broken,) = found(document(ran), "transports", "breaks")
    assert "no active messages transport" in broken["found"]
    assert "UCX_TLS=sm,self" in broken["to_do"]


@pytest.mark.nixl
def test_a_backend_that_is_not_there_is_named() -> None:
    ran = doctor("--json", "--no-transfer", "--only", "transports", "--backend", "NONESUCH")
    assert ran.returncode == 1
    (broken,) = found(document(ran), "transports", "breaks")
    assert "NONESUCH" in broken["found"]
    assert "nixl_backends" in broken["to_do"]
