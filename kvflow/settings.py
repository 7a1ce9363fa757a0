"""Settings of one engine, parsed once from vLLM's `kv_connector_extra_config`.

Every key is optional. An unknown key or a bad value is a `ConfigurationError` at start, which
names the key, the value and what is allowed.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvflow.core.timings import MAY_BE_ZERO, Timings
from kvflow.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator can set, beside the durations of `kvflow.core.Timings`.

    poll_quick_us      time between two looks for news while KV is being moved by this worker.
    poll_awaiting_us   the same while a load waits for its producer, or a finished prefill for its
                       consumer. That lasts as long as a prompt is computed: sooner costs processor
                       time all along, and gains at most this once.
    poll_expectant_us  the same while prompts are computed for consumers.
    poll_idle_us       the same while nothing is expected.
    poll_computing_us  at least so long while the model computes a step: what is seen sooner is not
                       taken sooner, and each look takes the interpreter from the step.
    idle_wait_ms       how long an engine step without model work may wait for news, so that an
                       idle decode engine neither spins nor sees an arrival late. The first such
                       step waits for 1 ms, each further one twice as long, up to this.
    mode               of a decode engine. `push`: producers write KV into its blocks. `pull`: it
                       reads the KV out of theirs. `auto`: it reads where the parameters tell of a
                       finished prefill (sequential dispatch), and is written to otherwise.
    recompute_below_tokens
                       of a decode engine: a prompt of which fewer tokens than these would have to
                       be moved is computed here instead, and its producer is released.
    stream             `on`: what a step has completed of a prompt is written while the next one
                       computes. `off`: a prompt is written when all of it is complete.
    stream_bytes_min   so much must be complete for a write of its own, before the prompt's end.
    post_bytes_max     bytes in one posted slice of a write or read. Where the library copies inside
                       the call, notices wait for as long as that takes: 3 ms at 5 GB/s.
    post_runs_max      runs in one posted slice of a write or read; 2 to 3 us each where it copies.
    posts_in_flight_max
                       slices of one write or read that may be in flight together.
    parked_max         loads of a decode engine that may wait for their KV at a time; further
                       requests stay in vLLM's queue.
    after_preemption   what becomes of a decode request that vLLM preempts after its KV has landed:
                       `recompute` computes its prompt here, `register` asks for the KV once more
                       while the producer keeps it (its `keep_sent_s`). `register` needs
                       `kv_load_failure_policy` to be `recompute`.
    cache_layout       vLLM's KV cache layout to ask for; VLLM_KV_CACHE_LAYOUT comes first, and what
                       the attention backend can do. `LBHNC` keeps what two ranks or two block sizes
                       share in one piece. `BLHNC` also puts all layers of a block side by side: one
                       run for all of them between equal ranks and block sizes, but vLLM cannot
                       split such blocks for kernels with smaller ones, and stops at start where it
                       would have to. "" leaves the choice to vLLM.
    side_channel_connections_max
                       connections that a side channel serves at once.
    shared_key_file    file with a key that seals every message (HMAC-SHA256); "" for none. The same
                       in every engine.
    inspect            whether live transfers are shown to whoever asks (`kvflow top`, `kvflow
                       inspect`): read only. Each worker listens on a free port then, and a decode
                       engine on its side channel's port, which must not be another engine's.
    nixl_backends      NIXL backends, in order of preference.
    """

    timings: Timings = field(default_factory=Timings)
    poll_quick_us: int = 400
    poll_awaiting_us: int = 1000
    poll_expectant_us: int = 5000
    poll_idle_us: int = 10_000
    poll_computing_us: int = 1000
    idle_wait_ms: float = 10.0
    mode: str = "push"
    recompute_below_tokens: int = 0
    stream: str = "on"
    stream_bytes_min: int = 2**20
    post_bytes_max: int = 16 * 2**20
    post_runs_max: int = 2048
    posts_in_flight_max: int = 4
    parked_max: int = 1024
    after_preemption: str = "recompute"
    cache_layout: str = "LBHNC"
    side_channel_connections_max: int = 256
    shared_key_file: str = ""
    inspect: bool = False
    nixl_backends: tuple[str, ...] = ("UCX",)


_LEAST = {
    "poll_quick_us": 20,
    "poll_awaiting_us": 20,
    "poll_expectant_us": 20,
    "poll_idle_us": 100,
    "poll_computing_us": 20,
    "idle_wait_ms": 0,
    "recompute_below_tokens": 0,
    "post_bytes_max": 4096,
}
"""Lowest value of each number; 1 where not named. Timings must be above 0."""
_CHOICES = {
    "mode": ("push", "pull", "auto"),
    "stream": ("on", "off"),
    "after_preemption": ("recompute", "register"),
    "cache_layout": ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", ""),
}
_MOST = 2**40
_TIMING_MOST = 86_400
"""A day; the wire carries no longer lease."""


def parse(extra_config: Mapping[str, object]) -> Settings:
    """Settings from `kv_connector_extra_config`. Raises `ConfigurationError`."""
    own = {f.name: f for f in dataclasses.fields(Settings) if f.name != "timings"}
    timings = {f.name: f for f in dataclasses.fields(Timings)}
    values: dict[str, object] = {}
    durations: dict[str, object] = {}
    for key, value in extra_config.items():
        if key in timings:
            above = None if key in MAY_BE_ZERO else 0
            durations[key] = _number(key, value, timings[key].type, above=above, most=_TIMING_MOST)
        elif key == "nixl_backends":
            values[key] = _names(key, value)
        elif key in _CHOICES:
            values[key] = _one_of(key, value, _CHOICES[key])
        elif key == "inspect":
            values[key] = _switch(key, value)
        elif key == "shared_key_file":
            values[key] = _path(key, value)
        elif key in own:
            values[key] = _number(key, value, own[key].type, least=_LEAST.get(key, 1))
        else:
            allowed = ", ".join(sorted([*own, *timings]))
            raise ConfigurationError(
                f"kv_connector_extra_config.{key}", value, f"one of the keys {allowed}"
            )
    return Settings(timings=Timings(**durations), **values)  # type: ignore[arg-type]


def _number(
    key: str,
    value: object,
    kind: object,
    *,
    least: float = 0,
    above: float | None = None,
    most: float = _MOST,
) -> float | int:
    wanted = int if kind in (int, "int") else float
    bound = f"at least {least}" if above is None else f"above {above}"
    allowed = f"{'an integer' if wanted is int else 'a number'} {bound} and at most {most}"
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or (wanted is int and not isinstance(value, int)):
        raise ConfigurationError(f"kv_connector_extra_config.{key}", value, allowed)
    assert isinstance(value, int | float)
    within = value >= least if above is None else value > above
    if not within or not value <= most:
        raise ConfigurationError(f"kv_connector_extra_config.{key}", value, allowed)
    return wanted(value)


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigurationError(f"kv_connector_extra_config.{key}", value, " or ".join(allowed))
    return str(value)


def _switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"kv_connector_extra_config.{key}", value, "true or false")
    return value


def _path(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"kv_connector_extra_config.{key}", value, "a file name")
    return value


def _names(key: str, value: object) -> tuple[str, ...]:
    good = isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)
    if not good:
        raise ConfigurationError(
            f"kv_connector_extra_config.{key}", value, "a list of NIXL backend names"
        )
    return tuple(value)  # type: ignore[arg-type]
