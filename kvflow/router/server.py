"""The router's process: what is checked before it listens, and how it ends.

A port in use, an engine that cannot be used and a bad key file are one sentence and exit status 2:
`StartError`.
"""

import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import structlog
import uvicorn
import uvloop
from starlette.applications import Starlette

from kvflow.errors import KVFlowError
from kvflow.io import seal
from kvflow.router.app import application
from kvflow.router.config import Config
from kvflow.router.dispatch import Dispatcher
from kvflow.router.engines import Engine, Fleet, Role
from kvflow.router.meeting import MeetingError, Meetings
from kvflow.router.metrics import Metrics
from kvflow.router.policies import POLICIES
from kvflow.router.watching import Watch

_CONNECT_TIMEOUT_S = 3.0
_BACKLOG = 2048
_DRAIN_S = 10
_KEEPALIVE_S = 75
"""Longer than clients keep an idle connection (vLLM's load generator: 60 s), so that they close it:
a request that is sent while the router closes one is lost."""
_READ_BYTES = 2**20


class StartError(Exception):
    """The router cannot start; says why in a sentence."""


@asynccontextmanager
async def routing(config: Config) -> AsyncIterator[Starlette]:
    """The application with its engines met and watched; everything ends with the block.

    Raises `StartError`.
    """
    engines = [
        Engine(url=url.rstrip("/"), role=role)
        for role, urls in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
        for url in urls
    ]
    fleet = Fleet(
        engines,
        policies={
            Role.PREFILL: POLICIES[config.prefill_policy](),
            Role.DECODE: POLICIES[config.decode_policy](),
        },
        engine_limit=config.engine_limit,
        queue_max=config.queue_max,
    )
    try:
        key = seal.from_file(config.shared_key_file)
    except KVFlowError as error:
        raise StartError(str(error)) from error
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=config.keepalive_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_READ_BYTES
    ) as session:
        metrics = Metrics(fleet)
        meetings = Meetings(session, key, config.meet_timeout_s)
        watch = Watch(fleet, session, meetings, config)
        dispatcher = Dispatcher(
            fleet=fleet,
            session=session,
            config=config,
            watch=watch,
            metrics=metrics,
            seal=key,
        )
        try:
            await watch.meet_all()
        except MeetingError as error:
            raise StartError(str(error)) from error
        watch.start()
        try:
            yield application(
                fleet=fleet,
                session=session,
                dispatcher=dispatcher,
                metrics=metrics,
                config=config,
            )
        finally:
            await watch.close()
            await dispatcher.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `StartError` when the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise StartError(f"cannot listen on {host}:{port}: {error}") from error
    listening.setblocking(False)
    return listening


async def serve(config: Config) -> None:
    """Routes until SIGINT or SIGTERM. Raises `StartError`."""
    log = structlog.get_logger("kvflow.router")
    with listen(config.host, config.port) as listening:
        async with routing(config) as app:
            port = listening.getsockname()[1]
            log.info(
                "listening",
                url=f"http://{config.host}:{port}",
                prefill=len(config.prefill),
                decode=len(config.decode),
                mode=str(config.mode),
            )
            server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    log_level="warning",
                    access_log=False,
                    lifespan="off",
                    timeout_keep_alive=_KEEPALIVE_S,
                    timeout_graceful_shutdown=_DRAIN_S,
                )
            )
            await server.serve(sockets=[listening])


def run(config: Config, *, as_json: bool) -> int:
    """The command; returns its exit status."""
    configure_log(as_json=as_json)
    try:
        uvloop.run(serve(config))
    except StartError as error:
        print(f"kvflow route: {error}", file=sys.stderr)
        return 2
    return 0


def configure_log(*, as_json: bool) -> None:
    """One line per request on standard error, for people or for programs."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(serializer=json.dumps)
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _drop_none,
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _drop_none(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {key: value for key, value in event.items() if value is not None}
