"""Which engine is chosen. A policy is one small class.

A new one is added here, to `POLICIES`, and to `PolicyName` in `config.py`.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from kvflow.router.config import PolicyName


class Loaded(Protocol):
    """What a policy sees of an engine."""

    url: str
    in_flight: int
    tokens: int
    kv_usage: float


E = TypeVar("E", bound=Loaded)


class Policy(Protocol):
    """Chooses among engines that can be used and have room; there is at least one."""

    def choose(self, engines: Sequence[E], head: bytes) -> E:
        """`head`: the beginning of the prompt."""
        ...


class LeastLoaded:
    """The fewest prompt tokens in flight here; then the emptiest KV pool; then in turns.

    What is in flight is known at once, KV usage only as of the last look.
    """

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, engines: Sequence[E], head: bytes) -> E:
        first = next(self._turns) % len(engines)
        in_turn = (*engines[first:], *engines[:first])
        return min(in_turn, key=lambda e: (e.tokens, e.in_flight, round(e.kv_usage, 2)))


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, engines: Sequence[E], head: bytes) -> E:
        return engines[next(self._turns) % len(engines)]


class PrefixAffinity:
    """Prompts that begin alike go to the same engine, whose prefix cache then has their beginning.

    By rendezvous hashing (each engine's hash with the beginning; the highest wins): an engine that
    comes or goes moves only its own share. One that has far more in flight than the least loaded is
    passed over, since waiting for it would cost more than computing.

    spread_tokens  so many prompt tokens more are far more.
    """

    def __init__(self, spread_tokens: int = 8192) -> None:
        self._spread_tokens = spread_tokens

    def choose(self, engines: Sequence[E], head: bytes) -> E:
        least = min(engine.tokens for engine in engines)
        near = [e for e in engines if e.tokens <= least + self._spread_tokens]
        return max(near, key=lambda e: hashlib.blake2b(head + e.url.encode()).digest())


POLICIES: Mapping[PolicyName, type[Policy]] = {
    PolicyName.PREFIX: PrefixAffinity,
    PolicyName.LEAST: LeastLoaded,
    PolicyName.ROBIN: RoundRobin,
}
