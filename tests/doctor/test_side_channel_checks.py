"""The address that an engine would listen at, over made-up facts and over real sockets."""

import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvflow.doctor import network
from kvflow.doctor.checks import engines, listening
from kvflow.doctor.facts import OpenAi, Reach, Reached, SideChannel
from kvflow.doctor.findings import Finding, Severity
from kvflow.ids import Address
from kvflow.io.seal import Seal
from kvflow.io.side_channel import SideChannel as Server

from .made_up import CHANNEL, named, the_worst, worst

HERE = "127.0.0.1"
LOCAL = replace(CHANNEL, host="localhost", addresses=("::1", HERE))


def findings(
    channel: SideChannel, *, listens: bool = True, remote_peers: bool = True
) -> list[Finding]:
    return list(listening.check(channel, listens=listens, remote_peers=remote_peers))


# -- made up -------------------------------------------------------------------------------------


def test_an_address_of_this_machine_is_in_order() -> None:
    assert worst(findings(CHANNEL)) is Severity.OK


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::"])
def test_loopback_breaks_remote_peers_and_no_others(host: str) -> None:
    channel = replace(CHANNEL, host=host, addresses=(host,))
    broken = the_worst(findings(channel))
    assert broken.severity is Severity.BREAKS
    assert host in broken.found
    assert broken.to_do == "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1"
    assert not named(Severity.BREAKS, findings(channel, remote_peers=False))


def test_a_name_that_means_loopback_is_found_out() -> None:
    channel = replace(CHANNEL, host="node-1", addresses=("127.0.1.1",))
    assert "node-1 (127.0.1.1)" in named(Severity.BREAKS, findings(channel))[0]


