"""What a worker's driver reports, as log lines, trace lines and counts.

One debug line per transition; one info line per transfer that ended well, one warning per transfer
that did not; what is refused or ignored is counted by kind, and warned of when the kind is new and
each time its count has grown tenfold.
"""

import logging

from kvflow.core import REASONS, TABLES, Reason
from kvflow.core.effects import Moved
from kvflow.observe.log import get_logger
from kvflow.observe.meter import Meter
from kvflow.observe.observer import Carried
from kvflow.observe.trace import TraceWriter

_TERMINAL = {table.name: table.terminal for table in TABLES}
_EXPECTED = frozenset({Reason.ABORTED, Reason.CANCELLED, Reason.RELEASED, Reason.SHUTDOWN})
"""Ends without KV that somebody here asked for."""


class Watch:
    """The driver's observer."""

    def __init__(
        self, trace: TraceWriter | None = None, meter: Meter | None = None, **fields: object
    ) -> None:
        self._trace = trace
        self._meter = meter or Meter("")
        self._log = get_logger("transfers", **fields)

    def moved(self, moved: Moved) -> None:
        """A record took a row."""
        self._meter.moved(moved)
        if self._trace is not None:
            self._trace.moved(moved)
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug(
                f"{moved.machine} {moved.source} -> {moved.dest}",
                trigger=moved.trigger,
                transfer=moved.key,
                request=moved.request_id,
                attempt=moved.attempt,
            )
        if moved.dest in _TERMINAL[moved.machine]:
            self._ended(moved)
        elif moved.machine == "peer" and moved.dest == "backing_off":
            self._log.warning("peer lost or not reached", peer=moved.key, detail=moved.detail)

    def carried(self, carried: Carried) -> None:
        """A WRITE or READ order is over."""
        self._meter.carried(carried)
        if self._trace is not None:
            self._trace.carried(carried)

    def ignored(self, kind: str, key: str) -> None:
        """Something was ignored, by kind."""
        count = self._meter.ignored(kind)
        self._log.debug(f"ignored {kind}", key=key, count=count)

    def refused(self, kind: str, detail: str) -> None:
        """A peer, or a message of one, was refused."""
        count = self._meter.refused(kind)
        if count in (1, 10, 100, 1000) or count % 10_000 == 0:
            self._log.warning(f"refused {kind}", detail=detail, count=count)

    def failed(self, what: str, error: BaseException) -> None:
        """A bug of ours."""
        self._meter.failed()
        self._log.error(f"failed: {what}", error=error, exc_info=error)

    def _ended(self, moved: Moved) -> None:
        spent = {f"{state}_ms": f"{ms:.1f}" for state, ms in (moved.spent_ms or {}).items()}
        fields: dict[str, object] = {
            "transfer": moved.key,
            "request": moved.request_id,
            "attempt": moved.attempt,
            "peer": moved.peer,
        }
        if moved.reason is None:
            if moved.machine == "producer" or moved.bytes:
                fields |= {"bytes": moved.bytes, "runs": moved.runs}
            self._log.info(f"{moved.machine} {moved.dest}", **fields, **spent)
            return
        fields |= {"reason": moved.reason, "meaning": REASONS[moved.reason]}
        if moved.detail:
            fields["detail"] = moved.detail
        tell = self._log.info if moved.reason in _EXPECTED else self._log.warning
        tell(f"{moved.machine} {moved.dest}", **fields, **spent)
