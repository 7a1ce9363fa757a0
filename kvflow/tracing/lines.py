"""The lines that `KVFLOW_TRACE` writes (`kvflow.observe.schema`), as typed values.

    traces = read_all([Path("prefill.ndjson"), Path("decode.ndjson")])

Rules: a key that is not known is passed over; a line that is no JSON object in UTF-8, lacks a
key, or is of another version or of no machine is an `UnreadableTraceError` with file and line; a
last line that is not finished is left out and told in `TraceFile.torn`.

Known limit: all lines are kept in memory, about 1 KB each.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvflow.core import TABLES
from kvflow.errors import KVFlowError
from kvflow.ids import ATTEMPT_STRIDE, PartId, TransferId, transfer_of
from kvflow.observe.schema import ORDERS, READABLE, REQUEST, TRACE

_WITH_STATES = tuple(table.name for table in TABLES)
_MACHINES = (*_WITH_STATES, *ORDERS, REQUEST, TRACE)

Version = Annotated[int, msgspec.Meta(ge=READABLE[0], le=READABLE[-1])]
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
Milliseconds = Annotated[float, msgspec.Meta(ge=-1e14, le=1e14)]


class UnreadableTraceError(KVFlowError):
    """A file that is not a trace: names file, line and what is wrong."""

    def __init__(self, place: str, said: str) -> None:
        super().__init__(f"{place}: {said}")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace. The keys are those of the schema, but for `v`, `from` and `to`.

    place  `file:number`: the reader sets it, and no key of a file has that name.
    """

    place: str = msgspec.field(name="file:number", default="")
    version: Version = msgspec.field(name="v")
    t: Seconds
    engine: str
    rank: str
    machine: str
    id: str
    attempt: int
    request: str | None
    trigger: str
    source: str = msgspec.field(name="from")
    dest: str = msgspec.field(name="to")
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
    def load(self) -> int:
        """Which load of its engine this attempt belongs to: a retry is one more attempt of it."""
        return self.attempt // ATTEMPT_STRIDE

    @property
    def record(self) -> tuple[str, str, str, str]:
        """Which record it is about, within one file: engine, rank, machine, key."""
        key = (self.request or "") if self.machine in ("consumer", REQUEST) else self.id
        return self.engine, self.rank, self.machine, key

    def __str__(self) -> str:
        who = f"{self.engine} {self.rank} {self.machine} {self.id}"
        return f"{who} attempt {self.attempt}: {self.source} --{self.trigger}--> {self.dest}"


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
                place = f"{path}:{number}"
                try:
                    line = _parse(text.decode())
                except ValueError as error:
                    if not raw.endswith(b"\n"):
                        torn = True
                        break
                    raise UnreadableTraceError(place, str(error)) from error
                msgspec.structs.force_setattr(line, "place", place)
                if line.machine == TRACE:
                    truncated = truncated or line.trigger == "truncated"
                else:
                    lines.append(line)
    except OSError as error:
        raise UnreadableTraceError(str(path), f"cannot be read: {error.strerror}") from error
    return TraceFile(path=path, lines=tuple(lines), torn=torn, truncated=truncated)


def _parse(text: str) -> Line:
    """Raises `ValueError` that says what is wrong."""
    try:
        line = _LINE.decode(text)
    except ValueError as error:
        raise ValueError(_fault(text, error)) from error
    if line.machine not in _MACHINES:
        raise ValueError(f"machine {line.machine!r} is not one of {', '.join(_MACHINES)}")
    if line.machine in _WITH_STATES and not (line.source and line.dest):
        raise ValueError(f"a line of the machine {line.machine} lacks from or to")
    return line


def _fault(text: str, error: ValueError) -> str:
    """A line of another version need not have this version's keys: that is said first."""
    try:
        version = _VERSIONED.decode(text).v
    except msgspec.ValidationError:
        return "not a JSON object"
    except ValueError:
        return f"not JSON: {error}"
    if version is None:
        return "the key 'v' is missing: not a line of a trace"
    if type(version) is int and version in READABLE:
        return str(error)
    known = " and ".join(map(str, READABLE))
    return f"schema version {version!r}; this kvflow reads versions {known}"
