"""Sends requests to a prefill and a decode engine in each dispatch order, and times them.

A request that goes through both engines has two legs. The *prefill leg* asks the producer for one
token and to keep the KV; the *decode leg* asks the consumer for all tokens, with the KV from the
producer. Both legs name the transfer: by a transfer id, or by the same `X-Request-Id` header.

- concurrent: both legs at once; the transfer id is all that they share.
- sequential: the decode leg after the prefill leg's answer, with the `kv_transfer_params` of that
  answer passed through, as the routers of today do.
- The *monolithic* run sends the same prompt to one engine, without any transfer.

A request that goes wrong is a `Completion` with an error, not an exception.
"""

import asyncio
import json
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self, TypeAlias, cast

import aiohttp

from kvflow.demo.engines import SERVED_MODEL, Engine, Json
from kvflow.demo.model import PROMPT_TOKEN_IDS
from kvflow.ids import TransferId

JsonObject: TypeAlias = Mapping[str, Json]

OUTPUT_TOKENS = 16
REQUEST_TIMEOUT_S = 120.0
_KEEPALIVE_S = 2.0
_LINE_BYTES_MAX = 4 * 1024 * 1024
_ERROR_CHARS_MAX = 400


class Dispatch(StrEnum):
    """In which order the two legs are sent."""

    CONCURRENT = "concurrent"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a producer and a consumer are reached."""

    producer_url: str
    consumer_url: str
    side_channel_host: str
    side_channel_port: int
    model: str = SERVED_MODEL

    @classmethod
    def of(cls, producer: Engine, consumer: Engine) -> "Endpoints":
        return cls(
            producer_url=producer.url,
            consumer_url=consumer.url,
            side_channel_host=producer.host,
            side_channel_port=producer.side_channel_port,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How the two legs of one request name their transfer."""

    transfer_id: TransferId | None = None
    request_id: str | None = None
    """Sent as the header `X-Request-Id` with both legs."""

    @classmethod
    def by_transfer_id(cls) -> "Naming":
        return cls(transfer_id=TransferId(f"demo-{secrets.token_hex(16)}"))

    @classmethod
    def by_request_id(cls) -> "Naming":
        return cls(request_id=f"demo-{secrets.token_hex(16)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came of one HTTP request."""

    token_ids: tuple[int, ...] = ()
    http_status: int | None = None
    """None: no answer came at all."""
    error: str | None = None
    first_token_s: float | None = None
    """Since the request was dispatched (for a decode leg: since its prefill leg was)."""
    last_token_s: float | None = None
    """Likewise."""
    total_s: float = 0.0
    """Likewise; when the answer had ended."""
    kv_transfer_params: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request through both engines."""

    naming: Naming
    prefill: Completion
    decode: Completion

    @property
    def error(self) -> str | None:
        if self.prefill.error is not None:
            return f"prefill leg: {self.prefill.error}"
        if self.decode.error is not None:
            return f"decode leg: {self.decode.error}"
        return None


def prompts(
    count: int, *, shortest: int = 64, longest: int = 2048, seed: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Prompts of random bytes; their lengths are spread evenly on a logarithmic scale."""
    source = random.Random(seed)
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    lengths = [round(shortest * ratio**i) for i in range(count)]
    return tuple(tuple(source.choices(PROMPT_TOKEN_IDS, k=length)) for length in lengths)


def http_session(timeout_s: float) -> aiohttp.ClientSession:
    """HTTP to engines or to a router: any number at a time, each for at most `timeout_s`.

    Not on a connection that the server may be closing, which vLLM does 5 s after its last answer.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        read_bufsize=_LINE_BYTES_MAX,
    )


class Client:
    """Sends completions; an async context manager around one HTTP session."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.endpoints = endpoints
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = http_session(self._timeout_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def monolithic(self, prompt: Sequence[int]) -> Completion:
        """The prompt's tokens by the producer alone."""
        return await self.complete(self.endpoints.producer_url, prompt, stream=True)

    async def disaggregated(
        self, prompt: Sequence[int], *, dispatch: Dispatch, naming: Naming | None = None
    ) -> Exchange:
        """The prompt's KV by the producer, its tokens by the consumer."""
        naming = Naming.by_transfer_id() if naming is None else naming
        began = time.monotonic()
        if dispatch is Dispatch.CONCURRENT:
            prefill, decode = await asyncio.gather(
                self.prefill_leg(prompt, naming), self.decode_leg(prompt, naming, began=began)
            )
            return Exchange(naming=naming, prefill=prefill, decode=decode)
        prefill = await self.prefill_leg(prompt, naming)
        if prefill.error is not None:
            skipped = Completion(error="not sent, since the prefill leg failed")
            return Exchange(naming=naming, prefill=prefill, decode=skipped)
        decode = await self.decode_leg(
            prompt, naming, began=began, passed_on=prefill.kv_transfer_params
        )
        return Exchange(naming=naming, prefill=prefill, decode=decode)

    async def prefill_leg(self, prompt: Sequence[int], naming: Naming) -> Completion:
        return await self.complete(
            self.endpoints.producer_url,
            prompt,
            tokens=1,
            params=prefill_params(naming),
            request_id=naming.request_id,
        )

    async def decode_leg(
        self,
        prompt: Sequence[int],
        naming: Naming,
        *,
        began: float | None = None,
        passed_on: JsonObject | None = None,
    ) -> Completion:
        """`passed_on`: the `kv_transfer_params` of the prefill leg's answer, if there is one."""
        params = {**decode_params(self.endpoints, naming), **(passed_on or {})}
        if naming.transfer_id is not None:
            params["transfer_id"] = naming.transfer_id
        return await self.complete(
            self.endpoints.consumer_url,
            prompt,
            params=params,
            request_id=naming.request_id,
            stream=True,
            began=began,
        )

    async def complete(
        self,
        url: str,
        prompt: Sequence[int],
        *,
        tokens: int = OUTPUT_TOKENS,
        params: JsonObject | None = None,
        request_id: str | None = None,
        stream: bool = False,
        began: float | None = None,
    ) -> Completion:
        """One request to one engine, with any `kv_transfer_params`."""
        assert self._session is not None, "enter the client's context first"
        began = time.monotonic() if began is None else began
        body: dict[str, Json] = {
            "model": self.endpoints.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {} if request_id is None else {"X-Request-Id": request_id}
        try:
            async with self._session.post(
                f"{url}/v1/completions", json=body, headers=headers
            ) as response:
                if response.status != 200:
                    error = (await response.text())[:_ERROR_CHARS_MAX]
                    return Completion(
                        http_status=response.status,
                        error=f"HTTP {response.status}: {error}",
                        total_s=time.monotonic() - began,
                    )
                read = _read_stream if stream else _read_answer
                return await read(response, began)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Completion(
                error=f"{type(error).__name__}: {error}", total_s=time.monotonic() - began
            )


def prefill_params(naming: Naming) -> dict[str, Json]:
    """`kv_transfer_params` of a prefill leg."""
    return {"do_remote_decode": True, **_transfer_id(naming)}


def decode_params(endpoints: Endpoints, naming: Naming) -> dict[str, Json]:
    """`kv_transfer_params` of a decode leg that knows only where the producer is."""
    return {
        "do_remote_prefill": True,
        "remote_host": endpoints.side_channel_host,
        "remote_port": endpoints.side_channel_port,
        **_transfer_id(naming),
    }


async def load(
    client: Client, asked: Sequence[Sequence[int]], *, per_s: float, dispatch: Dispatch
) -> list[Exchange]:
    """Dispatches one request every 1/`per_s` seconds, whether or not earlier ones have ended."""
    began = time.monotonic()

    async def one(index: int, prompt: Sequence[int]) -> Exchange:
        await asyncio.sleep(max(0.0, began + index / per_s - time.monotonic()))
        return await client.disaggregated(prompt, dispatch=dispatch)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, prompt)) for i, prompt in enumerate(asked)]
    return [task.result() for task in tasks]


