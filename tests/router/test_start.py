"""What is wrong at start is one sentence, and exit status 2."""

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvflow.errors import ConfigurationError
from kvflow.ids import Address
from kvflow.router.config import Config, Mode, PolicyName, configure
from kvflow.router.engines import Engine, Role
from kvflow.router.meeting import check_reachable
from kvflow.router.server import StartError, routing

from .fakes import FAST, FakeEngine, World

URLS = {"prefill": ["http://p:1"], "decode": ["http://d:2"]}


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


# -- settings --------------------------------------------------------------------------------------


def test_a_file_and_options_over_it_make_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "route.yaml"
    file.write_text("prefill: [http://p:1]\ndecode: [http://d:2]\nport: 9\nmode: pull\n")
    config = configure(file, {"port": 10})
    assert (config.port, config.mode, config.prefill) == (10, Mode.PULL, ("http://p:1",))
    assert config.prefill_policy is PolicyName.PREFIX


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"decode": ["http://d:2"]}, "prefill=.* at least one URL"),
        ({**URLS, "decode": ["d:2"]}, "decode='d:2' is not allowed; allowed: http://HOST:PORT"),
        ({**URLS, "decode": ["http://d:2/v1"]}, "http://HOST:PORT"),
        ({**URLS, "decode": ["http://d:port"]}, "http://HOST:PORT"),
        ({**URLS, "decode": ["http://p:1"]}, "an engine has one role here"),
        ({**URLS, "mode": "shove"}, r"Invalid enum value 'shove' - at `\$.mode`"),
        ({**URLS, "port": 70000}, r"<= 65535 - at `\$.port`"),
        ({**URLS, "colour": "red"}, "unknown field `colour`"),
        ({**URLS, "queue_timeout_s": 0}, r"> 0(.0)? - at `\$.queue_timeout_s`"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        configure(None, settings)


@pytest.mark.parametrize("text", ["prefill: [", "- a list\n", "just words", "1: 2", "\t"])
def test_a_file_that_is_no_yaml_of_settings_is_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "route.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="a YAML file") as caught:
        configure(file, dict(URLS))
    assert "\n" not in str(caught.value)


# -- engines ---------------------------------------------------------------------------------------


async def start_error(producer: FakeEngine, consumer: FakeEngine) -> str:
    for engine in (producer, consumer):
        await engine.start()
    try:
        urls = {"prefill": (producer.url,), "decode": (consumer.url,)}
        with pytest.raises(StartError) as caught:
            async with routing(Config(**urls, **FAST)):
                pass
    finally:
        for engine in (producer, consumer):
            await engine.stop()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("of_producer", "of_consumer", "sentence"),
    [
        ({"connector": "upstream"}, {}, "prefill engine .* runs another connector than kvflow"),
        ({"connector": "none"}, {}, "prefill engine .* without a connector, or its kv_role"),
        ({}, {"connector": "upstream"}, "decode engine .* another connector than kvflow"),
        ({}, {"model": "other"}, "decode engine .* serves other, but .* serves tiny"),
        ({"side_channel_host": "10.255.255.1"}, {}, "prefill engine .*10.255.255.1"),
    ],
)
def test_an_engine_that_cannot_be_used_is_named_with_the_reason(
    of_producer: dict[str, str], of_consumer: dict[str, str], sentence: str
) -> None:
    async def work() -> None:
        world = World()
        said = await start_error(
            FakeEngine("p", world, **of_producer),  # type: ignore[arg-type]
            FakeEngine("c", world, **of_consumer),  # type: ignore[arg-type]
        )
        assert re.search(sentence, said), said

    run(work())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_side_channel_on_the_loopback_of_another_machine_says_what_to_set(host: str) -> None:
    elsewhere = Engine(url="http://10.0.0.5:8100", role=Role.PREFILL)
    with pytest.raises(ValueError, match="set VLLM_NIXL_SIDE_CHANNEL_HOST there"):
        check_reachable(elsewhere, Address(host, 5600))
    check_reachable(elsewhere, Address("10.0.0.5", 5600))
    check_reachable(Engine(url="http://localhost:8100", role=Role.PREFILL), Address(host, 5600))


def test_kv_that_does_not_move_is_found_before_traffic() -> None:
    async def work() -> None:
        world = World()
        consumer = FakeEngine("c", world)
        consumer.knobs.status = 500
        assert "decode engine" in await start_error(FakeEngine("p", world), consumer)

    run(work())


# -- the command -----------------------------------------------------------------------------------


def route(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvflow.cli import main; main()", "route", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_an_unreachable_engine_is_one_sentence_and_status_2() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ended = route("--prefill", url, "--decode", "http://127.0.0.1:1", "--port", "0")
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith(f"kvflow route: prefill engine {url}: ")


def test_a_port_in_use_is_one_sentence_and_status_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = route(
            "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--port", str(port)
        )
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith(f"kvflow route: cannot listen on 127.0.0.1:{port}: ")


def test_a_bad_file_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "route.yaml"
    file.write_text("prefill: [")
    ended = route("--config", str(file))
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("kvflow route: --config=")
