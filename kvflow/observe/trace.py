"""The NDJSON trace: one line per transition.

Schema, version 1; optional keys are there when they are known:

v        1
t        Unix time in seconds
engine   engine id
rank     "pp0.tp0"
machine  "producer", "consumer" or "peer"
id       transfer id, or a peer's address or agent name
attempt  number of the registration, 0 when there is none
request  vLLM's request id
trigger, from, to
         the row that was taken
reason   why a transfer ended without its KV (optional)
detail   what the far side or a library said (optional)
peer     the other side (optional)
bytes, runs
         what was written by this producer, or read by this consumer (optional)
ms       milliseconds spent in each state, when the transfer is over (optional)
"""

import json
import os
import time
from typing import TextIO

from kvflow.core.effects import Moved
from kvflow.ids import Rank

VERSION = 1
ENVIRONMENT = "KVFLOW_TRACE"


class TraceWriter:
    """Appends to one file, a line at a time, flushed."""

    def __init__(self, path: str, *, engine_id: str, rank: Rank) -> None:
        """`%p` in `path` is replaced by the process id. Raises `OSError`."""
        self._file: TextIO = open(  # noqa: SIM115
            path.replace("%p", str(os.getpid())), "a", encoding="utf-8", buffering=1
        )
        self._head = {"v": VERSION, "engine": engine_id, "rank": str(rank)}
        self._offset_s = time.time() - time.monotonic()

    def write(self, moved: Moved) -> None:
        """One line."""
        line: dict[str, object] = {
            **self._head,
            "t": round(moved.at + self._offset_s, 6),
            "machine": moved.machine,
            "id": moved.key,
            "attempt": moved.attempt,
            "request": moved.request_id,
            "trigger": moved.trigger,
            "from": moved.source,
            "to": moved.dest,
        }
        optional = {
            "reason": moved.reason,
            "detail": moved.detail,
            "peer": moved.peer,
            "bytes": moved.bytes,
            "runs": moved.runs,
        }
        line |= {key: value for key, value in optional.items() if value}
        if moved.spent_ms is not None:
            line["ms"] = {state: round(ms, 3) for state, ms in moved.spent_ms.items()}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def from_environment(engine_id: str, rank: Rank) -> TraceWriter | None:
    """The trace that `KVFLOW_TRACE` asks for, if it does."""
    path = os.environ.get(ENVIRONMENT)
    return TraceWriter(path, engine_id=engine_id, rank=rank) if path else None
