"""`kvflow inspect`'s text: one transfer as all ranks of one engine know it."""

from collections.abc import Iterator

from kvflow.ids import Address
from kvflow.live.client import Found
from kvflow.live.words import duration, megabytes, printable
from kvflow.wire import live


def account(address: Address, found: Found) -> str:
    """All of it, a line per thing."""
    return "\n".join(printable(line) for line in _lines(address, found)) + "\n"


def _lines(address: Address, found: Found) -> Iterator[str]:
    engine = found.engine
    yield f"{found.transfers[0]} at {address} ({engine.role}, engine {engine.engine_id})"
    for each in found.telling:
        for record in each.records:
            yield ""
            yield from _record(f"pp{each.pp_rank}.tp{each.tp_rank}", record)


def _record(rank: str, record: live.Record) -> Iterator[str]:
    row = record.row
    part = f", part {row.part}" if row.part else ""
    yield f"{rank} as {row.machine}{part}, request {row.request_id or 'not known'}"
    yield _line("state", f"{row.state} for {duration(row.in_state_ms)}{_why(record)}")
    yield _line("waits for", row.waits_for)
    for each in record.ranks:
        yield _line("", _rank(each))
    yield _line("age", duration(row.total_ms) + (f", attempt {row.attempt}" if row.attempt else ""))
    if row.bytes:
        yield _line("moved", f"{megabytes(row.bytes)} MB")
    for title, deadline in _titled("deadlines", record.deadlines):
        yield _line(title, _deadline(deadline))
    if record.peer is not None:
        yield _line("peer", _peer(record.peer))
    yield from _history(record)
    spent = ", ".join(f"{state} {duration(ms)}" for state, ms in record.spent_ms)
    if spent:
        yield _line("spent in", spent)
    if record.facts:
        yield _line("on record", ", ".join(f"{name}: {value}" for name, value in record.facts))


def _line(title: str, text: str) -> str:
    return f"  {title:<10} {text}".rstrip()


def _titled(title: str, items: tuple[live.Deadline, ...]) -> Iterator[tuple[str, live.Deadline]]:
    for number, item in enumerate(items):
        yield ("" if number else title), item


def _why(record: live.Record) -> str:
    told = [str(record.row.reason)] if record.row.reason else []
    told += [record.detail] if record.detail else []
    return f" ({': '.join(told)})" if told else ""


def _rank(each: live.RankRow) -> str:
    named = f"pp{each.pp_rank}.tp{each.tp_rank}, {each.agent}"
    told = each.outcome or (f"awaited: {each.awaits}" if each.awaits else "nothing is awaited")
    missed = f", {each.misses} renewals unanswered" if each.misses else ""
    return f"{named}: {told}{missed}"


def _deadline(each: live.Deadline) -> str:
    passed = each.in_ms < 0
    when = f"{duration(-each.in_ms)} ago" if passed else f"in {duration(each.in_ms)}"
    leads = f" -> {each.dest}" if each.dest else ""
    return f"{when}, {each.what}{leads}" + (f": {each.why}" if each.why else "")


def _peer(each: live.PeerRow) -> str:
    silent = f", silent for {duration(each.silent_ms)}" if each.silent_ms is not None else ""
    told = f"{each.key} {each.state} for {duration(each.in_state_ms)}{silent}"
    return told + (f" ({each.detail})" if each.detail else "")


def _history(record: live.Record) -> Iterator[str]:
    for number, each in enumerate(record.history):
        why = f" ({each.reason})" if each.reason else ""
        told = f"{duration(each.ago_ms):>12} ago  {each.trigger}: {each.source} -> {each.dest}{why}"
        yield _line("" if number else "history", told)