def _transfer_id(naming: Naming) -> dict[str, Json]:
    return {} if naming.transfer_id is None else {"transfer_id": naming.transfer_id}


async def _read_answer(response: aiohttp.ClientResponse, began: float) -> Completion:
    answer = _object(await response.json())
    return Completion(
        token_ids=_token_ids(answer),
        http_status=response.status,
        total_s=time.monotonic() - began,
        kv_transfer_params=_object(answer.get("kv_transfer_params") or {}),
    )


async def _read_stream(response: aiohttp.ClientResponse, began: float) -> Completion:
    """Reads server-sent events; an error after the first byte comes as an event, with HTTP 200."""
    token_ids: list[int] = []
    first_token_s: float | None = None
    last_token_s: float | None = None
    error: str | None = "the stream ended early"
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            error = None if error == "the stream ended early" else error
            break
        event = _object(json.loads(data))
        if "error" in event:
            error = f"in the stream: {json.dumps(event['error'])[:_ERROR_CHARS_MAX]}"
            continue
        new = _token_ids(event)
        if new:
            last_token_s = time.monotonic() - began
            first_token_s = last_token_s if first_token_s is None else first_token_s
        token_ids += new
    return Completion(
        token_ids=tuple(token_ids),
        http_status=response.status,
        error=error,
        first_token_s=first_token_s,
        last_token_s=last_token_s,
        total_s=time.monotonic() - began,
    )


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {value!r:.80}")
    return cast(dict[str, Json], value)


def _token_ids(answer: JsonObject) -> tuple[int, ...]:
    """The generated token ids in one answer or one event of a stream."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return ()
    return tuple(cast(list[int], _object(choices[0]).get("token_ids") or []))
