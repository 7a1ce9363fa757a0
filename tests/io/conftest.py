"""A producer and a consumer over in-memory ports."""

from collections.abc import Callable

import pytest

from kvflow.settings import Settings
from kvflow.testing.port import MemoryNetwork

from .sides import Clock, Pair, Side

SMALL_SLICES = Settings(post_bytes_max=4096, post_runs_max=2, posts_in_flight_max=2)
"""So that a write of a few blocks takes several slices."""


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
