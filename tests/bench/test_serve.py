"""How a run is planned: the order of the pairs, and the engines' settings on either kind of
machine."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvflow import settings
from kvflow.bench import peers
from kvflow.bench.serve import rounds, serve
from kvflow.bench.serve_connectors import (
    CONNECTORS,
    PUSH,
    UPSTREAM_PULL,
    UPSTREAM_PUSH,
    Connector,
)
from kvflow.bench.serve_engines import Plan
from kvflow.bench.serve_load import Load, loads, prompts
from kvflow.bench.serve_options import ServeOptions
from kvflow.errors import ConfigurationError

OPTIONS = ServeOptions(
    connectors=("kvflow-push",), rates=(1.0,), lengths=(512, 2048), requests=2, repeats=1
)


def plan(*, is_cpu: bool, **changed: object) -> Plan:
    options = replace(OPTIONS, **changed)  # type: ignore[arg-type]
    return Plan(options=options, model="org/model", is_cpu=is_cpu)


def test_each_round_begins_one_connector_later() -> None:
    order = rounds(CONNECTORS[:3], 4)
    keys = [each.key.removeprefix("kvflow-") for _, each in order]
    assert [number for number, _ in order] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert keys[0:3] == ["streamed", "push", "pull"]
    assert keys[3:6] == ["push", "pull", "streamed"]
    assert keys[9:12] == keys[0:3]


def test_every_connector_meets_the_same_loads() -> None:
    options = replace(OPTIONS, rates=(1.0, 2.0), requests=3)
    asked = {length: prompts(3, length, "1") for length in options.lengths}

    def made(connector: Connector, number: int) -> list[Load]:
        return list(loads(options, connector, number, asked, {}))

    pull, push = made(UPSTREAM_PULL, 1), made(UPSTREAM_PUSH, 1)
    assert [(load.length, load.rate) for load in pull] == [
        *((512, 1.0), (512, 2.0)),
        *((2048, 1.0), (2048, 2.0)),
    ]
    assert [replace(load, dispatch=pull[0].dispatch) for load in push[::2]] == pull
    assert push[0].dispatch is not push[1].dispatch
    assert made(UPSTREAM_PUSH, 2)[0].dispatch is push[1].dispatch
    assert made(UPSTREAM_PULL, 2)[0].due != pull[0].due
    assert pull[0].due != pull[1].due


def test_a_run_without_any_connector_ends_with_one_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def parse(extra_config: Mapping[str, object]) -> None:
        raise ConfigurationError(next(iter(extra_config)), None, "one of the keys a, b")

    monkeypatch.setattr(settings, "parse", parse)
    out = tmp_path / "out"
    assert serve(replace(OPTIONS, connectors=("kvflow-pull",), out=out)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "kvflow pull: this version has no setting `mode`; left out",
        "no connector is left to measure",
    ]
    assert not out.exists()


def test_on_a_cpu_upstreams_engines_are_made_even_and_kvflows_write_traces(
    tmp_path: Path,
) -> None:
    upstream, _ = plan(is_cpu=True).settings(UPSTREAM_PUSH, tmp_path / "a")
    assert upstream.extra_env[peers.ENVIRONMENT] == "no-progress-thread,no-pinning"
    assert upstream.extra_env["PYTHONPATH"].startswith(str(tmp_path / "a" / "at_start"))
    assert (tmp_path / "a" / "at_start" / "sitecustomize.py").is_file()
    assert "KVFLOW_TRACE" not in upstream.extra_env
    assert upstream.kv_transfer_config == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {},
    }
    _, ours = plan(is_cpu=True).settings(PUSH, tmp_path / "b")
    assert ours.kv_transfer_config is not None
    assert ours.kv_transfer_config["kv_role"] == "kv_consumer"
    assert ours.extra_env["KVFLOW_TRACE"] == str(tmp_path / "b" / "consumer-%p.ndjson")
    assert peers.ENVIRONMENT not in ours.extra_env
    assert ours.max_model_tokens == 2048 + 16
    assert ours.extra_args == ("--max-num-batched-tokens", "512")


@pytest.mark.parametrize(
    ("is_cpu", "asked", "expected"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_peers_are_made_even_on_a_cpu_or_when_asked(
    is_cpu: bool, asked: bool | None, expected: bool, tmp_path: Path
) -> None:
    made = plan(is_cpu=is_cpu, even_peers=asked)
    assert made.steps(UPSTREAM_PULL) == (peers.EVEN if expected else ())
    assert made.steps(PUSH) == ()


def test_with_devices_each_engine_has_its_own(tmp_path: Path) -> None:
    made = plan(is_cpu=False, tensor_parallel_size=2, engine_arguments=("--block-size", "64"))
    producer, consumer = made.settings(PUSH, tmp_path)
    assert producer.extra_env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert consumer.extra_env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert consumer.extra_env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert str(consumer.model) == "org/model"
    assert consumer.extra_args[-2:] == ("--block-size", "64")
    assert consumer.extra_args[:3] == ("--dtype", "auto", "--no-enforce-eager")
    assert "--max-num-batched-tokens" not in consumer.extra_args
    given = plan(is_cpu=False, producer_devices=("4",), consumer_devices=("6",))
    names = [each.extra_env["CUDA_VISIBLE_DEVICES"] for each in given.settings(PUSH, tmp_path)]
    assert names == ["4", "6"]


def test_ranks_that_share_cores_get_a_queue_that_does_not_spin() -> None:
    made = plan(is_cpu=True, tensor_parallel_size=2)
    assert made.steps(PUSH) == (peers.QUIET_QUEUE,)
    assert made.steps(UPSTREAM_PULL) == (*peers.EVEN, peers.QUIET_QUEUE)
    assert made.arguments()[2:4] == ("--distributed-executor-backend", "mp")
