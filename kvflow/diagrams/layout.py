"""Where everything of a picture is: boxes, labels and the ways of edges, as data.

The second half of a layered layout (the first is `kvflow.diagrams.layers`). A state is a chip: each
edge that leaves it has a pin of its own, with its label beside the pin; all edges that arrive on
one side share one pin. A column is as wide as its widest state and the labels beside it; lanes and
states of a column never overlap from top to bottom, and a curve bends only between two columns. So
no line runs through a state or a label, and no two labels meet, whatever the table.

Heights are found by relaxation: edges pull their ends level, most of all where they run in lanes;
neighbours in a column that are too near push each other apart, ever more stiffly. Pulls are
weighted so that a line is level for long and then takes one step, rather than slanting everywhere.
At the end an isotonic regression per column makes every distance exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvflow.core import Table
from kvflow.diagrams.graph import Pair
from kvflow.diagrams.layers import Item, Layers, layers_of

CHAR_PX = 7.0
"""One letter of a monospaced font of 11 px, as wide as any renderer makes it."""
NAME_CHAR_PX = 8.0
"""The same of 13 px."""
LABEL_PX = 15.0
PITCH_PX = 18.0
"""From one pin of a state to the next."""
STATE_PX_MIN = 38.0
STATE_WIDTH_PX_MIN = 76.0
LANE_PX = 4.0
SPACE_PX = 12.0
STATE_SPACE_PX = 22.0
PAD_PX = 14.0
"""Between a state's side and the end of its column: room for an arrow's head."""
MARGIN_PX = 34.0
GAP_PX_MIN = 36.0
GAP_PX_MAX = 100.0
GAP_PER_RISE = 0.16
ROUNDS = 100
STIFFNESSES = (0.1, 1.0, 10.0, 100.0)
LEVEL_PX = 2.0
"""Two ends that differ by less count as level."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle, by its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: "Box") -> bool:
        """Whether the two share more than an edge."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of an edge: level from each even point to the next, a curve from each odd one.

    number  counts all edges of the picture from 1, state by state, pins from top to bottom.
    """

    number: int
    points: tuple[Point, ...]
    label: str
    label_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything's place.

    routes  in the order of their numbers.
    entry   both ends of the arrow into the initial state.
    """

    width: float
    height: float
    states: Mapping[str, Box]
    routes: Mapping[Pair, Route]
    entry: tuple[Point, Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    """Where a piece of an edge meets a state: of which edge it is the first piece, or of none.

    side   1 for the right side, -1 for the left.
    leave  the edge that begins here; None where edges arrive.
    """

    state: str
    side: int
    leave: Pair | None


def layout_of(table: Table, label: Callable[[Pair, int], str]) -> Layout:
    """Place one table's states and edges; `label` says what stands at an edge with this number."""
    layers = layers_of(table)
    offsets = _pins(layers)
    numbers = _numbers(table, offsets)
    labels = {pair: label(pair, number) for pair, number in numbers.items()}
    heights = _item_heights(layers, offsets)
    middles = _middles(layers, offsets, heights)
    top = min(middles[item] - heights[item] / 2 for item in middles) - MARGIN_PX
    middles = {item: round(y - top, 1) for item, y in middles.items()}
    columns = _column_places(layers, offsets, middles, labels)
    states = {
        item.state: Box(
            x=columns[item.column].state_x,
            y=round(middles[item] - heights[item] / 2, 1),
            width=columns[item.column].state_width,
            height=heights[item],
        )
        for item in middles
        if not item.is_lane
    }
    routes = {
        pair: _route(
            number,
            labels[pair],
            _points(layers.ways[pair], _ends(pair, layers.ways[pair], offsets), columns, middles),
        )
        for pair, number in numbers.items()
    }
    first = states[table.initial]
    entry_y = first.y + first.height / 2
    return Layout(
        width=round(columns[-1].end + MARGIN_PX, 1),
        height=round(max(middles[item] + heights[item] / 2 for item in middles) + MARGIN_PX, 1),
        states=states,
        routes=routes,
        entry=((first.x - MARGIN_PX + 8, entry_y), (first.x, entry_y)),
    )


# -- pins ------------------------------------------------------------------------------------------


