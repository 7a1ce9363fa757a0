"""Random pairs of engines that KV can move between, and a request of theirs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from hypothesis import strategies as st

from kvflow.layout import GroupBlocks, Side

from .engines import Design, Kind, Layout, blocks_of

FAMILIES = ("cells", "cells", "split", "vec", "amx", "latent", "state")
TP_SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 4, 6, 8)
TOKENS_MAX = 26
Pair = tuple[Layout, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two engines of one model, and the blocks of one request, per cache group."""

    kinds: tuple[Kind, ...]
    producer: Design
    consumer: Design
    blocks: tuple[GroupBlocks, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp = draw(st.tuples(st.sampled_from(TP_SIZES), st.sampled_from(TP_SIZES)))
    pp = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 2), (2, 1)]))
    shared = draw(st.booleans())
    groups = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 3))
    kinds = [draw(kinds_of(tp, layers)) for _ in range(1 if shared else groups)]
    pairs = [draw(layouts_of(kind)) for kind in kinds]
    if shared:
        kinds, pairs = kinds * groups, pairs * groups
    kinds = [
        replace(kind, layers=tuple(f"{group}.{layer}" for layer in kind.layers))
        for group, kind in enumerate(kinds)
    ]
    rng = random.Random(draw(st.integers(0, 2**32)))
    tokens = draw(st.integers(1, TOKENS_MAX))
    starts = [draw(starts_of(kind, pair, tokens)) for kind, pair in zip(kinds, pairs, strict=True)]
    pools = []
    ids = []
    for side in (0, 1):
        sizes = [pair[side] for pair in pairs]
        counts = [_count(each, tokens) + rng.choice([0, 0, 1, 2]) for each in sizes]
        orders = [draw(st.sampled_from(["up", "down", "any", "any"])) for _ in kinds]
        one, given = _ids(rng, counts, orders, shared=shared)
        pools.append(one)
        ids.append(given)
    pairs = [
        (replace(pair[0], pool=pools[0][nth]), replace(pair[1], pool=pools[1][nth]))
        for nth, pair in enumerate(pairs)
    ]
    blocks = [
        _blocks(draw, pair, (ids[0][nth], ids[1][nth]), starts[nth], tokens)
        for nth, pair in enumerate(pairs)
    ]
    stages = [_stages(rng, kinds, pp_size, shared=shared) for pp_size in pp]
    if pp[0] == pp[1]:
        stages[1] = stages[0]
    designs = [
        Design(
            side=Side(tp_size=tp[side], pp_size=pp[side]),
            layouts=tuple(pair[side] for pair in pairs),
            stages=stages[side],
            shared=shared,
        )
        for side in (0, 1)
    ]
    return Case(
        kinds=tuple(kinds),
        producer=designs[0],
        consumer=designs[1],
        blocks=tuple(blocks),
        seed=rng.randrange(2**32),
    )


@st.composite
def kinds_of(draw: st.DrawFn, tp: tuple[int, int], layers: int) -> Kind:
    """A kind whose heads both engines can split."""
    family = draw(st.sampled_from(FAMILIES))
    possible = [
        heads for heads in HEADS if all(heads % size == 0 or size % heads == 0 for size in tp)
    ]
    heads = draw(st.sampled_from(possible))
    if family == "latent" or (family == "state" and tp[0] != tp[1]):
        heads = 1
    elif family == "state":
        heads = draw(st.sampled_from([1, tp[0]]))
    return Kind(
        family=family,
        heads=heads,
        size=draw(st.sampled_from([2, 4] if family == "amx" else [1, 2, 3])),
        element_bytes=draw(st.integers(1, 2)),
        tile=draw(st.sampled_from([2, 4])),
        layers=tuple(str(layer) for layer in range(layers)),
    )


@st.composite
def layouts_of(draw: st.DrawFn, kind: Kind) -> Pair:
    """The layouts of the producer and of the consumer."""
    unit = kind.tile if kind.family == "amx" else 1
    sizes = st.sampled_from([1, 2, 3] if unit > 1 else [1, 2, 3, 4, 6, 8])
    tokens = draw(st.tuples(sizes, sizes) | sizes.map(lambda size: (size, size)))
    axes = "LBPH" if kind.family in ("vec", "amx") else "LBPHN"
    crossing = axes.replace("LB", "BL")
    orders = st.permutations(axes).map("".join) | st.sampled_from([axes, crossing])
    pads = st.just((0,) * len(axes)) | st.tuples(*[st.sampled_from([0, 0, 1, 4])] * len(axes))
    one, other = (
        Layout(
            order=draw(orders),
            pads=draw(pads),
            tokens=0 if kind.family == "state" else unit * size,
            subblocks=1 if kind.family == "state" else draw(st.sampled_from([1, 1, 2, 3])),
            pool=1,
        )
        for size in tokens
    )
    if draw(st.booleans()):
        other = replace(other, order=one.order, pads=one.pads)
    return one, other


@st.composite
def starts_of(draw: st.DrawFn, kind: Kind, pair: Pair, tokens: int) -> int:
    """Where the owed tokens begin: at a hit of whole blocks of the consumer, or anywhere."""
    block = pair[1].tokens * pair[1].subblocks or 1
    whole = st.integers(0, tokens // block).map(lambda blocks: blocks * block)
    return draw(st.just(0) | whole | st.integers(0, tokens) | st.just(tokens))


def _count(layout: Layout, tokens: int) -> int:
    return -(-tokens // (layout.tokens * layout.subblocks)) if layout.tokens else 1


def _ids(
    rng: random.Random, counts: list[int], orders: list[str], *, shared: bool
) -> tuple[list[int], list[list[int]]]:
    """Pool sizes and block ids of every group; groups with one pool share no id."""
    pools, ids = [], []
    pool, free = 0, []
    for count, order in zip(counts, orders, strict=True):
        if not shared or not pools:
            pool = (sum(counts) if shared else count) + 1 + rng.choice([1, 1, 4])
            free = list(range(1, pool))
        if order == "any":
            chosen = rng.sample(free, count)
        else:
            start = rng.randrange(len(free) - count + 1)
            chosen = free[start : start + count][:: 1 if order == "up" else -1]
        free = [each for each in free if each not in chosen]
        pools.append(pool)
        ids.append(chosen)
    return pools, ids


def _blocks(
    draw: st.DrawFn, pair: Pair, ids: tuple[list[int], list[int]], start: int, tokens: int
) -> GroupBlocks:
    source, destination = list(ids[0]), list(ids[1])
    if not pair[0].tokens:
        return blocks_of(source[:1], destination[:1], start, tokens)
    piece = gcd(pair[0].tokens, pair[1].tokens)
    freed = start // piece * piece // (pair[0].tokens * pair[0].subblocks)
    if draw(st.booleans()):
        source[:freed] = [0] * freed
    skipped = start // (pair[1].tokens * pair[1].subblocks)
    return blocks_of(source, destination[skipped:], start, tokens)


def _stages(
    rng: random.Random, kinds: Sequence[Kind], pp_size: int, *, shared: bool
) -> dict[str, int]:
    """The pipeline stage of each layer; alike in all groups that share their memory."""
    stages: dict[str, int] = {}
    cut = 0
    for nth, kind in enumerate(kinds):
        if nth == 0 or not shared:
            cut = rng.randrange(len(kind.layers) + 1) if pp_size > 1 else len(kind.layers)
        for number, layer in enumerate(kind.layers):
            stages[layer] = int(number >= cut)
    return stages
