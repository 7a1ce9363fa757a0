"""Whether each engine is well, and how full: asked at intervals, one task per engine.

An engine that does not answer twice goes out: what is in flight on it and has sent nothing to a
client is ended (and dispatched anew, elsewhere). One that is out is met again, after pauses that
double; until then nothing is sent to it.
"""

import asyncio
import time

import aiohttp
import structlog

from kvflow.router.config import Config
from kvflow.router.engines import Engine, Fleet, Met, Role
from kvflow.router.meeting import MeetingError, Meetings
from kvflow.router.scrape import COMPUTED, COMPUTED_HERE, USAGE, samples

MISSES_MAX = 2
_LOCAL_S = 60.0
"""So long after a request without legs, computed tokens may be its."""


class Watch:
    """Keeps `Engine.met`, `kv_usage` and `computed` up to date."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, meetings: Meetings, config: Config
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._meetings = meetings
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._looked_at: set[str] = set()
        self._suspected = {engine.url: asyncio.Event() for engine in fleet.engines}
        self._log = structlog.get_logger("kvflow.router")

    async def meet_all(self) -> None:
        """Every engine, once: producers first, since consumers are met with them.

        Raises `MeetingError` of the first one that cannot be used.
        """
        for role in Role:
            engines = self._fleet.of(role)
            for engine, met in zip(
                engines, await asyncio.gather(*map(self._meet, engines)), strict=True
            ):
                engine.enter(met)

    def start(self) -> None:
        """From now on each engine is watched."""
        self._tasks = [asyncio.create_task(self._watch(each)) for each in self._fleet.engines]

    async def close(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def suspect(self, engine: Engine) -> None:
        """A connection to it failed: it is asked at once."""
        self._suspected[engine.url].set()

    # -- one engine --------------------------------------------------------------------------------

    async def _meet(self, engine: Engine) -> Met:
        if engine.role is Role.PREFILL:
            return await self._meetings.producer(engine)
        producers = [each for each in self._fleet.of(Role.PREFILL) if each.met is not None]
        if not producers:
            raise MeetingError(
                f"{engine.role} engine {engine.url}: no prefill engine to try it with"
            )
        return await self._meetings.consumer(engine, min(producers, key=lambda e: e.tokens))

    async def _watch(self, engine: Engine) -> None:
        misses, pause_s = 0, self._config.retry_min_s
        while True:
            if engine.met is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.retry_max_s)
                if await self._try_again(engine):
                    misses, pause_s = 0, self._config.retry_min_s
                continue
            await self._interval(engine)
            missed = await self._look(engine)
            misses = 0 if missed is None else misses + 1
            if missed is not None and (misses >= MISSES_MAX or missed.is_refused):
                engine.leave(missed.what)
                self._log.warning("engine is out", engine=engine.url, why=missed.what)
                self._fleet.wake()

    async def _interval(self, engine: Engine) -> None:
        suspected = self._suspected[engine.url]
        try:
            async with asyncio.timeout(self._config.watch_interval_s):
                await suspected.wait()
        except TimeoutError:
            pass
        suspected.clear()

    async def _try_again(self, engine: Engine) -> bool:
        try:
            engine.enter(await self._meet(engine))
        except MeetingError as error:
            engine.why_out = str(error).partition(f"{engine.url}: ")[2]
            return False
        self._log.info("engine is back", engine=engine.url)
        self._fleet.wake()
        return True

    async def _look(self, engine: Engine) -> "Missed | None":
        try:
            async with asyncio.timeout(max(self._config.watch_interval_s, 0.5)):
                async with self._session.get(f"{engine.url}/metrics") as response:
                    text = await response.text()
        except TimeoutError:
            return Missed("does not answer")
        except aiohttp.ClientConnectorError as error:
            return Missed(f"does not listen: {error}", is_refused=True)
        except aiohttp.ClientError as error:
            return Missed(f"does not answer: {type(error).__name__}")
        try:
            engine.kv_usage = max(samples(text, USAGE), default=0.0)
            self._note_computed(engine, sum(samples(text, COMPUTED, source=COMPUTED_HERE)))
        except ValueError as error:
            return Missed(f"has no readable /metrics: {error}")
        return None

    def _note_computed(self, engine: Engine, computed: float) -> None:
        """Warns when a decode engine computes prompts although all of them had legs."""
        is_first = engine.url not in self._looked_at
        self._looked_at.add(engine.url)
        tokens, engine.computed = computed - engine.computed, computed
        had_legs = time.monotonic() - engine.local_at > _LOCAL_S
        if engine.role is Role.DECODE and not is_first and tokens > 0 and had_legs:
            self._log.warning(
                "KV was asked for, but computed locally", engine=engine.url, tokens=round(tokens)
            )


class Missed:
    """An engine has not said how it is.

    is_refused  nobody listens any more, so there is nothing to wait for.
    """

    def __init__(self, what: str, *, is_refused: bool = False) -> None:
        self.what = what
        self.is_refused = is_refused
