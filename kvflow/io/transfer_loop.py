"""One worker's transfers on a thread of their own: the only place where an agent is touched.

Rules: vLLM's thread calls `submit`, `outbox.take` and `outbox.wait`, and never waits for the
network; everything below the port happens in the loop thread.

The idea: one timer calls `Driver.look`, and the engine says how often (`Urgency`). While slices of
a write can be posted, the loop looks again at once, between its other work.
"""

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvflow.core import Urgency
from kvflow.core import events as ev
from kvflow.errors import KVFlowError, TransportError
from kvflow.ids import Address
from kvflow.io.coordinates import Identity
from kvflow.io.driver import Driver
from kvflow.io.gates import Gates, Ready
from kvflow.io.port import Port
from kvflow.io.seal import Seal
from kvflow.io.side_channel import meet
from kvflow.io.thread import LoopThread, Outbox
from kvflow.io.timer import PollTimer
from kvflow.io.window import Inspection, Window
from kvflow.observe.meter import Meter
from kvflow.observe.metrics import Reading
from kvflow.observe.observer import Observer
from kvflow.settings import Settings
from kvflow.wire import codec
from kvflow.wire import messages as m

_Overtaking = ev.PrefillStarted | ev.PrefillFinished | ev.PrefillPreempted | ev.PrefillAborted
"""What overtakes the news of a step that the device has not confirmed yet."""
_Gated = tuple[Ready, Sequence[ev.PrefillAdvanced]]
_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 10.0
"""For what closing takes beside `drain_s`."""


