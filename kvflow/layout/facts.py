"""What two workers must agree on before KV can move between them.

Each field is compared by itself, and a difference is told with the field's name and both values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.errors import IncompatiblePeersError
from kvflow.layout.plan import check_pair
from kvflow.layout.region import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One engine's facts.

    model        the model's architecture and shape, as one string.
    kv_dtype     element type of the KV cache.
    block_sizes  tokens per block, one per cache group.
    group_kinds  vLLM's kind of each cache group.
    tp_size, pp_size
                 ranks along each axis.
    kv_layout    vLLM's name of the KV cache layout.
    """

    model: str
    kv_dtype: str
    block_sizes: tuple[int, ...]
    group_kinds: tuple[str, ...]
    tp_size: int
    pp_size: int
    kv_layout: str


_NAMES = {
    "model": "model",
    "kv_dtype": "KV cache dtype",
    "block_sizes": "block size (tokens per block, per cache group)",
    "group_kinds": "kinds of cache groups",
    "tp_size": "tensor-parallel size",
    "pp_size": "pipeline-parallel size",
    "kv_layout": "KV cache layout",
}


def check_compatible(
    ours: Facts,
    our_regions: Sequence[Region],
    theirs: Facts,
    their_regions: Sequence[Region],
) -> None:
    """Raise `IncompatiblePeersError` for the first fact on which the two sides differ."""
    for field, name in _NAMES.items():
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise IncompatiblePeersError(name, mine, other)
    check_pair(our_regions, their_regions)
