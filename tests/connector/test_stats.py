"""Readings on vLLM's way to `/metrics`: encoded, added up over ranks, shown."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvflow.connector.stats import KVFlowPromMetrics, KVFlowStats
from kvflow.observe.metrics import METRICS, Reading

BYTES = "kvflow_bytes_total"
LIVE = "kvflow_transfers_live"
STATE = "kvflow_state_seconds"
ENDED = "kvflow_transfers_ended_total"


def reading(rank: str = "pp0.tp0", count: float = 10, live: float = 2) -> Reading:
    return Reading(
        counts={
            (BYTES, rank, "write"): count,
            (ENDED, rank, "consumer", "failed", "deadline"): 1,
        },
        levels={(LIVE, rank, "producer", "held"): live},
        seen={(STATE, rank, "producer", "held"): [0.5, 0.25]},
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def prom(registry: CollectorRegistry, *, tp: int = 1, engines: int = 1) -> KVFlowPromMetrics:
    config: Any = SimpleNamespace(
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=1),
    )

    def bound(kind: type) -> Any:
        return lambda **how: kind(registry=registry, **how)

    types: Any = {kind: bound(kind) for kind in (Counter, Gauge, Histogram)}
    labels: Any = {index: ["model", str(index)] for index in range(engines)}
    return KVFlowPromMetrics(config, types, ["model_name", "engine"], labels)


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(rank: str = "pp0.tp0", engine: int = 0, **own: str) -> frozenset[tuple[str, str]]:
    return frozenset({"model_name": "model", "engine": str(engine), "rank": rank, **own}.items())


def test_a_reading_survives_the_way_through_vllm() -> None:
    stats = KVFlowStats.of(reading())
    travelled = KVFlowStats(json.loads(json.dumps(stats.to_dict())))
    assert travelled.reading() == reading()
    assert not travelled.is_empty()
    assert KVFlowStats({}).is_empty()
    assert KVFlowStats.of(Reading()).is_empty()


def test_ranks_stay_apart_and_later_counts_are_added() -> None:
    stats = KVFlowStats({})
    for rank, count in (("pp0.tp0", 10), ("pp0.tp1", 5), ("pp0.tp0", 1)):
        stats.aggregate(KVFlowStats.of(reading(rank, count, live=count)))
    merged = stats.reading()
    assert merged.counts[BYTES, "pp0.tp0", "write"] == 11
    assert merged.counts[BYTES, "pp0.tp1", "write"] == 5
    assert merged.levels[LIVE, "pp0.tp0", "producer", "held"] == 1
    assert merged.seen[STATE, "pp0.tp0", "producer", "held"] == [0.5, 0.25, 0.5, 0.25]


def test_the_log_line_counts_transfers_once_and_bytes_of_all_ranks() -> None:
    stats = KVFlowStats.of(reading(count=2**20))
    stats.aggregate(KVFlowStats.of(reading("pp0.tp1", count=2**20)))
    assert stats.reduce() == {"Transfers failed": 1, "MiB by write": 2.0}


def test_every_metric_is_there_from_the_start(registry: CollectorRegistry) -> None:
    prom(registry, tp=2)
    text = generate_latest(registry).decode()
    for metric in METRICS:
        family = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        assert f"# HELP {family}" in text, metric.name
    at_first = samples(registry)
    for rank in ("pp0.tp0", "pp0.tp1"):
        assert at_first[BYTES, labels(rank, direction="write")] == 0
        assert at_first[LIVE, labels(rank, machine="consumer", state="registered")] == 0
    assert at_first["kvflow_prompt_tokens_received_total", labels("scheduler")] == 0


def test_what_is_observed_is_shown_by_engine_and_rank(registry: CollectorRegistry) -> None:
    metrics = prom(registry, tp=2, engines=2)
    metrics.observe(KVFlowStats.of(reading(count=10)).to_dict(), 0)
    metrics.observe(KVFlowStats.of(reading(count=5, live=7)).to_dict(), 0)
    metrics.observe(KVFlowStats.of(reading("pp0.tp1", count=3)).to_dict(), 1)
    shown = samples(registry)
    assert shown[BYTES, labels(direction="write")] == 15
    assert shown[BYTES, labels("pp0.tp1", 1, direction="write")] == 3
    assert shown[BYTES, labels("pp0.tp1", 0, direction="write")] == 0
    assert shown[LIVE, labels(machine="producer", state="held")] == 7
    assert shown[f"{STATE}_count", labels(machine="producer", state="held")] == 4
    assert shown[f"{STATE}_sum", labels(machine="producer", state="held")] == 1.5
    failed = labels(machine="consumer", outcome="failed", reason="deadline")
    assert shown[ENDED, failed] == 2
