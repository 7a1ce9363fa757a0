"""The lines that `KVFLOW_TRACE` writes, schema versions 1 and 2, as typed values.

    traces = read_all([Path("prefill.ndjson"), Path("decode.ndjson")])

Rules: a key that is not known is passed over; a line that is no JSON object, lacks a key or is of
another version is an `UnreadableTraceError` with file and line; a last line that is not finished
is left out and told in `TraceFile.torn`.

The schema is in specs/tracing.md. Known limit: all lines are kept in memory, about 1 KB each.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvflow.errors import KVFlowError
from kvflow.ids import PartId, TransferId, transfer_of

VERSIONS = (1, 2)
REQUEST = "request"
"""Machine of the lines that tell of vLLM's side."""
WRITE = "write"
READ = "read"
ORDERS = (WRITE, READ)
"""Machines of the lines that tell of one WRITE or READ order."""
TRACE = "trace"
"""Machine of the lines that tell of the trace itself."""
_MACHINES_WITH_STATES = ("producer", "consumer", "peer")

Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
Milliseconds = Annotated[float, msgspec.Meta(ge=-1e14, le=1e14)]


class UnreadableTraceError(KVFlowError):
    """A file that is not a trace: names file, line and what is wrong."""

    def __init__(self, place: str, said: str) -> None:
        super().__init__(f"{place}: {said}")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace. The keys are those of the schema, but for `from` and `to`."""

    version: int = msgspec.field(name="v")
    t: Seconds
    engine: str
    rank: str = ""
    machine: str
    id: str = ""
    attempt: int = 0
    request: str | None = None
    trigger: str
    source: str = msgspec.field(name="from", default="")
    dest: str = msgspec.field(name="to", default="")
    reason: str | None = None
    detail: str | None = None
    peer: str | None = None
    role: str | None = None
    tokens: int | None = None
    arrival: Seconds | None = None
    began: Seconds | None = None
    bytes: int | None = None
    runs: int | None = None
    posts: int | None = None
    ms: dict[str, Milliseconds] | None = None

    @property
    def transfer(self) -> TransferId:
        """The transfer that it is about; "" if it is about none, or its parameters named none."""
        return transfer_of(PartId(TransferId(self.id)))

    @property
    def record(self) -> tuple[str, str, str, str]:
        """Which record it is about, within one file: engine, rank, machine, key."""
        key = (self.request or "") if self.machine in ("consumer", REQUEST) else self.id
        return self.engine, self.rank, self.machine, key


class _Versioned(msgspec.Struct):
    v: object = None


_LINE = msgspec.json.Decoder(Line)
_VERSIONED = msgspec.json.Decoder(_Versioned)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """One file. `torn`: its last line was not finished. `truncated`: a size bound stopped it."""

    path: Path
    lines: tuple[Line, ...]
    torn: bool
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """All files that were given, in the order given."""

    files: tuple[TraceFile, ...]

    def __iter__(self) -> Iterator[Line]:
        for file in self.files:
            yield from file.lines

    def notes(self) -> list[str]:
        """What a reader has to know of how complete the files are."""
        notes = [f"{file.path}: the last line is not finished; left out" for file in self.torn()]
        notes += [
            f"{file.path}: a size bound stopped this trace; what came later is missing"
            for file in self.files
            if file.truncated
        ]
        return notes

    def torn(self) -> list[TraceFile]:
        return [file for file in self.files if file.torn]


def micros(seconds: float) -> int:
    """Whole microseconds: the resolution of a trace."""
    return round(seconds * 1e6)


def is_of(peer: str | None, engine: str, rank: str) -> bool:
    """Whether this agent name is that worker's (`kvflow.connector.worker` makes the names)."""
    return peer is not None and (peer == engine or peer.startswith(f"{engine[:32]}/{rank}/"))


def read_all(paths: Iterable[Path]) -> Traces:
    """Read all files; one that is given twice counts once. Raises `UnreadableTraceError`."""
    return Traces(files=tuple(_read(path) for path in dict.fromkeys(paths)))


def _read(path: Path) -> TraceFile:
    lines: list[Line] = []
    torn = truncated = False
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.strip()
                if not text:
                    continue
                try:
                    line = _parse(text)
                except ValueError as error:
                    if not raw.endswith(b"\n"):
                        torn = True
                        break
                    raise UnreadableTraceError(f"{path}:{number}", str(error)) from error
                if line.machine == TRACE:
                    truncated = truncated or line.trigger == "truncated"
                else:
                    lines.append(line)
    except OSError as error:
        raise UnreadableTraceError(str(path), f"cannot be read: {error.strerror}") from error
    return TraceFile(path=path, lines=tuple(lines), torn=torn, truncated=truncated)


def _parse(text: bytes) -> Line:
    """Raises `ValueError` that says what is wrong."""
    try:
        line = _LINE.decode(text)
    except ValueError as error:
        raise ValueError(_fault(text, error)) from error
    if line.version not in VERSIONS:
        raise ValueError(_of_another_version(line.version))
    if line.machine in _MACHINES_WITH_STATES and not (line.source and line.dest):
        raise ValueError(f"a line of the machine {line.machine} lacks from or to")
    return line


def _fault(text: bytes, error: ValueError) -> str:
    """A line of another version need not have this version's keys: that is said first."""
    try:
        version = _VERSIONED.decode(text).v
    except msgspec.ValidationError:
        return "not a JSON object"
    except ValueError:
        return f"not JSON: {error}"
    if version is None:
        return "the key 'v' is missing: not a line of a trace"
    known = type(version) is int and version in VERSIONS
    return str(error) if known else _of_another_version(version)


def _of_another_version(version: object) -> str:
    known = " and ".join(map(str, VERSIONS))
    return f"schema version {version!r}; this kvflow reads versions {known}"
