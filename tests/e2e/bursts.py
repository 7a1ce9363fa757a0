"""What the fault tests send, and how they wait for the middle of it."""

import asyncio
from collections.abc import Awaitable, Callable

from kvflow.demo.requests import Client, Completion, prompts

from .trio import FAILS, PRODUCER, RECOMPUTES, Prompt, Sent, Trio, note, until

CONSUMERS = (FAILS, RECOMPUTES)
TOKENS_EXPECTED = 64

LONG = prompts(2, shortest=6000, longest=6000, seed=11)
"""Computed in chunks of 1,024 tokens: long enough to be hit before the last one."""
BIG = prompts(10, shortest=2048, longest=2048, seed=12)
SMALL = prompts(12, shortest=64, longest=512, seed=13)
ONE = SMALL[8]

Clients = dict[str, Client]


def run(trio: Trio, work: Callable[[Clients], Awaitable[None]]) -> None:
    async def with_clients() -> None:
        async with trio.clients() as clients:
            await work(clients)

    asyncio.run(with_clients())


def burst(trio: Trio, clients: Clients, each: dict[str, int]) -> list[Sent]:
    """So many requests of 2,048 tokens to each consumer, both legs at once, in turns."""
    return [
        trio.send(clients[name], name, BIG[number])
        for number in range(max(each.values()))
        for name, count in each.items()
        if number < count
    ]


async def in_the_middle(trio: Trio, sent: list[Sent], *consumers: str) -> None:
    """Some KV has come to each of the consumers, and one prompt's has in part, or is on its way."""
    ids = {name: [s.transfer_id for s in sent if s.consumer == name] for name in consumers}

    def is_begun(transfer_id: str) -> bool:
        begun = trio.traces.reached(PRODUCER, transfer_id, *trio.way.moving)
        return begun and not trio.traces.count(PRODUCER, [transfer_id], "sent", "failed")

    def is_middle() -> bool:
        done = all(trio.traces.count(PRODUCER, ids[name], "sent") >= 1 for name in consumers)
        return done and any(is_begun(each.transfer_id) for each in sent)

    await until(is_middle, within_s=60, what="some sent, one in part")


def tell_ends(trio: Trio, sent: list[Sent], since: float, at: float) -> dict[str, float]:
    """Notes how the loads and answers of each consumer ended after a fault; returns the last."""
    latest: dict[str, float] = {}
    for name in {s.consumer for s in sent}:
        own = [s for s in sent if s.consumer == name]
        failures = [f for s in own if (f := trio.traces.failure(name, s.transfer_id))]
        reasons = sorted({str(f.reason) for f in failures})
        reported_s = max((f.at - at for f in failures), default=0.0)
        answered_s = max(s.ended for s in own) - since
        errors = sum(s.decode.error is not None for s in own)
        latest[name] = reported_s
        note(
            f"{name}: {len(own)} requests, {len(failures)} loads failed {reasons}, the last after "
            f"{reported_s:.2f} s; {errors} errors; the last answer after {answered_s:.2f} s"
        )
    return latest


async def complete(client: Client, trio: Trio, name: str, prompt: Prompt) -> Completion:
    return await client.complete(trio.engines[name].url, prompt, tokens=TOKENS_EXPECTED)
