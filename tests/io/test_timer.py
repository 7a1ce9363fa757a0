"""`PollTimer` on asyncio and uvloop. Durations are only bounded generously: machines are shared."""

import asyncio
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from kvflow.io.timer import PollTimer

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in a new loop of the kind, within ten seconds."""

    def run_it(coroutine: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(coroutine, 10))

    return run_it


async def count_for(timer_s: float | None, seconds: float) -> int:
    """Ticks that a timer of `timer_s` makes within `seconds`."""
    ticks: list[float] = []
    timer = PollTimer(asyncio.get_running_loop(), ticks.append)
    timer.set_interval(timer_s)
    await asyncio.sleep(seconds)
    timer.close()
    return len(ticks)


def test_ticks_come_below_a_millisecond_and_not_faster_than_asked(run: Run) -> None:
    async def check() -> None:
        start = time.monotonic()
        ticks = await count_for(200e-6, 0.5)
        elapsed_s = time.monotonic() - start
        # A perfect 1 ms timer would make 500.
        assert 20 < ticks <= elapsed_s / 200e-6 + 1

    run(check())


@pytest.mark.parametrize("interval_s", [None, 0, 0.0])
def test_a_disarmed_timer_does_not_tick(run: Run, interval_s: float | None) -> None:
    async def check() -> None:
        assert await count_for(interval_s, 0.05) == 0

    run(check())


def test_an_armed_timer_does_not_spin(run: Run) -> None:
    async def check() -> None:
        cpu_before_s = time.process_time()
        await count_for(0.005, 1.0)
        assert time.process_time() - cpu_before_s < 0.5

    run(check())


def test_ticks_missed_while_the_loop_is_busy_are_one_callback(run: Run) -> None:
    async def check() -> None:
        ticks: list[float] = []
        timer = PollTimer(asyncio.get_running_loop(), ticks.append)
        timer.set_interval(0.05)
        time.sleep(0.3)  # noqa: ASYNC251 - the point of this test
        timer.set_interval(None)
        timer.set_interval(30.0)
        await asyncio.sleep(0.05)
        assert ticks == []  # re-arming forgets what was missed
        timer.set_interval(0.001)
        time.sleep(0.1)  # noqa: ASYNC251
        timer_fired_at_most = 100
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(ticks) < timer_fired_at_most // 2
        assert max(ticks) > 0.05  # by how much the callback came too late
        timer.close()

    run(check())


def test_the_same_interval_again_does_not_push_the_next_tick_away(run: Run) -> None:
    async def check() -> None:
        ticked = asyncio.Event()
        timer = PollTimer(asyncio.get_running_loop(), lambda _: ticked.set())
        timer.set_interval(0.1)
        deadline = time.monotonic() + 5
        while not ticked.is_set() and time.monotonic() < deadline:
            timer.set_interval(0.1)
            await asyncio.sleep(0.01)
        assert ticked.is_set()
        timer.close()

    run(check())


def test_the_interval_can_be_changed_from_inside_the_callback(run: Run) -> None:
    async def check() -> None:
        done = asyncio.Event()
        intervals = [0.002, 0.001, None]

        def tick(late_s: float) -> None:
            interval = intervals.pop(0)
            timer.set_interval(interval)
            if interval is None:
                done.set()

        timer = PollTimer(asyncio.get_running_loop(), tick)
        timer.set_interval(0.001)
        await done.wait()
        await asyncio.sleep(0.05)
        assert intervals == []
        timer.set_interval(0.001)
        intervals.append(None)
        done.clear()
        await done.wait()
        timer.close()

    run(check())


def test_close_is_idempotent_and_can_come_from_the_callback(run: Run) -> None:
    async def check() -> None:
        ticks: list[float] = []

        def tick(late_s: float) -> None:
            ticks.append(late_s)
            timer.close()
            timer.close()

        timer = PollTimer(asyncio.get_running_loop(), tick)
        timer.set_interval(0.001)
        await asyncio.sleep(0.1)
        timer.set_interval(0.001)
        await asyncio.sleep(0.05)
        assert len(ticks) == 1

    run(check())


def test_a_negative_interval_is_refused(run: Run) -> None:
    async def check() -> None:
        timer = PollTimer(asyncio.get_running_loop(), lambda _: None)
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="negative"):
                timer.set_interval(wrong)
        timer.close()

    run(check())
