"""The last moves of each transfer, for whoever inspects one: a bounded memory of a worker's.

Rules: at most `MOVES_MAX` moves of a transfer and `transfers_max` transfers are remembered; a
forgotten transfer is forgotten here, too. Where there is no more room, those that have ended go
first, oldest first, so that one that is stuck for long keeps its history among many that come and
go.

Known limit: peers' moves are not remembered, only transfers'.
"""

from collections import deque

from kvflow.core import TABLES
from kvflow.core.effects import Moved
from kvflow.observe.meter import Meter
from kvflow.observe.trace import TraceWriter
from kvflow.observe.watch import Watch

MOVES_MAX = 32
TRANSFERS_MAX = 4096
_TERMINAL = {table.name: table.terminal for table in TABLES}
_Key = tuple[str, str, str]
"""Machine, transfer (of a producer: its part), and a consumer's request."""


class History:
    """The last moves by transfer; used in the loop thread only.

    Invariant: a transfer is in at most one of `_live` and `_ended`.
    """

    def __init__(self, transfers_max: int = TRANSFERS_MAX) -> None:
        self._transfers_max = transfers_max
        self._live: dict[_Key, deque[Moved]] = {}
        self._ended: dict[_Key, deque[Moved]] = {}

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def note(self, moved: Moved) -> None:
        """Remember a move."""
        if moved.machine == "peer":
            return
        key = _key(moved.machine, moved.key, moved.request_id)
        moves = self._live.pop(key, None) or self._ended.pop(key, None)
        if moved.dest == "forgotten":
            return
        if moves is None:
            moves = deque(maxlen=MOVES_MAX)
        moves.append(moved)
        over = moved.dest in _TERMINAL[moved.machine]
        (self._ended if over else self._live)[key] = moves
        while len(self) > self._transfers_max:
            oldest = self._ended or self._live
            del oldest[next(iter(oldest))]

    def of(self, machine: str, key: str, request_id: str | None) -> tuple[Moved, ...]:
        """What is remembered of a record, oldest first."""
        named = _key(machine, key, request_id)
        return tuple(self._live.get(named) or self._ended.get(named) or ())


def _key(machine: str, key: str, request_id: str | None) -> _Key:
    """A producer's part keeps its record when another prefill takes its id; a load does not."""
    return machine, key, (request_id or "") if machine == "consumer" else ""


class RememberingWatch(Watch):
    """The observer of a worker whose transfers may be inspected."""

    def __init__(
        self, history: History, trace: TraceWriter | None, meter: Meter | None, **fields: object
    ) -> None:
        super().__init__(trace, meter, **fields)
        self._history = history

    def moved(self, moved: Moved) -> None:
        """A record took a row."""
        self._history.note(moved)
        super().moved(moved)


def watching(
    history: History | None,
    trace: TraceWriter | None = None,
    meter: Meter | None = None,
    **fields: object,
) -> Watch:
    """A worker's observer, which remembers if there is a history."""
    if history is None:
        return Watch(trace, meter, **fields)
    return RememberingWatch(history, trace, meter, **fields)
