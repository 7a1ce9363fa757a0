"""Live transfers of real engines, while the producer of one is stopped amid its prompt."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvflow.demo.engines import Engine, EnginePair, EngineSettings, kvflow_connector, wait_ready
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import Client, Dispatch, Endpoints, Naming, prompts
from kvflow.ids import Address
from kvflow.io.seal import Seal
from kvflow.live.client import Access, look

from .pairs import Setup, Side
from .trio import note

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PROMPT = prompts(1, shortest=6000, longest=6000, seed=31)[0]
"""Computed in chunks, so long that its producer can be stopped before the last one."""
LOSS_S = 60.0
"""A silent producer is lost after this, so that looking at it takes no load from it."""
EXTRA = {"inspect": True, "renew_misses_max": int(LOSS_S / 0.25), "lease_s": 120.0}
PATIENCE = Access(timeout_s=10.0, seal=Seal())


def settings(name: str, directory: Path) -> EngineSettings:
    return EngineSettings(
        name=name,
        model=tiny_model(),
        log_path=directory / f"{name}.log",
        kv_transfer_config=kvflow_connector(f"kv_{name}", **EXTRA),
        max_model_tokens=8192,
        extra_args=("--max-num-batched-tokens", "512"),
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    directory = tmp_path_factory.mktemp("live")
    with EnginePair(
        producer=settings("producer", directory), consumer=settings("consumer", directory)
    ) as pair:
        wait_ready(pair.engines)
        try:
            yield pair
        finally:
            os.killpg(pair.producer.process.pid, signal.SIGCONT)  # a stopped one would not end


def address(engine: Engine) -> Address:
    return Address(engine.host, engine.side_channel_port)


def kvflow(*arguments: object) -> "subprocess.CompletedProcess[str]":
    typed = "from kvflow.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", typed, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


async def is_under_way(consumer: Engine, transfer_id: str) -> str:
    """Waits until the consumer has registered with the producer; returns its state then."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        told = await look(address(consumer), 100, PATIENCE)
        for worker in told.workers:
            for row in worker.told.transfers if worker.told else ():
                if row.transfer_id == transfer_id and row.state in ("registered", "transferring"):
                    return row.state
        await asyncio.sleep(0.005)
    raise AssertionError("not registered in time")


def test_idle_engines_of_both_roles_show_that_nothing_is_live(engines: EnginePair) -> None:
    shown = kvflow("top", *map(address, engines.engines), "--once", "--json")
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert [each["role"] for each in told["engines"]] == ["kv_producer", "kv_consumer"]
    assert [each["error"] for each in told["engines"]] == [None, None]
    assert [each["ranks"][0]["live"] for each in told["engines"]] == [0, 0]
    assert told["transfers"] == []


