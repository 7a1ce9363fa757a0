"""An analysis in a terminal: bars that are as wide as it is, or letters where there are no colours.

Rules: whatever comes from a trace was said by engines and their peers, so it is shown as plain
text: control characters are spelled out, and nothing in it is taken for markup.
"""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvflow.observe.schema import ORDERS
from kvflow.tracing.figures import (
    Analysis,
    Spread,
    endings,
    parts_seen,
    time_in_states,
    unfinished,
    where_time_went,
)
from kvflow.tracing.lines import Line, micros
from kvflow.tracing.parts import LOOKS, Part
from kvflow.tracing.transfers import Event, Transfer
from kvflow.tracing.waterfall import COUNTED, TO_FIRST_TOKEN, Outcome, Waterfall

UNFINISHED_SHOWN_MAX = 20
_BAR_MIN = 20
_ID_CHARS_MAX = 24
_NAME_CHARS_MIN = 8


def plain(text: str) -> str:
    """Text of a trace without anything that a terminal would obey."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def shortened(text: str, most: int) -> str:
    """The middle goes: ids often begin alike and differ at the end."""
    text = plain(text)
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[head + 1 - most :]}"


def short_names(engines: Iterable[str]) -> dict[str, str]:
    """The beginning of each engine's id that no other one has, of eight characters at least."""
    known = list(engines)
    names = {}
    for engine in known:
        others = [other for other in known if other != engine]
        length = _NAME_CHARS_MIN
        while length < len(engine) and any(o.startswith(engine[:length]) for o in others):
            length += 1
        names[engine] = plain(engine[:length])
    return names


def remarks(line: Line) -> str:
    """What a line says besides its transition."""
    said = [f"attempt {line.attempt}"] if line.attempt else []
    said += [f"reason {line.reason}"] if line.reason else []
    said += [line.detail] if line.detail else []
    said += [f"{line.tokens:,} tokens"] if line.tokens else []
    said += [f"{line.bytes:,} bytes"] if line.bytes else []
    if line.machine in ORDERS and line.began is not None:
        said.append(f"took {milliseconds((micros(line.t) - micros(line.began)) / 1000)} ms")
        said += [f"{name} {milliseconds(ms)}" for name, ms in (line.ms or {}).items()]
    return "; ".join(said)


def milliseconds(ms: float) -> str:
    return f"{ms:,.3f}" if abs(ms) < 10 else f"{ms:,.1f}"


def cells(fall: Waterfall, width: int, scale_us: int) -> list[tuple[Part, int]]:
    """How many characters each segment has, if `scale_us` has `width` of them.

    Rounded at the borders, so that the bar is as long as its span, and no error adds up.
    """
    if scale_us <= 0:
        return []
    borders = [round((s.end - fall.start) * width / scale_us) for s in fall.segments]
    return [
        (segment.part, border - before)
        for segment, before, border in zip(fall.segments, [0, *borders], borders, strict=False)
        if border > before
    ]


def bar(fall: Waterfall, width: int, scale_us: int, console: Console) -> Text:
    """One request's bar: letters, since colours alone tell nothing to some people and terminals."""
    text = Text()
    for part, count in cells(fall, width, scale_us):
        text.append(LOOKS[part].letter * count, style=_paint(part, console))
    return text


def show_summary(analysis: Analysis, shown: Sequence[Waterfall], console: Console) -> None:
    """Bars, then tables of what all requests say together."""
    got = [fall for fall in shown if fall.outcome in COUNTED]
    rest = [fall for fall in shown if fall.outcome not in COUNTED]
    total = sum(fall.outcome in COUNTED for fall in analysis.waterfalls)
    _show_bars("Requests", got, total, console)
    others = len(analysis.waterfalls) - total
    _show_bars("Requests without their KV, or not at their end", rest, others, console)
    _show_where_time_went(analysis, console)
    _show_states(analysis, console)
    _show_endings(analysis, console)
    _show_unfinished(analysis, console)
    _show_clocks(analysis, console)
    for note in analysis.notes():
        console.print(Text(f"note: {plain(note)}"), soft_wrap=True)


