"""Writes the NDJSON trace (`kvflow.observe.schema`): one line per transition, and a few more.

A line is written at once, and whole, so that a file may have several writers.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping

from kvflow.core.effects import Moved
from kvflow.errors import ConfigurationError
from kvflow.ids import Rank
from kvflow.observe.log import get_logger
from kvflow.observe.observer import Carried
from kvflow.observe.schema import REQUEST, TRACE, VERSION

ENVIRONMENT = "KVFLOW_TRACE"
ENVIRONMENT_MB_MAX = "KVFLOW_TRACE_MB_MAX"
MB_MAX = 256.0
"""A request takes 3 to 6 kB on each side."""


class TraceWriter:
    """Appends to one file, until it is full or cannot be written to."""

    def __init__(
        self, path: str, *, engine_id: str, rank: Rank | str, mb_max: float = MB_MAX
    ) -> None:
        """`%p` in `path` is replaced by the process id. Raises `OSError`."""
        path = path.replace("%p", str(os.getpid()))
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._head = {"v": VERSION, "engine": engine_id, "rank": str(rank)}
        self._offset_s = time.time() - time.monotonic()
        self._bytes_left = int(mb_max * 1e6) - os.fstat(self._fd).st_size
        self._log = get_logger("trace", engine=engine_id[:8])

    @property
    def is_open(self) -> bool:
        """Whether lines are still written."""
        return self._fd >= 0

    def moved(self, moved: Moved) -> None:
        """A transition."""
        optional: dict[str, object] = {
            "reason": moved.reason,
            "detail": moved.detail,
            "peer": moved.peer,
            "bytes": moved.bytes,
            "runs": moved.runs,
        }
        line = self._line(
            moved.at,
            machine=moved.machine,
            key=moved.key,
            attempt=moved.attempt,
            request_id=moved.request_id,
            step=(moved.trigger, moved.source, moved.dest),
        )
        line |= {key: value for key, value in optional.items() if value}
        if moved.spent_ms is not None:
            line["ms"] = {state: round(ms, 3) for state, ms in moved.spent_ms.items()}
        self._write(line)

    def carried(self, carried: Carried) -> None:
        """A WRITE or READ is over."""
        line = self._line(
            carried.at,
            machine=carried.kind,
            key=carried.key,
            attempt=carried.attempt,
            request_id=carried.request_id,
            step=(carried.outcome, "posted", carried.outcome),
        )
        line |= {
            "peer": carried.peer,
            "bytes": carried.bytes,
            "runs": carried.runs,
            "posts": carried.posts,
            "began": round(carried.began + self._offset_s, 6),
            "ms": {
                "plan": round(carried.plan_s * 1000, 3),
                "post": round(carried.post_s * 1000, 3),
            },
        }
        self._write(line)

    def request(
        self,
        transfer_id: str,
        request_id: str,
        source: str,
        dest: str,
        fields: Mapping[str, object],
    ) -> None:
        """A request, as vLLM's scheduler sees it, now."""
        line = self._line(
            time.monotonic(),
            machine=REQUEST,
            key=transfer_id,
            attempt=0,
            request_id=request_id,
            step=(dest, source, dest),
        )
        self._write({**line, **fields})

    def close(self) -> None:
        """Write nothing more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _line(
        self,
        at: float,
        *,
        machine: str,
        key: str,
        attempt: int,
        request_id: str | None,
        step: tuple[str, str, str],
    ) -> dict[str, object]:
        trigger, source, dest = step
        return {
            **self._head,
            "t": round(at + self._offset_s, 6),
            "machine": machine,
            "id": key,
            "attempt": attempt,
            "request": request_id,
            "trigger": trigger,
            "from": source,
            "to": dest,
        }

    def _write(self, line: Mapping[str, object]) -> None:
        if self._fd < 0:
            return
        text = _encode(line)
        self._bytes_left -= len(text)
        try:
            if self._bytes_left >= 0:
                os.write(self._fd, text)
                return
            end = self._line(
                time.monotonic(),
                machine=TRACE,
                key="",
                attempt=0,
                request_id=None,
                step=("truncated", "open", "closed"),
            )
            os.write(self._fd, _encode(end))
            self._log.warning("trace ends here: it has reached its limit", limit=ENVIRONMENT_MB_MAX)
        except OSError as error:
            self._log.warning("trace ends here", error=error)
        self.close()


def _encode(line: Mapping[str, object]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def from_environment(engine_id: str, rank: Rank | str) -> TraceWriter | None:
    """The trace that `KVFLOW_TRACE` asks for, if it does.

    Raises `OSError`, and `ConfigurationError` if the limit is no number above 0.
    """
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    given = os.environ.get(ENVIRONMENT_MB_MAX) or str(MB_MAX)
    try:
        mb_max = float(given)
    except ValueError:
        mb_max = 0.0
    if not 0 < mb_max < float("inf"):
        raise ConfigurationError(ENVIRONMENT_MB_MAX, given, "a number of megabytes above 0")
    return TraceWriter(path, engine_id=engine_id, rank=rank, mb_max=mb_max)