class TransferLoop:
    """Starts with `open`, ends with `close`; between them `submit`.

    make_port   called in the loop thread, so that the agent is born where it lives.
    meter       where this worker's counts are kept.
    inspection  whoever asks is shown what is live, at `window`; None: nobody.
    model_runs  set by vLLM's thread: it computes a step, and takes no report before its end.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        make_port: Callable[[Identity], Port],
        observer: Observer,
        seal: Seal | None = None,
        meter: Meter | None = None,
        name: str = "kvflow",
        clock: Callable[[], float] = time.monotonic,
        inspection: Inspection | None = None,
    ) -> None:
        self.outbox = Outbox()
        self.model_runs = self._paced_for = False
        self._settings = settings
        self._make_port = make_port
        self._observer = observer
        self._meter = meter or Meter("")
        self._clock = clock
        self._seal = seal or Seal()
        self._thread = LoopThread(name)
        self._inbox: deque[ev.Event | _Gated] = deque()
        self._gates = Gates()
        self._port: Port | None = None
        self._driver: Driver | None = None
        self._timer: PollTimer | None = None
        self._soon: asyncio.Handle | None = None
        self._window: Window | None = None
        if inspection is not None:
            self._window = Window(
                inspection,
                driver=lambda: self._driver,
                clock=clock,
                refused=observer.refused,
                seal=self._seal,
            )
        self._meetings: set[asyncio.Task[m.MeetReply]] = set()
        self._intervals_s = {
            Urgency.QUICK: settings.poll_quick_us / 1e6,
            Urgency.AWAITING: settings.poll_awaiting_us / 1e6,
            Urgency.EXPECTANT: settings.poll_expectant_us / 1e6,
            Urgency.IDLE: settings.poll_idle_us / 1e6,
        }

    # -- vLLM's thread -----------------------------------------------------------------------------

    @property
    def native_id(self) -> int | None:
        """The loop thread's id for the system."""
        return self._thread.native_id

    @property
    def window(self) -> Address | None:
        """Where live transfers are shown, once `open` has been called; None: nowhere."""
        return self._window.address if self._window is not None else None

    def read_meter(self) -> Reading:
        """What has changed in the counts since the last call."""
        driver = self._driver
        return self._meter.read(driver.engine.records.population if driver is not None else {})

    def open(self, identity: Identity) -> bytes:
        """Register memory, start looking for news; returns this worker's coordinates, encoded.

        Also used to start again after `suspend`. Raises `TransportError`.
        """
        return self._thread.run(self._open(identity), _START_TIMEOUT_S)

    def submit(self, events: Sequence[ev.Event]) -> None:
        """Hand events over, in order. Returns at once."""
        if events:
            self._inbox.extend(events)
            self._thread.call(self._take_inbox)

    def submit_when(self, ready: Ready, events: Sequence[ev.PrefillAdvanced]) -> None:
        """The same, for events that count once `ready` says so. It is asked in the loop thread."""
        self._inbox.append((ready, events))
        self._thread.call(self._take_inbox)

    def withdraw(self, events: Sequence[ev.PrefillPreempted | ev.PrefillAborted]) -> None:
        """Hand over that vLLM takes running requests' blocks; returns when nothing reads them.

        Nothing is posted from them any more. What is under way has ended within `slice_max_s`, on
        which every promise about blocks rests; no longer is waited, and what such a write brings
        does not count in any case.
        """
        slice_max_s = self._settings.timings.slice_max_s
        try:
            over = self._thread.run(self._withdraw(events, slice_max_s), 2 * slice_max_s)
        except KVFlowError as error:
            self._observer.failed("withdraw", error)
            return
        if not over:
            late = TransportError(f"blocks are still read {slice_max_s} s after they were taken")
            self._observer.failed("withdraw", late)

    def suspend(self) -> None:
        """End what is live, tell the peers, deregister memory; `open` starts again. Idempotent."""
        if self._thread.is_alive:
            drain_s = self._settings.timings.drain_s
            self._thread.run(self._shut(drain_s), drain_s + _CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """`suspend`, then end the thread. Idempotent, bounded by `drain_s` and a little."""
        if not self._thread.is_alive:
            return
        try:
            self.suspend()
        except KVFlowError as error:
            self._observer.failed("close", error)
        if self._window is not None:
            with contextlib.suppress(TransportError):
                self._thread.run(self._window.close(), _CLOSE_TIMEOUT_S)
        if not self._thread.stop():
            self._observer.failed("close", TransportError("the loop thread does not end"))

    # -- loop thread -------------------------------------------------------------------------------

    async def _open(self, identity: Identity) -> bytes:
        if self._driver is not None:
            raise TransportError("the transfer loop is open already")
        if self._window is not None:
            await self._window.open()
        with contextlib.ExitStack() as undo:
            port = self._make_port(identity)
            undo.callback(port.close)
            port.register(identity.regions)
            driver = Driver(
                identity=identity,
                port=port,
                settings=self._settings,
                clock=self._clock,
                seal=self._seal,
                start_meeting=self._start_meeting,
                results=self.outbox,
                observer=self._observer,
                tally=self._meter.tally,
            )
            undo.pop_all()
        self._port, self._driver = port, driver
        self._timer = PollTimer(asyncio.get_running_loop(), self._look)
        self._take_inbox()
        return codec.encode(driver.hello)

    async def _shut(self, drain_s: float) -> None:
        driver, port = self._driver, self._port
        if driver is None or port is None:
            return
        self._take_inbox()
        driver.take(ev.Closing())
        until = self._clock() + drain_s
        while driver.engine.live and self._clock() < until:
            driver.look()
            await asyncio.sleep(0.001)
        for meeting in self._meetings:
            meeting.cancel()
        await asyncio.gather(*self._meetings, return_exceptions=True)
        if self._timer is not None:
            self._timer.close()
        self._driver = self._port = self._timer = None
        self._gates = Gates()
        try:
            port.close()
        finally:
            driver.abandon()

    def _take_inbox(self) -> None:
        driver = self._driver
        if driver is None:
            return
        while self._inbox:
            self._take(driver, self._inbox.popleft())
        self._open_gates(driver)
        self._pace()

    def _take(self, driver: Driver, news: ev.Event | _Gated) -> None:
        if isinstance(news, tuple):
            self._gates.add(*news)
            return
        if self._gates and isinstance(news, _Overtaking):
            self._open_gates(driver)
            self._gates.overtake(news.request_id)
        driver.take(news)

    def _open_gates(self, driver: Driver) -> None:
        for event in self._gates.opened():
            driver.take(event)

    async def _withdraw(
        self, events: Sequence[ev.PrefillPreempted | ev.PrefillAborted], within_s: float
    ) -> bool:
        """Whether nothing reads the blocks any more."""
        driver = self._driver
        if driver is None:
            return True
        self._take_inbox()
        for event in events:
            self._take(driver, event)
        requests = [event.request_id for event in events]
        until = self._clock() + within_s
        while driver.reads(requests) and self._clock() < until:
            driver.look()
            await asyncio.sleep(0.001 if driver.reads(requests) else 0)
        self._pace()
        return not driver.reads(requests)

    def _look(self, late_s: float = 0.0) -> None:
        self._soon = None
        if self._driver is None:
            return
        self._meter.polled(late_s)
        happened = True
        try:
            self._open_gates(self._driver)
            happened = self._driver.look()
        finally:
            if happened or self._gates or self._paced_for != self.model_runs:
                self._pace()

    def _pace(self) -> None:
        """How soon to look again: it stays so until something happens."""
        driver, timer = self._driver, self._timer
        if driver is None or timer is None:
            return
        self._paced_for = self.model_runs
        if driver.can_post:
            timer.set_interval(None)
            self._soon = self._soon or asyncio.get_running_loop().call_soon(self._look)
        else:
            urgency = Urgency.QUICK if self._gates else driver.engine.urgency()
            least_s = self._settings.poll_computing_us / 1e6 if self._paced_for else 0.0
            timer.set_interval(max(self._intervals_s[urgency], least_s))

    def _start_meeting(self, address: Address) -> None:
        driver = self._driver
        assert driver is not None
        asking = meet(
            address,
            driver.identity.engine_id,
            self._settings.timings.meet_deadline_s,
            self._seal,
        )
        task = asyncio.get_running_loop().create_task(asking)
        self._meetings.add(task)
        task.add_done_callback(functools.partial(self._answered, driver, address))

    def _answered(
        self, driver: Driver, address: Address, meeting: asyncio.Task[m.MeetReply]
    ) -> None:
        """A meeting is over: told exactly once, also when it was cancelled before it began."""
        self._meetings.discard(meeting)
        if meeting.cancelled():
            driver.not_met(address, TransportError("cancelled"))
        elif (error := meeting.exception()) is None:
            driver.met(address, meeting.result())
        elif isinstance(error, KVFlowError):
            driver.not_met(address, error)
        else:
            self._observer.failed(f"meeting {address}", error)
            driver.not_met(address, TransportError(repr(error)))
        self._pace()