def _show_bars(title: str, shown: Sequence[Waterfall], total: int, console: Console) -> None:
    """The longest bar is as wide as the terminal allows."""
    if not total:
        return
    of = f"{len(shown):,} of {total:,}" if len(shown) < total else f"{total:,}"
    console.print(Text(f"{title} ({of})", style="bold"))
    names = [shortened(fall.request.id or "-", _ID_CHARS_MAX) for fall in shown]
    spans = [milliseconds(fall.span_us / 1000) for fall in shown]
    ends = [_ending(fall) for fall in shown]
    widths = [max(map(len, column), default=0) for column in (names, spans, ends)]
    width = max(console.width - sum(widths) - len("  ") * 2 - len(" ms  "), _BAR_MIN)
    scale_us = max((fall.span_us for fall in shown), default=0)
    for fall, name, span, end in zip(shown, names, spans, ends, strict=True):
        line = Text(f"{name:{widths[0]}}  {span:>{widths[1]}} ms  {end:{widths[2]}}  ")
        line.append_text(bar(fall, width, scale_us, console))
        line.rstrip()
        console.print(line, soft_wrap=True)
    if parts := parts_seen(shown):
        _show_legend([(part, "") for part in parts], console)
    console.print()


def _show_legend(parts: Sequence[tuple[Part, str]], console: Console) -> None:
    """What the letters mean; an entry is never broken."""
    line = Text()
    for part, more in parts:
        look = LOOKS[part]
        entry = Text.assemble((f" {look.letter} ", _paint(part, console)), f" {part.value}{more}")
        if line and line.cell_len + 2 + entry.cell_len > console.width:
            console.print(line, soft_wrap=True)
            line = Text()
        line.append("  " if line else "")
        line.append_text(entry)
    console.print(line, soft_wrap=True)


def _paint(part: Part, console: Console) -> str:
    return f"#000000 on {LOOKS[part].colour}" if console.color_system is not None else ""


def _ending(fall: Waterfall) -> str:
    if fall.outcome is Outcome.FIRST_TOKEN:
        return "first token"
    if fall.outcome in TO_FIRST_TOKEN:
        return f"first token, {fall.outcome.value}"
    reason = f" ({plain(fall.reason)})" if fall.reason else ""
    return f"{fall.outcome.value}{reason}"


def _table(title: str, columns: Sequence[str], texts: int) -> Table:
    """The first `texts` columns hold text, the others numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right", no_wrap=True)
    return table


def _numbers(spread: Spread) -> list[str]:
    times = (spread.mean_ms, spread.p50_ms, spread.p90_ms, spread.p99_ms, spread.max_ms)
    return [milliseconds(ms) for ms in times]


def _show_where_time_went(analysis: Analysis, console: Console) -> None:
    spreads = where_time_went(analysis.waterfalls)
    if not spreads[0].count:
        console.print("Where time went: no request has got its first token or its KV", style="bold")
        return
    table = _table(
        f"Where time went, in ms, over {spreads[0].count:,} requests",
        ("part", "mean", "p50", "p90", "p99", "max", "share"),
        1,
    )
    for spread in spreads:
        name = "all of it" if spread.name == "span" else spread.name
        table.add_row(name, *_numbers(spread), f"{spread.share:.1%}")
    console.print(table)


def _show_states(analysis: Analysis, console: Console) -> None:
    table = _table(
        "Seconds in each state",
        ("machine", "state", "visits", "mean", "p50", "p90", "p99", "max"),
        2,
    )
    for each in time_in_states(analysis.traces):
        s = each.spread
        seconds = [s.mean_ms, s.p50_ms, s.p90_ms, s.p99_ms, s.max_ms]
        table.add_row(
            each.machine,
            Text(plain(each.state)),
            f"{s.count:,}",
            *(f"{ms / 1000:,.4f}" for ms in seconds),
        )
    if table.rows:
        console.print(table)


def _show_endings(analysis: Analysis, console: Console) -> None:
    table = _table("Endings", ("machine", "state", "reason", "count"), 3)
    for (machine, state, reason), count in sorted(endings(analysis.traces).items()):
        table.add_row(machine, state, Text(plain(reason)), f"{count:,}")
    if table.rows:
        console.print(table)


def _show_unfinished(analysis: Analysis, console: Console) -> None:
    found = unfinished(analysis)
    if not found:
        return
    names = short_names(analysis.clocks.offsets)
    console.print(Text(f"Unfinished when the traces end ({len(found):,})", style="bold"))
    for each in found[:UNFINISHED_SHOWN_MAX]:
        line = each.line
        where = f"{names[line.engine]} {line.rank}"
        state = f"{line.machine} {line.dest} for {each.for_ms / 1000:,.3f} s on {where}"
        awaits = each.awaits.replace(line.peer or "", _worker(line.peer or ""), 1)
        text = f"{shortened(line.id, _ID_CHARS_MAX)}  {state}: awaits {awaits}"
        console.print(Text(plain(text)), soft_wrap=True)
    if len(found) > UNFINISHED_SHOWN_MAX:
        console.print(f"and {len(found) - UNFINISHED_SHOWN_MAX:,} more")
    console.print()


def _worker(agent: str) -> str:
    """An agent's name without its incarnation, and with a short id of its engine."""
    engine, _, rest = agent.partition("/")
    rank, _, incarnation = rest.partition("/")
    return f"{engine[:_NAME_CHARS_MIN]} {rank}" if incarnation else agent


