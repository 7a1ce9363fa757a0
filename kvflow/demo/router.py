"""Starts `kvflow route` as a child process, and ends it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvflow.demo.engines import HOST, import_path
from kvflow.demo.ports import lease_port
from kvflow.errors import KVFlowError

READY_TIMEOUT_S = 60.0
_POLL_S = 0.1
_STOP_TIMEOUT_S = 15.0
_COMMAND = "from kvflow.cli import main; main()"


class RouterFailedError(KVFlowError):
    """The router has ended, or is not ready in time; the message has what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router that serves."""

    url: str
    log_path: Path
    process: "subprocess.Popen[bytes]"

    def lines(self, event: str = "request") -> Iterator[dict[str, Any]]:
        """Its log's lines of one kind."""
        for line in self.log_path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                if fields.get("event") == event:
                    yield fields


@asynccontextmanager
async def router(
    prefill: Sequence[str], decode: Sequence[str], log_path: Path, *arguments: str
) -> AsyncIterator[Router]:
    """A router in front of engines, by their URLs; ends with the block."""
    urls = [arg for url in prefill for arg in ("--prefill", url)]
    urls += [arg for url in decode for arg in ("--decode", url)]
    port = lease_port(HOST)
    try:
        process = _start([*urls, "--port", str(port.port), *arguments], log_path)
        started = Router(url=f"http://{HOST}:{port.port}", log_path=log_path, process=process)
        try:
            await _until_ready(started)
            yield started
        finally:
            await asyncio.to_thread(_end, process)
    finally:
        port.release()


def _start(arguments: Sequence[str], log_path: Path) -> "subprocess.Popen[bytes]":
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "route", "--host", HOST, "--json", *arguments],
            env={**os.environ, "PYTHONPATH": import_path()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def _until_ready(started: Router) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if started.process.poll() is not None:
                break
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{started.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_POLL_S)
    said = started.log_path.read_text(encoding="utf-8", errors="replace").strip()
    raise RouterFailedError(f"the router does not serve: {said[-2000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
