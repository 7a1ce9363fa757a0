"""A worker's coordinates as they travel: its facts, its regions, and their limits."""

import dataclasses
from typing import Any

import msgspec
import pytest

from kvflow.errors import RemoteProtocolError
from kvflow.layout import Facts, Plane, Region
from kvflow.wire import codec
from kvflow.wire import messages as m

from .samples import FACTS, HELLO, NOT_TEXT, PLANE, REGION, with_fields


@pytest.mark.parametrize(("twin", "core"), [(m.Plane, Plane), (m.Region, Region), (m.Facts, Facts)])
def test_layouts_travel_field_by_field(twin: type, core: type) -> None:
    assert twin.__struct_fields__ == tuple(field.name for field in dataclasses.fields(core))


BAD_HELLO: list[tuple[str, list[Any]]] = [
    ("agent", ["", "a" * 513, *NOT_TEXT]),
    ("engine_id", ["", "a" * 513, *NOT_TEXT]),
    ("incarnation", ["", "a" * 513, *NOT_TEXT]),
    ("pp_rank", [-1, 1024, 0.5, None]),
    ("tp_rank", [-1, 1024, 0.5, None]),
    ("metadata", ["text", None, 1]),
    ("facts", [None, {}, with_fields(FACTS, tp_size=0), with_fields(FACTS, kv_dtype="")]),
    ("facts", [with_fields(FACTS, block_sizes=(-1,)), with_fields(FACTS, model="m" * 4097)]),
    ("regions", [None, 1, (1,), (REGION,) * 4097]),
    *(
        ("regions", [(with_fields(REGION, **{field: value}),) for value in values])
        for field, values in {
            "layer": ["", "l" * 513, None],
            "group": [-1, 64, "0"],
            "base": [0, -1, 2**62],
            "block_bytes": [0, -1, 2**62],
            "stride_bytes": [0, -1, 2**62],
            "blocks": [0, -1, 2**31],
            "memory": ["", "dram", "DRAM\n", "FILE", None],
            "tokens": [-1, 2**31],
            "subblocks": [0, 2**31],
            "heads": [0, 2**31],
            "head_first": [-1, 2**31],
            "heads_total": [0, 2**31],
            "planes": [(), (PLANE,) * 9, (None,), None, ((),), (("kv", 0, 0, 1),)],
            "encoding": ["", "e" * 513, None],
            "device": [-1, 2**15],
        }.items()
    ),
    *(
        (
            "regions",
            [(with_fields(REGION, planes=(with_fields(PLANE, **{field: v}),)),) for v in values],
        )
        for field, values in {
            "name": ["", "p" * 513, None],
            "offset": [-1, 2**62],
            "head_stride": [-1, 2**62],
            "rows": [0, 2**31],
            "row_stride": [-1, 2**62],
            "token_stride": [-1, 2**62, "1"],
            "cell_bytes": [0, 2**62],
            "tile": [0, 2**31, None],
        }.items()
    ),
]


@pytest.mark.parametrize(("field", "values"), BAD_HELLO)
def test_coordinates_past_their_limits_are_refused(field: str, values: list[Any]) -> None:
    for value in values:
        hello = with_fields(HELLO, **{field: value})
        with pytest.raises(RemoteProtocolError):
            codec.decode_hello(codec.encode(hello))
        with pytest.raises(RemoteProtocolError):
            codec.decode_frame(codec.encode(m.Frame(notices=(), hello=hello)))


@pytest.mark.parametrize("message", [PLANE, REGION])
def test_what_travels_as_an_array_has_no_more_elements_than_fields(message: msgspec.Struct) -> None:
    """And none less than up to the last one that may be left out."""
    fields = list(msgspec.to_builtins(message))
    kind = type(message)
    assert msgspec.convert(fields, kind) == message
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([*fields, 1], kind)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields[:6], kind)