def _pins(layers: Layers) -> dict[_Pin, float]:
    """Every pin, and how far below the middle of its state it is."""
    place = {item: at for column in layers.columns for at, item in enumerate(column)}
    towards: dict[tuple[str, int], dict[_Pin, list[float]]] = {}
    for pair, way in layers.ways.items():
        side = way[1].column - way[0].column
        out = _Pin(state=pair[0], side=side, leave=pair)
        into = _Pin(state=pair[1], side=-side, leave=None)
        # Of two edges between the same two states, the one to the right runs above the other.
        nudge = 0.0 if side > 0 else 0.125
        towards.setdefault((out.state, out.side), {})[out] = [place[way[1]] + nudge]
        arriving = towards.setdefault((into.state, into.side), {})
        arriving.setdefault(into, []).append(place[way[-2]] + nudge)
    offsets = {}
    for pins in towards.values():
        ordered = sorted(pins, key=lambda pin: sum(pins[pin]) / len(pins[pin]))
        for at, pin in enumerate(ordered):
            offsets[pin] = (at - (len(ordered) - 1) / 2) * PITCH_PX
    return offsets


def _numbers(table: Table, offsets: Mapping[_Pin, float]) -> dict[Pair, int]:
    """State by state; right sides before left ones, from top to bottom."""
    order = list(table.states)
    leaving = [(pin, pin.leave) for pin in offsets if pin.leave is not None]
    leaving.sort(key=lambda each: (order.index(each[0].state), -each[0].side, offsets[each[0]]))
    return {pair: number for number, (_, pair) in enumerate(leaving, 1)}


def _ends(pair: Pair, way: Sequence[Item], offsets: Mapping[_Pin, float]) -> tuple[float, float]:
    """How far below the middles of its two states an edge begins and ends."""
    side = way[1].column - way[0].column
    out = _Pin(state=pair[0], side=side, leave=pair)
    into = _Pin(state=pair[1], side=-side, leave=None)
    return offsets[out], offsets[into]


# -- from top to bottom ----------------------------------------------------------------------------


def _item_heights(layers: Layers, offsets: Mapping[_Pin, float]) -> dict[Item, float]:
    lowest: dict[str, float] = {}
    for pin, offset in offsets.items():
        lowest[pin.state] = max(lowest.get(pin.state, 0.0), offset)
    return {
        item: LANE_PX
        if item.is_lane
        else max(STATE_PX_MIN, 2 * lowest.get(item.state, 0.0) + PITCH_PX + 4)
        for column in layers.columns
        for item in column
    }


def _middles(
    layers: Layers, offsets: Mapping[_Pin, float], heights: Mapping[Item, float]
) -> dict[Item, float]:
    """The middle of each item."""
    pulls: dict[Item, dict[tuple[Item, float], float]] = {}
    for pair, way in layers.ways.items():
        start, end = _ends(pair, way, offsets)
        below = [start, *([0.0] * (len(way) - 2)), end]
        for at in range(len(way) - 1):
            one, other, shift = way[at], way[at + 1], below[at + 1] - below[at]
            weight = (1.0, 2.0, 40.0)[one.is_lane + other.is_lane]
            pulls.setdefault(one, {})[other, shift] = weight
            pulls.setdefault(other, {})[one, -shift] = weight
    middles: dict[Item, float] = {}
    for column in layers.columns:
        steps = _steps(column, heights)
        middles |= {item: at - steps[-1] / 2 for item, at in zip(column, steps, strict=True)}
    for stiffness in STIFFNESSES:
        _relax(layers, pulls, heights, middles, stiffness)
    for column in layers.columns:
        wanted = [middles[item] for item in column]
        placed = _isotonic(wanted, [1.0] * len(column), _steps(column, heights))
        middles |= dict(zip(column, placed, strict=True))
    return middles


def _relax(
    layers: Layers,
    pulls: Mapping[Item, Mapping[tuple[Item, float], float]],
    heights: Mapping[Item, float],
    middles: dict[Item, float],
    stiffness: float,
) -> None:
    """Move everything towards where its springs want it."""
    for _ in range(ROUNDS):
        for column in layers.columns:
            steps = _steps(column, heights)
            for at, item in enumerate(column):
                here = middles[item]
                weight = total = 0.0
                for (other, shift), strength in pulls.get(item, {}).items():
                    wanted = middles[other] + shift
                    pull = strength / max(abs(wanted - here), LEVEL_PX)
                    weight, total = weight + pull, total + pull * wanted
                for beside in (at - 1, at + 1):
                    if 0 <= beside < len(column):
                        bound = middles[column[beside]] + steps[at] - steps[beside]
                        if (here < bound) == (beside < at) and here != bound:
                            weight, total = weight + stiffness, total + stiffness * bound
                if weight:
                    middles[item] = total / weight


