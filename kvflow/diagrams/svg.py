"""Machines as SVG: self-contained, the same bytes for the same tables and traces.

The picture brings its own background, since pages are light or dark; it has no script, no style
sheet and no font of its own (all text is in whatever monospaced font there is). Edges are numbered,
and a legend below says which triggers lead along each. Where a picture is opened by itself, states
and edges tell more when they are pointed at: the meaning of a state; the guard and the reason of
each row.

With the heat of traces, an edge is as wide and as red as the logarithm of how often it was taken;
the count stands beside its number. Edges that were never taken are thin and grey.
"""

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvflow.core import Table
from kvflow.diagrams.graph import Edge, Pair, edges_of, final_states
from kvflow.diagrams.heat import Heat
from kvflow.diagrams.layout import (
    LABEL_PX,
    MARGIN_PX,
    Box,
    Layout,
    Point,
    Route,
    layout_of,
)
from kvflow.diagrams.legend import Legend, legend_of

FONT = "'DejaVu Sans Mono', ui-monospace, Menlo, Consolas, monospace"
BACKGROUND, INK, FAINT = "#fbfcfd", "#1f2933", "#6b7785"
STATE_FILL, STATE_LINE, TERMINAL_FILL = "#e6eef8", "#3a5a80", "#dfe3e8"
UNTAKEN = "#c3cad3"
ENDINGS = {
    "failed": "#c8283c", "draining": "#d9822b", "stopping": "#d9822b", "fencing": "#a85c12",
    "sent": "#1f8a4c", "received": "#1f8a4c", "kept": "#5f9e2f", "forgotten": "#8792a0",
}  # fmt: skip
COLOURS = (
    "#1f6fb2", "#8a3fa0", "#0f8288", "#7a5230", "#5b5fc7", "#b0307f", "#2aa3c9", "#52616f",
)  # fmt: skip
"""Edges to one state have one colour: of `ENDINGS`, or the next one of these, over and over."""
COLD, HOT = (0xE9, 0xA8, 0x20), (0xB0, 0x10, 0x20)
TITLE_PX = 46.0
ARROW_PX = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One machine, placed: what it is drawn from. `edges` in the order of their numbers."""

    table: Table
    edges: tuple[Edge, ...]
    layout: Layout
    legend: Legend
    heat: Heat | None

    @property
    def width(self) -> float:
        return max(self.layout.width, self.legend.width + 2 * MARGIN_PX)

    @property
    def height(self) -> float:
        return TITLE_PX + self.layout.height + self.legend.height + MARGIN_PX


def picture_of(table: Table, heat: Heat | None = None) -> Picture:
    """Number the edges, state by state, and place everything."""

    def label(pair: Pair, number: int) -> str:
        count = heat.taken.get(pair, 0) if heat else 0
        return f"{number}: {count:,}x" if count else str(number)

    def say(edge: Edge, trigger: str) -> str:
        count = heat.triggers.get((edge.pair, trigger), 0) if heat else 0
        # A count stays in the line of its trigger.
        return f"{trigger}\u00a0{count:,}x" if count else trigger

    layout = layout_of(table, label)
    by_pair = {edge.pair: edge for edge in edges_of(table)}
    edges = tuple(by_pair[pair] for pair in layout.routes)
    legend = legend_of(table, edges, say, width_min=layout.width - 2 * MARGIN_PX)
    return Picture(table=table, edges=edges, layout=layout, legend=legend, heat=heat)


def as_svg(tables: Sequence[Table], heat: Mapping[str, Heat] | None = None) -> str:
    """One document with each machine below the other."""
    pictures = [picture_of(table, heat[table.name] if heat else None) for table in tables]
    width = max(picture.width for picture in pictures)
    height = sum(picture.height for picture in pictures)
    root = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_px(width)} {_px(height)}",
            "width": _px(width),
            "height": _px(height),
            "font-family": FONT,
            "font-size": "11",
            "fill": INK,
        },
    )
    _rect(root, Box(x=0, y=0, width=width, height=height), {"fill": BACKGROUND, "rx": "8"})
    y = 0.0
    for picture in pictures:
        _draw(_group(root, "machine", y=y), picture)
        y += picture.height
    ET.indent(root)
    ascii_only: bytes = ET.tostring(root, encoding="us-ascii")
    return ascii_only.decode() + "\n"


def _draw(into: ET.Element, picture: Picture) -> None:
    into.set("data-machine", picture.table.name)
    _title_line(into, picture)
    drawing = _group(into, "drawing", y=TITLE_PX)
    _entry(drawing, picture.layout.entry)
    counts = picture.heat.taken if picture.heat else {}
    # What is taken most is drawn last, on top.
    for edge in sorted(picture.edges, key=lambda edge: counts.get(edge.pair, 0)):
        _edge(drawing, picture, edge)
    for state in picture.table.states:
        _state(drawing, picture, state)
    _legend(into, picture)


def _legend(into: ET.Element, picture: Picture) -> None:
    group = _group(into, "legend", x=MARGIN_PX, y=TITLE_PX + picture.layout.height)
    bold = {"font-weight": "bold"}
    looks = {
        "head": {"fill": STATE_LINE, "font-size": "13", **bold},
        "number": {"fill": FAINT},
        "dest": bold,
        "trigger": {},
    }
    for each in picture.legend.texts:
        cold = picture.heat and each.edge and each.edge not in picture.heat.taken
        look = looks[each.kind] | ({"fill": FAINT} if cold else {})
        _text(group, (each.box.x, each.box.y + each.box.height - 4), each.text, look)


def _title_line(into: ET.Element, picture: Picture) -> None:
    name = picture.table.name
    _text(into, (MARGIN_PX, 30), name, {"font-size": "18", "font-weight": "bold"})
    if picture.heat is None:
        said = "numbers: see below; edges to one state run together and have one colour"
    else:
        taken, traces = picture.heat.taken, picture.heat.traces
        changes = sum(taken.values())
        said = (
            f"{changes:,} change{'s' * (changes != 1)} of state in {traces:,} "
            f"trace{'s' * (traces != 1)}; {len(taken)} of {len(picture.edges)} edges taken; "
            "times are medians in a state"
        )
    _text(into, (MARGIN_PX + len(name) * 11.0 + 16, 30), said, {"fill": FAINT})


# -- states and edges ------------------------------------------------------------------------------


def _state(into: ET.Element, picture: Picture, state: str) -> None:
    table, box = picture.table, picture.layout.states[state]
    group = _group(into, "state")
    group.set("data-state", state)
    ends = state in table.terminal | final_states(table)
    marks = [
        "initial" if state == table.initial else "",
        "terminal" if state in table.terminal else "",
    ]
    told = ", ".join(mark for mark in marks if mark)
    spent_s = picture.heat.median_s.get(state) if picture.heat else None
    lines = [f"{state}{f' ({told})' if told else ''}: {table.states[state]}"]
    if spent_s is not None:
        lines.append(f"median time in it: {duration(spent_s)}")
    _title(group, lines)
    look = {"fill": TERMINAL_FILL if ends else STATE_FILL, "stroke": STATE_LINE, "rx": "7"}
    _rect(group, box, {**look, "stroke-width": "1.4"})
    if ends:
        inner = Box(x=box.x + 3, y=box.y + 3, width=box.width - 6, height=box.height - 6)
        _rect(group, inner, {"fill": "none", "stroke": STATE_LINE, "rx": "5"})
    middle = box.x + box.width / 2, box.y + box.height / 2
    centered = {"text-anchor": "middle"}
    shift = 4.5 if spent_s is None else -1.5
    name = {**centered, "font-size": "13", "font-weight": "bold"}
    _text(group, (middle[0], middle[1] + shift), state, name)
    if spent_s is not None:
        _text(group, (middle[0], middle[1] + 12), duration(spent_s), {**centered, "fill": FAINT})


def _edge(into: ET.Element, picture: Picture, edge: Edge) -> None:
    route = picture.layout.routes[edge.pair]
    group = _group(into, "edge")
    group.set("data-from", edge.source)
    group.set("data-to", edge.dest)
    count = 0
    if picture.heat is None:
        colour, width = _colour(picture.table, edge.dest), 1.6
    else:
        count = picture.heat.taken.get(edge.pair, 0)
        group.set("data-count", str(count))
        colour, width = _warmth(count, max(picture.heat.taken.values(), default=0))
    _title(group, _edge_told(edge, count if picture.heat else None))
    look = {"fill": "none", "stroke": colour, "stroke-width": _px(width)}
    ET.SubElement(group, "path", {"d": _path(route), **look})
    _arrow(group, route.points[-2:], colour, width)
    label = {"fill": BACKGROUND, "stroke": colour, "rx": "4"}
    if count:
        label["fill"] = colour
    _rect(group, route.label_box, label)
    box = route.label_box
    where = box.x + box.width / 2, box.y + LABEL_PX - 4
    ink = {"fill": "#ffffff", "font-weight": "bold"} if count else {"fill": INK}
    if picture.heat is not None and not count:
        ink = {"fill": FAINT}
    _text(group, where, route.label, {"text-anchor": "middle", **ink})


def _edge_told(edge: Edge, count: int | None) -> list[str]:
    taken = "" if count is None else f", taken {count:,} times"
    lines = [f"{edge.source} → {edge.dest}{taken}"]
    for row in edge.rows:
        guard = f" [{row.guard.__name__}]" if row.guard else ""
        lines.append(f"{row.trigger}{guard}: {row.why}")
    return lines


def _colour(table: Table, dest: str) -> str:
    others = [state for state in table.states if state not in ENDINGS]
    return ENDINGS.get(dest) or COLOURS[others.index(dest) % len(COLOURS)]


def _warmth(count: int, most: int) -> tuple[str, float]:
    """Colour and width."""
    if count == 0:
        return UNTAKEN, 1.0
    share = math.log1p(count) / math.log1p(most)
    mixed = [round(cold + (hot - cold) * share) for cold, hot in zip(COLD, HOT, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed), 1.5 + 5.5 * share


def duration(seconds: float) -> str:
    """As people say it: three digits at most, and a unit."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    if seconds >= 0.000_999_5:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds * 1e6:.0f} us"


