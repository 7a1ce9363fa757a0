"""One leg over HTTP: sent, watched, its answer's beginning read.

Rules: a leg ends when its engine is out, whether or not the connection does; an answer has begun
only when something of it is there that a client can be given. vLLM answers a stream with HTTP 200
before it computes, and tells of an error in the first event, or, of a chat, in the one after the
role's, which it sends before it looks at what there is: here that is an error like any other.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvflow.router.engines import Engine

T = TypeVar("T")

_EVENT_END = b"\n\n"
_FIRST_EVENT_BYTES_MAX = 4 * 2**20
_ROLE_ALONE_S = 1.0
"""For so long a chat's role is kept back: whatever vLLM has to say then comes with it, except where
it parses what a model thinks, and has nothing to show yet."""
_ERROR_CHARS_MAX = 500
_JSON = "application/json"
_CLIENT_ERRORS = range(400, 500)
_BUSY = 429


class LegError(Exception):
    """A leg failed.

    status  of the engine's answer; None if there was none.
    body    of that answer: vLLM's own sentence.
    """

    def __init__(
        self, engine: Engine, what: str, *, status: int | None = None, body: bytes = b""
    ) -> None:
        self.engine = engine
        self.status = status
        self.body = body
        super().__init__(f"{engine.role} engine {engine.url}: {what}")

    @property
    def is_clients(self) -> bool:
        """Whether any engine would answer so, since the request is wrong."""
        return self.status in _CLIENT_ERRORS and self.status != _BUSY


class UnreachableError(LegError):
    """Nobody listens there, or the connection broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client can be given: the beginning, and the rest as it comes.

    rest   raises `LegError` if it breaks off.
    close  ends the leg, wherever it is; vLLM then ends the request.
    """

    content_type: str
    first: bytes
    rest: AsyncIterator[bytes]
    close: Callable[[], None]

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")


async def post(
    session: aiohttp.ClientSession,
    engine: Engine,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Answer:
    """Send a leg; returns when its answer has begun. Raises `LegError`.

    The connection is closed, and vLLM ends the request, when the task that reads is cancelled.
    """
    return await _unless_lost(engine, _begin(session, engine, path, body, headers))


def json_of(answer: Answer) -> dict[str, Any]:
    """An answer that is not a stream. Raises `ValueError` if it is no JSON object."""
    try:
        decoded = msgspec.json.decode(answer.first)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if not isinstance(decoded, dict):
        raise ValueError("not a JSON object")
    return decoded


async def _begin(
    session: aiohttp.ClientSession,
    engine: Engine,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Answer:
    try:
        response = await session.post(
            engine.url + path,
            data=msgspec.json.encode(body),
            headers={**headers, "Content-Type": _JSON},
        )
        with ExitStack() as undo:
            undo.callback(response.close)
            if response.status != 200:
                raise _refused(engine, response.status, await response.read())
            is_stream = response.content_type == "text/event-stream"
            first = await (_first_event(response) if is_stream else response.read())
            if is_stream:
                _check(engine, first)
            undo.pop_all()
    except aiohttp.ClientError as error:
        raise UnreachableError(engine, f"{type(error).__name__}: {error}") from error
    return Answer(
        content_type=response.headers.get("Content-Type", _JSON),
        first=first,
        rest=_rest(engine, response) if is_stream else _nothing(),
        close=response.close,
    )


async def _first_event(response: aiohttp.ClientResponse) -> bytes:
    """What has come when there is an event that says more than a role."""
    read = bytearray()
    while _first_word(read) is None and len(read) <= _FIRST_EVENT_BYTES_MAX:
        try:
            async with asyncio.timeout(_ROLE_ALONE_S if _EVENT_END in read else None):
                chunk = await response.content.readany()
        except TimeoutError:
            break
        if not chunk:
            break
        read += chunk
    return bytes(read)


def _first_word(read: bytes | bytearray) -> bytes | bytearray | None:
    """The first whole event that says more than a role."""
    *events, _ = read.split(_EVENT_END)
    return next((event for event in events if not _is_role(event)), None)


def _is_role(event: bytes | bytearray) -> bool:
    """Whether it says nothing but who speaks."""
    choices = _told(event).choices if b'"role"' in event else ()
    return bool(choices) and not any(choice.says_more for choice in choices)


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def says_more(self) -> bool:
        said = {**(self.delta or {"text": True}), "role": None}
        return any(said.values()) or self.finish_reason is not None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    error: dict[str, Any] | None = None


_EVENT = msgspec.json.Decoder(_Event)


def _told(event: bytes | bytearray) -> _Event:
    """What an event has of that; nothing if it is no such thing."""
    try:
        return _EVENT.decode(event.removeprefix(b"data:").strip())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Event()


def _check(engine: Engine, first: bytes) -> None:
    """Raises `LegError` if the first event is an error, or there is none."""
    if _EVENT_END not in first:
        raise UnreachableError(engine, "the stream ended before its first event")
    word = _first_word(first) or b""
    if b'"error"' not in word:
        return
    if (error := _told(word).error) is not None:
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        raise _refused(engine, status, msgspec.json.encode({"error": error}))


def _refused(engine: Engine, status: int, body: bytes) -> LegError:
    what = body[:_ERROR_CHARS_MAX].decode(errors="replace")
    return LegError(engine, f"HTTP {status}: {what}", status=status, body=body)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _rest(engine: Engine, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    lost = asyncio.ensure_future(engine.lost.wait())
    try:
        while True:
            read = asyncio.ensure_future(response.content.readany())
            try:
                await asyncio.wait({read, lost}, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    raise LegError(engine, f"is out: {engine.why_out}")
                chunk = read.result()
            except aiohttp.ClientError as error:
                raise UnreachableError(engine, f"{type(error).__name__}: {error}") from error
            finally:
                read.cancel()
            if not chunk:
                return
            yield chunk
    finally:
        lost.cancel()
        response.close()


async def _unless_lost(engine: Engine, work: Awaitable[T]) -> T:
    """The work's result. Raises `LegError` when the engine goes out before."""
    lost = asyncio.ensure_future(engine.lost.wait())
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise LegError(engine, f"is out: {engine.why_out}")
        return task.result()
    finally:
        lost.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
