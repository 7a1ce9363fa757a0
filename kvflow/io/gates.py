"""Events that wait for a device: what a step computes is complete when its device says so.

Rules: polled, never waited for; in order; an event that was overtaken by a later one of its request
is dropped, for the later one says more (it was finished) or takes it back (it was preempted).
"""

from collections.abc import Callable, Iterator, Sequence

from kvflow.core.events import PrefillAdvanced
from kvflow.ids import RequestId

Ready = Callable[[], bool]


class Gates:
    """Batches of events, each behind a question that is asked until it is answered with yes."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Ready, list[PrefillAdvanced]]] = []

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def add(self, ready: Ready, events: Sequence[PrefillAdvanced]) -> None:
        """Events that count once `ready` says so, after those that were added before."""
        self._waiting.append((ready, list(events)))

    def opened(self) -> Iterator[PrefillAdvanced]:
        """What counts by now, in order."""
        while self._waiting and self._waiting[0][0]():
            yield from self._waiting.pop(0)[1]

    def overtake(self, request_id: RequestId) -> None:
        """A later event of this request is about to be taken."""
        for _, events in self._waiting:
            events[:] = [event for event in events if event.request_id != request_id]
