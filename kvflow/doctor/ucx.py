"""What UCX says of itself, and its names.

With UCX_LOG_LEVEL=info and UCX_PROTO_INFO=y, UCX (1.12 and newer) prints a table for each kind of
operation and peer, once: which lanes carry which sizes. Its heading names the operation ("remote
memory write by ucp_put*(multi) from host memory to host") and, above that, the peer ("intra-node
cfg#1", "self cfg#0" for the process itself); the row whose range ends in "inf" is that of large
messages. Nothing else tells reliably what is in use: `ucx_info` lists what could be, and does not
come with NIXL.
"""

import re
from collections.abc import Iterator

from kvflow.doctor.facts import Lane, Way

LOGGING = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_COMPLAINT = re.compile(r"UCX\s+ERROR\s+(.*)|^E\d{4} [\d:.]+\s+\d+ \S+\] (.*)", re.MULTILINE)
"""UCX's lines, and those of NIXL's C++ half."""
_CELLS = re.compile(r"\|(.*)\|\s*$")
_RULE = re.compile(r"\+-[-+]*\+\s*$")
_LANE = re.compile(r"\b([a-z][a-z0-9_]*)/([A-Za-z0-9_.:-]+)")
_PUT, _MESSAGE = "remote memory write", "active message"
_COMPLAINTS_SHOWN = 3

SHARED_MEMORY = frozenset(
    {"sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "mem", "memory"}
)
_WAYS = (
    (Way.SHARED, SHARED_MEMORY | {"self"}),
    (Way.TCP, {"tcp"}),
    (Way.GPU, {"cuda_ipc", "rocm_ipc", "ze_ipc"}),
)
_RDMA = ("rc", "dc", "ud", "srd", "gga", "ib")


def way(lane: Lane) -> Way:
    """What kind of transport a lane is."""
    for kind, names in _WAYS:
        if lane.transport in names:
            return kind
    return Way.RDMA if lane.transport.split("_")[0] in _RDMA else Way.OTHER


def version(log: str) -> str:
    """UCX's version; "" if it did not say."""
    found = _VERSION.search(log)
    return found[1] if found else ""


def complaints(log: str) -> tuple[str, ...]:
    """The first errors that UCX and NIXL logged."""
    said = dict.fromkeys((found[1] or found[2]).strip() for found in _COMPLAINT.finditer(log))
    return tuple(said)[:_COMPLAINTS_SHOWN]


def data_lanes(log: str) -> tuple[Lane, ...]:
    """That carry large writes from host memory to another process; the last word counts."""
    return _lanes(log, _PUT)


def notice_lanes(log: str) -> tuple[Lane, ...]:
    """That carry notifications to another process."""
    return _lanes(log, _MESSAGE)


def without_shared_memory(tls: str | None) -> str | None:
    """UCX_TLS as it would be if there were no shared memory; None if nothing were left."""
    if not tls or tls == "all":
        return "^sm"
    if tls.startswith("^"):
        return f"{tls},sm"
    kept = [name for name in tls.split(",") if name.lstrip("\\") not in SHARED_MEMORY]
    return ",".join(kept) if set(kept) - {"self"} else None


def _lanes(log: str, operation: str) -> tuple[Lane, ...]:
    lanes: tuple[Lane, ...] = ()
    for peer, title, rows in _tables(log):
        if " self " in f" {peer} " or not title.startswith(operation):
            continue
        for span, _, config in rows:
            if span.endswith("inf"):
                found = dict.fromkeys(_LANE.findall(config))
                lanes = tuple(Lane(transport=name, device=device) for name, device in found)
    return lanes


def _tables(log: str) -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Peer, operation, rows (range, description, lanes) of each table."""
    heading: list[str] = []
    rows: list[tuple[str, str, str]] = []
    for line in log.splitlines():
        if _RULE.search(line):
            if rows:
                if len(heading) > 1:
                    yield heading[0], heading[1], rows
                heading, rows = [], []
            continue
        found = _CELLS.search(line)
        if found is None:
            heading, rows = [], []
            continue
        cells = [cell.strip() for cell in found[1].split("|")]
        if len(cells) == 1:
            heading.append(cells[0])
        elif len(cells) == 3 and cells[0] != "Range":
            rows.append((cells[0], cells[1], cells[2]))
