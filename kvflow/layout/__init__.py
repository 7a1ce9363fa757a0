"""Block ids -> byte runs. Pure arithmetic: knows neither vLLM nor NIXL."""

from kvflow.layout.facts import Facts, check_compatible
from kvflow.layout.plan import Int64s, Runs, check_pair, plan, slices
from kvflow.layout.region import Region

__all__ = [
    "Facts",
    "Int64s",
    "Region",
    "Runs",
    "check_compatible",
    "check_pair",
    "plan",
    "slices",
]