# -- shapes ----------------------------------------------------------------------------------------


def _path(route: Route) -> str:
    first, *others = route.points
    parts = [f"M{_px(first[0])} {_px(first[1])}"]
    at = first
    for index, point in enumerate(others):
        if index % 2 == 0:
            parts.append(f"H{_px(point[0])}")
        else:
            bend = _px((at[0] + point[0]) / 2)
            end = f"{_px(point[0])} {_px(point[1])}"
            parts.append(f"C{bend} {_px(at[1])} {bend} {_px(point[1])} {end}")
        at = point
    return "".join(parts)


def _arrow(into: ET.Element, last: Sequence[Point], colour: str, width: float) -> None:
    """A head whose tip is the end of the way."""
    (before, _), (x, y) = last
    back = x - math.copysign(ARROW_PX + width, x - before)
    half = 3.2 + width * 0.6
    corners = [(x, y), (back, y - half), (back, y + half)]
    points = " ".join(f"{_px(px)},{_px(py)}" for px, py in corners)
    ET.SubElement(into, "polygon", {"points": points, "fill": colour})


def _entry(into: ET.Element, entry: tuple[Point, Point]) -> None:
    (x, y), end = entry
    ET.SubElement(into, "circle", {"cx": _px(x), "cy": _px(y), "r": "5", "fill": INK})
    ET.SubElement(into, "path", {"d": f"M{_px(x)} {_px(y)}H{_px(end[0])}", "stroke": INK})
    _arrow(into, entry, INK, 1.0)


def _group(into: ET.Element, kind: str, *, x: float = 0.0, y: float = 0.0) -> ET.Element:
    group = ET.SubElement(into, "g", {"class": kind})
    if x or y:
        group.set("transform", f"translate({_px(x)} {_px(y)})")
    return group


def _title(into: ET.Element, lines: Sequence[str]) -> None:
    ET.SubElement(into, "title").text = "\n".join(lines)


def _rect(into: ET.Element, box: Box, look: Mapping[str, str]) -> None:
    where = {"x": _px(box.x), "y": _px(box.y), "width": _px(box.width), "height": _px(box.height)}
    ET.SubElement(into, "rect", {**where, **look})


def _text(into: ET.Element, where: Point, words: str, look: Mapping[str, str]) -> None:
    element = ET.SubElement(into, "text", {"x": _px(where[0]), "y": _px(where[1]), **look})
    element.text = words


def _px(value: float) -> str:
    """To a tenth, without a tail of zeros."""
    return f"{value:.1f}".removesuffix(".0")
