"""Two random engines, real memory: what is planned against a copy token by token.

More examples than the default: `KVFLOW_EXAMPLES=5000 pytest tests/layout/test_property.py`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvflow.io.nixl_port import registered_ranges
from kvflow.layout import Pairing, Runs, check_layers, check_sizes, owed, pair, writers

from .cases import Case, cases
from .engines import Worker, heads_of, perform, place_of

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("KVFLOW_EXAMPLES", "200"))


@dataclass
class World:
    """A case with workers that have memory; the producers hold the right bytes."""

    case: Case
    producers: list[Worker]
    consumers: list[Worker]
    content: dict[tuple[str, str], np.ndarray]

    def pairing(self, producer: Worker, consumer: Worker) -> Pairing:
        ours, theirs = self.case.producer.side, self.case.consumer.side
        owes = partial(owed, ours, producer.rank, theirs, consumer.rank)
        return pair(producer.regions, consumer.regions, owes)

    def plans(self) -> Iterator[tuple[Worker, Worker, list[Runs]]]:
        """Of every two ranks that have something to move."""
        for producer in self.producers:
            for consumer in self.consumers:
                pairing = self.pairing(producer, consumer)
                if pairing.layers:
                    yield producer, consumer, pairing.plan(self.case.blocks)


def world_of(case: Case) -> World:
    rng = np.random.default_rng(case.seed)
    content = {
        (layer, plane): rng.integers(
            0,
            256,
            (kind.heads, kind.rows(plane), stop_of(case, group), kind.bytes // kind.rows(plane)),
            dtype=np.uint8,
        )
        for group, kind in enumerate(case.kinds)
        for layer in kind.layers
        for plane in kind.planes
    }
    world = World(
        case=case,
        producers=case.producer.workers(case.kinds, rng),
        consumers=case.consumer.workers(case.kinds, rng),
        content=content,
    )
    for worker in world.producers:
        for group, layer, plane, head, token in cells_of(world, worker):
            block_ids = case.blocks[group].source
            place = place_of(case.producer.layouts[group], block_ids, token)
            at = worker.cells(layer, plane, head, place)
            worker.memory[at] = content[layer, plane][head, :, token]
    return world


def start_of(case: Case, group: int) -> int:
    """The first token that is moved: rounded down to what both sides' blocks have in common."""
    common = gcd(*(side.layouts[group].tokens for side in (case.producer, case.consumer)))
    return case.blocks[group].start // common * common if common else 0


