"""The HTTP side that clients see.

Completions go through `Dispatcher`; `/health` and `/metrics` are answered here; all else is passed
to a decode engine as it is. Errors have the shape that OpenAI's clients know.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvflow.errors import CapacityError
from kvflow.router import legs
from kvflow.router.config import Config
from kvflow.router.dispatch import Asked, Dispatch, Dispatcher
from kvflow.router.engines import Fleet, NoEngineError, Role
from kvflow.router.metrics import Metrics
from kvflow.router.upstream import Answer, LegError

_HOP_BY_HOP = frozenset(
    "connection content-length host keep-alive te trailer transfer-encoding upgrade "
    "accept-encoding expect".split()
)
_NOT_FORWARDED = _HOP_BY_HOP | {"content-type"}
_RETRY_AFTER_S = 1
_METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]


def error_body(message: str, kind: str, status: int) -> bytes:
    """As vLLM and OpenAI word an error."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}
    )


def error_response(message: str, kind: str, status: int) -> Response:
    """503 says when to come again."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else {}
    return Response(
        error_body(message, kind, status), status, headers, media_type="application/json"
    )


class Completions:
    """An ASGI endpoint: one request, answered, or ended when its client goes away."""

    def __init__(self, path: str, dispatcher: Dispatcher, metrics: Metrics, config: Config) -> None:
        self._path = path
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._config = config
        self._log = structlog.get_logger("kvflow.router")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        request = Request(scope, receive)
        try:
            asked = self._asked(request, await request.body())
        except ClientDisconnect:
            return
        except ValueError as error:
            self._metrics.ended("refused")
            await error_response(str(error), "BadRequestError", 400)(scope, receive, send)
            return
        tries: list[Dispatch] = []
        sending = Sending(send)
        work = asyncio.create_task(self._answer(asked, tries, began, scope, sending))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            # After the last byte, too, the server says that the client has gone.
            outcome = await work if work.done() or sending.is_whole else "gone"
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        self._metrics.ended(outcome)
        self._tell(asked, tries, outcome, time.monotonic() - began)

    def _asked(self, request: Request, raw: bytes) -> Asked:
        """Raises `ValueError` with a sentence for the client."""
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise ValueError(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ValueError("the body is not a JSON object")
        headers = {
            key: value for key, value in request.headers.items() if key not in _NOT_FORWARDED
        }
        headers.setdefault("x-request-id", secrets.token_hex(8))
        return Asked(
            path=self._path,
            body=body,
            headers=headers,
            head=legs.head(self._path, body, self._config.prefix_chars),
            tokens=legs.size(self._path, body),
        )

    async def _answer(
        self,
        asked: Asked,
        tries: list[Dispatch],
        began: float,
        scope: Scope,
        send: "Sending",
    ) -> str:
        """Returns how it ended, as `Metrics` counts it."""
        try:
            async with (
                asyncio.timeout(self._config.request_timeout_s),
                self._dispatcher.answer(asked, tries) as answer,
            ):
                self._metrics.first(time.monotonic() - began)
                await _relay(answer, send)
            return "answered"
        except LegError as error:
            if send.has_begun:
                return await _break(send, str(error))
            if error.is_clients:
                body, status = error.body, error.status or 400
                response = Response(body, status, media_type="application/json")
                await _respond(response, scope, send)
                return "refused"
            response = error_response(str(error), "BadGatewayError", 502)
            await _respond(response, scope, send)
            return "failed"
        except TimeoutError:
            what = f"not answered in {self._config.request_timeout_s:g} s"
            if send.has_begun:
                return await _break(send, what)
            await _respond(error_response(what, "TimeoutError", 504), scope, send)
            return "failed"
        except (NoEngineError, CapacityError) as error:
            response = error_response(str(error), "ServiceUnavailableError", 503)
            await _respond(response, scope, send)
            return "busy"

    def _tell(self, asked: Asked, tries: list[Dispatch], outcome: str, total_s: float) -> None:
        """One line per request."""
        last = tries[-1] if tries else Dispatch()
        self._log.info(
            "request",
            outcome=outcome,
            transfer_id=last.transfer_id,
            request_id=asked.headers["x-request-id"],
            path=asked.path,
            mode=str(last.mode or "local"),
            local=last.local,
            producer=last.producer.url if last.producer else None,
            consumer=last.consumer.url if last.consumer else None,
            dispatches=len(tries),
            prompt_tokens=asked.tokens,
            prefill_ms=_ms(last.prefill_s),
            first_ms=_ms(last.first_s),
            total_ms=_ms(total_s),
        )


class Sending:
    """A `send` that knows how far the answer is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.is_whole = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        self.has_begun = True
        body = message["type"] == "http.response.body"
        self.is_whole = body and not message.get("more_body", False)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