def _steps(column: Sequence[Item], heights: Mapping[Item, float]) -> list[float]:
    """How far below the first item each one is, at least."""
    steps = [0.0]
    for upper, lower in pairwise(column):
        space = SPACE_PX if upper.is_lane or lower.is_lane else STATE_SPACE_PX
        steps.append(steps[-1] + (heights[upper] + heights[lower]) / 2 + space)
    return steps


def _isotonic(
    wanted: Sequence[float], weights: Sequence[float], steps: Sequence[float]
) -> list[float]:
    """The places nearest to `wanted`, by weighted squares, that are `steps` apart at least."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, count
    for want, weight, step in zip(wanted, weights, steps, strict=True):
        block = (want - step, weight, 1)
        while blocks and blocks[-1][0] >= block[0]:
            mean, heavy, count = blocks.pop()
            both = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / both, both, count + block[2])
        blocks.append(block)
    flat = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + step for mean, step in zip(flat, steps, strict=True)]


# -- from left to right ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    start: float
    state_x: float
    state_width: float
    end: float


def label_width(text: str) -> float:
    """Of the box that a label is drawn in."""
    return round(len(text) * CHAR_PX + 8, 1)


def _column_places(
    layers: Layers,
    offsets: Mapping[_Pin, float],
    middles: Mapping[Item, float],
    labels: Mapping[Pair, str],
) -> list[_Column]:
    room = {(column, side): 0.0 for column in range(len(layers.columns)) for side in (-1, 1)}
    rise = dict.fromkeys(range(len(layers.columns)), 0.0)
    for pair, way in layers.ways.items():
        here = way[0].column, way[1].column - way[0].column
        room[here] = max(room[here], label_width(labels[pair]) + 4)
        start, end = _ends(pair, way, offsets)
        below = [start, *([0.0] * (len(way) - 2)), end]
        heights = [middles[item] + shift for item, shift in zip(way, below, strict=True)]
        for at in range(len(way) - 1):
            left = min(way[at].column, way[at + 1].column)
            rise[left] = max(rise[left], abs(heights[at] - heights[at + 1]))
    places = []
    x = MARGIN_PX
    for index, column in enumerate(layers.columns):
        longest = max(len(item.state) for item in column if not item.is_lane)
        width = max(STATE_WIDTH_PX_MIN, longest * NAME_CHAR_PX + 22)
        state_x = x + room[index, -1] + PAD_PX
        end = state_x + width + PAD_PX + room[index, 1]
        places.append(
            _Column(
                start=round(x, 1),
                state_x=round(state_x, 1),
                state_width=round(width, 1),
                end=round(end, 1),
            )
        )
        x = end + min(GAP_PX_MAX, GAP_PX_MIN + GAP_PER_RISE * rise[index])
    return places


def _points(
    way: Sequence[Item],
    ends: tuple[float, float],
    columns: Sequence[_Column],
    middles: Mapping[Item, float],
) -> tuple[Point, ...]:
    right = way[1].column > way[0].column
    points: list[Point] = []
    for at, item in enumerate(way):
        column = columns[item.column]
        sides = [column.start, column.end]
        y = middles[item]
        if at == 0:
            sides[0 if right else 1] = column.state_x + (column.state_width if right else 0)
            y += ends[0]
        elif at == len(way) - 1:
            sides[1 if right else 0] = column.state_x + (0 if right else column.state_width)
            y += ends[1]
        points += [(round(x, 1), round(y, 1)) for x in (sides if right else sides[::-1])]
    return tuple(points)


def _route(number: int, label: str, points: tuple[Point, ...]) -> Route:
    (x, y), (beyond, _), *_ = points
    width = label_width(label)
    box = Box(
        x=round(x + 5 if beyond > x else x - 5 - width, 1),
        y=round(y - LABEL_PX / 2, 1),
        width=width,
        height=LABEL_PX,
    )
    return Route(number=number, points=points, label=label, label_box=box)
