"""A worker's window: where whoever may ask is shown the transfers that are live in it.

Rules: served in the loop thread, since only that may look at the records; read only; one reply is
made at a time, in pieces between which the loop goes on (`kvflow.io.snapshot`); open for as long as
the loop's thread lives, also while its memory is suspended, and then it says so.

The same framing, limits and seal as the side channel, at a port of its own: vLLM's workers may be
other processes than its scheduler, and an idle engine makes no steps, so the scheduler could not
ask them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvflow.ids import Address
from kvflow.io.driver import Driver
from kvflow.io.framing import NO_SEAL, FramedServer
from kvflow.io.seal import Seal
from kvflow.io.snapshot import Snapshot
from kvflow.observe.history import History
from kvflow.wire import codec, live
from kvflow.wire import messages as m

CONNECTIONS_MAX = 16
_SUSPENDED = "this worker's KV memory is suspended (vLLM sleeps): nothing is live in it"
_ANOTHER_QUESTION = "this is a worker's window, which only shows live transfers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """That a worker's transfers may be inspected: where it listens, and what it remembers."""

    host: str
    history: History


class Window(FramedServer):
    """Serves one worker's live transfers.

    driver  called per request; None while the memory is suspended.
    """

    what = "the window of a worker (setting `inspect`)"

    def __init__(
        self,
        inspection: Inspection,
        *,
        driver: Callable[[], Driver | None],
        clock: Callable[[], float],
        refused: Callable[[str, str], None],
        seal: Seal = NO_SEAL,
    ) -> None:
        super().__init__(refused=refused, connections_max=CONNECTIONS_MAX, seal=seal)
        self._inspection = inspection
        self._driver = driver
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self.address: Address | None = None

    async def open(self) -> None:
        """Listen at a free port; no-op if it does. Raises `TransportError`."""
        if self.address is None:
            self.address = await self.start(Address(self._inspection.host, 0))

    async def answer_to(self, request: codec.Request) -> codec.Reply:
        if not isinstance(request, live.LiveRequest | live.InspectRequest):
            return m.Refusal(detail=_ANOTHER_QUESTION)
        async with self._one_at_a_time:
            driver = self._driver()
            if driver is None:
                return m.Refusal(detail=_SUSPENDED)
            snapshot = Snapshot(driver=driver, history=self._inspection.history, clock=self._clock)
            if isinstance(request, live.LiveRequest):
                return await snapshot.of_all(request.limit)
            return await snapshot.of_one(request.name)
