"""A region that makes no sense is refused in a sentence that names it."""

from dataclasses import replace

import pytest

from kvflow.layout import Region

from .regions import cells, state, with_plane

PAGES = {
    "layer": "a",
    "group": 0,
    "base": 1,
    "block_bytes": 4,
    "stride_bytes": 4,
    "blocks": 1,
    "memory": "DRAM",
    "device": 0,
}


@pytest.mark.parametrize(
    "bad", ["base", "block_bytes", "stride_bytes", "blocks", "group", "device"]
)
def test_a_number_that_is_negative_is_refused_f20(bad: str) -> None:
    with pytest.raises(ValueError, match=f"region of a: {bad} must"):
        Region.pages(**{**PAGES, bad: -1})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"base": 0}, "base must be positive"),
        ({"subblocks": 0}, "subblocks must be positive"),
        ({"tokens": -1}, "tokens must not be negative"),
        ({"head_first": 1}, "heads range.1, 3. are not among 2"),
        ({"heads_total": 1}, "heads range.0, 2. are not among 1"),
        ({"base": 2**63 - 100}, "it ends beyond the last address"),
        ({"blocks": 2**62}, "it ends beyond the last address"),
        ({"planes": ()}, "planes .* must be 1 to 8"),
        ({"planes": cells().planes * 2}, "planes .* each with a name of its own"),
        ({"block_bytes": 63}, "plane kv: its cells end at byte 64, the block at 63"),
        ({"stride_bytes": 63}, "plane kv: cells overlap: a stride of 63 bytes"),
        ({"tokens": 5}, "plane kv: its cells end at byte 72, the block at 64"),
    ],
)
def test_a_region_that_makes_no_sense_is_refused_f20(
    changes: dict[str, object], fault: str
) -> None:
    with pytest.raises(ValueError, match=f"region of a: {fault}"):
        replace(cells("a"), **changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rows": 0}, "must be positive"),
        ({"cell_bytes": 0}, "must be positive"),
        ({"tile": 0}, "must be positive"),
        ({"offset": -1}, "must not be negative"),
        ({"head_stride": -8}, "must not be negative"),
        ({"offset": 1}, "end at byte 65"),
        ({"token_stride": 4}, "cells overlap: a stride of 4 bytes is below the 8"),
        ({"token_stride": 0}, "cells overlap"),
        ({"head_stride": 24}, "cells overlap: a stride of 24 bytes is below the 32"),
        ({"rows": 2, "row_stride": 0}, "cells overlap"),
    ],
)
def test_a_plane_that_makes_no_sense_is_refused_f20(changes: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=f"region of a: plane kv: .*{fault}"):
        with_plane(cells("a"), **changes)


def test_a_state_has_no_parts() -> None:
    with pytest.raises(ValueError, match="a state has no subblocks"):
        replace(state(), subblocks=2)


def test_pages_are_whole_tokens() -> None:
    assert Region.pages(**PAGES, tokens=2).planes[0].cell_bytes == 2
    with pytest.raises(ValueError, match="region of a: 4 bytes are not 3 tokens"):
        Region.pages(**PAGES, tokens=3)
    with pytest.raises(ValueError, match="region of a: 4 bytes are not 0 tokens"):
        Region.pages(**PAGES, tokens=0)


@pytest.mark.parametrize(
    ("changes", "span"),
    [
        ({}, 640),
        ({"stride_bytes": 100}, 964),
        ({"subblocks": 3}, 30 * 64),
        ({"blocks": 1}, 64),
    ],
)
def test_a_span_reaches_from_the_first_block_to_the_end_of_the_last(
    changes: dict[str, object], span: int
) -> None:
    assert replace(cells(), **changes).span_bytes == span
