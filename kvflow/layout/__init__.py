"""Block ids -> byte runs, between any two layouts. Pure arithmetic: knows neither vLLM nor NIXL."""

from kvflow.layout.facts import Facts, check_compatible
from kvflow.layout.pairing import check_layers, check_pair, pair, plan
from kvflow.layout.plan import GroupBlocks, Pairing
from kvflow.layout.region import Plane, Region
from kvflow.layout.runs import Int64s, Runs, slices
from kvflow.layout.topology import Side, check_sizes, owed, served, writers

__all__ = [
    "Facts",
    "GroupBlocks",
    "Int64s",
    "Pairing",
    "Plane",
    "Region",
    "Runs",
    "Side",
    "check_compatible",
    "check_layers",
    "check_pair",
    "check_sizes",
    "owed",
    "pair",
    "plan",
    "served",
    "slices",
    "writers",
]
