"""A producer in a process of its own and a consumer in this one, with real NIXL agents."""

from collections.abc import Iterator

import numpy as np
import pytest

from .led_process import LedEngine
from .loop_process import BLOCK_BYTES, BLOCKS, LAYERS, Engine

SEED = 11
"""Of the producers' memory."""


def producers_memory() -> np.ndarray:
    """What a producer's process made of its seed."""
    rng = np.random.default_rng(SEED)
    shape = (LAYERS, BLOCKS, BLOCK_BYTES + 512)
    return rng.integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def shared_producer() -> Iterator[LedEngine]:
    """For tests that leave it alive (a process takes seconds to start)."""
    producer = LedEngine("producer", SEED)
    yield producer
    producer.close()


@pytest.fixture
def own_producer() -> Iterator[LedEngine]:
    producer = LedEngine("producer", SEED)
    yield producer
    producer.close()


@pytest.fixture
def consumer() -> Iterator[Engine]:
    with Engine("consumer", seed=5) as consumer:
        yield consumer
