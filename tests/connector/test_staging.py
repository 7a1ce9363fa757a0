"""A staging buffer between a device's caches and a peer, with a copying operation of ours."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

import torch

from kvflow.connector.staging import HostStaging
from kvflow.core import events as ev
from kvflow.errors import ConfigurationError
from kvflow.ids import Address, RequestId, TransferId

BLOCKS = 6
LOAD = RequestId("load")


def copying(source: Any, destination: Any, ids: list[int], to: list[int], direction: str) -> None:
    """What vLLM's operations do, between two CPU tensors."""
    for layer in source:
        destination[layer][to] = source[layer][ids]


def caches(ratio: int = 1) -> dict[str, torch.Tensor]:
    """Two groups of one layer each, as a device would have them."""
    return {
        layer: torch.rand(BLOCKS * ratio, 2, 16 // ratio, 8) for layer in ("full.0", "window.0")
    }


def finished(*blocks: tuple[int, ...]) -> ev.PrefillFinished:
    return ev.PrefillFinished(
        transfer_id=TransferId("t"), request_id=RequestId("prefill"), blocks=blocks, tokens=32
    )


def allocated(*blocks: tuple[int, ...]) -> ev.BlocksAllocated:
    return ev.BlocksAllocated(
        transfer_id=TransferId("t"),
        request_id=LOAD,
        attempt=16,
        address=Address("prefill", 5600),
        engine_id=None,
        blocks=blocks,
        starts=(0,) * len(blocks),
        tokens=32,
    )


@pytest.fixture(params=[1, 2], ids=["kernel blocks", "half a block each"])
def ratio(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def staging(of: dict[str, torch.Tensor]) -> HostStaging:
    staging = HostStaging(of, [["full.0"], ["window.0", "elsewhere.0"]], BLOCKS)
    staging.copy_with(copying)
    for host in staging.host.values():
        host.zero_()
    return staging


def block(cache: torch.Tensor, index: int, ratio: int) -> torch.Tensor:
    return cache[index * ratio : (index + 1) * ratio]


def test_kv_goes_from_device_to_device_through_host_memory(ratio: int) -> None:
    there, here = caches(ratio), caches(ratio)
    before = {layer: cache.clone() for layer, cache in here.items()}
    producer, consumer = staging(there), staging(here)
    producer.note([finished((3, 5), (0, 2))])
    consumer.note([allocated((1, 4), (2,))])
    for layer, source, destination in (
        ("full.0", 3, 1),
        ("full.0", 5, 4),
        ("window.0", 2, 2),
    ):
        block(consumer.host[layer], destination, ratio)[:] = block(
            producer.host[layer], source, ratio
        )
    consumer.arrived(LOAD, complete=True)
    assert torch.equal(block(here["full.0"], 1, ratio), block(there["full.0"], 3, ratio))
    assert torch.equal(block(here["full.0"], 4, ratio), block(there["full.0"], 5, ratio))
    assert torch.equal(block(here["window.0"], 2, ratio), block(there["window.0"], 2, ratio))
    for layer, others in (("full.0", (0, 2, 3, 5)), ("window.0", (0, 1, 3, 4, 5))):
        for other in others:
            assert torch.equal(block(here[layer], other, ratio), block(before[layer], other, ratio))


def test_the_null_block_is_not_copied_out() -> None:
    there = caches()
    producer = staging(there)
    producer.note([finished((1, 2), (0, 2))])
    assert not producer.host["window.0"][0].any()


def test_a_failed_load_changes_nothing_on_the_device() -> None:
    here = caches()
    before = {layer: cache.clone() for layer, cache in here.items()}
    consumer = staging(here)
    consumer.note([allocated((1, 4), (2,))])
    consumer.arrived(LOAD, complete=False)
    consumer.arrived(LOAD, complete=False)
    assert all(torch.equal(here[layer], before[layer]) for layer in here)


def test_without_an_operation_of_vllms_it_is_refused_with_a_sentence() -> None:
    producer = HostStaging(caches(), [["full.0"], ["window.0"]], BLOCKS)
    with pytest.raises(ConfigurationError, match="kv_buffer_device"):
        producer.note([finished((1,), (1,))])
