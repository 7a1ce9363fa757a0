"""Pictures of the machines: everything is there, nothing lies upon anything, counts are right."""

import functools
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.core import TABLES, Table
from kvflow.core.table import row
from kvflow.diagrams.graph import Pair, edges_of
from kvflow.diagrams.heat import Heat
from kvflow.diagrams.layers import crossings, layers_of
from kvflow.diagrams.layout import Box, Point, Route
from kvflow.diagrams.svg import Picture, as_svg, picture_of

SVG = "{http://www.w3.org/2000/svg}"
EVERY_TABLE = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
PLAIN_AND_HEATED = pytest.mark.parametrize("most", [0, 9_999_999], ids=["plain", "heated"])
STEPS = 12
"""Points at which a curve is looked at."""


def states(*options: str) -> str:
    result = CliRunner().invoke(app, ["states", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def groups(root: ET.Element, kind: str) -> list[ET.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == kind]


def title(group: ET.Element) -> str:
    found = group.find(f"{SVG}title")
    assert found is not None
    return found.text or ""


def along(route: Route) -> Iterator[tuple[Point, bool]]:
    """Points on the way of an edge, and whether the way bends there."""
    for index, ((x0, y0), (x1, y1)) in enumerate(itertools.pairwise(route.points)):
        for step in range(STEPS + 1):
            part = step / STEPS
            # A cubic with level ends, whose handles are half-way: x is not linear in `part`.
            ease = part * part * (3 - 2 * part)
            bend = 3 * part * (1 - part) * ((x0 + x1) / 2)
            x = (1 - part) ** 3 * x0 + bend + part**3 * x1
            yield (x, y0 + (y1 - y0) * ease), index % 2 == 1


def inside(point: Point, box: Box) -> bool:
    return (
        box.x + 0.5 < point[0] < box.x + box.width - 0.5
        and box.y + 0.5 < point[1] < box.y + box.height - 0.5
    )


def overlapping(boxes: Iterable[tuple[object, Box]]) -> list[tuple[object, object]]:
    return [
        (one, other)
        for (one, box), (other, beside) in itertools.combinations(boxes, 2)
        if box.overlaps(beside)
    ]


@functools.cache
def drawn(name: str, most: int = 0) -> Picture:
    """A machine without heat, or with different counts on all edges, `most` on the first."""
    (table,) = (table for table in TABLES if table.name == name)
    counts = {edge.pair: most - number for number, edge in enumerate(edges_of(table))}
    heat = Heat(
        taken=counts,
        triggers={(edge.pair, edge.triggers[0]): counts[edge.pair] for edge in edges_of(table)},
        median_s=dict.fromkeys(table.states, 12.3456),
        traces=1,
    )
    return picture_of(table, heat if most else None)


# -- what is drawn ---------------------------------------------------------------------------------


@EVERY_TABLE
def test_every_state_is_drawn_once_with_its_meaning(table: Table) -> None:
    found = groups(ET.fromstring(as_svg([table])), "state")
    assert sorted(group.get("data-state") or "" for group in found) == sorted(table.states)
    for group in found:
        state = group.get("data-state") or ""
        assert table.states[state] in title(group)
        assert [text.text for text in group.iter(f"{SVG}text")] == [state]


@EVERY_TABLE
def test_every_change_of_state_is_drawn_once_with_each_row_that_does_it(table: Table) -> None:
    rows: dict[Pair, list[str]] = {}
    for each in table.rows:
        for source in each.sources:
            if each.dest not in (None, source):
                guard = f" [{each.guard.__name__}]" if each.guard else ""
                told = f"{each.trigger}{guard}: {each.why}"
                rows.setdefault((source, str(each.dest)), []).append(told)
    found = groups(ET.fromstring(as_svg([table])), "edge")
    pairs = [(group.get("data-from") or "", group.get("data-to") or "") for group in found]
    assert sorted(pairs) == sorted(rows)
    for pair, group in zip(pairs, found, strict=True):
        assert title(group).split("\n") == [f"{pair[0]} → {pair[1]}", *rows[pair]]


@EVERY_TABLE
def test_the_legend_has_each_edge_once_by_its_number_with_all_triggers(table: Table) -> None:
    picture = drawn(table.name)
    expected = {edge.pair: edge.triggers for edge in edges_of(table)}
    told: dict[Pair, dict[str, list[str]]] = {}
    for text in picture.legend.texts:
        if text.edge is not None:
            told.setdefault(text.edge, {}).setdefault(text.kind, []).append(text.text)
    assert set(told) == set(expected)
    for pair, words in told.items():
        assert words["number"] == [picture.layout.routes[pair].label]
        assert words["dest"] == [f"→ {pair[1]}"]
        assert tuple(re.findall(r"\w+", " ".join(words["trigger"]))) == expected[pair]
    numbers = [route.number for route in picture.layout.routes.values()]
    assert numbers == list(range(1, len(expected) + 1))


@EVERY_TABLE
def test_a_way_begins_at_its_source_and_its_arrow_ends_at_its_dest(table: Table) -> None:
    layout = drawn(table.name).layout
    for (source, dest), route in layout.routes.items():
        for state, (x, y) in ((source, route.points[0]), (dest, route.points[-1])):
            box = layout.states[state]
            assert min(abs(x - box.x), abs(x - box.x - box.width)) < 0.2, (source, dest)
            assert box.y < y < box.y + box.height, (source, dest)


@EVERY_TABLE
def test_edges_that_have_met_lead_to_the_same_state(table: Table) -> None:
    """Or else nobody could say where a line leads."""
    beyond_label: dict[Point, set[str]] = {}
    for (_, dest), route in drawn(table.name).layout.routes.items():
        for point in route.points[1:]:
            beyond_label.setdefault(point, set()).add(dest)
    shared = {point: dests for point, dests in beyond_label.items() if len(dests) > 1}
    assert shared == {}


# -- where it is drawn -----------------------------------------------------------------------------


@EVERY_TABLE
@PLAIN_AND_HEATED
def test_no_label_or_state_overlaps_another(table: Table, most: int) -> None:
    picture = drawn(table.name, most)
    layout = picture.layout
    labels = [(pair, route.label_box) for pair, route in layout.routes.items()]
    assert overlapping([*layout.states.items(), *labels]) == []
    assert overlapping([(text.text, text.box) for text in picture.legend.texts]) == []


@EVERY_TABLE
@PLAIN_AND_HEATED
def test_no_line_runs_through_a_state_or_another_edge_s_label(table: Table, most: int) -> None:
    layout = drawn(table.name, most).layout
    for pair, route in layout.routes.items():
        for point, bends in along(route):
            through = [state for state, box in layout.states.items() if inside(point, box)]
            assert not through, pair
            labels = [
                other
                for other, beside in layout.routes.items()
                if inside(point, beside.label_box) and (other != pair or bends)
            ]
            assert not labels, pair


@EVERY_TABLE
@PLAIN_AND_HEATED
def test_nothing_is_outside_the_view_box(table: Table, most: int) -> None:
    picture = drawn(table.name, most)
    layout = picture.layout
    boxes = [*layout.states.values(), *(route.label_box for route in layout.routes.values())]
    points = [point for route in layout.routes.values() for point, _ in along(route)]
    points += [corner for box in boxes for corner in corners(box)]
    points += layout.entry
    assert all(0 < x < layout.width and 0 < y < layout.height for x, y in points)
    legend = picture.legend
    ends = [corner for text in legend.texts for corner in corners(text.box)]
    assert all(0 <= x <= legend.width and 0 <= y <= legend.height for x, y in ends)


def corners(box: Box) -> list[Point]:
    return [(box.x, box.y), (box.x + box.width, box.y + box.height)]


@EVERY_TABLE
def test_the_order_has_fewer_crossings_than_the_table_s(table: Table) -> None:
    layers = layers_of(table)
    naive = [sorted(column) for column in layers.columns]
    assert crossings(layers.columns, layers.segments) <= crossings(naive, layers.segments) / 2


# -- the document ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_tables_give_the_same_bytes() -> None:
    assert as_svg(TABLES) == as_svg(TABLES)


@EVERY_TABLE
def test_a_picture_is_self_contained(table: Table) -> None:
    root = ET.fromstring(as_svg([table]))
    kinds = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert kinds <= {"svg", "g", "title", "rect", "path", "polygon", "circle", "text"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in names if "href" in name or name.startswith("on")]
    first = root[0]
    assert first.tag == f"{SVG}rect"
    assert (first.get("width"), first.get("height")) == (root.get("width"), root.get("height"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


def test_all_machines_are_drawn_one_below_the_other() -> None:
    text = states("--format", "svg")
    found = groups(ET.fromstring(text), "machine")
    assert [group.get("data-machine") for group in found] == [table.name for table in TABLES]
    heights = [0.0, *itertools.accumulate(picture_of(table).height for table in TABLES)]
    tops = [re.findall(r"[\d.]+", group.get("transform") or "0 0")[1] for group in found]
    assert [float(top) for top in tops] == pytest.approx(heights[:-1], abs=0.1)
    assert float(ET.fromstring(text).get("height") or 0) == pytest.approx(heights[-1], abs=0.1)


def test_one_machine_is_what_specs_has() -> None:
    text = states("--format", "svg", "--machine", "producer")
    specs = Path(__file__).resolve().parents[2] / "specs" / "diagrams" / "producer.svg"
    assert text == specs.read_text(encoding="utf-8")


def test_texts_are_escaped() -> None:
    why = 'if a < b & c > "d"'
    table = Table(
        name="<odd> & co",
        initial="new",
        states={"new": "<b>not bold</b>", "over": "]]> &amp;"},
        terminal=frozenset({"over"}),
        rows=(row("ended", "new", "over", why=why), row("ended", "over", "=", why="again")),
        impossible={},
    )
    root = ET.fromstring(as_svg([table]))
    (machine,), (edge,) = groups(root, "machine"), groups(root, "edge")
    assert machine.get("data-machine") == "<odd> & co"
    assert title(edge) == f"new → over\nended: {why}"
    told = {group.get("data-state"): title(group) for group in groups(root, "state")}
    assert told == {
        "new": "new (initial): <b>not bold</b>",
        "over": "over (terminal): ]]> &amp;",
    }
