"""What UCX's log says, and what is said of it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvflow.doctor import ucx
from kvflow.doctor.checks import transports
from kvflow.doctor.facts import Lane, Nixl, NixlPair, Rdma, Way
from kvflow.doctor.findings import Finding, Severity

from .made_up import CMA, HERE, NIXL, RC, RDMA, TCP, named, the_worst, worst

LOG = (Path(__file__).parent / "ucx_tables.txt").read_text(encoding="utf-8")


def findings(
    nixl: Nixl,
    here: Rdma | None = None,
    environment: Mapping[str, str] | None = None,
    remote_peers: bool = False,
) -> list[Finding]:
    return list(
        transports.check(nixl, here or Rdma(), environment or {}, remote_peers=remote_peers)
    )


def over(tls: str | None, *data: Lane) -> NixlPair:
    return replace(HERE, tls=tls, data=data)


def two(tls: str | None, data: Lane, elsewhere: Lane) -> Nixl:
    return Nixl(backends=("UCX",), here=over(tls, data), elsewhere=over("^sm", elsewhere))


# -- the log -------------------------------------------------------------------------------------


def test_lanes_are_read_from_the_tables_of_the_other_process() -> None:
    assert ucx.version(LOG) == "1.23.0"
    assert ucx.data_lanes(LOG) == (
        Lane(transport="rc_mlx5", device="mlx5_0:1"),
        Lane(transport="rc_mlx5", device="mlx5_1:1"),
    )
    assert ucx.notice_lanes(LOG) == (Lane(transport="tcp", device="lo"),)


def test_a_log_that_says_nothing_gives_no_lanes() -> None:
    for log in ("", "NIXL INFO Backend UCX was instantiated\n", LOG[:2000]):
        assert ucx.data_lanes(log) == ()


def test_errors_are_kept_once_each() -> None:
    line = "[1.2] [vm:1 :0]  select.c:722  UCX  ERROR   no active messages transport\n"
    warning = "W1130 06:26:02.080284   26664 ucx_enums.cpp:58] Unexpected UCX error\n"
    nixl = "E1130 06:25:36.355598   26540 nixl_agent.cpp:334] createBackend: unsupported\n"
    said = ucx.complaints(line * 3 + warning + nixl)
    assert said == ("no active messages transport", "createBackend: unsupported")


def test_another_backend_that_makes_no_agent_is_about_its_plugin() -> None:
    pair = NixlPair(tls=None, failed_at="agent", error="NIXL_ERR_NOT_FOUND")
    (broken,) = findings(Nixl(backends=("LIBFABRIC",), here=pair))
    assert "LIBFABRIC: libfabric" in broken.to_do


@pytest.mark.parametrize(
    ("lane", "way"),
    [
        (RC, Way.RDMA),
        (Lane(transport="dc_mlx5", device="mlx5_0:1"), Way.RDMA),
        (Lane(transport="rc_verbs", device="mlx5_0:1"), Way.RDMA),
        (Lane(transport="srd", device="rdmap0:1"), Way.RDMA),
        (TCP, Way.TCP),
        (CMA, Way.SHARED),
        (Lane(transport="posix", device="memory"), Way.SHARED),
        (Lane(transport="cuda_ipc", device="cuda"), Way.GPU),
        (Lane(transport="new", device="x"), Way.OTHER),
    ],
)
def test_a_transport_is_of_a_kind(lane: Lane, way: Way) -> None:
    assert ucx.way(lane) is way


@pytest.mark.parametrize(
    ("tls", "without"),
    [
        (None, "^sm"),
        ("", "^sm"),
        ("all", "^sm"),
        ("^ib", "^ib,sm"),
        ("rc,sm,self,cuda_copy", "rc,self,cuda_copy"),
        ("tcp", "tcp"),
        ("sm,self", None),
        ("posix,cma", None),
    ],
)
def test_shared_memory_is_taken_out_of_ucx_tls(tls: str | None, without: str | None) -> None:
    assert ucx.without_shared_memory(tls) == without


# -- what is said --------------------------------------------------------------------------------


def test_rdma_to_others_and_shared_memory_within_are_in_order() -> None:
    assert worst(findings(NIXL, RDMA, remote_peers=True)) is Severity.OK


def test_tcp_that_nobody_asked_for_is_a_warning_where_it_matters() -> None:
    nixl = two(None, CMA, TCP)
    assert worst(findings(nixl)) is Severity.NOTE
    assert worst(findings(nixl, remote_peers=True)) is Severity.WARNING
    with_cards = the_worst(findings(nixl, RDMA))
    assert with_cards.severity is Severity.WARNING
    assert "mlx5_0" in with_cards.why
    assert "tcp/eth0" in with_cards.found


def test_tcp_that_was_asked_for_is_a_note_that_says_so() -> None:
    said = findings(two("tcp,sm,self", CMA, TCP), RDMA, remote_peers=True)
    assert worst(said) is Severity.NOTE
    assert "UCX_TLS=tcp,sm,self says so: it is meant" in the_worst(said).why


def test_tcp_within_a_machine_is_a_warning_unless_meant() -> None:
    fallen = findings(Nixl(backends=("UCX",), here=over(None, TCP)))
    assert "fell back to TCP within one machine" in named_why(fallen, Severity.WARNING)
    meant = findings(Nixl(backends=("UCX",), here=over("tcp", TCP)))
    assert worst(meant) is Severity.NOTE


def test_shared_memory_alone_reaches_no_other_machine() -> None:
    nixl = Nixl(backends=("UCX",), here=over("posix,self", CMA))
    assert worst(findings(nixl)) is Severity.NOTE
    broken = the_worst(findings(nixl, remote_peers=True))
    assert broken.severity is Severity.BREAKS
    assert "UCX_TLS=posix,self" in broken.found


def test_lanes_that_fail_without_shared_memory_break_remote_peers() -> None:
    failed = NixlPair(tls="rc,self", failed_at="agent", error="none", complaints=("no device",))
    nixl = Nixl(backends=("UCX",), here=over("rc,sm,self", CMA), elsewhere=failed)
    assert worst(findings(nixl)) is Severity.WARNING
    broken = the_worst(findings(nixl, remote_peers=True))
    assert broken.severity is Severity.BREAKS
    assert "no device" in broken.found


@pytest.mark.parametrize(
    ("pair", "found", "to_do"),
    [
        (
            NixlPair(tls=None, failed_at="agent", error="NIXL cannot be imported: x"),
            "No NIXL agent can be made: NIXL cannot be imported: x.",
            "pip install 'kvflow[nixl]'",
        ),
        (
            NixlPair(tls="sm", failed_at="agent", error="e", complaints=("no peer failure",)),
            "The log says: no peer failure.",
            "UCX_TLS=sm leaves UCX nothing",
        ),
        (
            NixlPair(tls=None, failed_at="agent", error="NIXL has no backend LIBFABRIC here"),
            "no backend LIBFABRIC",
            "An engine's log",
        ),
        (
            NixlPair(tls=None, failed_at="bytes", error="other bytes"),
            "other bytes",
            "NIXL_LOG_LEVEL",
        ),
        (NixlPair(tls=None, failed_at="write", error="SIGSEGV"), "SIGSEGV", "NIXL_LOG_LEVEL"),
    ],
)
def test_nixl_that_does_not_work_breaks_serving(pair: NixlPair, found: str, to_do: str) -> None:
    (broken,) = findings(Nixl(backends=("UCX",), here=pair))
    assert broken.severity is Severity.BREAKS
    assert found in broken.found
    assert to_do in broken.to_do


def test_devices_that_are_named_and_not_used_are_a_warning() -> None:
    used = findings(NIXL, RDMA, {"UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1"}, remote_peers=True)
    assert worst(used) is Severity.OK
    missed = findings(NIXL, RDMA, {"UCX_NET_DEVICES": "mlx5_7:1"}, remote_peers=True)
    assert "UCX_NET_DEVICES=mlx5_7:1" in named(Severity.WARNING, missed)[0]


def test_a_silent_ucx_and_another_backend_are_notes() -> None:
    assert worst(findings(Nixl(backends=("UCX",), here=over(None)))) is Severity.NOTE
    assert worst(findings(Nixl(backends=("LIBFABRIC",), here=over(None)))) is Severity.NOTE


def test_a_transport_of_no_known_kind_is_a_note() -> None:
    said = findings(two(None, CMA, Lane(transport="new", device="x")))
    assert "new/x (something else)" in named(Severity.NOTE, said)[0]


def named_why(said: list[Finding], severity: Severity) -> str:
    return " ".join(finding.why for finding in said if finding.severity is severity)
