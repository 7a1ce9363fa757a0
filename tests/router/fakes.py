"""Engines that answer like vLLM with kvflow, and fail when told to; the router in front of them.

A fake's tokens follow from its prompt alone, so whoever computes it says the same. A decode leg is
answered when the prefill with its transfer id is, as with push; its KV comes by no other way.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from kvflow import __version__
from kvflow.ids import Address, TransferId
from kvflow.io.side_channel import SideChannelServer
from kvflow.router.config import Config, configure
from kvflow.router.server import listen, routing
from kvflow.wire import messages as m

MODEL = "tiny"
WAIT_S = 10.0
"""How long a test waits for what must come, if it says nothing about how soon."""
FAST: Mapping[str, Any] = {
    "watch_interval_s": 0.1,
    "retry_min_s": 0.05,
    "retry_max_s": 0.2,
    "meet_timeout_s": 2.0,
}


def words(prompt: object, count: int) -> list[str]:
    """What every engine answers to a prompt."""
    return [f"{abs(hash(json.dumps(prompt))) % 997}.{number}" for number in range(count)]


@dataclass(slots=True, kw_only=True)
class World:
    """What the engines share.

    kv        transfer id -> set when its prefill has ended; True: its KV can be had.
    released  transfer ids that the router gave up.
    events    what happened, in order: (engine, what, transfer id).
    """

    kv: dict[str, "asyncio.Future[bool]"] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)

    def of(self, transfer_id: str) -> "asyncio.Future[bool]":
        return self.kv.setdefault(transfer_id, asyncio.get_running_loop().create_future())

    def happened(self, what: str) -> list[tuple[str, str]]:
        """(engine, transfer id) of all events of a kind, without the meeting's."""
        return [(engine, id_) for engine, kind, id_ in self.events if kind == what]


@dataclass(slots=True, kw_only=True)
class Knobs:
    """How an engine misbehaves; may be changed while it runs.

    prefill_s, decode_s
             how long computing takes.
    status   answer every leg with this error.
    in_stream
             or: with an error as the first event of a stream.
    role_alone_s
             how long nothing follows the role with which a chat's stream begins.
    breaks_after
             close the connection after so many words of a stream.
    hangs    accept, and answer nothing.
    """

    prefill_s: float = 0.02
    decode_s: float = 0.01
    status: int = 0
    in_stream: bool = False
    role_alone_s: float = 0.0
    breaks_after: int | None = None
    hangs: bool = False
    kv_usage: float = 0.0
    computed: int = 7


