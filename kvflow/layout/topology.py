"""Which rank of one engine holds what a rank of another needs. Closed formulas, no tables.

Heads are split over an engine's tensor-parallel ranks in order: with at least as many heads as
ranks each rank holds an equal part, with fewer each head is held by as many neighbouring ranks.
Layers are split over pipeline stages; which ones a stage holds is not known here, so a stage that
may hold a layer is asked.

`owed` is the one function. `served` says to whom a rank owes, `writers` the same from the far end.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvflow.errors import IncompatiblePeersError
from kvflow.ids import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How many ranks one engine has along each axis."""

    tp_size: int
    pp_size: int


def check_sizes(producer: Side, consumer: Side) -> None:
    """Raise `IncompatiblePeersError`, by name, for sizes between which nothing is planned.

    Tensor-parallel sizes must divide one another either way. Pipeline sizes must be equal, or one
    of them 1. The same question from either end.
    """
    ours, theirs = sorted((producer.tp_size, consumer.tp_size))
    if theirs % ours:
        raise IncompatiblePeersError("tensor-parallel size", producer.tp_size, consumer.tp_size)
    if producer.pp_size != consumer.pp_size and 1 not in (producer.pp_size, consumer.pp_size):
        raise IncompatiblePeersError("pipeline-parallel size", producer.pp_size, consumer.pp_size)


def held(side: Side, tp_rank: int, heads_total: int) -> range:
    """Indices of the heads that a tensor-parallel rank holds, of `heads_total`.

    Raises `IncompatiblePeersError` when they cannot be split evenly.
    """
    size = side.tp_size
    if heads_total % size and size % heads_total:
        raise IncompatiblePeersError(
            "heads over tensor-parallel ranks", f"{heads_total} heads", f"{size} ranks"
        )
    first = tp_rank * heads_total // size
    return range(first, first + max(heads_total // size, 1))


def owed(
    producer: Side, producer_rank: Rank, consumer: Side, consumer_rank: Rank, heads_total: int
) -> range:
    """Indices of the heads that this producer rank writes to this consumer rank; maybe none.

    Of every stage that may hold a layer, exactly one rank owes a consumer rank a given head. Where
    several hold it, the consumer ranks that want it are spread evenly over them.
    """
    nothing = range(0)
    if producer.pp_size == consumer.pp_size and producer_rank.pp != consumer_rank.pp:
        return nothing
    mine = held(producer, producer_rank.tp, heads_total)
    wanted = held(consumer, consumer_rank.tp, heads_total)
    both = range(max(mine.start, wanted.start), min(mine.stop, wanted.stop))
    # Of `copies` ranks here that hold the same head, and `takers` there that want it from them.
    copies = max(producer.tp_size // heads_total, 1)
    each = max(consumer.tp_size // heads_total, 1)
    stages = consumer.pp_size if producer.pp_size == 1 else 1
    takers = stages * each
    taker = consumer_rank.pp % stages * each + consumer_rank.tp % each
    writer = taker * copies // takers
    return both if both and producer_rank.tp % copies == writer else nothing


def writers(
    producer: Side, consumer: Side, consumer_rank: Rank, heads_totals: Iterable[int]
) -> frozenset[Rank]:
    """The producer ranks, of all stages, from which this consumer rank waits for a word.

    `heads_totals`: of the consumer's regions; each number once is enough.
    """
    totals = set(heads_totals)
    return frozenset(
        rank
        for rank in _ranks(producer)
        if consumer_rank in served(producer, rank, consumer, totals)
    )


def served(
    producer: Side, producer_rank: Rank, consumer: Side, heads_totals: Iterable[int]
) -> tuple[Rank, ...]:
    """The consumer ranks, in order, that this producer rank owes something.

    One that owes nothing, since others have copies of its heads, answers to one consumer rank all
    the same: it has nothing to write to it, and so learns when its own blocks are free.
    """
    totals = set(heads_totals)
    owing = tuple(
        rank
        for rank in _ranks(consumer)
        if any(owed(producer, producer_rank, consumer, rank, total) for total in totals)
    )
    stage = min(producer_rank.pp, consumer.pp_size - 1)
    return owing or (Rank(stage, producer_rank.tp * consumer.tp_size // producer.tp_size),)


def _ranks(side: Side) -> Iterable[Rank]:
    return (Rank(pp, tp) for pp in range(side.pp_size) for tp in range(side.tp_size))
