"""Measures one pair of engines that is up: what the client sees, and what only the engines know."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvflow.bench import serve_meters
from kvflow.bench.report_data import Point, RequestRecord
from kvflow.bench.serve_connectors import Connector, Legs, Origin
from kvflow.bench.serve_load import Load, prompts, run_load, send
from kvflow.demo.engines import EnginePair
from kvflow.demo.requests import Client, Dispatch
from kvflow.demo.traces import read_journeys
from kvflow.errors import KVFlowError

_SETTLE_S = 1.0
"""Before and after a point: what the engines still have to do or write is done."""
_WARM_UP_REQUESTS = 3
"""Per length and dispatch order: handshakes, first touches of memory."""


class PairFailedError(KVFlowError):
    """A pair is up, but cannot be measured."""


async def warm_up(
    client: Client, connector: Connector, lengths: Sequence[int], *, seed: str, tokens: int
) -> Legs:
    """Requests that do not count, in every length and order; learns who the producer is.

    Raises `PairFailedError` if one of them fails.
    """
    legs = Legs(connector=connector, endpoints=client.endpoints)
    orders = tuple(dict.fromkeys((Dispatch.SEQUENTIAL, *connector.dispatches)))
    asked = [prompt for length in lengths for prompt in prompts(_WARM_UP_REQUESTS, length, seed)]
    for prompt, dispatch in ((prompt, dispatch) for prompt in asked for dispatch in orders):
        sent = await send(client, legs, prompt, dispatch=dispatch, tokens=tokens)
        if sent.error is not None:
            raise PairFailedError(f"warm-up, {dispatch.value}: {sent.error}")
        if dispatch is Dispatch.SEQUENTIAL:
            legs = legs.knowing(sent.prefill.kv_transfer_params)
    return legs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPair:
    """A pair that is warm."""

    engines: EnginePair
    client: Client
    legs: Legs
    round: int

    async def point(self, load: Load) -> Point:
        """Runs one load, and reads every meter around it."""
        await asyncio.sleep(_SETTLE_S)
        before, used_s = await self._counters(), self._cpu_s()
        began = time.monotonic()
        requests = await run_load(self.client, self.legs, load)
        window_s = time.monotonic() - began
        cpu_s = {who: now_s - used_s[who] for who, now_s in self._cpu_s().items()}
        await asyncio.sleep(_SETTLE_S)
        after = await self._counters()
        risen = {side: serve_meters.risen(before[side], after[side]) for side in after}
        connector = self.legs.connector
        if connector.origin is Origin.KVFLOW:
            requests = self._with_traces(requests)
        kv_bytes, kv_descriptors = moved(requests, risen)
        computed = risen["consumer"].pop(serve_meters.COMPUTED, None)
        return Point(
            connector=connector.key,
            name=connector.name,
            origin=connector.origin.value,
            dispatch=load.dispatch.value,
            round=self.round,
            rate=load.rate,
            length=load.length,
            window_s=window_s,
            producer_cpu_s=cpu_s["producer"],
            consumer_cpu_s=cpu_s["consumer"],
            others_cpu_s=max(0.0, cpu_s.pop("machine") - sum(cpu_s.values())),
            kv_bytes=kv_bytes,
            kv_descriptors=kv_descriptors,
            consumer_computed_tokens=None if computed is None else int(computed),
            counters={
                f"{side} {name}": value
                for side, found in risen.items()
                for name, value in found.items()
            },
            requests=tuple(requests),
        )

    async def _counters(self) -> dict[str, dict[str, float]]:
        return {e.name: await serve_meters.counters(e.url) for e in self.engines.engines}

    def _cpu_s(self) -> dict[str, float]:
        """Of each engine, of this client, and of the whole machine with all of them."""
        return {
            **{e.name: serve_meters.tree_cpu_s(e.process.pid) for e in self.engines.engines},
            "client": time.process_time(),
            "machine": serve_meters.machine_cpu_s(),
        }

    def _with_traces(self, requests: Sequence[RequestRecord]) -> list[RequestRecord]:
        """With the bytes and runs that kvflow's traces, beside the logs, have for them."""
        journeys = read_journeys(self.engines.producer.log_path.parent)
        return [
            replace(request, kv_bytes=journey.kv_bytes(), kv_descriptors=journey.kv_runs())
            if (journey := journeys.get(request.name)) is not None
            else request
            for request in requests
        ]


def moved(
    requests: Sequence[RequestRecord], risen: Mapping[str, Mapping[str, float]]
) -> tuple[float | None, float | None]:
    """Bytes and descriptors per transfer: from the requests' traces, else from vLLM's counters.

    A transfer is the KV of one request that was answered, over all ranks.
    """
    answered = [request for request in requests if request.error is None]
    traced = [request for request in answered if request.kv_bytes is not None]
    if traced:
        sums = (
            sum(request.kv_bytes or 0 for request in traced),
            sum(request.kv_descriptors or 0 for request in traced),
        )
        return sums[0] / len(traced), sums[1] / len(traced)
    counted = [
        sum(found.get(f"vllm:nixl_{what}_sum", 0.0) for found in risen.values())
        for what in ("bytes_transferred", "num_descriptors")
    ]
    kv_bytes, descriptors = (
        count / len(answered) if count and answered else None for count in counted
    )
    return kv_bytes, descriptors
