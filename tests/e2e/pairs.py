"""Pairs of engines whose two sides are set up differently, and what must hold for every request.

What is right is what one engine alone makes of the same prompt (greedy, token ids): the producer,
and it is asked after the request has gone through both, so that its prefix cache cannot help. That
a consumer did not compute the prompt by itself is read in two places: kvflow's trace (the KV was
received) and vLLM's own count of prompt tokens by their source.
"""

import asyncio
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvflow.demo.engines import EnginePair, EngineSettings, kvflow_connector, wait_ready
from kvflow.demo.families import FAMILIES
from kvflow.demo.model import tiny_model
from kvflow.demo.report import Trial
from kvflow.demo.requests import Client, Dispatch, Endpoints
from kvflow.demo.run import judged
from kvflow.demo.traces import TRACE_SUFFIX

Prompt = tuple[int, ...]

QUIET_QUEUE = Path(__file__).parent / "quiet_queue"
ROOT = Path(__file__).parents[2]
NGRAM = (
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,'
    ' "prompt_lookup_min": 1}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How one engine of a pair is set up."""

    block_tokens: int = 32
    dtype: str = "float32"
    ranks: int = 1
    """Tensor-parallel ranks."""
    prefix_caching: bool = False
    chunk_tokens: int | None = None
    """Longest piece of a prompt that is computed in one step; None: vLLM's own choice."""
    ngram: bool = False
    """Speculate with n-grams of the prompt."""

    def arguments(self) -> tuple[str, ...]:
        arguments = ["--dtype", self.dtype]
        if self.ranks > 1:
            arguments += ["--tensor-parallel-size", str(self.ranks)]
            arguments += ["--distributed-executor-backend", "mp"]
        if self.prefix_caching:
            arguments += ["--enable-prefix-caching"]
        if self.chunk_tokens is not None:
            arguments += ["--max-num-batched-tokens", str(self.chunk_tokens)]
        if self.ngram:
            arguments += ["--speculative-config", NGRAM]
        return tuple(arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A pair: one model, two sides."""

    name: str
    family: str = "qwen3"
    producer: Side = Side()  # noqa: RUF009 - frozen
    consumer: Side = Side()  # noqa: RUF009 - frozen

    def settings(
        self, directory: Path, *, env: Mapping[str, str] | None = None, args: tuple[str, ...] = ()
    ) -> Iterator[EngineSettings]:
        """The producer's and the consumer's; `env` and `args` are added to both."""
        family = FAMILIES[self.family]
        for name, side in (("producer", self.producer), ("consumer", self.consumer)):
            yield EngineSettings(
                name=name,
                model=tiny_model(family=self.family),
                log_path=directory / f"{name}.log",
                kv_transfer_config=kvflow_connector(f"kv_{name}"),
                block_tokens=side.block_tokens,
                extra_env={
                    "KVFLOW_TRACE": str(directory / f"{name}-%p{TRACE_SUFFIX}"),
                    **({"PYTHONPATH": f"{QUIET_QUEUE}:{ROOT}"} if side.ranks > 1 else {}),
                    **family.engine_env,
                    **(env or {}),
                },
                extra_args=(*family.engine_args, *side.arguments(), *args),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPair:
    """A pair that serves."""

    setup: Setup
    engines: EnginePair
    directory: Path

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints.of(self.engines.producer, self.engines.consumer)

    def assert_served(
        self, prompts: Sequence[Prompt], dispatch: Dispatch, *, together: bool = False
    ) -> "Tokens":
        """Right tokens and received KV for each prompt; returns where the consumer's came from.

        `together`: all at once, not one after the other.
        """
        before = prompt_tokens(self.endpoints.consumer_url)
        trials = asyncio.run(self._trials(prompts, dispatch, together))
        for verdict in asyncio.run(judged(trials, self.directory)):
            trial = verdict.trial
            assert verdict.problem is None, (
                f"{self.setup.name}, {dispatch.value}, {trial.prompt_tokens} tokens: "
                f"{verdict.problem}"
            )
        return prompt_tokens(self.endpoints.consumer_url) - before

    async def _trials(
        self, prompts: Sequence[Prompt], dispatch: Dispatch, together: bool
    ) -> list[Trial]:
        async with Client(self.endpoints) as client:
            sent = [client.disaggregated(prompt, dispatch=dispatch) for prompt in prompts]
            exchanges = await asyncio.gather(*sent) if together else [await one for one in sent]
            alone = [await client.monolithic(prompt) for prompt in prompts]
        return [
            Trial(
                number=number,
                dispatch=dispatch,
                prompt_tokens=len(prompt),
                monolithic=monolithic,
                exchange=exchange,
            )
            for number, (prompt, monolithic, exchange) in enumerate(
                zip(prompts, alone, exchanges, strict=True), start=1
            )
        ]

    def warm(self, url: str, prompt: Prompt) -> None:
        """Lets one engine alone compute a prompt, which fills its prefix cache."""

        async def complete() -> None:
            async with Client(self.endpoints) as client:
                assert (await client.complete(url, prompt, tokens=1)).error is None

        asyncio.run(complete())


@contextmanager
def running(
    setup: Setup,
    directory: Path,
    *,
    env: Mapping[str, str] | None = None,
    args: tuple[str, ...] = (),
) -> Iterator[RunningPair]:
    """Starts a pair, and ends it."""
    producer, consumer = setup.settings(directory, env=env, args=args)
    with EnginePair(producer=producer, consumer=consumer) as engines:
        wait_ready(engines.engines)
        yield RunningPair(setup=setup, engines=engines, directory=directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Prompt tokens of one engine, by where their KV came from, says vLLM."""

    computed: int
    cached: int
    received: int

    def __sub__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            computed=self.computed - other.computed,
            cached=self.cached - other.cached,
            received=self.received - other.received,
        )


def prompt_tokens(url: str) -> Tokens:
    """What an engine has counted so far."""
    return Tokens(
        computed=_by_source(metrics(url), "local_compute"),
        cached=_by_source(metrics(url), "local_cache_hit"),
        received=_by_source(metrics(url), "external_kv_transfer"),
    )


def metrics(url: str) -> str:
    """An engine's Prometheus text."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return str(response.read().decode())


def _by_source(text: str, source: str) -> int:
    pattern = rf'^vllm:prompt_tokens_by_source_total\{{.*source="{source}".*\}} (\S+)$'
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))
