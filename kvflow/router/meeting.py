"""Who an engine is: asked over HTTP before it is used, so that nothing is typed in twice.

A producer is asked for the KV of a few tokens; its answer names its side channel, which is then
asked whether it is that engine. A consumer is given that KV, and its answer says what became of it:
so what is met has been seen to work, from one engine to the other.
"""

import asyncio
import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvflow.errors import KVFlowError
from kvflow.ids import Address, TransferId
from kvflow.io import side_channel
from kvflow.io.seal import Seal
from kvflow.router import legs, upstream
from kvflow.router.engines import Engine, Met
from kvflow.router.ids import new_transfer_id
from kvflow.router.scrape import USAGE, samples
from kvflow.router.upstream import LegError

PROMPT = (0,) * 16
"""Token ids: every vocabulary has a 0, and not every engine has a tokenizer."""


class MeetingError(Exception):
    """An engine that cannot be used; the sentence says which, why, and what to set."""


class Meetings:
    """Asks engines who they are."""

    def __init__(self, session: aiohttp.ClientSession, seal: Seal, timeout_s: float) -> None:
        self._session = session
        self._seal = seal
        self._timeout_s = timeout_s

    async def producer(self, engine: Engine) -> Met:
        """Raises `MeetingError`."""
        return await self._in_time(engine, self._producer(engine))

    async def consumer(self, engine: Engine, producer: Engine) -> Met:
        """With KV from a producer that was met. Raises `MeetingError`."""
        return await self._in_time(engine, self._consumer(engine, producer))

    async def _in_time(self, engine: Engine, asking: Any) -> Met:
        try:
            async with asyncio.timeout(self._timeout_s):
                met: Met = await asking
        except TimeoutError:
            what = f"has not answered in {self._timeout_s:g} s"
        except (LegError, aiohttp.ClientError, KVFlowError, ValueError) as error:
            what = str(error).removeprefix(f"{engine.role} engine {engine.url}: ")
        else:
            return met
        raise MeetingError(f"{engine.role} engine {engine.url}: {what}")

    async def _producer(self, engine: Engine) -> Met:
        models = await self._models(engine)
        transfer_id = new_transfer_id()
        ranks = await self._ranks(engine)
        told = await self._prefill(engine, next(iter(models)), transfer_id, ranks)
        address = Address(str(told.get("remote_host")), int(told.get("remote_port", 0)))
        check_reachable(engine, address)
        timeout_s = self._timeout_s / 2
        reply = await side_channel.meet(address, "router", timeout_s, self._seal)
        await side_channel.release(address, transfer_id, timeout_s, self._seal)
        if reply.engine_id != told.get("remote_engine_id"):
            raise ValueError(f"at its side channel {address} answers another engine")
        return Met(
            models=models,
            address=address,
            engine_id=reply.engine_id,
            version=str(told["kvflow"].get("version")),
            ranks=ranks,
        )

    async def _consumer(self, engine: Engine, producer: Engine) -> Met:
        met = producer.met  # it may go out meanwhile
        assert met is not None
        assert met.address is not None
        models = await self._models(engine)
        if models.keys() != met.models.keys():
            ours, theirs = ", ".join(sorted(models)), ", ".join(sorted(met.models))
            raise ValueError(f"serves {ours}, but {producer.url} serves {theirs}")
        transfer_id = new_transfer_id()
        model = next(iter(models))
        passed_on = await self._prefill(producer, model, transfer_id, met.ranks)
        body = legs.decode_leg(_probe(model), transfer_id, met.address, passed_on)
        answer = await upstream.post(self._session, engine, legs.COMPLETIONS, body, {})
        told = _of_kvflow(upstream.json_of(answer).get("kv_transfer_params"))
        if told is None:
            raise ValueError(
                "does not say what became of KV that it was to load: it runs another connector "
                "than kvflow, an older one, or its kv_role is kv_producer"
            )
        if told.get("outcome") != "landed":
            raise ValueError(
                f"was to load KV from {producer.url}, and its load is {told.get('outcome')!r}: the "
                "logs of both say why"
            )
        return Met(models=models, mode=str(told.get("mode")), version=str(told.get("version")))

    async def _models(self, engine: Engine) -> dict[str, int | None]:
        async with self._session.get(f"{engine.url}/v1/models") as response:
            if response.status != 200:
                raise ValueError(f"/v1/models answers HTTP {response.status}")
            listed = await response.json()
        try:
            models = {str(each["id"]): each.get("max_model_len") for each in listed["data"]}
        except (KeyError, TypeError) as error:
            raise ValueError(f"/v1/models answers nonsense: {error!r}") from error
        if not models:
            raise ValueError("/v1/models lists no model")
        return models

    async def _ranks(self, engine: Engine) -> int:
        """How many data-parallel engines are behind the URL: each has samples of its own."""
        async with self._session.get(f"{engine.url}/metrics") as response:
            text = await response.text()
        return max(1, len(list(samples(text, USAGE))))

    async def _prefill(
        self, engine: Engine, model: str, transfer_id: TransferId, ranks: int
    ) -> Mapping[str, Any]:
        """The parameters that a producer (its first rank) answers with."""
        body = legs.prefill_leg(_probe(model), transfer_id)
        headers = {legs.RANK_HEADER: "0"} if ranks > 1 else {}
        answer = await upstream.post(self._session, engine, legs.COMPLETIONS, body, headers)
        told = upstream.json_of(answer).get("kv_transfer_params")
        if not told:
            raise ValueError(
                "keeps no KV for others: it runs without a connector, or its kv_role is kv_consumer"
            )
        if _of_kvflow(told) is None:
            raise ValueError("runs another connector than kvflow, or an older one")
        params: Mapping[str, Any] = told
        return params


def _probe(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0}


def _of_kvflow(params: Any) -> Mapping[str, Any] | None:
    told = params.get("kvflow") if isinstance(params, Mapping) else None
    return told if isinstance(told, Mapping) else None


def check_reachable(engine: Engine, address: Address) -> None:
    """Raises `ValueError` if an engine elsewhere says that its side channel is on a loopback."""
    if _is_loopback(address.host) and not _is_loopback(urlsplit(engine.url).hostname or ""):
        raise ValueError(
            f"says that its side channel is at {address}, where no other machine reaches it: set "
            "VLLM_NIXL_SIDE_CHANNEL_HOST there to an address of that machine"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
