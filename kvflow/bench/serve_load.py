"""The load: when requests arrive, what they ask, and what is written down of each.

Arrivals are a Poisson process whose times depend on the seed, the round, the rate and the length
only, so that every connector meets the same ones. So do the prompts, and they are the same for
every rate and round: prefix caching is off, and their tokens without any transfer need be known
only once. A request is sent when it is due, whether or not earlier ones have been answered.
"""

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvflow.bench.report_data import RequestRecord
from kvflow.bench.serve_connectors import Connector, Legs
from kvflow.bench.serve_options import ServeOptions
from kvflow.demo.model import PROMPT_TOKEN_IDS
from kvflow.demo.requests import Client, Completion, Dispatch

Prompt: TypeAlias = tuple[int, ...]
Tokens: TypeAlias = tuple[int, ...]


def arrivals(count: int, per_s: float, seed: str) -> tuple[float, ...]:
    """Times in seconds of a Poisson process; the first one is 0."""
    source = random.Random(f"arrivals {seed}")
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + source.expovariate(per_s))
    return tuple(times)


def prompts(count: int, length: int, seed: str) -> tuple[Prompt, ...]:
    """Prompts of random bytes, none like another."""
    source = random.Random(f"prompts {seed} {length}")
    return tuple(tuple(source.choices(PROMPT_TOKEN_IDS, k=length)) for _ in range(count))


async def alone(client: Client, asked: Sequence[Prompt], tokens: int) -> list[Completion]:
    """What the producer makes of the prompts without any transfer, one at a time."""
    url = client.endpoints.producer_url
    return [await client.complete(url, prompt, tokens=tokens, stream=True) for prompt in asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request's two answers."""

    name: str
    prefill: Completion
    decode: Completion

    @property
    def error(self) -> str | None:
        if self.prefill.error is not None:
            return f"prefill leg: {self.prefill.error}"
        if self.decode.error is not None:
            return f"decode leg: {self.decode.error}"
        return None


async def send(
    client: Client, legs: Legs, prompt: Prompt, *, dispatch: Dispatch, tokens: int
) -> Sent:
    """One request through both engines; times count from its dispatch."""
    name = f"bench-{secrets.token_hex(16)}"
    request_id = legs.request_id(name)
    began = time.monotonic()

    async def prefill() -> Completion:
        return await client.complete(
            client.endpoints.producer_url,
            prompt,
            tokens=1,
            params=legs.prefill(name),
            request_id=request_id,
            began=began,
        )

    async def decode(answer: Completion | None) -> Completion:
        return await client.complete(
            client.endpoints.consumer_url,
            prompt,
            tokens=tokens,
            params=legs.decode(name, None if answer is None else answer.kv_transfer_params),
            request_id=request_id,
            stream=True,
            began=began,
        )

    if dispatch is Dispatch.CONCURRENT:
        first, second = await asyncio.gather(prefill(), decode(None))
        return Sent(name=name, prefill=first, decode=second)
    first = await prefill()
    if first.error is not None:
        second = Completion(error="not sent, since the prefill leg failed")
    else:
        second = await decode(first)
    return Sent(name=name, prefill=first, decode=second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a pair is asked at one rate and length."""

    rate: float
    length: int
    dispatch: Dispatch
    prompts: tuple[Prompt, ...]
    due: tuple[float, ...]
    """Seconds since the beginning, one for each prompt."""
    expected: Mapping[Prompt, Tokens]
    """The tokens of the monolithic run."""
    tokens: int
    """Of each answer."""


def loads(
    options: ServeOptions,
    connector: Connector,
    round_number: int,
    asked: Mapping[int, tuple[Prompt, ...]],
    expected: Mapping[Prompt, Tokens],
) -> Iterator[Load]:
    """A pair's loads in one round, `asked` by length.

    Each second round turns the dispatch orders round: none always meets the colder pair.
    """
    orders = connector.dispatches if round_number % 2 else connector.dispatches[::-1]
    for length, rate, dispatch in itertools.product(options.lengths, options.rates, orders):
        seed = f"{options.seed} {round_number} {rate} {length}"
        yield Load(
            rate=rate,
            length=length,
            dispatch=dispatch,
            prompts=asked[length],
            due=arrivals(options.requests, rate, seed),
            expected=expected,
            tokens=options.output_tokens,
        )


async def run_load(client: Client, legs: Legs, load: Load) -> list[RequestRecord]:
    """Sends each prompt when it is due, and waits for all answers."""
    began = time.monotonic()

    async def one(number: int, prompt: Prompt, at: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        late_s = time.monotonic() - began - at
        sent = await send(client, legs, prompt, dispatch=load.dispatch, tokens=load.tokens)
        expected = load.expected[prompt]
        return record(number, sent, prompt, expected, arrival_s=at, late_s=late_s)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(one(number, prompt, at))
            for number, (prompt, at) in enumerate(zip(load.prompts, load.due, strict=True), start=1)
        ]
    return [task.result() for task in tasks]


def record(
    number: int, sent: Sent, prompt: Prompt, expected: Tokens, *, arrival_s: float, late_s: float
) -> RequestRecord:
    """What is written down of a request."""
    decode, prefill = sent.decode, sent.prefill
    first, last = decode.first_token_s, decode.last_token_s
    count = len(decode.token_ids)
    tpot_s = None
    if first is not None and last is not None and count > 1:
        tpot_s = (last - first) / (count - 1)
    answered = prefill.total_s if prefill.error is None else None
    handover_s = None if first is None or answered is None else first - answered
    return RequestRecord(
        number=number,
        name=sent.name,
        arrival_s=round(arrival_s, 6),
        late_ms=round(late_s * 1000, 3),
        prompt_tokens=len(prompt),
        output_tokens=count,
        ttft_ms=_ms(first),
        tpot_ms=_ms(tpot_s),
        handover_ms=_ms(handover_s),
        prefill_ms=_ms(answered),
        total_ms=_ms(decode.total_s if decode.error is None else None),
        error=sent.error,
        mismatch=None if sent.error is not None else difference(decode.token_ids, expected),
    )


def difference(got: Tokens, expected: Tokens) -> str | None:
    """Where tokens differ from those of the monolithic run; None: nowhere."""
    if got == expected:
        return None
    for place, (ours, theirs) in enumerate(zip(got, expected, strict=False), start=1):
        if ours != theirs:
            return f"token {place} of {len(expected)} is {ours}, and {theirs} in the monolithic run"
    return f"{len(got)} tokens, and {len(expected)} in the monolithic run"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
