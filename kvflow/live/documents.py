"""What `top` and `inspect` know, as JSON for scripts. Schema, version 1: see specs/live.md."""

import time
from collections.abc import Iterator, Sequence

import msgspec

from kvflow.ids import Address
from kvflow.live.client import Found, OfWorker
from kvflow.live.polling import View
from kvflow.wire import live

VERSION = 1


def of_top(views: Sequence[View], stuck_s: float) -> bytes:
    """One document, on one line."""
    document = {
        "v": VERSION,
        "t": round(time.time(), 3),
        "engines": [_engine(view) for view in views],
        "transfers": sorted(
            (row for view in views for row in _transfers(view, stuck_s)),
            key=lambda row: -float(str(row["in_state_ms"])),
        ),
    }
    return msgspec.json.encode(document) + b"\n"


def of_inspect(address: Address, found: Found) -> bytes:
    """One document, on one line."""
    document = {
        "v": VERSION,
        "t": round(time.time(), 3),
        "engine": str(address),
        "engine_id": found.engine.engine_id,
        "role": found.engine.role,
        "transfer": found.transfers[0],
        "errors": found.errors,
        "records": [
            {"rank": f"pp{each.pp_rank}.tp{each.tp_rank}", **_record(record)}
            for each in found.telling
            for record in each.records
        ],
    }
    return msgspec.json.encode(document) + b"\n"


def _engine(view: View) -> dict[str, object]:
    told, engine = view.told, view.engine
    return {
        "engine": str(view.address),
        "engine_id": told.engine_id if told else None,
        "role": told.role if told else None,
        "error": (engine.error or None) if engine else "not asked to the end yet",
        "failing_s": round(view.failing_s, 3) if view.failing_s else None,
        "ranks": [_rank(each) for each in engine.workers] if engine else [],
    }


def _rank(worker: OfWorker) -> dict[str, object]:
    told = worker.told
    if told is None:
        return {"rank": str(worker.rank), "error": worker.error}
    counts: dict[str, dict[str, int]] = {}
    for each in told.population:
        counts.setdefault(each.machine, {})[each.state] = each.count
    return {
        "rank": str(worker.rank),
        "error": None,
        "counts": counts,
        "live": told.live,
        "left_out": max(told.live - len(told.transfers), 0),
        "peers": [plain(each) for each in told.peers],
    }


def _transfers(view: View, stuck_s: float) -> Iterator[dict[str, object]]:
    for worker in view.engine.workers if view.engine else ():
        for row in worker.told.transfers if worker.told else ():
            yield {
                "engine": str(view.address),
                "rank": str(worker.rank),
                **plain(row),
                "stuck": row.in_state_ms >= stuck_s * 1000,
            }


def _record(record: live.Record) -> dict[str, object]:
    return {
        **plain(record.row),
        "spent_ms": dict(record.spent_ms),
        "deadlines": [plain(each) for each in record.deadlines],
        "ranks": [plain(each) for each in record.ranks],
        "facts": dict(record.facts),
        "history": [plain(each) for each in record.history],
        "peer_record": plain(record.peer) if record.peer else None,
        "detail": record.detail,
    }


def plain(row: live.Row) -> dict[str, object]:
    """By name, what travels as an array."""
    return msgspec.structs.asdict(row)
