"""Running side channels of engines that do nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from kvflow.ids import Address, AgentName, Rank, new_incarnation
from kvflow.io.coordinates import Identity
from kvflow.io.seal import Seal
from kvflow.io.side_channel import SideChannel
from kvflow.layout import Facts, Region
from kvflow.wire import codec

HERE = Address("127.0.0.1", 0)
FACTS = Facts(
    model="tiny",
    kv_dtype="torch.bfloat16",
    block_sizes=(16,),
    group_kinds=("FullAttentionSpec",),
    tp_size=1,
    pp_size=1,
    kv_layout="page",
)


@contextmanager
def engine(
    name: str, *, tokens: int = 16, ranks: bool = True, seal: Seal | None = None
) -> Iterator[Address]:
    """A side channel of an engine whose kernels permute the tokens of a block."""
    memory = np.zeros((32, tokens * 64), dtype=np.uint8)
    region = Region.pages(
        layer="layer.0",
        group=0,
        base=memory.ctypes.data,
        block_bytes=memory.shape[1],
        stride_bytes=memory.shape[1],
        blocks=len(memory),
        memory="DRAM",
        device=0,
        tokens=tokens,
    )
    identity = Identity(
        engine_id=name,
        incarnation=new_incarnation(),
        rank=Rank(0, 0),
        facts=replace(FACTS, block_sizes=(tokens,)),
        regions=(region,),
    )
    channel = SideChannel(
        engine_id=name, refused=lambda *_: None, connections_max=8, seal=seal or Seal()
    )
    if ranks:
        hello = identity.hello(AgentName(f"{name}/agent"), b"metadata")
        channel.introduce({Rank(0, 0): codec.encode(hello)})
    try:
        yield channel.listen(HERE)
    finally:
        channel.close()
