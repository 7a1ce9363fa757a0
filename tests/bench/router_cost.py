"""What the router adds to a request, beside a client that sends both legs itself; in one run.

    python tests/bench/router_cost.py [REQUESTS]

One producer, one consumer, prompts of 64 tokens, one request at a time, streamed, by turns through
the router and without it. What is printed is the time to the first token.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from rich.console import Console

from kvflow.demo.engines import SERVED_MODEL
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import OUTPUT_TOKENS, Client, Dispatch, Endpoints, prompts
from kvflow.demo.routed import served
from kvflow.demo.router import router


async def main(count: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="kvflow-router-cost-"))
    asked = prompts(count, shortest=64, longest=64, seed=3)
    took: dict[str, list[float]] = {"direct": [], "routed": []}
    async with served(directory, tiny_model(), Console(stderr=True), producers=1) as engines:
        (producer,), (consumer,) = engines.producers, engines.consumers
        endpoints = Endpoints.of(producer, consumer)
        async with (
            router([producer.url], [consumer.url], directory / "router.log") as running,
            Client(endpoints) as client,
            aiohttp.ClientSession() as session,
        ):
            for number, prompt in enumerate(asked):
                for way in ("direct", "routed") if number % 2 else ("routed", "direct"):
                    if way == "routed":
                        took[way].append(await first_token_s(session, running.url, prompt))
                        continue
                    sent = await client.disaggregated(prompt, dispatch=Dispatch.CONCURRENT)
                    assert sent.error is None
                    assert sent.decode.first_token_s is not None
                    took[way].append(sent.decode.first_token_s)
    print("time to the first token, ms (quartiles)")
    for way, seconds in took.items():
        quartiles = statistics.quantiles([1000 * each for each in seconds], n=4)
        print(f"  {way}" + "".join(f"{each:9.2f}" for each in quartiles))
    added = statistics.median(took["routed"]) - statistics.median(took["direct"])
    print(f"the router adds {1000 * added:.2f} ms at the median of {count}")


async def first_token_s(session: aiohttp.ClientSession, url: str, prompt: tuple[int, ...]) -> float:
    body = {"model": SERVED_MODEL, "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    began = time.monotonic()
    first: float | None = None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: ") and first is None:
                first = time.monotonic() - began
    assert first is not None
    return first


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
