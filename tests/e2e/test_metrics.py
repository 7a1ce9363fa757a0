"""`/metrics` of both engines after 50 requests: everything is there, and the counts agree (T4)."""

import asyncio
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvflow.demo.engines import EnginePair
from kvflow.demo.requests import Client, Dispatch, Endpoints, Exchange, Naming, prompts
from kvflow.observe.metrics import METRICS

from .trio import PRODUCER, Traces, until

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(180)]

REQUESTS = 50
AT_ONCE = 4
SETTLES_IN_S = 20
PROMPTS = prompts(REQUESTS, shortest=64, longest=1024, seed=7)
GIVEN_UP = 3


@dataclass
class Shown:
    """Samples of one engine, summed by name and some labels."""

    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)
    families: set[str] = field(default_factory=set)

    def sum(self, name: str, **labels: str) -> float:
        return sum(
            value
            for sample, has, value in self.samples
            if sample == name and labels.items() <= has.items()
        )

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for sample, has, value in self.samples:
            if sample == name and labels.items() <= has.items() and value:
                sums[has[label]] += value
        return dict(sums)


def shown_by(url: str) -> Shown:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    shown = Shown()
    for family in text_string_to_metric_families(text):
        if family.name.startswith("kvflow_"):
            shown.families.add(family.name)
            shown.samples += [(s.name, s.labels, s.value) for s in family.samples]
    return shown


def increase(after: Shown, before: Shown, name: str, **labels: str) -> float:
    return after.sum(name, **labels) - before.sum(name, **labels)


async def ask(endpoints: Endpoints, traces: Traces) -> tuple[list[Exchange], int]:
    """50 requests, some sequential, and a few whose clients go away amid them."""
    async with Client(endpoints) as client:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Exchange:
            order = Dispatch.SEQUENTIAL if number % 5 == 0 else Dispatch.CONCURRENT
            async with room:
                return await client.disaggregated(PROMPTS[number], dispatch=order)

        answers = await asyncio.gather(*map(one, range(REQUESTS)))
        for number in range(GIVEN_UP):
            # Its prefill is never asked for: it waits until its client has gone.
            naming = Naming.by_transfer_id()
            leg = asyncio.create_task(client.decode_leg(PROMPTS[number], naming))
            await until(
                lambda held=str(naming.transfer_id): traces.reached(PRODUCER, held, "held"),
                within_s=SETTLES_IN_S,
                what="a registration is held",
            )
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
        return answers, GIVEN_UP


async def settled(endpoints: Endpoints) -> tuple[Shown, Shown]:
    """What both show once nothing is live. Counts come with steps, so each is asked something."""
    until = time.monotonic() + SETTLES_IN_S
    async with Client(endpoints) as client:
        while True:
            for url in (endpoints.producer_url, endpoints.consumer_url):
                assert (await client.complete(url, PROMPTS[0], tokens=4)).error is None
            await asyncio.sleep(0.3)
            producer, consumer = shown_by(endpoints.producer_url), shown_by(endpoints.consumer_url)
            live = [each.sum("kvflow_transfers_live") for each in (producer, consumer)]
            if not any(live):
                return producer, consumer
            assert time.monotonic() < until, f"still live: {live}"


def test_every_metric_is_there_and_the_counts_agree_after_50_requests(
    engine_pair: EnginePair, endpoints: Endpoints, trace_directory: Path
) -> None:
    async def work() -> None:
        before_p, before_c = await settled(endpoints)
        answers, given_up = await ask(endpoints, Traces(trace_directory))
        assert all(answer.error is None for answer in answers)
        producer, consumer = await settled(endpoints)

        for metric in METRICS:
            family = metric.name.removesuffix("_total")
            assert family in producer.families, metric.name
            assert family in consumer.families, metric.name

        # Since the engines began, of whatever other tests have done with them as well.
        for shown in (producer, consumer):
            for machine in ("producer", "consumer"):
                started = shown.sum("kvflow_transfers_started_total", machine=machine)
                assert started == shown.sum("kvflow_transfers_ended_total", machine=machine)
            assert shown.sum("kvflow_registrations_received_total") == shown.sum(
                "kvflow_registrations_settled_total"
            )
            assert shown.sum("kvflow_internal_errors_total") == 0
            assert shown.sum("kvflow_polls_total") > 0
            assert shown.by("kvflow_bytes_total", "rank").keys() <= {"pp0.tp0"}

        # Of these requests alone.
        sent = increase(consumer, before_c, "kvflow_registrations_sent_total")
        received = increase(producer, before_p, "kvflow_registrations_received_total")
        matched = increase(producer, before_p, "kvflow_registrations_settled_total", fate="matched")
        ended = "kvflow_transfers_ended_total"
        landed = increase(consumer, before_c, ended, machine="consumer", outcome="received")
        failed = increase(consumer, before_c, ended, machine="consumer", outcome="failed")
        assert sent == received == REQUESTS + given_up
        assert matched == landed == REQUESTS
        assert failed == given_up
        assert increase(producer, before_p, ended, machine="producer", outcome="sent") == REQUESTS
        cancelled = increase(
            producer, before_p, ended, machine="producer", outcome="failed", reason="cancelled"
        )
        assert cancelled == given_up
        for state in ("registered", "registering"):
            seen = increase(
                consumer, before_c, "kvflow_state_seconds_count", machine="consumer", state=state
            )
            assert 0 < seen <= REQUESTS + given_up
        # Every token of every prompt has 16 KiB here; whole blocks are moved.
        tokens = increase(consumer, before_c, "kvflow_prompt_tokens_received_total")
        assert tokens == sum(map(len, PROMPTS))
        written = increase(producer, before_p, "kvflow_bytes_total", direction="write")
        assert written >= tokens * 16 * 1024
        posts = increase(producer, before_p, "kvflow_posts_total")
        orders = increase(producer, before_p, "kvflow_orders_total", outcome="done")
        runs = increase(producer, before_p, "kvflow_runs_total")
        assert runs >= posts >= orders >= REQUESTS
        took = increase(producer, before_p, "kvflow_order_seconds_count", direction="write")
        assert took == orders

    asyncio.run(work())
