"""The engines: what is known of each, what is in flight on it, and who waits for one.

Invariants: `in_flight` counts exactly the legs that hold a place; a place is given back once;
who has waited longest gets a place first, if it fits.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvflow.errors import CapacityError
from kvflow.ids import Address
from kvflow.router.policies import Policy


class Role(StrEnum):
    """What an engine is used for here."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What an engine has said of itself.

    models     what it serves: id -> longest prompt and answer, in tokens.
    address    a producer's side channel; None of a consumer.
    engine_id  a producer's own name of itself.
    mode       a consumer's setting `mode`; "" of a producer.
    ranks      data-parallel engines behind the URL; the side channel of each is a port further.
    version    of kvflow there.
    """

    models: dict[str, int | None]
    address: Address | None = None
    engine_id: str = ""
    mode: str = ""
    version: str = ""
    ranks: int = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """One engine.

    met        who it is; None until it was met, and while it is out.
    why_out    a sentence, while it is out.
    tokens     prompt tokens in flight, about.
    kv_usage   share of its KV pool in use, when it was last asked.
    computed   prompt tokens that it has computed itself, as it counts them.
    turn       the data-parallel rank that was used last.
    local_at   when a request without legs was sent to it last (monotonic).
    lost       set when it goes out: legs that have sent nothing to a client give up.
    """

    url: str
    role: Role
    met: Met | None = None
    why_out: str = "not met yet"
    in_flight: int = 0
    tokens: int = 0
    kv_usage: float = 0.0
    computed: float = 0.0
    turn: int = 0
    local_at: float = -math.inf
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def next_rank(self) -> tuple[Address, int | None]:
        """A met producer's next data-parallel engine: its side channel, and its rank if it has one.

        They are used in turns; which one is least loaded is known to vLLM alone.
        """
        assert self.met is not None and self.met.address is not None
        if self.met.ranks == 1:
            return self.met.address, None
        self.turn = (self.turn + 1) % self.met.ranks
        host, port = self.met.address
        return Address(host, port + self.turn), self.turn

    def enter(self, met: Met) -> None:
        """It is used from now on."""
        self.met, self.why_out = met, ""

    def leave(self, why: str) -> None:
        """It is not used until it was met again."""
        self.met, self.why_out = None, why
        lost, self.lost = self.lost, asyncio.Event()  # the next one is for legs from now on
        lost.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a leg needs: an engine of a role; one that was tried only if there is no other."""

    role: Role
    head: bytes
    tokens: int
    tried: frozenset[str] = frozenset()


class NoEngineError(Exception):
    """No engine of a role can be used: all are out."""

    def __init__(self, role: Role, why: str) -> None:
        super().__init__(f"no {role} engine can be used: {why}")


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """A place that a leg holds on an engine."""

    engine: Engine
    tokens: int
    fleet: "Fleet"
    is_held: bool = True

    def free(self, *_: object) -> None:
        """Give it back. Idempotent; also a callback of a leg's task."""
        if not self.is_held:
            return
        self.is_held = False
        assert self.engine.in_flight > 0 and self.engine.tokens >= self.tokens
        self.engine.in_flight -= 1
        self.engine.tokens -= self.tokens
        self.fleet.wake()


Turn: TypeAlias = "asyncio.Future[tuple[Place, ...]]"


class Fleet:
    """All engines; hands out places on them."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        policies: dict[Role, Policy],
        engine_limit: int,
        queue_max: int,
    ) -> None:
        self.engines = tuple(engines)
        self._policies = policies
        self._engine_limit = engine_limit
        self._queue_max = queue_max
        self._waiting: deque[tuple[tuple[Wanted, ...], Turn]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def of(self, role: Role) -> list[Engine]:
        """Those of a role."""
        return [each for each in self.engines if each.role is role]

    def usable(self, role: Role) -> list[Engine]:
        """Those of a role that are in. Raises `NoEngineError` if none is."""
        engines = [each for each in self.of(role) if each.met is not None]
        if not engines:
            raise NoEngineError(role, "; ".join(f"{e.url}: {e.why_out}" for e in self.of(role)))
        return engines

    async def take(self, *wanted: Wanted) -> tuple[Place, ...]:
        """Engines with a place taken on each, all at once, so that nobody holds one and waits.

        Raises `NoEngineError`, and `CapacityError` when too many wait already.
        """
        taken = self._try(wanted)
        if taken is not None:
            return taken
        if len(self._waiting) >= self._queue_max:
            raise CapacityError("queue_max", self._queue_max)
        turn: Turn = asyncio.get_running_loop().create_future()
        entry = (wanted, turn)
        self._waiting.append(entry)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                for place in turn.result():
                    place.free()
            raise
        finally:
            self._waiting.remove(entry)

    def _try(self, wanted: Sequence[Wanted]) -> tuple[Place, ...] | None:
        chosen = []
        for want in wanted:
            usable = self.usable(want.role)
            fresh = [each for each in usable if each.url not in want.tried]
            free = [each for each in fresh or usable if each.in_flight < self._engine_limit]
            if not free:
                return None
            chosen.append(self._policies[want.role].choose(free, want.head))
        for engine, want in zip(chosen, wanted, strict=True):
            engine.in_flight += 1
            engine.tokens += want.tokens
        return tuple(
            Place(engine=engine, tokens=want.tokens, fleet=self)
            for engine, want in zip(chosen, wanted, strict=True)
        )

    def wake(self) -> None:
        """Something has changed: those who wait get what there is, the first one first.

        One that waits for engines of another role is passed over until those are free.
        """
        for wanted, turn in self._waiting:
            if turn.done():
                continue
            try:
                taken = self._try(wanted)
            except NoEngineError as error:
                turn.set_exception(error)
                continue
            if taken is not None:
                turn.set_result(taken)
