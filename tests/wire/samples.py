"""A worker's coordinates that are as they should be, for tests that spoil them."""

from typing import Any

import msgspec

from kvflow.wire import messages as m

FACTS = m.Facts(
    model="tiny",
    kv_dtype="bf16",
    block_sizes=(16,),
    group_kinds=("FullAttentionSpec",),
    tp_size=1,
    pp_size=1,
    kv_layout="",
)
PLANE = m.Plane(
    name="kv",
    offset=0,
    head_stride=64,
    rows=1,
    row_stride=64,
    token_stride=4,
    cell_bytes=4,
)
REGION = m.Region(
    layer="layer.0",
    group=0,
    base=4096,
    stride_bytes=64,
    block_bytes=64,
    blocks=8,
    tokens=16,
    planes=(PLANE,),
    encoding="float32",
    memory="DRAM",
    device=0,
)
HELLO = m.Hello(
    agent="agent",
    engine_id="engine",
    incarnation="incarnation",
    pp_rank=0,
    tp_rank=0,
    metadata=b"\x00\xff",
    facts=FACTS,
    regions=(REGION,),
)
NOT_TEXT = [None, 1, b"t", ["t"]]


def fields_of(message: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def with_fields(message: msgspec.Struct, **changes: object) -> msgspec.Struct:
    return type(message)(**{**fields_of(message), **changes})
