"""Which memory is registered for which regions. Needs no NIXL."""

import pytest

from kvflow.io.nixl_port import MemoryRange, registered_ranges
from kvflow.layout import Region


def span(start: int, size: int, memory: str = "DRAM", device: int = 0) -> Region:
    return Region.pages(
        layer="any",
        group=0,
        base=start,
        block_bytes=size,
        stride_bytes=size,
        blocks=1,
        memory=memory,
        device=device,
    )


def extent(start: int, stop: int, memory: str = "DRAM", device: int = 0) -> MemoryRange:
    return MemoryRange(memory=memory, device=device, start=start, stop=stop)


@pytest.mark.parametrize(
    ("given", "ranges"),
    [
        ([], []),
        ([span(10, 5)], [extent(10, 15)]),
        ([span(10, 5), span(15, 5)], [extent(10, 20)]),
        ([span(16, 5), span(10, 5)], [extent(10, 15), extent(16, 21)]),
        ([span(10, 20), span(12, 2), span(29, 4)], [extent(10, 33)]),
        ([span(10, 5), span(10, 5)], [extent(10, 15)]),
        (
            [span(15, 5, "VRAM", 1), span(10, 5, "VRAM", 1), span(11, 2, "VRAM", 1)],
            [extent(10, 15, "VRAM", 1), extent(15, 20, "VRAM", 1)],
        ),
        ([span(10, 5), span(12, 5, "DRAM", 1)], [extent(10, 15), extent(12, 17, "DRAM", 1)]),
    ],
)
def test_regions_are_registered_in_as_few_ranges_as_possible(
    given: list[Region], ranges: list[MemoryRange]
) -> None:
    assert registered_ranges(given) == ranges
