"""Engines that are asked again and again, by a clock that is set."""

import asyncio

from kvflow.ids import Address, Rank
from kvflow.live.client import OfEngine, OfWorker
from kvflow.live.polling import Polled
from kvflow.wire import live

HERE = Address("10.0.0.1", 5600)
TOLD = live.Windows(engine_id="engine", role="kv_producer", windows=())
NOTHING = live.Live(
    pp_rank=0, tp_rank=0, population=(), live=0, transfers=(), peers_known=0, peers=()
)
GOOD = OfEngine(address=HERE, told=TOLD, workers=(OfWorker(rank=Rank(0, 0), told=NOTHING),))
BAD = OfEngine(address=HERE, error="gone")


class World:
    """Answers in order, and a clock."""

    def __init__(self, *answers: OfEngine) -> None:
        self.now = 100.0
        self._answers = list(answers)
        self.polled = Polled(HERE, self.look, lambda: self.now)

    async def look(self, address: Address) -> OfEngine:
        assert address == HERE
        self.now += 1.0
        return self._answers.pop(0)


def test_an_engine_is_nothing_until_it_was_asked_to_the_end() -> None:
    async def check() -> None:
        world = World(GOOD)
        assert world.polled.view.engine is None
        assert not world.polled.view.answers
        await world.polled.look()
        assert world.polled.view.answers
        assert world.polled.seen.is_set()

    asyncio.run(check())


def test_failures_are_counted_from_when_the_first_was_asked_and_end_with_an_answer() -> None:
    async def check() -> None:
        world = World(BAD, BAD, GOOD, BAD)
        told = []
        for _ in range(4):
            await world.polled.look()
            told.append((world.polled.view.failing_s, world.polled.view.tries))
        assert told == [(1.0, 1), (2.0, 2), (0.0, 0), (1.0, 1)]

    asyncio.run(check())


def test_who_it_was_is_remembered_while_it_is_silent() -> None:
    async def check() -> None:
        world = World(GOOD, BAD)
        await world.polled.look()
        await world.polled.look()
        view = world.polled.view
        assert view.told == TOLD
        assert view.engine == BAD
        assert not view.answers

    asyncio.run(check())


def test_an_engine_of_which_no_worker_answers_shows_nothing() -> None:
    silent = OfEngine(
        address=HERE, told=TOLD, workers=(OfWorker(rank=Rank(0, 0), error="suspended"),)
    )

    async def check() -> None:
        world = World(silent)
        await world.polled.look()
        assert not world.polled.view.answers
        assert world.polled.view.tries == 0

    asyncio.run(check())


def test_it_is_asked_for_ever_until_it_is_cancelled() -> None:
    async def check() -> None:
        world = World(*[GOOD, BAD] * 500)
        task = asyncio.create_task(world.polled.poll(0.0))
        while world.now < 110.0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(check())
