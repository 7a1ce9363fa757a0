"""What two engines must agree on before anybody looks at their memory.

Each field is compared by itself, and a difference is told with the field's name and both values.
How memory lies may differ: `pair` finds out whether KV can move between two regions.
"""

from dataclasses import dataclass

from kvflow.errors import IncompatiblePeersError
from kvflow.layout.topology import Side, check_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One engine's facts.

    model        the model's architecture and shape, as one string; must agree.
    kv_dtype     element type of the KV cache; must agree.
    block_sizes  tokens per block, one per cache group.
    group_kinds  vLLM's kind of each cache group; must agree.
    tp_size, pp_size
                 ranks along each axis; see `check_sizes`.
    kv_layout    vLLM's name of the KV cache layout; for people.
    """

    model: str
    kv_dtype: str
    block_sizes: tuple[int, ...]
    group_kinds: tuple[str, ...]
    tp_size: int
    pp_size: int
    kv_layout: str

    @property
    def side(self) -> Side:
        """The engine's sizes, as `kvflow.layout.topology` takes them."""
        return Side(tp_size=self.tp_size, pp_size=self.pp_size)


_SAME = {
    "model": "model",
    "kv_dtype": "KV cache dtype",
    "group_kinds": "kinds of cache groups",
}


def check_compatible(ours: Facts, theirs: Facts) -> None:
    """Raise `IncompatiblePeersError` for the first fact on which the two cannot differ."""
    for field, name in _SAME.items():
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise IncompatiblePeersError(name, mine, other)
    check_sizes(ours.side, theirs.side)