async def _gone(receive: Receive) -> None:
    """Returns when the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relay(answer: Answer, send: Send) -> None:
    headers = [(b"content-type", answer.content_type.encode())]
    if not answer.is_stream:
        headers.append((b"content-length", str(len(answer.first)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer.first, "more_body": True})
    async for chunk in answer.rest:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _break(send: Send, what: str) -> str:
    """Tells of an error in a stream that has begun, as vLLM does."""
    event = b"data: " + error_body(what, "BadGatewayError", 502) + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": False})
    return "broken"


async def _respond(response: Response, scope: Scope, send: Send) -> None:
    await response(scope, _nothing, send)


async def _nothing() -> Any:
    raise AssertionError("a whole response asks for nothing")


class Front:
    """What is answered here, and what is passed on."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self._fleet = fleet
        self._session = session
        self._metrics = metrics

    async def health(self, request: Request) -> Response:
        """200 while requests can be answered; each engine's state either way."""
        engines = [
            {
                "engine": e.url,
                "role": str(e.role),
                "up": e.met is not None,
                "why": e.why_out,
                "in_flight": e.in_flight,
                "kv_usage": e.kv_usage,
                "mode": e.met.mode if e.met else "",
            }
            for e in self._fleet.engines
        ]
        serves = all(any(e.met for e in self._fleet.of(role)) for role in Role)
        return JSONResponse(
            {"status": "ok" if serves else "unavailable", "engines": engines},
            status_code=200 if serves else 503,
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def passed_on(self, request: Request) -> Response:
        """To the decode engine with the least in flight, as it is."""
        try:
            engine = min(self._fleet.usable(Role.DECODE), key=lambda e: e.in_flight)
            answer = await self._session.request(
                request.method,
                f"{engine.url}{request.url.path}",
                params=request.url.query,
                data=await request.body(),
                headers={k: v for k, v in request.headers.items() if k not in _HOP_BY_HOP},
            )
        except NoEngineError as error:
            return error_response(str(error), "ServiceUnavailableError", 503)
        except aiohttp.ClientError as error:
            what = f"decode engine {engine.url}: {type(error).__name__}: {error}"
            return error_response(what, "BadGatewayError", 502)
        return StreamingResponse(
            _chunks(answer),
            answer.status,
            {"Content-Type": answer.headers.get("Content-Type", "application/json")},
        )


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for chunk in answer.content.iter_any():
            yield chunk


def application(
    *,
    fleet: Fleet,
    session: aiohttp.ClientSession,
    dispatcher: Dispatcher,
    metrics: Metrics,
    config: Config,
) -> Starlette:
    """The router as an ASGI application."""
    front = Front(fleet, session, metrics)
    completions = [
        Route(path, Completions(path, dispatcher, metrics, config), methods=["POST"])
        for path in legs.PATHS
    ]
    return Starlette(
        routes=[
            *completions,
            Route("/health", front.health),
            Route("/metrics", front.metrics),
            Route("/{path:path}", front.passed_on, methods=_METHODS),
        ]
    )