def test_whom_a_load_waits_for_is_told_while_its_producer_is_stopped(engines: EnginePair) -> None:
    producer, consumer = engines.producer, engines.consumer
    before = json.loads(kvflow("top", address(producer), "--once", "--json").stdout)
    engine_id = before["engines"][0]["engine_id"]
    naming = Naming.by_transfer_id()
    transfer_id = str(naming.transfer_id)

    async def work() -> None:
        async with Client(Endpoints.of(producer, consumer)) as client:
            exchange = asyncio.create_task(
                client.disaggregated(PROMPT, dispatch=Dispatch.CONCURRENT, naming=naming)
            )
            state = await is_under_way(consumer, transfer_id)
            os.killpg(producer.process.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                await asyncio.sleep(1.0)
                await asyncio.to_thread(looked_at)
            finally:
                os.killpg(producer.process.pid, signal.SIGCONT)
            note(f"stopped in {state!r} for {time.monotonic() - stopped:.1f} s")
            answer = (await exchange).decode
            assert answer.error is None, answer.error
            alone = await client.complete(producer.url, PROMPT)
            assert answer.token_ids == alone.token_ids

    def looked_at() -> None:
        top = kvflow(
            "top",
            *(address(consumer), address(producer)),
            *("--once", "--json", "--stuck-s", "0.2", "--timeout-s", "2"),
        )
        assert top.returncode == 0, top.stderr
        told = json.loads(top.stdout)
        here, there = told["engines"]
        assert here["error"] is None
        assert "did not answer in 2.0 s" in there["error"]
        (row,) = [each for each in told["transfers"] if each["transfer_id"] == transfer_id]
        assert (row["engine"], row["machine"]) == (str(address(consumer)), "consumer")
        assert row["state"] in ("registered", "transferring")
        assert row["stuck"] is True
        assert row["waits_on"] == "producer"
        assert f"DONE from {engine_id[:32]}/pp0.tp0/" in row["waits_for"]
        assert row["peer"] == str(address(producer))
        (peer,) = here["ranks"][0]["peers"]
        assert peer["silent_ms"] > 800

        # By the request's id, of which the transfer's is no part.
        inspected = kvflow("inspect", address(consumer), row["request_id"])
        assert inspected.returncode == 0, inspected.stderr
        print(top.stdout, inspected.stdout, sep="\n")
        assert inspected.stdout.startswith(f"{transfer_id} at {address(consumer)} (kv_consumer,")
        assert f"as consumer, request {row['request_id']}" in inspected.stdout
        assert f"  state      {row['state']} for " in inspected.stdout
        assert f"DONE from {engine_id[:32]}/pp0.tp0/" in inspected.stdout
        assert "renewals unanswered" in inspected.stdout
        assert "the deadline of the whole load passed" in inspected.stdout
        assert "accepted: registering -> " in inspected.stdout

        silent = kvflow("inspect", address(producer), transfer_id, "--timeout-s", "0.5")
        assert silent.returncode == 2
        assert "did not answer in 0.5 s" in silent.stderr
        assert kvflow("inspect", address(consumer), "no-such-transfer").returncode == 1

    asyncio.run(work())
    for engine, end in ((consumer, "received"), (producer, "sent")):
        after = json.loads(kvflow("inspect", address(engine), transfer_id, "--json").stdout)
        (record,) = after["records"]
        assert record["state"] == end
        assert record["history"][-1]["dest"] == end


def test_every_rank_shows_its_own_part_of_a_transfer(tmp_path: Path) -> None:
    """They are other processes than the one that says where they are."""
    producing, consuming = Setup(name="live", consumer=Side(ranks=2)).settings(tmp_path)
    shown = [
        replace(each, kv_transfer_config=kvflow_connector(f"kv_{each.name}", **EXTRA))
        for each in (producing, consuming)
    ]
    naming = Naming.by_transfer_id()
    with EnginePair(producer=shown[0], consumer=shown[1]) as pair:
        wait_ready(pair.engines)
        top = json.loads(kvflow("top", address(pair.consumer), "--once", "--json").stdout)
        ranks = top["engines"][0]["ranks"]
        assert [(each["rank"], each["error"]) for each in ranks] == [
            ("pp0.tp0", None),
            ("pp0.tp1", None),
        ]

        async def work() -> None:
            async with Client(Endpoints.of(*pair.engines)) as client:
                prompt = prompts(1, shortest=300, longest=300, seed=32)[0]
                exchange = await client.disaggregated(
                    prompt, dispatch=Dispatch.CONCURRENT, naming=naming
                )
                assert exchange.error is None

        asyncio.run(work())
        told = kvflow("inspect", address(pair.consumer), naming.transfer_id, "--json")
        assert told.returncode == 0, told.stderr
        records = json.loads(told.stdout)["records"]
        assert [(each["rank"], each["state"]) for each in records] == [
            ("pp0.tp0", "received"),
            ("pp0.tp1", "received"),
        ]
        told = kvflow("inspect", address(pair.producer), naming.transfer_id, "--json")
        parts = json.loads(told.stdout)["records"]
        assert sorted(each["part"] for each in parts) == [0, 1]
        assert {each["state"] for each in parts} == {"sent"}
