"""What a serving benchmark has measured, as values and as JSON.

Times are in milliseconds where a name says so, on the client's clock. `specs/benchmarks.md` defines
every figure.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvflow.demo.engines import Json

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request through both engines. A time is None if that moment never came."""

    number: int
    name: str
    """Its transfer id (kvflow) or `X-Request-Id` (upstream)."""
    arrival_s: float
    """When it was due, since the point's beginning."""
    late_ms: float
    """How much later it was sent."""
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    handover_ms: float | None = None
    prefill_ms: float | None = None
    """From the sending of the prefill leg to the end of its answer."""
    total_ms: float | None = None
    kv_bytes: int | None = None
    kv_descriptors: int | None = None
    error: str | None = None
    """Why there was no whole answer."""
    mismatch: str | None = None
    """Where its tokens differ from the monolithic run's."""

    @property
    def is_right(self) -> bool:
        return self.error is None and self.mismatch is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One connector, one dispatch order, one rate and one prompt length, in one round."""

    connector: str
    """Its key."""
    name: str
    origin: str
    dispatch: str
    round: int
    rate: float
    length: int
    window_s: float
    """From the first dispatch to the last answer."""
    producer_cpu_s: float
    consumer_cpu_s: float
    """Of the engine's whole process tree, in the window."""
    others_cpu_s: float
    """Of everything else on the machine but the client, in the window."""
    kv_bytes: float | None
    kv_descriptors: float | None
    """Per transfer (the KV of one request, over all ranks)."""
    consumer_computed_tokens: int | None
    """Prompt tokens that the consumer computed by itself, as vLLM counts them."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """By how much vLLM's `vllm:nixl_*` counters of both engines rose."""
    requests: tuple[RequestRecord, ...]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.dispatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """How the two engines of a connector were started in one round."""

    connector: str
    name: str
    round: int
    transfer_config: Mapping[str, Json]
    asked: tuple[str, ...]
    """What was to be changed when an engine started (see `kvflow.bench.peers`)."""
    steps: Mapping[str, tuple[str, ...]]
    """By engine: what its log says was changed."""
    arguments: tuple[str, ...]
    """Beyond those that every engine of the demo has."""
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A whole run."""

    date: str
    wall_s: float
    machine: Mapping[str, Json]
    versions: Mapping[str, Json]
    options: Mapping[str, Json]
    set_ups: tuple[SetUp, ...]
    points: tuple[Point, ...]
    left_out: tuple[str, ...]
    """Connectors that this version does not have."""
    problems: tuple[str, ...]
    """What could not be measured, and why."""

    @property
    def is_good(self) -> bool:
        """Whether everything was measured and every request was right."""
        requests = [request for point in self.points for request in point.requests]
        return (
            bool(requests) and not self.problems and all(request.is_right for request in requests)
        )


def as_json(result: Result, summary: list[dict[str, Json]], ratios: list[dict[str, Json]]) -> str:
    """Everything: raw, and as it is printed."""
    whole = {
        "version": VERSION,
        "kind": "serve",
        "ok": result.is_good,
        **dataclasses.asdict(result),
        "summary": summary,
        "ratios": ratios,
    }
    return json.dumps(whole, indent=1)


def write(path: Path, text: str) -> None:
    """Writes beside the file's place and renames, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)