class FakeEngine:
    """One engine on a free port of this machine."""

    def __init__(
        self,
        name: str,
        world: World,
        *,
        mode: str = "push",
        model: str = MODEL,
        connector: str = "kvflow",
        side_channel_host: str = "127.0.0.1",
        ranks: int = 1,
    ) -> None:
        self.name = name
        self.world = world
        self.mode = mode
        self.model = model
        self.connector = connector
        self.ranks = ranks
        self.legs: list[tuple[Mapping[str, str], Mapping[str, Any]]] = []
        """Headers and `kv_transfer_params` of what came."""
        self.connections: list[tuple[str, int]] = []
        """From where each leg came."""
        self.knobs = Knobs()
        self.in_flight = 0
        self.looks = 0
        """How often it was asked for `/metrics`, and answered."""
        self.port = 0
        self._side_channel_host = side_channel_host
        self._engine_id = f"id-of-{name}"
        self._runner: web.AppRunner | None = None
        self._side_channel: SideChannelServer | None = None
        self._address = Address("127.0.0.1", 0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Also again, on the same port."""
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._side_channel = SideChannelServer(
            reply=lambda: m.MeetReply(engine_id=self._engine_id, incarnation="1", ranks=()),
            refused=lambda what, why: None,
            connections_max=64,
            release=self._released,
        )
        self._address = await self._side_channel.start(Address("127.0.0.1", 0))

    async def stop(self) -> None:
        """As if killed: connections break."""
        if self._runner is not None:
            for connection in list(self._runner.server.connections):  # type: ignore[union-attr]
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None
        if self._side_channel is not None:
            await self._side_channel.close()
            self._side_channel = None

    def _released(self, transfer_id: TransferId) -> None:
        self.world.released.append(transfer_id)
        future = self.world.of(transfer_id)
        if not future.done():
            future.set_result(False)

    # -- HTTP --------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 4096}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.knobs.hangs:
            await asyncio.sleep(60)
        usage = [
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {self.knobs.kv_usage}\n'
            for rank in range(self.ranks)
        ]
        self.looks += 1
        return web.Response(
            text="".join(usage)
            + 'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} '
            f"{self.knobs.computed}\n"
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"engine": self.name, "asked": await request.json()})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        id_ = params.get("transfer_id", "")
        self.legs.append((dict(request.headers), params))
        assert request.transport is not None
        self.connections.append(request.transport.get_extra_info("peername"))
        prefill = params.get("do_remote_decode", False)
        what = "prefill" if prefill else "decode" if params else "local"
        self.world.events.append((self.name, what, id_))
        self.in_flight += 1
        try:
            return await self._answer(request, body, what, id_)
        except asyncio.CancelledError:
            self.world.events.append((self.name, f"{what} cancelled", id_))
            raise
        finally:
            self.in_flight -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], what: str, id_: str
    ) -> web.StreamResponse:
        knobs = self.knobs
        if knobs.hangs:
            await asyncio.sleep(60)
        if knobs.status:
            return _error(knobs.status, f"{self.name} was told to")
        if what == "prefill":
            await asyncio.sleep(knobs.prefill_s)
            kv = self.world.of(id_)
            if not kv.done():
                kv.set_result(True)
            return web.json_response(self._whole(body, 1, self._params(id_)))
        if what == "decode" and not await self.world.of(id_):
            return _error(500, "KV load failure")
        await asyncio.sleep(knobs.decode_s)
        told = {"kvflow": {"version": __version__, "mode": self.mode, "outcome": "landed"}}
        if not body.get("stream"):
            of_consumer = told if self.connector == "kvflow" and what == "decode" else None
            return web.json_response(self._whole(body, body.get("max_tokens", 16), of_consumer))
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if request.path.endswith("/chat/completions"):
            # vLLM says who speaks before it looks at what there is to say.
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            await response.write(b"data: " + json.dumps(role).encode() + b"\n\n")
            await asyncio.sleep(self.knobs.role_alone_s)
        if self.knobs.in_stream:
            error = {"error": {"message": "KV load failure", "code": 500}}
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        for number, word in enumerate(words(_prompt(body), body.get("max_tokens", 16))):
            if number == self.knobs.breaks_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            event = {"choices": [{"index": 0, "text": word}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(self.knobs.decode_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _whole(
        self, body: dict[str, Any], count: int, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        text = " ".join(words(_prompt(body), count))
        return {"choices": [{"index": 0, "text": text}], "kv_transfer_params": params}

    def _params(self, id_: str) -> Mapping[str, Any] | None:
        if self.connector == "none":
            return None
        told = {"kvflow": {"version": __version__}} if self.connector == "kvflow" else {}
        return {
            "do_remote_prefill": True,
            "transfer_id": id_,
            "remote_engine_id": self._engine_id,
            "remote_host": self._side_channel_host,
            "remote_port": self._address.port,
            "remote_block_ids": [[1, 2]],
            **told,
        }


def _prompt(body: Mapping[str, Any]) -> object:
    return body.get("prompt") or body.get("messages")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


# -- the router ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Routed:
    """The router, its engines, and a client's session."""

    url: str
    world: World
    producers: list[FakeEngine]
    consumers: list[FakeEngine]
    session: aiohttp.ClientSession

    async def complete(self, **body: Any) -> tuple[int, Any]:
        """One completion; the status, and the answer or the error."""
        asked = {"model": MODEL, "prompt": "hello", "max_tokens": 4, **body}
        async with self.session.post(f"{self.url}/v1/completions", json=asked) as response:
            if response.content_type == "text/event-stream":
                return response.status, (await response.read()).decode()
            return response.status, await response.json()

    async def page(self, path: str) -> str:
        async with self.session.get(f"{self.url}{path}") as response:
            return await response.text()

    async def shows(self, line: str) -> None:
        """Waits until the router's `/metrics` has it."""
        began = time.monotonic()
        while line not in (page := await self.page("/metrics")):
            assert time.monotonic() - began < WAIT_S, page
            await asyncio.sleep(0.005)

    def forget_meetings(self) -> None:
        """What follows is what clients have caused."""
        self.world.events.clear()
        self.world.released.clear()


@asynccontextmanager
async def routed(
    producers: int = 1,
    consumers: int = 1,
    *,
    consumers_mode: str = "push",
    ranks: int = 1,
    **settings: Any,
) -> AsyncIterator[Routed]:
    """A router in front of fakes. `consumers_mode`: their own setting; `ranks`: of a producer."""
    world = World()
    ps = [FakeEngine(f"p{number}", world, ranks=ranks) for number in range(producers)]
    cs = [FakeEngine(f"c{number}", world, mode=consumers_mode) for number in range(consumers)]
    try:
        for engine in (*ps, *cs):
            await engine.start()
        urls = {"prefill": [e.url for e in ps], "decode": [e.url for e in cs]}
        config = configure(None, {**FAST, **urls, **settings})
        async with serving(config) as url, aiohttp.ClientSession() as session:
            made = Routed(url=url, world=world, producers=ps, consumers=cs, session=session)
            made.forget_meetings()
            yield made
    finally:
        for engine in (*ps, *cs):
            await engine.stop()


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[str]:
    """The router itself, over HTTP; yields its URL."""
    with listen("127.0.0.1", 0) as listening:
        async with routing(config) as app:
            settings = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
            server = uvicorn.Server(settings)
            serve = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serve


async def looked_at(engine: FakeEngine) -> None:
    """Waits until the router knows what the engine says now."""
    looks = engine.looks + 2  # it asks again when it has read the answer before
    await until(lambda: engine.looks >= looks, within_s=WAIT_S)


async def until(condition: Any, *, within_s: float = 2.0) -> None:
    """Waits until the condition holds; fails after the time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.005)