def stop_of(case: Case, group: int) -> int:
    """The token after the last one that is moved, rounded up."""
    common = gcd(*(side.layouts[group].tokens for side in (case.producer, case.consumer)))
    if not common:
        return 1
    blocks = case.blocks[group]
    last = -(-blocks.tokens // common) * common
    return last if blocks.start < blocks.tokens else start_of(case, group)


def cells_of(world: World, worker: Worker) -> Iterator[tuple[int, str, str, int, int]]:
    """(group, layer, plane, head, token) of everything owed to, or held by, a worker."""
    case = world.case
    for region in worker.regions:
        kind = case.kinds[region.group]
        for plane in kind.planes:
            for head in range(region.head_first, region.head_first + region.heads):
                for token in range(start_of(case, region.group), stop_of(case, region.group)):
                    yield region.group, region.layer, plane, head, token


def place_there(case: Case, group: int, token: int) -> tuple[int, int]:
    """Where a consumer has a token: its ids begin with the block that holds `start`."""
    layout, blocks = case.consumer.layouts[group], case.blocks[group]
    skipped = blocks.start // (layout.tokens * layout.subblocks) if layout.tokens else 0
    return place_of(layout, [0] * skipped + blocks.destination.tolist(), token)


@given(cases())
@settings(max_examples=EXAMPLES)
def test_every_owed_byte_comes_once_and_no_other_is_touched_s6_s7_f14(case: Case) -> None:
    check_sizes(case.producer.side, case.consumer.side)
    world = world_of(case)
    for consumer in world.consumers:
        expected = consumer.memory.copy()
        times = np.zeros_like(consumer.written)
        for group, layer, plane, head, token in cells_of(world, consumer):
            at = consumer.cells(layer, plane, head, place_there(case, group, token))
            expected[at] = world.content[layer, plane][head, :, token]
            times[at] += 1
        for producer in world.producers:
            perform(world.pairing(producer, consumer).plan(case.blocks), producer, consumer)
        assert np.array_equal(consumer.written, times)
        assert np.array_equal(consumer.memory, expected)


@given(cases(), st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=EXAMPLES)
def test_a_prompt_that_is_moved_in_stretches_is_moved_as_a_whole_s6_s7(
    case: Case, cuts: list[float]
) -> None:
    """Where a stretch ends within a piece, the piece is moved again with the next one."""
    assume(all(kind.family != "state" for kind in case.kinds))
    world = world_of(case)
    stops = sorted(int(cut * max(each.tokens for each in case.blocks)) for cut in cuts)
    for consumer in world.consumers:
        expected = consumer.memory.copy()
        for group, layer, plane, head, token in cells_of(world, consumer):
            at = consumer.cells(layer, plane, head, place_there(case, group, token))
            expected[at] = world.content[layer, plane][head, :, token]
        for producer in world.producers:
            moved, pairing = 0, world.pairing(producer, consumer)
            for stop in [*stops, 2**40]:
                stretch = [
                    replace(each, moved=moved, tokens=min(stop, each.tokens))
                    for each in case.blocks
                ]
                perform(pairing.plan(stretch), producer, consumer)
                moved = stop
        assert np.array_equal(consumer.memory, expected)


@given(cases())
@settings(max_examples=EXAMPLES)
def test_runs_are_as_few_as_the_bytes_allow_f19(case: Case) -> None:
    world = world_of(case)
    for producer, consumer, planned in world.plans():
        sources, destinations = [], []
        for group, layer, plane, head, token in cells_of(world, consumer):
            if not any(region.layer == layer for region in producer.regions):
                continue
            if head not in owed_by(world, producer, consumer, group):
                continue
            place = place_of(case.producer.layouts[group], case.blocks[group].source, token)
            sources.append(producer.cells(layer, plane, head, place).ravel())
            there = place_there(case, group, token)
            destinations.append(consumer.cells(layer, plane, head, there).ravel())
        assert sum(map(len, planned)) == fewest(sources, destinations)


def owed_by(world: World, producer: Worker, consumer: Worker, group: int) -> range:
    ours, theirs = world.case.producer.side, world.case.consumer.side
    return owed(ours, producer.rank, theirs, consumer.rank, world.case.kinds[group].heads)


def fewest(sources: list[np.ndarray], destinations: list[np.ndarray]) -> int:
    """The number of runs into which bytes (source, destination) can be joined."""
    if not sources:
        return 0
    source, destination = np.concatenate(sources), np.concatenate(destinations)
    order = np.argsort(source)
    source, destination = source[order], destination[order]
    return 1 + int(((np.diff(source) != 1) | (np.diff(destination) != 1)).sum())


@given(cases())
@settings(max_examples=EXAMPLES)
def test_a_consumer_awaits_exactly_the_ranks_that_may_write_to_it_f5_f14(case: Case) -> None:
    world = world_of(case)
    ours, theirs = case.producer.side, case.consumer.side
    for consumer in world.consumers:
        totals = [region.heads_total for region in consumer.regions]
        awaited = writers(ours, theirs, consumer.rank, totals)
        they = [worker for worker in world.producers if worker.rank in awaited]
        check_layers(consumer.regions, [worker.regions for worker in they])
        for producer in world.producers:
            if world.pairing(producer, consumer).layers:
                assert producer.rank in awaited
        assert sorted(_layers(world, they, consumer)) == sorted(
            (region.layer, head)
            for region in consumer.regions
            for head in heads_of(case.kinds[region.group], consumer.rank.tp, theirs.tp_size)
        )


def _layers(world: World, writing: list[Worker], consumer: Worker) -> Iterator[tuple[str, int]]:
    """(layer, head) that is written to `consumer`, each time that it is."""
    for producer in writing:
        wanted = {region.layer: region for region in consumer.regions}
        for layer in world.pairing(producer, consumer).layers:
            for head in owed_by(world, producer, consumer, wanted[layer].group):
                yield layer, head


@given(cases())
@settings(max_examples=EXAMPLES)
def test_a_run_lies_in_one_registered_range_on_both_sides_f19(case: Case) -> None:
    """Also where ranges that merely touch are not joined: the null block lies between them."""
    world = world_of(case)
    for producer, consumer, planned in world.plans():
        for runs in planned:
            for worker, start in ((producer, runs.source), (consumer, runs.destination)):
                regions = [replace(region, memory="VRAM") for region in worker.regions]
                ranges = registered_ranges(regions)
                starts = np.array([each.start for each in ranges])
                stops = np.array([each.stop for each in ranges])
                nth = np.searchsorted(starts, start, side="right") - 1
                assert (start + runs.length <= stops[nth]).all()
