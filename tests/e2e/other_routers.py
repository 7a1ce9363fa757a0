"""Other routers, in front of kvflow's engines: a proxy like vLLM's example, and vllm-router."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sysconfig
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvflow.demo.engines import HOST
from kvflow.demo.ports import lease_port
from kvflow.demo.requests import http_session

READY_TIMEOUT_S = 60.0
_LEG_TIMEOUT_S = 120.0
_BYTES_MAX = 2**24


@asynccontextmanager
async def example_proxy(prefill: str, decode: str) -> AsyncIterator[str]:
    """One leg after the other, with upstream's parameters, and one X-Request-Id for both.

    It knows of no transfer id; what the prefill leg answers goes to the decode leg as it is.
    """

    async def forward(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {key: value for key, value in body.items() if key != "stream_options"}
        first |= {"max_tokens": 1, "stream": False}
        first["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        url = f"{prefill}{request.path}"
        async with session.post(url, json=first, headers=headers) as answer:
            answer.raise_for_status()
            told = (await answer.json())["kv_transfer_params"]
        second = {**body, "kv_transfer_params": told}
        url = f"{decode}{request.path}"
        async with session.post(url, json=second, headers=headers) as answer:
            relayed = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await relayed.prepare(request)
            async for chunk in answer.content.iter_any():
                await relayed.write(chunk)
            return relayed

    app = web.Application(client_max_size=_BYTES_MAX)
    app.router.add_post("/{path:.*}", forward)
    runner = web.AppRunner(app)
    async with http_session(_LEG_TIMEOUT_S) as session:
        await runner.setup()
        try:
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def vllm_router(prefill: list[str], decode: list[str], log_path: Path) -> AsyncIterator[str]:
    """vLLM's own router, as its wheel installs it."""
    command = [str(Path(sysconfig.get_path("scripts")) / "vllm-router")]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += [argument for url in prefill for argument in ("--prefill", url)]
    command += [argument for url in decode for argument in ("--decode", url)]
    port = lease_port(HOST)
    metrics = lease_port(HOST)
    command += ["--host", HOST, "--port", str(port.port), "--prometheus-port", str(metrics.port)]
    process = await asyncio.to_thread(_start, command, log_path)
    try:
        await _until_listening(f"http://{HOST}:{port.port}", process, log_path)
        yield f"http://{HOST}:{port.port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        port.release()
        metrics.release()


def _start(command: list[str], log_path: Path) -> "subprocess.Popen[bytes]":
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _said(log_path: Path) -> str:
    return log_path.read_text(errors="replace")[-2000:]


async def _until_listening(url: str, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            assert process.poll() is None, _said(log_path)
            assert time.monotonic() < deadline, _said(log_path)
            await asyncio.sleep(0.2)