@pytest.mark.parametrize(
    ("changes", "severity", "found"),
    [
        (
            {"host": "nowhere", "addresses": (), "is_own": False},
            Severity.BREAKS,
            "does not resolve",
        ),
        ({"host": "10.9.9.9", "is_own": False}, Severity.BREAKS, "is no address of this machine"),
        ({"port": "56oo"}, Severity.BREAKS, "'56oo'"),
        ({"port": "70000"}, Severity.BREAKS, "'70000'"),
        ({"taken": "Address already in use"}, Severity.BREAKS, "10.0.0.1:5600 cannot be listened"),
        ({"taken": "in use", "holder": "process 7 (nc)"}, Severity.BREAKS, "process 7 (nc)"),
        ({"taken": "in use", "serves": "engine-a"}, Severity.NOTE, "engine engine-a answers"),
        ({"port": "40000"}, Severity.WARNING, "(32768 to 60999)"),
        ({"port": "40000", "ephemeral": None}, Severity.OK, "40000"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(
    changes: dict[str, Any], severity: Severity, found: str
) -> None:
    said = findings(replace(CHANNEL, **changes))
    assert worst(said) is severity
    assert found in the_worst(said).found


def test_a_pure_consumer_does_not_listen_so_nothing_is_wrong_with_its_address() -> None:
    (only,) = findings(LOCAL, listens=False)
    assert only.severity is Severity.OK


@pytest.mark.parametrize("reach", list(Reach))
def test_each_way_not_to_be_reached_says_something_else(reach: Reach) -> None:
    finding = listening.reached(Reached(address=Address("h", 1), reach=reach, detail="d"))
    expected = Severity.OK if reach is Reach.CONNECTED else Severity.BREAKS
    assert finding.severity is expected


def test_refused_speaks_of_a_listener_and_timed_out_of_a_firewall() -> None:
    address = Address("10.0.0.2", 5600)
    refused = listening.reached(Reached(address=address, reach=Reach.REFUSED))
    silent = listening.reached(Reached(address=address, reach=Reach.TIMED_OUT))
    assert "nothing listens" in refused.why
    assert "firewall" in silent.why
    assert "nothing listens" not in silent.why


@pytest.mark.parametrize(
    ("engine", "severity", "found"),
    [
        (OpenAi(url="u", status=200, version="0.32.1", models=("m",)), Severity.OK, "serves m"),
        (OpenAi(url="u", status=200, version="0.31.0"), Severity.WARNING, "vLLM 0.31.0"),
        (OpenAi(url="u", status=200, version="dev"), Severity.WARNING, "vLLM dev"),
        (OpenAi(url="u", status=404), Severity.WARNING, "HTTP 404"),
        (OpenAi(url="u", error="refused"), Severity.BREAKS, "refused"),
    ],
)
def test_an_engine_is_held_against_what_kvflow_supports(
    engine: OpenAi, severity: Severity, found: str
) -> None:
    (finding,) = engines.check([engine], ">=0.32,<0.34")
    assert finding.severity is severity
    assert found in finding.found


def test_engines_that_serve_different_models_break_serving() -> None:
    one = OpenAi(url="a", status=200, version="0.32.1", models=("m",))
    said = list(engines.check([one, replace(one, url="b", models=("n",))], ">=0.32"))
    assert "a m; b n" in named(Severity.BREAKS, said)[0]


# -- real sockets --------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[Address]:
    """A port on which something listens that is no side channel."""
    with socket.create_server((HERE, 0)) as server:
        yield Address(*server.getsockname())


def look(given: Address | None = None, **environment: str) -> SideChannel:
    return network.listening(given, environment, Seal(), 0.5)


def free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return int(server.getsockname()[1])


def test_the_address_comes_from_the_option_then_the_environment_then_vllm() -> None:
    keys = {network.HOST_KEY: HERE, network.PORT_KEY: "5601"}
    given = look(Address(HERE, 5602), **keys)
    assert (given.source, given.host, given.port) == ("option", HERE, "5602")
    found = look(**keys)
    assert (found.source, found.host, found.port) == ("environment", HERE, "5601")
    found = look()
    assert (found.source, found.host, found.port) == ("default", "localhost", "5600")


def test_a_free_port_is_free() -> None:
    found = look(Address(HERE, free_port()))
    assert found.is_own
    assert found.taken == ""


def test_a_port_in_use_is_found(taken: Address) -> None:
    found = look(taken)
    assert found.taken == "Address already in use"
    assert found.serves == ""


def test_the_process_that_holds_a_port_is_named(taken: Address) -> None:
    pytest.importorskip("psutil")
    assert f"process {os.getpid()} " in look(taken).holder


def test_a_side_channel_of_kvflow_on_the_port_is_known() -> None:
    server = Server(engine_id="engine-a", refused=lambda *_: None, connections_max=4)
    address = server.listen(Address(HERE, 0))
    try:
        assert look(address).serves == "engine-a"
    finally:
        server.close()


def test_an_address_of_another_machine_is_not_ours() -> None:
    found = look(Address("192.0.2.77", 5600))
    assert found.addresses == ("192.0.2.77",)
    assert not found.is_own


def test_a_name_that_does_not_resolve_has_no_addresses() -> None:
    found = look(Address("no.such.host.invalid", 5600))
    assert found.addresses == ()
    assert not found.is_own


def test_a_port_that_is_no_number_is_passed_on(taken: Address) -> None:
    assert look(**{network.HOST_KEY: HERE, network.PORT_KEY: "x"}).port == "x"


def test_connections_are_told_apart(taken: Address) -> None:
    assert network.reach(taken, 1.0).reach is Reach.CONNECTED
    assert network.reach(Address(HERE, free_port()), 1.0).reach is Reach.REFUSED
    assert network.reach(Address("no.such.host.invalid", 1), 1.0).reach is Reach.UNRESOLVED
    assert network.reach(Address("a..b", 1), 1.0).reach is Reach.UNRESOLVED


def test_a_connection_into_nothing_times_out() -> None:
    # A listener whose queue is full does not answer, as a firewall that drops does not.
    with socket.socket() as server:
        server.bind((HERE, 0))
        server.listen(0)
        address = Address(*server.getsockname())
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        try:
            assert network.reach(address, 0.3).reach is Reach.TIMED_OUT
        finally:
            for each in waiting:
                each.close()


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers what an engine of vLLM answers, as far as it is asked."""

    answers: ClassVar[Mapping[str, object]] = {
        "/version": {"version": "0.32.1"},
        "/v1/models": {"data": [{"id": "tiny"}]},
    }

    def do_GET(self) -> None:
        body = json.dumps(self.answers.get(self.path, {})).encode()
        self.send_response(200 if self.path in self.answers else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Stranger(Engine):
    answers: ClassVar[Mapping[str, object]] = {"/version": {"name": "nginx"}}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Engine, OpenAi(url="", status=200, version="0.32.1", models=("tiny",))),
        (Stranger, OpenAi(url="", status=200, error="answers nonsense: KeyError('version')")),
    ],
)
def test_an_engine_tells_its_version_and_its_models(kind: type[Engine], expected: OpenAi) -> None:
    with http.server.ThreadingHTTPServer((HERE, 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://{HERE}:{server.server_port}"
        try:
            assert network.engine(url, 5.0) == replace(expected, url=url)
        finally:
            server.shutdown()
            thread.join()


def test_an_http_port_that_is_no_engine_is_told_apart_from_none(taken: Address) -> None:
    assert network.engine(f"http://{HERE}:{free_port()}", 1.0).status == 0
    assert "timed out" in network.engine(f"http://{taken}", 0.3).error
