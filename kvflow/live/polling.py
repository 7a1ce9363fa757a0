"""Engines that are asked again and again, each in its own time: a silent one stops no other."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvflow.ids import Address
from kvflow.live.client import OfEngine
from kvflow.wire import live

Look = Callable[[Address], Awaitable[OfEngine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An engine as it was seen last.

    engine    None: it has not been asked to the end yet.
    told      who it is, or was when it last answered.
    failing_s since when, in seconds, it has not answered; 0 if it has.
    tries     how often in a row it has not.
    """

    address: Address
    engine: OfEngine | None
    told: live.Windows | None
    failing_s: float
    tries: int

    @property
    def answers(self) -> bool:
        """Whether at least one of its workers shows what is live."""
        return self.engine is not None and any(each.told for each in self.engine.workers)


class Polled:
    """One engine."""

    def __init__(
        self, address: Address, look: Look, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._look = look
        self._clock = clock
        self._engine: OfEngine | None = None
        self._told: live.Windows | None = None
        self._failing_since: float | None = None
        self._tries = 0
        self.seen = asyncio.Event()

    async def poll(self, interval_s: float) -> None:
        """Ask for ever, at most every `interval_s`."""
        while True:
            began = self._clock()
            await self.look()
            await asyncio.sleep(max(interval_s - (self._clock() - began), 0.0))

    async def look(self) -> None:
        """Ask once."""
        began = self._clock()
        self._engine = engine = await self._look(self._address)
        self._told = engine.told or self._told
        if engine.error:
            self._tries += 1
            if self._failing_since is None:
                self._failing_since = began
        else:
            self._tries, self._failing_since = 0, None
        self.seen.set()

    @property
    def view(self) -> View:
        """As it was seen last."""
        since = self._failing_since
        return View(
            address=self._address,
            engine=self._engine,
            told=self._told,
            failing_s=self._clock() - since if since is not None else 0.0,
            tries=self._tries,
        )
