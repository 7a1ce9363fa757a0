"""What two described engines would move for one request, counted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np

from kvflow.ids import Rank
from kvflow.layout import (
    GroupBlocks,
    Int64s,
    Region,
    check_compatible,
    check_layers,
    owed,
    pair,
    writers,
)
from kvflow.planning.description import Cache, DescriptionError, Engine

_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """tokens: of the prompt. hit: of them, there already. fragmented: block ids are scattered."""

    tokens: int
    hit: int
    fragmented: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one producer rank writes to one consumer rank; lengths in bytes."""

    producer: Rank
    consumer: Rank
    layers: int
    heads: str
    lengths: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Runs of at least `start` and less than `stop` bytes."""

    start: int
    stop: int
    runs: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is written for one request."""

    shares: tuple[Share, ...]
    idle: tuple[Rank, ...]

    @property
    def lengths(self) -> Int64s:
        """Of all runs, in bytes."""
        empty = np.zeros(0, dtype=np.int64)
        return np.concatenate([empty, *(share.lengths for share in self.shares)])

    def histogram(self) -> Iterator[Bucket]:
        """Run lengths by powers of two, from the shortest to the longest."""
        lengths = self.lengths
        powers = np.frexp(lengths)[1] - 1
        for power in np.unique(powers):
            chosen = lengths[powers == power]
            yield Bucket(
                start=2 ** int(power),
                stop=2 ** int(power + 1),
                runs=len(chosen),
                bytes=int(chosen.sum()),
            )


def plan(producer: Engine, consumer: Engine, request: Request) -> Plan:
    """Raises `IncompatiblePeersError`; `DescriptionError` when a pool is too small; and, in a
    sentence, `ValueError` when the runs of two ranks are too many for one plan.
    """
    check_compatible(producer.facts(), consumer.facts())
    ours = {rank: producer.regions(rank) for rank in producer.ranks}
    rng = np.random.default_rng(_SEED)
    blocks = [
        _blocks(mine, other, request, rng)
        for mine, other in zip(producer.caches, consumer.caches, strict=True)
    ]
    shares = []
    for rank in consumer.ranks:
        regions = consumer.regions(rank)
        totals = {region.heads_total for region in regions}
        writing = writers(producer.side, consumer.side, rank, totals)
        check_layers(regions, [ours[other] for other in writing])
        for other in writing:
            owes = partial(owed, producer.side, other, consumer.side, rank)
            pairing = pair(ours[other], regions, owes)
            lengths = [runs.length for runs in pairing.plan(blocks)]
            if lengths:
                written = [region for region in regions if region.layer in pairing.layers]
                share = Share(
                    producer=other,
                    consumer=rank,
                    layers=len(written),
                    heads=_heads(consumer, written, owes),
                    lengths=np.concatenate(lengths),
                )
                shares.append(share)
    busy = {share.producer for share in shares}
    return Plan(
        shares=tuple(sorted(shares, key=attrgetter("producer", "consumer"))),
        idle=tuple(rank for rank in producer.ranks if rank not in busy),
    )


def _blocks(
    producer: Cache, consumer: Cache, request: Request, rng: np.random.Generator
) -> GroupBlocks:
    """Made-up block ids of one group."""
    start = request.hit
    if consumer.group.window is not None:
        start = max(start, request.tokens - consumer.group.window)
    source = _ids("producer", producer, request, rng)
    destination = _ids("consumer", consumer, request, rng)
    skipped = 0 if consumer.group.kind == "state" else start // consumer.block_size
    return GroupBlocks(
        source=source,
        destination=destination[skipped:],
        start=start,
        tokens=request.tokens,
    )


def _ids(side: str, cache: Cache, request: Request, rng: np.random.Generator) -> Int64s:
    is_state = cache.group.kind == "state"
    count = 1 if is_state else -(-request.tokens // cache.block_size)
    pool = cache.engine.pool_blocks
    if count >= pool:
        raise DescriptionError(
            f"{side}: {request.tokens} tokens need {count} blocks besides the null block, and "
            f"pool_blocks is {pool}"
        )
    if request.fragmented:
        return 1 + rng.permutation(pool - 1)[:count]
    return np.arange(1, count + 1)


def _heads(engine: Engine, regions: list[Region], owes: Callable[[int], range]) -> str:
    """Which heads of the model, in words; the groups may differ."""
    words = []
    for region in regions:
        kind = engine.groups[region.group].kind
        heads = owes(region.heads_total)
        if kind in ("mla", "state"):
            words.append("latent" if kind == "mla" else "state")
        elif len(heads) == 1:
            words.append(str(heads.start))
        else:
            words.append(f"{heads.start}-{heads[-1]}")
    return ", ".join(dict.fromkeys(words))
