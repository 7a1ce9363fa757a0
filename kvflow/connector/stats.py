"""kvflow's metrics on vLLM's own way from the workers to `/metrics`.

Rule: nothing is counted here; `kvflow.observe.metrics` says what there is.

The idea: vLLM carries a plain dict per step from its workers, through the scheduler, to the process
that serves `/metrics`. A series travels as one text: its name, rank and labels.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvflow.ids import Rank
from kvflow.observe.metrics import BY_NAME, METRICS, SCHEDULER, Metric, Reading, Series

_BETWEEN = "\x1f"
_ENDED = "kvflow_transfers_ended_total"
_BYTES = "kvflow_bytes_total"


class KVFlowStats(KVConnectorStats):
    """A `Reading`, as vLLM carries it: texts, numbers and lists."""

    @classmethod
    def of(cls, reading: Reading) -> "KVFlowStats":
        """A reading, encoded."""
        return cls(
            {
                "counts": {_BETWEEN.join(series): n for series, n in reading.counts.items()},
                "levels": {_BETWEEN.join(series): n for series, n in reading.levels.items()},
                "seen": {
                    _BETWEEN.join(series): list(each) for series, each in reading.seen.items()
                },
            }
        )

    def reading(self) -> Reading:
        """The reading again."""
        return Reading(
            counts={_series(text): n for text, n in self.data.get("counts", {}).items()},
            levels={_series(text): n for text, n in self.data.get("levels", {}).items()},
            seen={_series(text): list(each) for text, each in self.data.get("seen", {}).items()},
        )

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Of another rank, or later."""
        assert isinstance(other, KVFlowStats)
        counts = self.data.setdefault("counts", {})
        for text, n in other.data.get("counts", {}).items():
            counts[text] = counts.get(text, 0) + n
        self.data.setdefault("levels", {}).update(other.data.get("levels", {}))
        seen = self.data.setdefault("seen", {})
        for text, each in other.data.get("seen", {}).items():
            seen.setdefault(text, []).extend(each)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs each ten seconds: of one rank, where every rank has each transfer."""
        counts = self.reading().counts
        first = str(Rank(0, 0))
        ends = {s[3]: 0.0 for s in counts if s[:2] == (_ENDED, first)}
        for series, n in counts.items():
            if series[:2] == (_ENDED, first):
                ends[series[3]] += n
        moved = {series[2]: 0.0 for series in counts if series[0] == _BYTES}
        for series, n in counts.items():
            if series[0] == _BYTES:
                moved[series[2]] += n / 2**20
        told: dict[str, int | float] = {f"Transfers {end}": int(n) for end, n in ends.items()}
        return told | {f"MiB by {direction}": round(mb, 1) for direction, mb in moved.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())


class KVFlowPromMetrics(KVConnectorPromMetrics):
    """Every metric of the table, on vLLM's registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._made(metric, metric_types) for metric in METRICS}
        parallel = vllm_config.parallel_config
        ranks = [
            str(Rank(pp, tp))
            for pp in range(parallel.pipeline_parallel_size)
            for tp in range(parallel.tensor_parallel_size)
        ]
        for metric in METRICS:
            for engine in per_engine_labelvalues:
                for rank in [SCHEDULER] if metric.scheduler else ranks:
                    for labels in metric.known:
                        self._child(engine, (metric.name, rank, *labels))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine's workers and scheduler tell."""
        reading = KVFlowStats(transfer_stats_data).reading()
        for series, count in reading.counts.items():
            self._child(engine_idx, series).inc(count)
        for series, level in reading.levels.items():
            self._child(engine_idx, series).set(level)
        for series, values in reading.seen.items():
            child = self._child(engine_idx, series)
            for value in values:
                child.observe(value)

    def _made(self, metric: Metric, types: Mapping[type[Any], type[Any]]) -> Any:
        names = [*self._labelnames, "rank", *metric.labels]
        common: dict[str, Any] = {
            "name": metric.name,
            "documentation": metric.help,
            "labelnames": names,
        }
        match metric.kind:
            case "counter":
                return types[Counter](**common)
            case "histogram":
                return types[Histogram](**common, buckets=list(metric.buckets))
            case _:
                # Each API server process would have its own idea of a gauge.
                return types[Gauge](**common, multiprocess_mode="mostrecent")

    def _child(self, engine: int, series: Series) -> Any:
        name, *labels = series
        values = [*self.per_engine_labelvalues[engine], *labels]
        return self._metrics[BY_NAME[name].name].labels(*(str(value) for value in values))


def _series(text: str) -> Series:
    return tuple(text.split(_BETWEEN))
