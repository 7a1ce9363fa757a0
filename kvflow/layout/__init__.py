"""Block ids -> byte runs. Pure arithmetic: knows neither vLLM nor NIXL."""

from kvflow.layout.plan import Int64s, Runs, check_pair, plan, slices
from kvflow.layout.region import Region

__all__ = ["Int64s", "Region", "Runs", "check_pair", "plan", "slices"]
