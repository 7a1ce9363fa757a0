"""What an engine says of itself on `/metrics`."""

import re
import time
import urllib.request
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Prompt tokens of one engine, by where their KV came from."""

    computed: int
    cached: int
    received: int

    def __sub__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            computed=self.computed - other.computed,
            cached=self.cached - other.cached,
            received=self.received - other.received,
        )


def prompt_tokens(url: str) -> Tokens:
    """What an engine has counted so far."""
    name = "vllm:prompt_tokens_by_source_total"
    return Tokens(
        computed=int(metric(url, name, 'source="local_compute"')),
        cached=int(metric(url, name, 'source="local_cache_hit"')),
        received=int(metric(url, name, 'source="external_kv_transfer"')),
    )


def kv_usage(url: str) -> float:
    """The share of the engine's KV blocks that is in use."""
    return metric(url, "vllm:kv_cache_usage_perc")


def usage_after(url: str, limit_s: float) -> float:
    """The same, once it is 0 or `limit_s` have passed."""
    until = time.monotonic() + limit_s
    while (usage := kv_usage(url)) and time.monotonic() < until:
        time.sleep(0.1)
    return usage


def metric(url: str, name: str, label: str = "") -> float:
    """One Prometheus sample of an engine: of this name, with this label."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    pattern = rf"^{re.escape(name)}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$"
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
