"""An analysis as one HTML page that needs nothing else: no network, no other file.

Rules: ids, reasons and details come from the network, so every text goes through `_text`, and the
embedded JSON has no `<`; the page's own policy lets no script run but the one that is here, and
nothing be loaded. Without scripts the bars and tables are there all the same; the script sorts,
filters, and opens a row's history. `page.html#ID` opens the history of that transfer.

Each part of a bar is an element with `data-part` and `data-ms`; their sum is the row's
`data-ttft` exactly, in decimal.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from importlib import resources

import msgspec

from kvflow.tracing.figures import (
    Analysis,
    endings,
    parts_seen,
    time_in_states,
    unfinished,
    where_time_went,
)
from kvflow.tracing.parts import LOOKS, Part
from kvflow.tracing.terminal import milliseconds, plain, remarks, short_names
from kvflow.tracing.transfers import Event, Transfer
from kvflow.tracing.waterfall import COUNTED, TO_FIRST_TOKEN, Outcome, Waterfall

_JSON_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def as_html(analysis: Analysis) -> str:
    """The page."""
    css, script = _resource("page.css"), _resource("page.js")
    css += "".join(f".p-{part.value} {{ background: {LOOKS[part].colour}; }}\n" for part in Part)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    sections = [
        _heading(analysis),
        _legend(analysis),
        _requests(analysis),
        _where_time_went(analysis),
        _unfinished(analysis),
        _clocks(analysis),
        _endings(analysis),
        _states(analysis),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>kvflow trace: {len(analysis.waterfalls):,} requests</title>",
            f"<style>\n{css}</style></head><body>",
            *(section for section in sections if section),
            f'<script type="application/json" id="histories">{_histories(analysis)}</script>',
            f"<script>{script}</script>",
            "</body></html>",
            "",
        ]
    )


def _resource(name: str) -> str:
    return (resources.files("kvflow.tracing") / name).read_text(encoding="utf-8")


def _text(text: object) -> str:
    """Text for an element, or for an attribute in double quotes."""
    return html.escape(plain(str(text)), quote=True)


def _cells(texts: Iterable[object], numbers: Iterable[object] = ()) -> str:
    left = "".join(f'<td class="text">{_text(text)}</td>' for text in texts)
    return left + "".join(f"<td>{_text(number)}</td>" for number in numbers)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th class="text" scope="col">{_text(name)}</th>' for name in texts)
    head += "".join(f'<th scope="col">{_text(name)}</th>' for name in numbers)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<h2>{_text(title)}</h2>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n'
        f"{body}\n</tbody></table></div>"
    )


# -- sections --------------------------------------------------------------------------------------


def _heading(analysis: Analysis) -> str:
    files = analysis.traces.files
    lines = sum(len(file.lines) for file in files)
    engines = len(analysis.clocks.offsets)
    notes = "".join(f"<li>{_text(note)}</li>" for note in analysis.notes())
    return (
        "<h1>Where the time to first token went</h1>"
        f'<p class="soft">{len(analysis.waterfalls):,} requests in {lines:,} lines of '
        f"{len(files):,} files, {engines:,} engines</p>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _legend(analysis: Analysis) -> str:
    entries = "".join(
        f'<li title="{_text(LOOKS[part].meaning)}"><span class="swatch p-{part.value}"></span>'
        f"{_text(_title(part))}</li>"
        for part in parts_seen(analysis.waterfalls)
    )
    return f'<ul class="legend" aria-label="Parts">{entries}</ul>'


def _title(part: Part) -> str:
    return part.value.replace("_", " ")


def _requests(analysis: Analysis) -> str:
    falls = sorted(analysis.waterfalls, key=lambda fall: -fall.span_us)
    parts = parts_seen(falls)
    keys = [("start", "start, ms"), ("ttft", "TTFT, ms" if _to_token(falls) else "span, ms")]
    columns = [(part.value, _title(part)) for part in parts]

    def header(key: str, name: str) -> str:
        order = "descending" if key == "ttft" else "none"
        # `dataset` has no underscore to translate: the attribute and the key are the same.
        return (
            f'<th scope="col" data-key="{key.replace("_", "")}" aria-sort="{order}">'
            f'<button type="button">{_text(name)}</button></th>'
        )

    head = (
        '<th class="text" scope="col">transfer</th><th class="text" scope="col">ended</th>'
        + "".join(header(*key) for key in keys)
        + '<th class="text path" scope="col">critical path</th>'
        + "".join(header(*column) for column in columns)
    )
    scales = {
        counted: max((f.span_us for f in falls if (f.outcome in COUNTED) is counted), default=0)
        for counted in (True, False)
    }
    numbers = {id(transfer): index for index, transfer in enumerate(analysis.transfers)}
    zero = min((fall.start for fall in falls), default=0)
    rows = "\n".join(
        _request(fall, parts, zero, scales[fall.outcome in COUNTED], numbers) for fall in falls
    )
    return (
        '<div class="tools"><label>Filter <input type="search" id="filter" '
        'placeholder="id, engine or ending (press /)"></label>'
        f'<span class="soft" id="shown" aria-live="polite">{len(falls)} of {len(falls)}</span>'
        '<label><input type="checkbox" id="full"> each bar over the full width</label></div>\n'
        f'<div class="scroll"><table class="requests"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _request(
    fall: Waterfall, parts: Sequence[Part], zero: int, scale_us: int, numbers: dict[int, int]
) -> str:
    request = fall.request
    engines = " ".join([request.consumer, *request.producers])
    ended = fall.outcome.value.replace("_", " ") + (f" ({fall.reason})" if fall.reason else "")
    about = f"request {request.request_id} on {request.consumer}; " if request.consumer else ""
    about += f"producer {', '.join(request.producers) or 'unknown'}; attempts: {request.attempts}"
    bad = "" if fall.outcome in COUNTED - {Outcome.RECOMPUTED} else " bad"
    data = {
        "id": request.id,
        "transfer": numbers[id(request.transfer)],
        "find": f"{request.id} {request.request_id} {engines} {ended}",
        "about": about,
        "start": _exact(fall.start - zero),
        "ttft": _exact(fall.span_us),
        **{part.value.replace("_", ""): _exact(fall.us(part)) for part in parts},
    }
    attributes = " ".join(f'data-{key}="{_text(value)}"' for key, value in data.items())
    spans = "".join(
        f'<span class="p-{s.part.value}" data-part="{s.part.value}" data-ms="{_exact(s.us)}" '
        f'style="flex-grow:{s.us}" title="{_title(s.part)} {milliseconds(s.us / 1000)} ms"></span>'
        for s in fall.segments
    )
    said = ", ".join(f"{_title(s.part)} {milliseconds(s.us / 1000)} ms" for s in fall.segments)
    width = 100 * fall.span_us / scale_us if scale_us else 0
    numbers_shown = "".join(
        f"<td>{milliseconds(fall.us(part) / 1000) if fall.us(part) else ''}</td>" for part in parts
    )
    return (
        f'<tr class="request" {attributes}>'
        f'<td class="text"><button type="button" class="open" aria-expanded="false" '
        f'title="{_text(request.id)}">{_text(request.id) or "-"}</button></td>'
        f'<td class="text{bad}">{_text(ended)}</td>'
        f"<td>{milliseconds((fall.start - zero) / 1000)}</td>"
        f"<td>{milliseconds(fall.span_us / 1000)}</td>"
        f'<td class="path"><div class="bar" role="img" aria-label="{_text(said)}" '
        f'style="--width:{width:.3f}">{spans}</div></td>{numbers_shown}</tr>'
    )


def _to_token(falls: Iterable[Waterfall]) -> bool:
    """Whether all spans that are counted are times to first token."""
    return all(fall.outcome in TO_FIRST_TOKEN for fall in falls if fall.outcome in COUNTED)


def _exact(us: int) -> str:
    """Milliseconds with all three digits that there are."""
    return f"{'-' if us < 0 else ''}{abs(us) // 1000}.{abs(us) % 1000:03d}"


def _where_time_went(analysis: Analysis) -> str:
    spreads = where_time_went(analysis.waterfalls)
    if not spreads[0].count:
        return ""
    whole = "time to first token" if _to_token(analysis.waterfalls) else "whole span"
    rows = []
    for spread in spreads:
        is_whole = spread.name == "span"
        name = whole if is_whole else _title(Part(spread.name))
        swatch = "" if is_whole else f'<span class="swatch p-{spread.name}"></span>'
        bar = (
            ""
            if is_whole
            else f'<span class="share p-{spread.name}" style="width:{spread.share * 12:.2f}rem">'
            "</span>"
        )
        meaning = "" if is_whole else LOOKS[Part(spread.name)].meaning
        times = (spread.mean_ms, spread.p50_ms, spread.p90_ms, spread.p99_ms, spread.max_ms)
        rows.append(
            f'<td class="text">{swatch}{_text(name)}</td>'
            + _cells((), [*map(milliseconds, times), f"{spread.share:.1%}"])
            + f'<td class="text">{bar}</td><td class="text soft">{_text(meaning)}</td>'
        )
    title = f"Where time went, in ms, over {spreads[0].count:,} requests"
    columns = ("mean", "p50", "p90", "p99", "max", "share", "", "")
    return _table(title, ("part",), columns, rows)


def _unfinished(analysis: Analysis) -> str:
    rows = [
        _cells(
            (each.line.id, f"{each.line.engine} {each.line.rank}", each.line.machine),
        )
        + _cells((each.line.dest, each.awaits), (f"{each.for_ms / 1000:,.3f}",))
        for each in unfinished(analysis)
    ]
    if not rows:
        return ""
    columns = ("transfer", "where", "machine", "state", "awaits")
    return _table(f"Unfinished when the traces end ({len(rows):,})", columns, ("for s",), rows)


def _clocks(analysis: Analysis) -> str:
    clocks = analysis.clocks
    if len(clocks.offsets) < 2:
        return ""
    rows = []
    for engine, offset in clocks.offsets.items():
        known = clocks.is_known(engine)
        ahead = milliseconds(offset.ahead_us / 1000) if known else "taken as 0"
        doubt = milliseconds(offset.uncertainty_us / 1000) if known else "unknown"
        rows.append(_cells((engine,), (ahead, doubt, offset.exchanges)))
    title = f"Clocks, in ms ahead of {clocks.reference}"
    return _table(title, ("engine",), ("ahead", "± at most", "exchanges"), rows)


def _endings(analysis: Analysis) -> str:
    rows = [
        _cells((machine, state, reason), (f"{count:,}",))
        for (machine, state, reason), count in sorted(endings(analysis.traces).items())
    ]
    return _table("Endings", ("machine", "state", "reason"), ("count",), rows) if rows else ""


def _states(analysis: Analysis) -> str:
    rows = []
    for each in time_in_states(analysis.traces):
        s = each.spread
        times = (s.mean_ms, s.p50_ms, s.p90_ms, s.p99_ms, s.max_ms)
        seconds = [f"{ms / 1000:,.4f}" for ms in times]
        rows.append(_cells((each.machine, each.state), (f"{s.count:,}", *seconds)))
    if not rows:
        return ""
    columns = ("visits", "mean", "p50", "p90", "p99", "max")
    return _table("Seconds in each state", ("machine", "state"), columns, rows)


# -- what the script opens -------------------------------------------------------------------------


def _histories(analysis: Analysis) -> str:
    """JSON for the script: workers by number, and each transfer's lines."""
    names = short_names(analysis.clocks.offsets)
    workers: dict[str, int] = {}
    transfers = [
        [_history(transfer, event, names, workers) for event in transfer.events]
        for transfer in analysis.transfers
    ]
    text = msgspec.json.encode({"workers": list(workers), "transfers": transfers}).decode()
    for character, escape in _JSON_ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _history(
    transfer: Transfer, event: Event, names: dict[str, str], workers: dict[str, int]
) -> list[object]:
    line = event.line
    worker = workers.setdefault(f"{names[line.engine]} {plain(line.rank)}", len(workers))
    texts = (line.machine, line.trigger, line.source, line.dest, remarks(line))
    return [_exact(event.at - transfer.start), worker, *map(plain, texts)]
