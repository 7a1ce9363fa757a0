"""Which column each state stands in, and in which order from top to bottom.

The first half of a layered (Sugiyama) layout:

1. Columns. A state stands right of every neighbour that the table lists before it: the tables list
   their states in the order of a transfer's life. Terminal states come after all others, and final
   ones last. So no edge stays within a column.
2. Lanes. An edge that skips columns passes each of them in a lane. All edges to one state in one
   direction share their lanes: they run together from where they meet, and never part again, so
   that what leaves a state can be followed to where it leads.
3. Order. Barycenter sweeps and exchanges of neighbours, from several starting orders; the order
   with the fewest crossings is taken. Nothing is random.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvflow.core import Table
from kvflow.diagrams.graph import Pair, edges_of, final_states

SWEEPS = 12
STARTS = 24


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Item:
    """What takes room in a column: a state, or the lane of all edges that run on to it.

    leads  0 for the state itself, 1 for a lane that is travelled to the right, -1 to the left.
    """

    state: str
    column: int
    leads: int

    @property
    def is_lane(self) -> bool:
        return self.leads != 0


Segment = tuple[Item, Item]
"""Left and right end, in adjacent columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Columns of items, and the way of each edge: items from its source to its dest."""

    columns: tuple[tuple[Item, ...], ...]
    ways: Mapping[Pair, tuple[Item, ...]]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Every piece between two columns, once."""
        return _segments(self.ways.values())


def layers_of(table: Table) -> Layers:
    """Columns, lanes and order of one table's states."""
    column_of = _columns(table)
    ways = {edge.pair: _way(edge.source, edge.dest, column_of) for edge in edges_of(table)}
    count = max(column_of.values()) + 1
    items = dict.fromkeys(
        [Item(state=state, column=column, leads=0) for state, column in column_of.items()]
    )
    for way in ways.values():
        items |= dict.fromkeys(way)
    columns = [[item for item in items if item.column == column] for column in range(count)]
    return Layers(columns=_best_order(columns, _segments(ways.values())), ways=ways)


def _columns(table: Table) -> dict[str, int]:
    pairs = {edge.pair for edge in edges_of(table)}
    final = final_states(table)
    column_of: dict[str, int] = {}
    groups = (
        [state for state in table.states if state not in table.terminal | final],
        [state for state in table.states if state in table.terminal - final],
        [state for state in table.states if state in final],
    )
    for group in groups:
        floor = max(column_of.values(), default=-1) + 1 if group is not groups[0] else 0
        for state in group:
            beside = [
                column
                for other, column in column_of.items()
                if (state, other) in pairs or (other, state) in pairs
            ]
            column_of[state] = max([floor, *(column + 1 for column in beside)])
    return column_of


def _way(source: str, dest: str, column_of: Mapping[str, int]) -> tuple[Item, ...]:
    start, end = column_of[source], column_of[dest]
    step = 1 if end > start else -1
    return (
        Item(state=source, column=start, leads=0),
        *(Item(state=dest, column=at, leads=step) for at in range(start + step, end, step)),
        Item(state=dest, column=end, leads=0),
    )


def _segments(ways: Iterable[Sequence[Item]]) -> tuple[Segment, ...]:
    found: dict[Segment, None] = {}
    for way in ways:
        for one, other in pairwise(way):
            found[(one, other) if one.column < other.column else (other, one)] = None
    return tuple(found)


# -- order -----------------------------------------------------------------------------------------


def crossings(columns: Sequence[Sequence[Item]], segments: Iterable[Segment]) -> int:
    """How many pairs of segments cross; those that meet in an end do not."""
    place = _places(columns)
    between: dict[int, list[tuple[int, int]]] = {}
    for left, right in segments:
        between.setdefault(left.column, []).append((place[left], place[right]))
    return sum(
        (one[0] - other[0]) * (one[1] - other[1]) < 0
        for pairs in between.values()
        for index, one in enumerate(pairs)
        for other in pairs[:index]
    )


def _places(columns: Sequence[Sequence[Item]]) -> dict[Item, int]:
    return {item: place for column in columns for place, item in enumerate(column)}


def _best_order(
    columns: list[list[Item]], segments: tuple[Segment, ...]
) -> tuple[tuple[Item, ...], ...]:
    best, fewest = columns, crossings(columns, segments)
    beside: dict[Item, list[Item]] = {}
    for left, right in segments:
        beside.setdefault(left, []).append(right)
        beside.setdefault(right, []).append(left)
    for start in range(STARTS):
        order = [_turned(column, start) for column in columns]
        for sweep in range(SWEEPS):
            _sort_by_barycenter(order, beside, to_the_right=(sweep + start) % 2 == 0)
            _exchange(order, beside)
            count = crossings(order, segments)
            if count < fewest:
                best, fewest = [list(column) for column in order], count
    return tuple(tuple(column) for column in best)


def _turned(column: list[Item], by: int) -> list[Item]:
    """One of many starting orders."""
    stride = 1 + by % max(len(column), 1)
    keyed = sorted(range(len(column)), key=lambda index: ((index * stride + by) % 7, index))
    return [column[index] for index in keyed]


def _sort_by_barycenter(
    order: list[list[Item]], beside: Mapping[Item, list[Item]], *, to_the_right: bool
) -> None:
    """Each column by the mean place of what it is connected to in the column before it."""
    step = 1 if to_the_right else -1
    for column in order[step::step] if to_the_right else order[-2::-1]:
        before = {item: place for place, item in enumerate(order[column[0].column - step])}

        def center(
            entry: tuple[int, Item], before: Mapping[Item, int] = before
        ) -> tuple[float, int]:
            place, item = entry
            places = [before[other] for other in beside.get(item, ()) if other in before]
            return (sum(places) / len(places) if places else place, place)

        column[:] = [item for _, item in sorted(enumerate(column), key=center)]


def _exchange(order: list[list[Item]], beside: Mapping[Item, list[Item]]) -> None:
    """Exchange two neighbours where that takes crossings away, until nowhere it does."""
    place = _places(order)
    moved = True
    while moved:
        moved = False
        for column in order:
            for index in range(len(column) - 1):
                upper, lower = column[index], column[index + 1]
                if _gain(upper, lower, beside, place) > 0:
                    column[index], column[index + 1] = lower, upper
                    place[upper], place[lower] = index + 1, index
                    moved = True


def _gain(
    upper: Item, lower: Item, beside: Mapping[Item, list[Item]], place: Mapping[Item, int]
) -> int:
    """Crossings fewer if the two change places."""
    gain = 0
    for one in beside.get(upper, ()):
        for other in beside.get(lower, ()):
            if one.column == other.column:
                gain += (place[one] > place[other]) - (place[one] < place[other])
    return gain