def _show_clocks(analysis: Analysis, console: Console) -> None:
    clocks = analysis.clocks
    if len(clocks.offsets) < 2:
        return
    title = f"Clocks, in ms ahead of {plain(clocks.reference)}"
    table = _table("", ("engine", "ahead", "± at most", "exchanges"), 1)
    for engine, offset in clocks.offsets.items():
        known = clocks.is_known(engine)
        table.add_row(
            Text(plain(engine)),
            milliseconds(offset.ahead_us / 1000) if known else "taken as 0",
            milliseconds(offset.uncertainty_us / 1000) if known else "unknown",
            f"{offset.exchanges}" if engine != clocks.reference else "reference",
        )
    console.print(Text(title, style="bold"))
    table.title = None
    console.print(table)


def show_transfer(
    transfer: Transfer, falls: Sequence[Waterfall], names: Mapping[str, str], console: Console
) -> None:
    """One transfer's lines of both sides on one clock, and its bars.

    names  of the engines, as `short_names` makes them.
    """
    console.print(Text(f"Transfer {plain(transfer.id)}", style="bold"))
    for fall in falls:
        width = max(console.width - 1, _BAR_MIN)
        head = f"{_ending(fall)}: {milliseconds(fall.span_us / 1000)} ms"
        if fall.request.consumer:
            head += f", request {fall.request.request_id} on {fall.request.consumer}"
        console.print(Text(plain(head)), soft_wrap=True)
        console.print(bar(fall, width, fall.span_us, console), soft_wrap=True)
        legend = [(s.part, f" {milliseconds(s.us / 1000)}") for s in fall.segments]
        _show_legend(legend, console)
        console.print()
    rows = [("ms", "engine", "machine", "trigger", "from -> to", "")]
    rows += [_history_row(event, transfer.start, names) for event in transfer.events]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for at, engine, machine, trigger, moved, more in rows:
        text = (
            f"{at:>{widths[0]}}  {engine:{widths[1]}}  {machine:{widths[2]}}  "
            f"{trigger:{widths[3]}}  {moved:{widths[4]}}  {more}"
        )
        console.print(Text(text.rstrip()), soft_wrap=True)


def _history_row(
    event: Event, start: int, names: Mapping[str, str]
) -> tuple[str, str, str, str, str, str]:
    line = event.line
    engine = f"{names[line.engine]} {line.rank}"
    moved = f"{line.source} -> {line.dest}" if line.source else line.dest
    texts = (engine, line.machine, line.trigger, moved, remarks(line))
    engine, machine, trigger, moved, rest = map(plain, texts)
    return milliseconds((event.at - start) / 1000), engine, machine, trigger, moved, rest
