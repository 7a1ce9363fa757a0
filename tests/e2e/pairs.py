"""Pairs of engines whose two sides are set up differently, and what must hold for every request.

What is right is what one engine alone makes of the same prompt (greedy, token ids): the producer,
and it is asked after the request has gone through both, so that its prefix cache cannot help. Such
an answer was found to be the same for every set-up that is compared here: other block sizes, two
ranks instead of one, chunks, prefix caching, speculation, alone or in a batch, the first time and
the second (12 prompts each; the exception is `deepseek_v2`, see `test_families`).

That a consumer did not compute the prompt by itself is read in two places: kvflow's trace (the KV
was received) and vLLM's own count of prompt tokens by their source.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from kvflow.demo.engines import EnginePair, EngineSettings, kvflow_connector, wait_ready
from kvflow.demo.families import FAMILIES
from kvflow.demo.model import PROMPT_TOKEN_IDS, tiny_model
from kvflow.demo.report import Trial
from kvflow.demo.requests import Client, Completion, Dispatch, Endpoints, Exchange
from kvflow.demo.run import judged
from kvflow.demo.traces import TRACE_SUFFIX

from .metrics import Tokens, prompt_tokens, usage_after

Prompt = tuple[int, ...]
Result = TypeVar("Result")

QUIET_QUEUE = Path(__file__).parent / "quiet_queue"
ROOT = Path(__file__).parents[2]
NGRAM = (
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,'
    ' "prompt_lookup_min": 1}'
)
EMPTY_WITHIN_S = 10.0


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

    @property
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

    @property
    def environment(self) -> dict[str, str]:
        # With the demo's limit oneDNN has no kernel for bfloat16.
        return {"ONEDNN_MAX_CPU_ISA": "DEFAULT"} if self.dtype == "bfloat16" else {}

    @property
    def modules(self) -> tuple[Path, ...]:
        return (QUIET_QUEUE,) if self.ranks > 1 else ()

    def cached(self, tokens: int) -> int:
        """Of a head of so many tokens that was computed before, what is found in the cache."""
        return tokens // self.block_tokens * self.block_tokens if self.prefix_caching else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A pair: one model, two sides."""

    name: str
    family: str = "qwen3"
    producer: Side = Side()
    consumer: Side = Side()
    computed: int = 0
    """Tokens of a prompt that the consumer computes by itself."""
    mode: str = "push"
    """The consumer's setting of that name."""
    modules: tuple[Path, ...] = ()
    """Directories of modules that both engines import."""
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()

    def settings(self, directory: Path) -> tuple[EngineSettings, EngineSettings]:
        """The producer's and the consumer's."""
        return (
            self._settings("producer", self.producer, directory),
            self._settings("consumer", self.consumer, directory),
        )

    def _settings(self, name: str, side: Side, directory: Path) -> EngineSettings:
        family = FAMILIES[self.family]
        return EngineSettings(
            name=name,
            model=tiny_model(family=self.family),
            log_path=directory / f"{name}.log",
            kv_transfer_config=kvflow_connector(f"kv_{name}", mode=self.mode),
            block_tokens=side.block_tokens,
            extra_env={
                "KVFLOW_TRACE": str(directory / f"{name}-%p{TRACE_SUFFIX}"),
                "PYTHONPATH": ":".join(map(str, (*side.modules, *self.modules, ROOT))),
                **side.environment,
                **family.engine_env,
                **self.env,
            },
            extra_args=(*family.engine_args, *side.arguments, *self.args),
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

    @property
    def producer_url(self) -> str:
        return self.engines.producer.url

    @property
    def consumer_url(self) -> str:
        return self.engines.consumer.url

    def exchanges(
        self, prompts: Sequence[Prompt], dispatch: Dispatch, *, together: bool = False
    ) -> list[Exchange]:
        """Each prompt through both engines: one after the other, or all at once."""

        async def send(client: Client) -> list[Exchange]:
            sent = [client.disaggregated(prompt, dispatch=dispatch) for prompt in prompts]
            return list(await asyncio.gather(*sent)) if together else [await one for one in sent]

        return self._with_client(send)

    def alone(self, url: str, prompts: Sequence[Prompt]) -> list[Completion]:
        """What one engine makes of the prompts; its prefix cache knows them afterwards."""

        async def send(client: Client) -> list[Completion]:
            return [await client.complete(url, prompt, stream=True) for prompt in prompts]

        return self._with_client(send)

    def assert_good(
        self, prompts: Sequence[Prompt], exchanges: Sequence[Exchange], dispatch: Dispatch
    ) -> None:
        """Token-identical with the producer alone, and the KV of each was received."""
        alone = self.alone(self.producer_url, prompts)
        trials = [
            Trial(
                number=number,
                dispatch=dispatch,
                prompt_tokens=len(prompt),
                monolithic=one,
                exchange=exchange,
            )
            for number, (prompt, one, exchange) in enumerate(
                zip(prompts, alone, exchanges, strict=True), start=1
            )
        ]
        problems = {
            f"{verdict.trial.prompt_tokens} tokens": verdict.problem
            for verdict in asyncio.run(judged(trials, self.directory))
            if verdict.problem is not None
        }
        assert not problems, problems

    def assert_empty(self) -> None:
        """No block of either pool is in use, or soon none is."""
        for url in (self.producer_url, self.consumer_url):
            assert usage_after(url, EMPTY_WITHIN_S) == 0, url

    def _with_client(self, work: Callable[[Client], Awaitable[Result]]) -> Result:
        async def run() -> Result:
            async with Client(self.endpoints) as client:
                return await work(client)

        return asyncio.run(run())


@contextmanager
def running(setup: Setup, directory: Path) -> Iterator[RunningPair]:
    """Starts a pair, and ends it."""
    producer, consumer = setup.settings(directory)
    with EnginePair(producer=producer, consumer=consumer) as engines:
        wait_ready(engines.engines)
        yield RunningPair(setup=setup, engines=engines, directory=directory)


# -- what is checked -------------------------------------------------------------------------------


def check_fresh_prompts(
    pair: RunningPair, lengths: Sequence[int], dispatch: Dispatch, *, together: bool
) -> None:
    """Prompts that neither engine has seen: right tokens, and all KV came."""
    prompts = fresh_prompts(lengths, f"{pair.setup.name} {dispatch} {together}")
    before = prompt_tokens(pair.consumer_url)
    exchanges = pair.exchanges(prompts, dispatch, together=together)
    told = prompt_tokens(pair.consumer_url) - before
    pair.assert_good(prompts, exchanges, dispatch)
    own = pair.setup.computed * len(prompts)
    assert told == Tokens(computed=own, cached=0, received=sum(lengths) - own), told
    pair.assert_empty()


def check_shared_heads(pair: RunningPair, heads: Sequence[int], dispatch: Dispatch) -> None:
    """Prompts that begin like one that is in a cache: the producer's, the consumer's, both."""
    sides = {"producer": pair.setup.producer, "consumer": pair.setup.consumer}
    caching = [name for name, side in sides.items() if side.prefix_caching]
    if not caching:
        pytest.skip("neither side caches prefixes")
    for warm in dict.fromkeys(((caching[0],), (caching[-1],), tuple(caching))):
        for tokens in heads:
            _check_shared_head(pair, tokens, warm, dispatch)
    pair.assert_empty()


def _check_shared_head(
    pair: RunningPair, tokens: int, warm: Sequence[str], dispatch: Dispatch
) -> None:
    head, tail = fresh_prompts((tokens, 45), f"{pair.setup.name} {dispatch} {warm} {tokens}")
    urls = {"producer": pair.producer_url, "consumer": pair.consumer_url}
    for name in warm:
        assert pair.alone(urls[name], [head])[0].error is None
    before = {name: prompt_tokens(url) for name, url in urls.items()}
    exchanges = pair.exchanges([head + tail], dispatch)
    told = {name: prompt_tokens(url) - before[name] for name, url in urls.items()}
    pair.assert_good([head + tail], exchanges, dispatch)
    sides = {"producer": pair.setup.producer, "consumer": pair.setup.consumer}
    for name, side in sides.items():
        assert told[name].cached == (side.cached(tokens) if name in warm else 0), (name, told)
    own = pair.setup.computed
    missing = tokens + len(tail) - told["consumer"].cached
    assert (told["consumer"].computed, told["consumer"].received) == (own, missing - own), told


def fresh_prompts(lengths: Sequence[int], seed: str) -> list[Prompt]:
    """Prompts of random bytes."""
    source = random.Random(seed)
    return [tuple(source.choices(PROMPT_TOKEN_IDS, k=length)) for length in lengths]
