"""Starts the two processes of `nixl_pair`, and reads what became of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvflow.doctor import ucx
from kvflow.doctor.facts import Measured, Nixl, NixlPair, Way
from kvflow.doctor.nixl_pair import MODULE, Order

BYTES = 64 * 2**20
RUN_BYTES = 16 * 2**10
_SECONDS = 3.0
_LIMIT_S = 45.0
"""For a pair, with the import of NIXL in both processes."""


def nixl(backends: tuple[str, ...], environment: Mapping[str, str], *, measure: bool) -> Nixl:
    """Two processes as the environment has it, and two as if on two machines."""
    order = Order(
        backends=backends,
        bytes=BYTES if measure else 2**20,
        run_bytes=RUN_BYTES,
        seconds=_SECONDS,
        measure=measure,
    )
    here = run(order, environment)
    apart = ucx.without_shared_memory(here.tls)
    is_same = here.failed_at or not any(ucx.way(lane) is Way.SHARED for lane in here.data)
    if apart is None or is_same:
        return Nixl(backends=backends, here=here)
    elsewhere = run(order, {**environment, "UCX_TLS": apart})
    return Nixl(backends=backends, here=here, elsewhere=elsewhere)


def run(order: Order, environment: Mapping[str, str]) -> NixlPair:
    """One pair. Whatever NIXL does, this returns."""
    # UCX_LOG_FILE would take the log away from us.
    env = {key: value for key, value in environment.items() if key != "UCX_LOG_FILE"}
    with tempfile.TemporaryDirectory(prefix="kvflow-doctor-") as directory:
        results, log = Path(directory) / "results", Path(directory) / "log"
        results.touch()
        arguments = ["lead", str(results), msgspec.json.encode(order).decode()]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments],
                env={**env, **ucx.LOGGING},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            ended = _ended(process)
        told = _merged(results.read_text(encoding="utf-8"))
        text = log.read_text(encoding="utf-8", errors="replace")
    return _pair(environment.get("UCX_TLS"), told, text, ended)


def _ended(process: "subprocess.Popen[bytes]") -> str:
    """How the process ended, if not well; it and its follower are gone then."""
    try:
        status = process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"it had not ended after {_LIMIT_S:.0f} s"
    finally:
        # None is left, if all went well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}" if status else ""


def _merged(lines: str) -> dict[str, Any]:
    told: dict[str, Any] = {"at": "start"}
    for line in lines.splitlines():
        told |= json.loads(line)
    return told


def _pair(tls: str | None, told: Mapping[str, Any], log: str, ended: str) -> NixlPair:
    error = told.get("error", "") or ended
    if not error and told["at"]:
        error = "the process ended without a word"
    if told["at"] == "start" and log.strip():
        error = f"{error}: {log.strip().splitlines()[-1]}"
    measured = told.get("measured")
    return NixlPair(
        tls=tls,
        failed_at=told["at"] if error else "",
        error=error,
        complaints=ucx.complaints(log),
        plugins=tuple(told.get("plugins", ())),
        ucx_version=ucx.version(log),
        data=ucx.data_lanes(log),
        notices=ucx.notice_lanes(log),
        measured=msgspec.convert(measured, Measured) if measured else None,
    )
