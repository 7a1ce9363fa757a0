"""`kvflow top` and `kvflow inspect` as they are typed, against workers with an in-memory port."""

import json
import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvflow.cli import app
from kvflow.ids import Address, Rank
from kvflow.io.seal import KEY_BYTES_MIN, Seal
from kvflow.testing.port import MemoryNetwork

from .conftest import SHOWN
from .loops import HERE, Tarpit, Worker
from .sides import DESTINATION

KEY = b"k" * KEY_BYTES_MIN
SENTENCE = re.compile(r"kvflow (top|inspect): [^\n]+\n")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def nobody() -> Address:
    """An address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind((HERE, 0))
        return Address(HERE, unused.getsockname()[1])


# -- top, once -------------------------------------------------------------------------------------


def test_the_transfers_of_all_engines_are_listed_with_what_they_wait_for(
    stuck_pair: tuple[Worker, Worker],
) -> None:
    producer, consumer = stuck_pair
    result = command("top", producer.address, f"http://{consumer.address}", "--once")
    assert result.exit_code == 0, result.output
    heads = [line for line in result.stdout.splitlines() if "engine" in line and "live" in line]
    assert [line.split()[:2] for line in heads] == [
        [str(producer.address), "kv_producer"],
        [str(consumer.address), "kv_consumer"],
    ]
    assert "registered 1" in heads[1]
    rows = [line for line in result.stdout.splitlines() if line.split()[1:2] == ["stuck"]]
    assert len(rows) == 2
    (here,) = [line for line in rows if line.startswith(str(consumer.address))]
    for word in ("load-stuck", "consumer", "registered", str(producer.address)):
        assert word in here
    assert f"the producer's prefill, then DONE from {producer.port.name}" in here
    assert result.stderr == ""


def test_what_is_long_in_its_state_is_marked(stuck_pair: tuple[Worker, Worker]) -> None:
    _, consumer = stuck_pair
    marked = command("top", consumer.address, "--once", "--stuck-s", "0")
    plain = command("top", consumer.address, "--once", "--stuck-s", "1000")
    assert re.search(r"registered +! [\d.]+ m?s", marked.stdout)
    assert re.search(r"registered +[\d.]+ m?s", plain.stdout)
    assert "!" not in plain.stdout


def test_json_is_one_document_per_look(stuck_pair: tuple[Worker, Worker]) -> None:
    producer, consumer = stuck_pair
    result = command(
        "top", consumer.address, producer.address, "--json", "--count", "2", "--interval", "0.1"
    )
    assert result.exit_code == 0
    first, second = map(json.loads, result.stdout.splitlines())
    assert second["t"] > first["t"]
    assert [each["role"] for each in first["engines"]] == ["kv_consumer", "kv_producer"]
    (rank,) = first["engines"][0]["ranks"]
    assert rank["counts"]["consumer"] == {"registered": 1}
    assert rank["peers"][0]["key"] == str(producer.address)
    by_side = {row["machine"]: row for row in second["transfers"]}
    assert by_side["consumer"]["transfer_id"] == "stuck"
    assert by_side["consumer"]["request_id"] == "load-stuck"
    assert by_side["consumer"]["state"] == "registered"
    assert by_side["consumer"]["waits_on"] == "producer"
    assert by_side["producer"]["waits_on"] == "vllm"
    assert by_side["consumer"]["stuck"] is False


def test_an_engine_that_does_not_answer_is_shown_and_stops_no_other(
    stuck_pair: tuple[Worker, Worker],
) -> None:
    _, consumer = stuck_pair
    gone = nobody()
    with Tarpit() as silent:
        engines = gone, silent.address, consumer.address
        result = command("top", *engines, "--once", "--timeout-s", "2", "--interval", "10")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    (refused,) = [line for line in lines if line.startswith(str(gone))]
    assert re.search(r"does not answer since .*1 try: ", refused)
    (late,) = [line for line in lines if line.startswith(str(silent.address))]
    assert "did not answer in 2.0 s" in late
    assert any(line.split()[1:2] == ["stuck"] for line in lines)


def test_with_an_engine_gone_the_time_and_the_tries_are_counted(
    stuck_pair: tuple[Worker, Worker],
) -> None:
    _, consumer = stuck_pair
    result = command(
        "top", nobody(), consumer.address, "--json", "--count", "4", "--interval", "0.1"
    )
    assert result.exit_code == 0
    told = [json.loads(line)["engines"][0]["failing_s"] for line in result.stdout.splitlines()]
    assert told == sorted(told)
    assert told[-1] >= 0.25


def test_if_nobody_answers_the_status_says_so_and_a_sentence_for_each() -> None:
    gone = nobody(), nobody()
    result = command("top", *gone, "--once", "--timeout-s", "1")
    assert result.exit_code == 2
    lines = result.stderr.splitlines(keepends=True)
    assert len(lines) == 2
    for line, address in zip(lines, gone, strict=True):
        assert SENTENCE.fullmatch(line)
        assert str(address) in line


def test_an_engine_without_the_setting_is_refused_with_its_name(network: MemoryNetwork) -> None:
    with Worker("plain", network, seed=1) as plain:
        for result in (
            command("top", plain.address, "--once"),
            command("inspect", plain.address, "t"),
        ):
            assert result.exit_code == 2
            assert SENTENCE.fullmatch(result.stderr)
            assert "`inspect`" in result.stderr


def test_an_http_server_is_not_mistaken_for_a_side_channel() -> None:
    with Tarpit(b"HTTP/1.1 400 Bad Request\r\n\r\n") as api:
        result = command("inspect", f"http://{api.address}", "t")
    assert result.exit_code == 2
    assert "an HTTP server answers, not a side channel" in result.stderr


def test_a_suspended_engine_says_so(stuck_pair: tuple[Worker, Worker]) -> None:
    _, consumer = stuck_pair
    consumer.loop.suspend()
    result = command("top", consumer.address, "--once")
    assert result.exit_code == 2
    assert "suspended" in result.stdout
    assert "suspended" in result.stderr


def test_the_shared_key_is_needed_and_is_enough(network: MemoryNetwork, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    with Worker("sealed", network, seed=1, settings=SHOWN, seal=Seal(KEY)) as sealed:
        sealed.start_prefill("t")
        sealed.comes_to("producer", "t", "allocated")
        for arguments in (("top", sealed.address, "--once"), ("inspect", sealed.address, "t")):
            result = command(*arguments)
            assert result.exit_code == 2
            assert "shared_key_file" in result.stderr
            assert command(*arguments, "--shared-key-file", key).exit_code == 0


def test_each_rank_is_asked_and_one_that_is_silent_hides_no_other(
    stuck_pair: tuple[Worker, Worker],
) -> None:
    _, consumer = stuck_pair
    consumer.side_channel.show({Rank(0, 1): nobody()})
    top = command("top", consumer.address, "--once")
    assert top.exit_code == 0
    lines = top.stdout.splitlines()
    assert lines[0].endswith("2 ranks")
    assert re.match(r"  pp0\.tp0  1 live  ", lines[1])
    assert re.match(r"  pp0\.tp1  pp0\.tp1: .*Connect call failed", lines[2])
    assert any("consumer pp0.tp0" in line and line.startswith("stuck") for line in lines)
    told = command("inspect", consumer.address, "stuck")
    assert told.exit_code == 0
    assert "pp0.tp0 as consumer" in told.stdout
    assert SENTENCE.fullmatch(told.stderr)
    assert "pp0.tp1" in told.stderr


# -- inspect ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stuck", "load-stuck", "stu", "load-s"])
def test_a_transfer_is_told_by_any_name_of_it(stuck_pair: tuple[Worker, Worker], name: str) -> None:
    producer, consumer = stuck_pair
    result = command("inspect", consumer.address, name)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.startswith(f"stuck at {consumer.address} (kv_consumer, engine consumer)\n")
    assert "pp0.tp0 as consumer, request load-stuck" in text
    assert re.search(r"state +registered for [\d.]+ m?s", text)
    assert f"waits for  the producer's prefill, then DONE from {producer.port.name}" in text
    assert re.search(r"deadlines +in .*\n", text)
    assert re.search(r"in [45] min \d\d s, end -> draining: the deadline of the whole load", text)
    assert re.search(r"history +[\d.]+ m?s ago  blocks_allocated: new -> allocated", text)
    assert re.search(r" [\d.]+ m?s ago  accepted: registering -> registered", text)
    assert f"peer       {producer.address} met" in text


def test_the_producers_side_is_told_by_the_producer(stuck_pair: tuple[Worker, Worker]) -> None:
    producer, consumer = stuck_pair
    result = command("inspect", producer.address, "stuck", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["engine_id"], told["role"], told["transfer"]) == (
        "producer",
        "kv_producer",
        "stuck",
    )
    (record,) = told["records"]
    assert (record["rank"], record["machine"], record["state"]) == (
        "pp0.tp0",
        "producer",
        "registered",
    )
    assert record["peer"] == consumer.port.name
    assert [move["dest"] for move in record["history"]][-1] == "registered"
    assert {each["what"] for each in record["deadlines"]} == {"end", "peer"}
    assert record["facts"]["tokens wanted"] == str(16 * len(DESTINATION))


def test_what_nobody_knows_is_status_1_and_a_sentence(stuck_pair: tuple[Worker, Worker]) -> None:
    _, consumer = stuck_pair
    for name in ("x", "stuck1", "tuck"):
        result = command("inspect", consumer.address, name)
        assert result.exit_code == 1
        assert SENTENCE.fullmatch(result.stderr)
        assert name in result.stderr
        assert result.stdout == ""


def test_what_several_are_called_is_status_1_and_names_them(
    stuck_pair: tuple[Worker, Worker],
) -> None:
    producer, _ = stuck_pair
    producer.start_prefill("stucco")
    producer.comes_to("producer", "stucco", "allocated")
    result = command("inspect", producer.address, "stuc")
    assert result.exit_code == 1
    assert SENTENCE.fullmatch(result.stderr)
    assert "stuck" in result.stderr
    assert "stucco" in result.stderr


def test_an_engine_that_is_gone_or_silent_is_status_2_and_a_sentence() -> None:
    result = command("inspect", nobody(), "t")
    assert result.exit_code == 2
    assert SENTENCE.fullmatch(result.stderr)
    with Tarpit() as silent:
        result = command("inspect", silent.address, "t", "--timeout-s", "0.1")
    assert result.exit_code == 2
    assert "did not answer in 0.1 s" in result.stderr


# -- what is typed wrongly -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("top",), "ENGINE"),
        (("top", "host"), "ENGINE"),
        (("top", "host:"), "ENGINE"),
        (("top", ":5600"), "ENGINE"),
        (("top", "host:0"), "ENGINE"),
        (("top", "host:65536"), "ENGINE"),
        (("top", "https://host:5600"), "ENGINE"),
        (("top", "http://host:5600/metrics"), "ENGINE"),
        (("top", "host:²"), "ENGINE"),
        (("top", "host:1", "--interval", "0"), "INTERVAL"),
        (("top", "host:1", "--count", "0"), "COUNT"),
        (("top", "host:1", "--limit", "1001"), "LIMIT"),
        (("top", "host:1", "--shared-key-file", "/nowhere/key"), "/NOWHERE/KEY"),
        (("inspect", "host:1"), "TRANSFER"),
        (("inspect", "host:1", ""), "TRANSFER"),
        (("inspect", "host:1", "x" * 513), "TRANSFER"),
        (("inspect", "host", "t"), "ENGINE"),
        (("inspect", "host:1", "t", "--timeout-s", "0"), "TIMEOUT"),
        (("inspect", "host:1", "t", "--shared-key-file", "/nowhere/key"), "/NOWHERE/KEY"),
    ],
)
def test_a_bad_argument_is_named_and_status_2(arguments: tuple[str, ...], named: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr.upper()


@pytest.mark.parametrize("name", ["top", "inspect"])
def test_the_help_teaches(name: str) -> None:
    result = command(name, "--help")
    assert result.exit_code == 0
    for word in ("HOST:PORT", "kv_connector_extra_config", "inspect", "Ends with"):
        assert word in re.sub(r"[\s│]+", " ", result.stdout)
