"""What kvflow's threads cost in real engines that have nothing to do.

Starts a pair, sends one transfer through it so that both sides know each other, waits for quiet,
and reads each `kvflow-*` thread's processor time (user and system) from /proc twice, 10 s apart.

Run: `python tests/bench/engine_idle_cost.py`. Prints one line per thread; asserts nothing.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from kvflow.demo.engines import EnginePair, EngineSettings, kvflow_connector, wait_ready
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import Client, Dispatch, Endpoints, prompts

WATCH_S = 10.0


def threads() -> dict[str, float]:
    """CPU seconds of every kvflow thread of this user's vLLM processes, by "pid/name"."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for comm in Path("/proc").glob("[0-9]*/task/*/comm"):
        try:
            name = comm.read_text().strip()
            if not name.startswith("kvflow"):
                continue
            fields = (comm.parent / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        key = f"pid {comm.parts[2]} {name}"
        found[key] = (int(fields[11]) + int(fields[12])) / ticks
    return found


def settings(name: str, logs: Path, model: Path) -> EngineSettings:
    return EngineSettings(
        name=name,
        model=model,
        log_path=logs / f"{name}.log",
        kv_transfer_config=kvflow_connector(f"kv_{name}"),
    )


async def one_transfer(endpoints: Endpoints) -> None:
    async with Client(endpoints) as client:
        exchange = await client.disaggregated(prompts(1)[0], dispatch=Dispatch.CONCURRENT)
    if exchange.error is not None:
        raise SystemExit(exchange.error)


def main() -> int:
    model = tiny_model()
    logs = Path(tempfile.mkdtemp(prefix="kvflow-idle-"))
    pair = EnginePair(
        producer=settings("producer", logs, model), consumer=settings("consumer", logs, model)
    )
    with pair:
        wait_ready(pair.engines)
        asyncio.run(one_transfer(Endpoints.of(pair.producer, pair.consumer)))
        time.sleep(3)
        before, at = threads(), time.monotonic()
        time.sleep(WATCH_S)
        after, elapsed = threads(), time.monotonic() - at
    for key in sorted(after):
        share = (after[key] - before.get(key, 0.0)) / elapsed
        print(f"{key}: {100 * share:.2f} % of a core over {elapsed:.0f} s idle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
