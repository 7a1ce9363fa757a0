"""What holds of every finding, over many made-up machines; and of running the checks."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvflow.doctor import report
from kvflow.doctor.examine import CHECKS, Facts, examine
from kvflow.doctor.facts import Asked, Gpu, Nixl, NixlPair, OpenAi, Packages, Rdma, Side
from kvflow.doctor.findings import NOTHING, Finding, Severity
from kvflow.ids import Address

from . import made_up
from .made_up import CARD, CHANNEL, CMA, HERE, LIMITS, MEASURED, NIXL, TCP, with_packages

SLOW = replace(MEASURED, slice_s=0.5, scattered_s=1.0, round_trip_s=(0.1, 0.2))
CONFIG = {"kv_connector": "KVFlowConnector", "kv_role": "kv_both"}
ODD_CONFIG = {
    "kv_connector": "x",
    "kv_role": "x",
    "kv_load_failure_policy": "x",
    "kv_rank": 1,
    "kv_connector_extra_config": {"after_preemption": "register"},
}
LOST = Side(name="producer", where="10.0.0.1:5600", error="protocol version 1, ours is 3")
MACHINES: dict[str, tuple[Asked, dict[str, Any]]] = {
    "in order": (Asked(remote_peers=True), {}),
    "bare": (
        Asked(),
        {
            "packages": with_packages(nixl=None, nixl_cu12=None, vllm=None, uvloop=None),
            "rdma": Rdma(),
            "environment": {},
            "limits": replace(LIMITS, shm_bytes=None, open_files=256),
            "listening": replace(CHANNEL, host="localhost", port="40000"),
        },
    ),
    "old": (
        Asked(kv_config=ODD_CONFIG),
        {"packages": replace(with_packages(vllm="0.20.0", nixl="1.0.0"), python="3.9.1")},
    ),
    "loopback with remote peers": (
        Asked(remote_peers=True, peers=(Address("10.0.0.2", 5600),)),
        {"listening": replace(CHANNEL, host="0.0.0.0", taken="in use"), "rdma": Rdma()},
    ),
    "64 KiB locked": (
        Asked(backends=("UCX",), kv_config={**CONFIG, "kv_role": "kv_consumer"}),
        {
            "limits": replace(LIMITS, memlock_bytes=65_536),
            "rdma": Rdma(devices=(replace(CARD, driver="efa", ports=()),)),
            "gpu": Gpu(driver="NVRM 570"),
        },
    ),
    "TCP": (
        Asked(remote_peers=True, kv_config=CONFIG),
        {
            "nixl": replace(
                NIXL,
                here=replace(HERE, data=(CMA,), measured=SLOW),
                elsewhere=replace(HERE, data=(TCP,), tls="^sm", measured=SLOW),
            ),
            "environment": {"UCX_NET_DEVICES": "mlx5_0:1"},
        },
    ),
    "NIXL fails": (
        Asked(engines=("http://10.0.0.1:8000",)),
        {
            "nixl": Nixl(backends=("UCX",), here=NixlPair(tls="sm", failed_at="agent", error="e")),
            "engine": OpenAi(url="http://10.0.0.1:8000", error="refused"),
        },
    ),
    "a pair that cannot be met": (
        Asked(described=(LOST, replace(LOST, name="consumer", error="odd"))),
        {},
    ),
}


def findings_of(name: str) -> list[Finding]:
    asked, changes = MACHINES[name]
    return made_up.examined(asked, **changes)


@pytest.mark.parametrize("name", MACHINES)
def test_every_finding_has_all_three_texts(name: str) -> None:
    findings = findings_of(name)
    assert findings
    for finding in findings:
        assert not finding.found.startswith("Could not check"), finding
        assert finding.found.rstrip().endswith((".", "'")), finding
        assert len(finding.why) > 10
        assert finding.why.endswith("."), finding
        assert finding.to_do
        if finding.severity in (Severity.WARNING, Severity.BREAKS):
            assert finding.to_do != NOTHING


def test_the_machines_between_them_have_every_severity_in_every_check_that_has_it() -> None:
    def seen() -> Iterator[tuple[str, Severity]]:
        for asked, changes in MACHINES.values():
            for result in examine(Facts(asked, made_up.probes(**changes))):
                for finding in result.findings:
                    yield result.check.name, finding.severity

    assert {name for name, severity in seen() if severity is not Severity.OK} == {
        check.name for check in CHECKS
    } - {"peers"}


def test_a_check_that_fails_by_a_bug_says_so_and_ends_no_other() -> None:
    def broken() -> Packages:
        raise ZeroDivisionError("a bug")

    facts = Facts(Asked(), replace(made_up.probes(), packages=broken))
    results = {result.check.name: result.findings for result in examine(facts)}
    (failed,) = results["versions"]
    assert failed.severity is Severity.WARNING
    assert failed.found == "Could not check versions: ZeroDivisionError: a bug."
    assert len(results) == len(CHECKS)
    assert all(finding.severity is Severity.OK for finding in results["memory"])


def test_what_a_check_has_found_before_it_failed_is_kept() -> None:
    def broken() -> Gpu:
        raise OSError("a bug")

    facts = Facts(Asked(), replace(made_up.probes(), gpu=broken))
    (result,) = [each for each in examine(facts) if each.check.name == "rdma"]
    assert [finding.found.partition(":")[0] for finding in result.findings][-1] == (
        "Could not check rdma"
    )


def test_each_probe_is_asked_once() -> None:
    asked: list[str] = []

    def rdma() -> Rdma:
        asked.append("rdma")
        return made_up.RDMA

    examine(Facts(Asked(), replace(made_up.probes(), rdma=rdma)))
    assert asked == ["rdma"]


def test_the_document_names_every_check() -> None:
    text = (Path(__file__).parents[2] / "specs" / "doctor.md").read_text(encoding="utf-8")
    assert [check.name for check in CHECKS] == re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)


# -- reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "status"), [("in order", 0), ("bare", 1), ("TCP", 0)])
def test_only_what_breaks_serving_makes_the_status_1(name: str, status: int) -> None:
    asked, changes = MACHINES[name]
    assert report.status(examine(Facts(asked, made_up.probes(**changes)))) == status


def test_a_report_says_why_and_what_to_set_of_all_that_is_not_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked, changes = MACHINES["bare"]
    report.print_report(examine(Facts(asked, made_up.probes(**changes))))
    text = capsys.readouterr().out
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert "  BREAKS NIXL is not installed.\n" in text
    assert "set: pip install 'kvflow[nixl]'\n" in text
    assert "why: Each client" in text
    assert text.splitlines()[-1].startswith("Not ready: ")


def test_a_report_that_is_in_order_ends_with_ready(capsys: pytest.CaptureFixture[str]) -> None:
    asked, changes = MACHINES["in order"]
    report.print_report(examine(Facts(asked, made_up.probes(**changes))))
    text = capsys.readouterr().out
    assert "why:" not in text
    assert text.splitlines()[-1].startswith("Ready: 0 break serving, 0 warnings, 0 notes, ")


def test_scripts_get_all_texts_and_what_was_measured() -> None:
    asked, changes = MACHINES["TCP"]
    facts = Facts(asked, made_up.probes(**changes))
    document = json.loads(json.dumps(report.as_dict(examine(facts), facts)))
    assert document["ready"] is True
    assert document["counts"]["warning"] > 0
    assert [check["name"] for check in document["checks"]] == [check.name for check in CHECKS]
    for check in document["checks"]:
        for finding in check["findings"]:
            assert set(finding) == {"severity", "found", "why", "to_do"}
    assert document["nixl"]["here"]["measured"]["bytes"] == MEASURED.bytes
    assert document["nixl"]["elsewhere"]["data"] == [{"transport": "tcp", "device": "eth0"}]
