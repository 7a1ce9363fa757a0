"""A producer and a consumer over in-memory ports."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvflow.settings import Settings
from kvflow.testing.port import MemoryNetwork

from .loops import Worker, fast
from .sides import DESTINATION, Clock, Pair, Side

SMALL_SLICES = Settings(post_bytes_max=4096, post_runs_max=2, posts_in_flight_max=2)
"""So that a write of a few blocks takes several slices."""
SHOWN = replace(
    fast(load_deadline_s=300.0, lease_s=300.0, hold_max_s=300.0, renew_misses_max=1000),
    inspect=True,
)
"""Live transfers may be inspected, and are live for long."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def make_side(network: MemoryNetwork, clock: Clock) -> Callable[..., Side]:
    def make(name: str, **options: object) -> Side:
        options.setdefault("settings", SMALL_SLICES)
        return Side(name, network, clock, **options)

    return make


@pytest.fixture
def pair(make_side: Callable[..., Side], clock: Clock) -> Pair:
    return Pair(make_side("producer"), make_side("consumer"), clock)


@pytest.fixture
def stuck_pair(network: MemoryNetwork) -> Iterator[tuple[Worker, Worker]]:
    """A producer whose prompt "stuck" is never computed to its end, and the consumer of it."""
    with (
        Worker("producer", network, seed=1, settings=SHOWN) as producer,
        Worker("consumer", network, seed=2, settings=SHOWN, role="kv_consumer") as consumer,
    ):
        producer.start_prefill("stuck")
        consumer.load("stuck", producer.address, DESTINATION)
        consumer.comes_to("consumer", "stuck", "registered")
        yield producer, consumer
