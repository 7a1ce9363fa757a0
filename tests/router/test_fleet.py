"""Places on engines: who gets one, who waits, and that each comes back once."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import CapacityError
from kvflow.router.engines import Engine, Fleet, Met, NoEngineError, Place, Role, Wanted
from kvflow.router.policies import RoundRobin


def fleet(producers: int = 1, consumers: int = 1, *, limit: int = 1, queue_max: int = 100) -> Fleet:
    engines = [Engine(url=f"p{n}", role=Role.PREFILL) for n in range(producers)]
    engines += [Engine(url=f"c{n}", role=Role.DECODE) for n in range(consumers)]
    for each in engines:
        each.enter(Met(models={"m": None}))
    policies = {role: RoundRobin() for role in Role}
    return Fleet(engines, policies=policies, engine_limit=limit, queue_max=queue_max)


def want(role: Role, tried: frozenset[str] = frozenset()) -> Wanted:
    return Wanted(role=role, head=b"", tokens=10, tried=tried)


PREFILL, DECODE = want(Role.PREFILL), want(Role.DECODE)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


def test_a_pair_is_taken_at_once_or_not_at_all() -> None:
    async def work() -> None:
        two = fleet()
        (computing,) = await two.take(PREFILL)
        pair = asyncio.create_task(two.take(PREFILL, DECODE))
        await asyncio.sleep(0)
        (answering,) = await two.take(DECODE)  # nobody holds it while they wait for the other
        computing.free()
        await asyncio.sleep(0)
        assert not pair.done()
        answering.free()
        assert [place.engine.role for place in await pair] == [Role.PREFILL, Role.DECODE]

    run(work())


def test_whoever_waits_longest_is_first_and_nobody_waits_for_another_role() -> None:
    async def work() -> None:
        two = fleet()
        (computing,), (answering,) = await two.take(PREFILL), await two.take(DECODE)
        order: list[str] = []

        async def wait(name: str, wanted: Wanted) -> None:
            (place,) = await two.take(wanted)
            order.append(name)
            place.free()

        waiting = [
            asyncio.create_task(wait(name, wanted))
            for name, wanted in (("a", PREFILL), ("b", PREFILL), ("c", DECODE))
        ]
        await asyncio.sleep(0)
        assert two.waiting == 3
        answering.free()
        await waiting[2]
        assert order == ["c"]
        computing.free()
        await asyncio.gather(*waiting)
        assert order == ["c", "a", "b"]

    run(work())


def test_more_than_may_wait_are_refused_at_once() -> None:
    async def work() -> None:
        two = fleet(queue_max=1)
        (place,) = await two.take(DECODE)
        first = asyncio.create_task(two.take(DECODE))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="queue_max of 1"):
            await two.take(DECODE)
        place.free()
        await first

    run(work())


def test_those_who_wait_for_an_engine_that_goes_out_are_told_why() -> None:
    async def work() -> None:
        two = fleet()
        await two.take(DECODE)
        waiting = asyncio.create_task(two.take(DECODE))
        await asyncio.sleep(0)
        two.of(Role.DECODE)[0].leave("does not answer")
        two.wake()
        with pytest.raises(
            NoEngineError, match="no decode engine can be used: c0: does not answer"
        ):
            await waiting
        with pytest.raises(NoEngineError):
            await two.take(DECODE)
        assert two.waiting == 0

    run(work())


def test_what_was_tried_is_avoided_and_taken_if_there_is_nothing_else() -> None:
    async def work() -> None:
        two = fleet(producers=2, limit=10)
        for _ in range(3):
            (place,) = await two.take(want(Role.PREFILL, frozenset({"p0"})))
            assert place.engine.url == "p1"
        (place,) = await two.take(want(Role.PREFILL, frozenset({"p0", "p1"})))
        assert place.engine.url in ("p0", "p1")

    run(work())


def test_a_place_that_comes_in_the_moment_of_a_cancel_is_not_lost() -> None:
    async def work() -> None:
        two = fleet()
        (place,) = await two.take(DECODE)
        waiting = asyncio.create_task(two.take(DECODE))
        await asyncio.sleep(0)
        place.free()  # it is given to the one that waits,
        waiting.cancel()  # which goes away before it has noticed
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (again,) = await two.take(DECODE)
        again.free()
        again.free()
        assert again.engine.in_flight == 0
        assert again.engine.tokens == 0

    run(work())


@given(seed=st.integers(0, 2**32), limit=st.integers(1, 3))
def test_places_are_counted_right_whoever_takes_frees_waits_or_goes(seed: int, limit: int) -> None:
    source = random.Random(seed)

    async def work() -> None:
        some = fleet(producers=2, consumers=2, limit=limit)
        held: list[Place] = []
        waiting: list[asyncio.Task[tuple[Place, ...]]] = []
        for _ in range(60):
            match source.randrange(5):
                case 0 | 1:
                    wanted = source.choice([(PREFILL,), (DECODE,), (PREFILL, DECODE)])
                    waiting.append(asyncio.create_task(some.take(*wanted)))
                case 2 if held:
                    held.pop(source.randrange(len(held))).free()
                case 3 if waiting:
                    waiting[source.randrange(len(waiting))].cancel()
                case _:
                    await asyncio.sleep(0)
            for task in [task for task in waiting if task.done()]:
                waiting.remove(task)
                if not task.cancelled():
                    held += task.result()
            # Tasks that have a place and were not looked at yet hold one, too.
            assert all(each.in_flight <= limit for each in some.engines)
        for task in waiting:
            task.cancel()
        for done in await asyncio.gather(*waiting, return_exceptions=True):
            held += done if isinstance(done, tuple) else ()
        for place in held:
            place.free()
        assert [(e.in_flight, e.tokens) for e in some.engines] == [(0, 0)] * 4
        assert some.waiting == 0

    run(work())
