"""A region: one registered piece of KV memory with a stated layout.

In this version a region holds one attention layer of one cache group as equal blocks: block `i`
occupies `block_bytes` bytes from `base + i * stride_bytes`. Two regions of the same layer can
exchange blocks when their `block_bytes` agree.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One layer's blocks in one worker.

    layer         vLLM's name of the layer; pairs regions of two engines.
    group         index of the KV cache group whose block ids address this region.
    base          address of block 0, in bytes.
    block_bytes   bytes that belong to one block.
    stride_bytes  bytes from one block to the next; at least `block_bytes`.
    blocks        number of blocks in the pool; valid ids are 0 <= id < blocks.
    memory        "DRAM" or "VRAM", as NIXL names it.
    device        device number; 0 for DRAM.
    """

    layer: str
    group: int
    base: int
    block_bytes: int
    stride_bytes: int
    blocks: int
    memory: str
    device: int

    def __post_init__(self) -> None:
        if self.base <= 0 or self.block_bytes <= 0 or self.blocks <= 0 or self.group < 0:
            raise ValueError(f"region of {self.layer}: base, block_bytes, blocks must be positive")
        if self.stride_bytes < self.block_bytes:
            raise ValueError(f"region of {self.layer}: stride_bytes is below block_bytes")

    @property
    def span_bytes(self) -> int:
        """Bytes from block 0 to the end of the last block."""
        return (self.blocks - 1) * self.stride_bytes + self.block_bytes
