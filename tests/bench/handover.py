"""How long a finished prefill takes to become a first token, by push and by pull, side by side.

    python -m tests.bench.handover [ROUNDS]

One producer and two consumers, of which one is pushed to and one pulls, serve the same prompts in
turn, the decode leg after the prefill leg. Printed per length and mode: quartiles of the time from
the prefill's answer to the first token, and of the load itself (allocated to received, by the
trace). Only what one run says of both modes may be compared.
"""

import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from kvflow.demo.requests import Client, Dispatch, prompts
from kvflow.demo.traces import read_journeys
from tests.e2e.trio import FAILS, PRODUCER, RECOMPUTES, Trio

LENGTHS = (64, 512, 1024, 4096)
MODES = {FAILS: "push", RECOMPUTES: "pull"}


async def measure(trio: Trio, rounds: int) -> dict[tuple[int, str], list[tuple[float, str]]]:
    """Seconds to the first token, and the transfer's id, by length and mode."""
    took: dict[tuple[int, str], list[tuple[float, str]]] = defaultdict(list)
    async with trio.clients() as clients:
        for number in range(rounds + 1):
            for length in LENGTHS:
                (prompt,) = prompts(1, shortest=length, longest=length, seed=100 * number + length)
                order = list(MODES) if number % 2 else list(MODES)[::-1]
                for name in order:
                    took_s, id_ = await once(trio, clients[name], name, prompt)
                    if number:  # the first round meets, connects and warms up
                        took[length, MODES[name]].append((took_s, id_))
    return took


async def once(trio: Trio, client: Client, name: str, prompt: tuple[int, ...]) -> tuple[float, str]:
    sent = trio.send(client, name, prompt, dispatch=Dispatch.SEQUENTIAL)
    exchange = await sent.exchange
    assert exchange.error is None, exchange.error
    assert exchange.decode.first_token_s is not None
    return exchange.decode.first_token_s - exchange.prefill.total_s, sent.transfer_id


def load_ms(directory: Path, transfer_id: str) -> float:
    """From the consumer's allocation to the end of its load."""
    steps = read_journeys(directory)[transfer_id].transitions
    mine = [t for t in steps if t.machine == "consumer"]
    began = next(t.at for t in mine if t.dest == "allocated")
    return 1000 * (next(t.at for t in mine if t.dest == "received") - began)


def quartiles(values: list[float]) -> str:
    return " / ".join(f"{value:7.2f}" for value in statistics.quantiles(values, n=4))


async def main(rounds: int) -> None:
    trio = Trio(directory=Path(tempfile.mkdtemp(prefix="kvflow-handover-")))
    try:
        await trio.start(
            trio.settings(PRODUCER),
            trio.settings(FAILS, extra={"mode": "push"}),
            trio.settings(RECOMPUTES, extra={"mode": "pull"}),
        )
        took = await measure(trio, rounds)
        await asyncio.sleep(1.0)
        journeys = trio.directory
        print("tokens  mode   prefill's answer to first token, ms    load, ms (quartiles)")
        result = {}
        for (length, mode), each in sorted(took.items()):
            first = [1000 * seconds for seconds, _ in each]
            loads = [load_ms(journeys, id_) for _, id_ in each]
            result[f"{length} {mode}"] = {"first_ms": first, "load_ms": loads}
            print(f"{length:6}  {mode}   {quartiles(first)}    {quartiles(loads)}", flush=True)
        (trio.directory / "handover.json").write_text(json.dumps(result))
        print(trio.directory)
    finally:
        trio.stop()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
