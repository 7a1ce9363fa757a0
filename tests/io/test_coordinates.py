"""Regions travel whole, and large region tables fit into a message."""

from dataclasses import replace

from kvflow.ids import AgentName, Rank
from kvflow.io.coordinates import Identity
from kvflow.layout import Facts, Region
from kvflow.layout.named import amx_planes
from kvflow.wire import codec
from kvflow.wire import messages as m

FACTS = Facts(
    model="large",
    kv_dtype="bfloat16",
    block_sizes=(32,),
    group_kinds=("FullAttentionSpec",),
    tp_size=8,
    pp_size=1,
    kv_layout="amx",
)
PLANES = amx_planes(16, 128, 2)
REGION = Region(
    layer="model.layers.0.self_attn.attn",
    group=0,
    base=2**46,
    stride_bytes=PLANES[0].head_stride,
    block_bytes=PLANES[0].head_stride,
    blocks=100_000,
    tokens=16,
    subblocks=2,
    heads=1,
    head_first=3,
    heads_total=8,
    planes=PLANES,
    encoding="bfloat16/amx",
    memory="DRAM",
    device=0,
)


def identity(layers: int) -> Identity:
    regions = tuple(
        replace(REGION, layer=f"model.layers.{layer}.self_attn.attn") for layer in range(layers)
    )
    return Identity(
        engine_id="engine", incarnation="i", rank=Rank(0, 3), facts=FACTS, regions=regions
    )


def test_a_peer_has_the_regions_that_were_sent() -> None:
    ours = identity(3)
    sent = codec.encode(ours.hello(AgentName("agent"), b""))
    assert ours.check(codec.decode_hello(sent)) == ours.regions


def test_an_engine_with_as_many_ranks_as_may_be_fits_into_a_reply() -> None:
    hello = identity(32).hello(AgentName("agent"), bytes(1000))
    reply = m.MeetReply(engine_id="engine", incarnation="i", ranks=(hello,) * m.RANKS_MAX)
    assert codec.decode_reply(codec.encode(reply)) == reply


def test_a_worker_with_as_many_regions_as_may_be_fits_into_a_hello() -> None:
    hello = identity(m.REGIONS_MAX).hello(AgentName("agent"), bytes(m.AGENT_METADATA_BYTES_MAX))
    assert codec.decode_hello(codec.encode(hello)) == hello
