"""A heap of named deadlines: at most one per key, re-armed and cancelled in O(log n).

Re-arming leaves the old entry in the heap; it is recognised by its serial and dropped when it
surfaces. The heap is rebuilt when more than half of it is such leftovers.
"""

import heapq
from collections.abc import Hashable

_REBUILD_FROM = 64
_Entry = tuple[float, int, Hashable]
"""When, serial, key."""


class Deadlines:
    """Invariant: every armed key has exactly one live entry in the heap."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._armed: dict[Hashable, _Entry] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._armed)

    def arm(self, key: Hashable, at: float) -> None:
        """Set `key`'s deadline, replacing one that it may have."""
        self._serial += 1
        self._armed[key] = entry = (at, self._serial, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > max(_REBUILD_FROM, 2 * len(self._armed)):
            self._heap = list(self._armed.values())
            heapq.heapify(self._heap)

    def cancel(self, key: Hashable) -> None:
        """Forget `key`'s deadline; no-op if it has none."""
        self._armed.pop(key, None)

    def at(self, key: Hashable) -> float | None:
        """When `key` is due, or None if it has no deadline."""
        entry = self._armed.get(key)
        return entry[0] if entry is not None else None

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap and self._armed.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Hashable | None:
        """Remove and return one key whose deadline is not after `now`, earliest first."""
        at = self.next()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._armed[key]
        return key
