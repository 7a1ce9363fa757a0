"""Who writes what to whom, for all sizes that are planned between."""

import itertools
from collections import Counter

import pytest

from kvflow.errors import IncompatiblePeersError
from kvflow.ids import Rank
from kvflow.layout import Side, check_sizes, owed, served, writers
from kvflow.layout.topology import held

SIZES = (1, 2, 4, 8)
STAGES = ((1, 1), (2, 2), (1, 2), (4, 1))
HEADS = (1, 2, 4, 6, 8, 16)


def fits(heads: int, *tp_sizes: int) -> bool:
    return all(heads % size == 0 or size % heads == 0 for size in tp_sizes)


CASES = [
    (Side(tp_size=ours, pp_size=pp[0]), Side(tp_size=theirs, pp_size=pp[1]), heads)
    for ours, theirs, pp, heads in itertools.product(SIZES, SIZES, STAGES, HEADS)
    if fits(heads, ours, theirs)
]


def ranks(side: Side) -> list[Rank]:
    return [Rank(pp, tp) for pp in range(side.pp_size) for tp in range(side.tp_size)]


def test_a_consumers_head_is_owed_by_exactly_one_rank_of_each_stage_that_serves_it_f14() -> None:
    for producer, consumer, heads in CASES:
        check_sizes(producer, consumer)
        for rank in ranks(consumer):
            owes = Counter(
                (other.pp, head)
                for other in ranks(producer)
                for head in owed(producer, other, consumer, rank, heads)
            )
            equal = producer.pp_size == consumer.pp_size
            stages = [rank.pp] if equal else range(producer.pp_size)
            wanted = held(consumer, rank.tp, heads)
            assert owes == Counter((stage, head) for stage in stages for head in wanted)


def test_nobody_owes_what_it_does_not_hold_f14() -> None:
    for producer, consumer, heads in CASES:
        for ours, theirs in itertools.product(ranks(producer), ranks(consumer)):
            part = owed(producer, ours, consumer, theirs, heads)
            assert set(part) <= set(held(producer, ours.tp, heads))


def test_writers_and_served_are_one_function_seen_from_both_sides_f5() -> None:
    for producer, consumer, heads in CASES:
        for totals in ([heads], [heads, heads, 1]):
            from_consumers = {
                (ours, theirs)
                for theirs in ranks(consumer)
                for ours in writers(producer, consumer, theirs, totals)
            }
            from_producers = {
                (ours, theirs)
                for ours in ranks(producer)
                for theirs in served(producer, ours, consumer, totals)
            }
            assert from_consumers == from_producers
            for rank in ranks(producer):
                served_ranks = served(producer, rank, consumer, totals)
                assert served_ranks == tuple(sorted(served_ranks))


def test_ranks_that_hold_the_same_head_share_the_work_evenly() -> None:
    for producer, consumer, heads in CASES:
        for stage, head in itertools.product(range(producer.pp_size), range(heads)):
            holders = [
                rank
                for rank in ranks(producer)
                if rank.pp == stage and head in held(producer, rank.tp, heads)
            ]
            loads = [
                sum(
                    head in owed(producer, rank, consumer, other, heads)
                    for other in ranks(consumer)
                )
                for rank in holders
            ]
            assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("tp_size", "heads", "wanted"),
    [
        (1, 4, ["0-3"]),
        (2, 4, ["0-1", "2-3"]),
        (4, 4, ["0-0", "1-1", "2-2", "3-3"]),
        (4, 2, ["0-0", "0-0", "1-1", "1-1"]),
        (4, 1, ["0-0", "0-0", "0-0", "0-0"]),
        (2, 6, ["0-2", "3-5"]),
    ],
)
def test_heads_are_given_to_ranks_in_order(tp_size: int, heads: int, wanted: list[str]) -> None:
    side = Side(tp_size=tp_size, pp_size=1)
    ranges = [held(side, rank, heads) for rank in range(tp_size)]
    assert [f"{each.start}-{each[-1]}" for each in ranges] == wanted


def test_every_consumer_of_a_latent_has_a_producer_rank_of_its_own_where_there_are_enough() -> None:
    producer, consumer = Side(tp_size=8, pp_size=1), Side(tp_size=2, pp_size=1)
    writing = [
        {rank for rank in ranks(producer) if owed(producer, rank, consumer, other, 1)}
        for other in ranks(consumer)
    ]
    assert writing == [{Rank(0, 0)}, {Rank(0, 4)}]


def test_a_rank_that_owes_nothing_answers_to_one_consumer_rank_all_the_same() -> None:
    for producer, consumer, heads in CASES:
        for rank in ranks(producer):
            others = served(producer, rank, consumer, [heads])
            owing = [other for other in others if owed(producer, rank, consumer, other, heads)]
            assert owing == list(others) or (owing == [] and len(others) == 1)
    producer, consumer = Side(tp_size=8, pp_size=1), Side(tp_size=2, pp_size=1)
    assert writers(producer, consumer, Rank(0, 0), [1]) == {Rank(0, tp) for tp in range(4)}


@pytest.mark.parametrize(
    ("ours", "theirs", "field"),
    [
        ((2, 1), (3, 1), "tensor-parallel size"),
        ((6, 1), (4, 1), "tensor-parallel size"),
        ((1, 2), (1, 3), "pipeline-parallel size"),
        ((1, 2), (1, 4), "pipeline-parallel size"),
    ],
)
def test_sizes_between_which_nothing_is_planned_are_refused_by_name_f14(
    ours: tuple[int, int], theirs: tuple[int, int], field: str
) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(IncompatiblePeersError) as raised:
            check_sizes(
                Side(tp_size=one[0], pp_size=one[1]), Side(tp_size=other[0], pp_size=other[1])
            )
        assert raised.value.field == field
        assert {raised.value.ours, raised.value.theirs} == {max(ours), max(theirs)}


def test_heads_that_ranks_cannot_share_are_refused_by_name_f14() -> None:
    with pytest.raises(IncompatiblePeersError, match="'6 heads' here and '4 ranks' there"):
        held(Side(tp_size=4, pp_size=1), 0, 6)
