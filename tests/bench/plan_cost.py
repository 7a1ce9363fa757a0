"""What planning costs: `python tests/bench/plan_cost.py`.

16,384 tokens x 64 layers x 8 heads of 128 elements, blocks of 16 tokens, for several pairs of
layouts; block ids one after the other and scattered. Prints the milliseconds of `pair` (once per
peer) and of `Pairing.plan` (once per write), the best of several, and the number of runs.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvflow.ids import Rank
from kvflow.layout import GroupBlocks, owed, pair
from kvflow.planning.description import Engine, Group

TOKENS = 16_384
TRIES = 15
PAIRS = [
    ("HND", 16, 1, "HND", 16, 1),
    ("NHD", 16, 1, "NHD", 16, 1),
    ("BLHNC", 16, 1, "BLHNC", 16, 1),
    ("cpu-vec", 32, 1, "cpu-vec", 32, 1),
    ("HND", 16, 1, "HND", 32, 1),
    ("HND", 16, 8, "HND", 16, 4),
    ("HND", 16, 2, "HND", 16, 1),
    ("NHD", 16, 2, "NHD", 16, 1),
    ("NHD", 16, 1, "HND", 16, 1),
]


def engine(layout: str, block_size: int, tp: int) -> Engine:
    return Engine(
        model="bench",
        dtype="bfloat16",
        layout=layout,
        block_size=block_size,
        pool_blocks=4 * TOKENS // block_size,
        tp=tp,
        kv_heads=8,
        head_size=128,
        groups=(Group(kind="full", layers=64),),
    )


def ids(of: Engine, seed: int, *, scattered: bool) -> np.ndarray:
    count = TOKENS // of.block_size
    if scattered:
        return 1 + np.random.default_rng(seed).permutation(of.pool_blocks - 1)[:count]
    return np.arange(1, count + 1)


def milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """Best and median."""
    spent = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        spent.append(1000 * (time.perf_counter() - start))
    return min(spent), statistics.median(spent)


def main() -> None:
    first = Rank(0, 0)
    sides = f"{'producer':<16}{'consumer':<16}"
    print(f"{sides}{'ids':<12}{'pair ms':>9}{'plan ms':>9}{'median':>9}{'runs':>11}")
    for layout, size, tp, other_layout, other_size, other_tp in PAIRS:
        ours, theirs = engine(layout, size, tp), engine(other_layout, other_size, other_tp)
        source, destination = ours.regions(first), theirs.regions(first)
        owes = partial(owed, ours.side, first, theirs.side, first)
        pairing = pair(source, destination, owes)
        pair_ms, _ = milliseconds(partial(pair, source, destination, owes))
        for scattered in (False, True):
            blocks = GroupBlocks(
                source=ids(ours, 1, scattered=scattered),
                destination=ids(theirs, 2, scattered=scattered),
                start=0,
                tokens=TOKENS,
            )
            best, median = milliseconds(partial(pairing.plan, [blocks]))
            runs = sum(len(each) for each in pairing.plan([blocks]))
            sides = f"{layout}/{size}/TP{tp}", f"{other_layout}/{other_size}/TP{other_tp}"
            words = "scattered" if scattered else "consecutive"
            print(
                f"{sides[0]:<16}{sides[1]:<16}{words:<12}"
                f"{pair_ms:>9.2f}{best:>9.2f}{median:>9.2f}{runs:>11,}"
            )


if __name__ == "__main__":
    main()
