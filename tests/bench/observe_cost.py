"""What logs and metrics cost per transfer, with the trace off. Prints; asserts nothing.

    python tests/bench/observe_cost.py [--transfers 200] [--rounds 7]

Two engines with real NIXL agents in this process, without vLLM. Each round runs the same transfers
with what an engine has (`Watch`, `Meter` and `Tally`) and with an observer that keeps nothing,
in turn, and takes the processor time of both loop threads, as the kernel counts it. Counts are read
four times a second, as vLLM's steps do; the reader's time is told apart.
"""

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "nixl"))

from loop_process import Engine  # noqa: E402

from kvflow.core.tally import Tally  # noqa: E402
from kvflow.observe.meter import Meter  # noqa: E402
from kvflow.observe.observer import Observer  # noqa: E402
from kvflow.observe.watch import Watch  # noqa: E402

BLOCKS = 16
READ_S = 0.25


class NoTally(Tally):
    """Counts nothing."""

    def took(self, *_: object, **__: object) -> None:
        """Nothing."""

    def registered(self, *_: object, **__: object) -> None:
        """Nothing."""


class NoMeter(Meter):
    """Likewise."""

    def __init__(self) -> None:
        super().__init__("")
        self.tally = NoTally()

    def polled(self, late_s: float) -> None:
        """Nothing."""


class Observed(Engine):
    """With all that an engine inside vLLM has."""

    def _make_observer(self) -> Observer:
        self.meter = Meter("pp0.tp0")
        return Watch(None, self.meter, engine=self.name)

    def _make_meter(self) -> Meter:
        return self.meter


class Counted(Engine):
    """With what metrics need, and no log."""

    def _make_observer(self) -> Observer:
        self.meter = Meter("pp0.tp0")
        watch = Watch(None, self.meter, engine=self.name)
        watch.moved = self.meter.moved  # type: ignore[method-assign]
        return watch

    def _make_meter(self) -> Meter:
        return self.meter


class Silent(Engine):
    """With an observer that keeps nothing."""

    def _make_meter(self) -> Meter:
        return NoMeter()


def cpu_s(native_id: int | None) -> float:
    """Time on a processor so far, of one thread of this process."""
    stat = Path(f"/proc/self/task/{native_id}/schedstat").read_text()
    return int(stat.split()[0]) / 1e9


def round_of(kind: type[Engine], transfers: int, number: int) -> tuple[float, float]:
    """Processor seconds of both loops per transfer; the same of reading the counts."""
    with kind(f"p{number}", 1) as producer, kind(f"c{number}", 2) as consumer:
        engines = (producer, consumer)
        blocks = list(range(1, 2 * BLOCKS, 2))

        def one(name: str) -> None:
            producer.start_prefill(name)
            consumer.load(name, producer.address, blocks)
            producer.finish_prefill(name, blocks)
            reason = consumer.outcome(name)
            assert reason is None, reason
            producer.collect_sent(name, 60)

        for warm in range(10):
            one(f"warm-{warm}")
        for each in engines:
            each.loop.read_meter()
        before = sum(cpu_s(each.loop.native_id) for each in engines)
        reading, read_at = 0.0, time.monotonic()
        for transfer in range(transfers):
            one(f"t{transfer}")
            if time.monotonic() - read_at >= READ_S:
                start = time.thread_time()
                for each in engines:
                    each.loop.read_meter()
                reading += time.thread_time() - start
                read_at = time.monotonic()
        spent = sum(cpu_s(each.loop.native_id) for each in engines) - before
        return spent / transfers, reading / transfers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transfers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.INFO)
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    logging.getLogger("vllm").propagate = False
    times: dict[type[Engine], list[tuple[float, float]]] = {Silent: [], Counted: [], Observed: []}
    for number in range(options.rounds):
        # In turn forwards and backwards, so that no kind always comes first.
        for kind, spent in list(times.items())[:: 1 if number % 2 else -1]:
            spent.append(round_of(kind, options.transfers, number))
    without = statistics.median(each for each, _ in times[Silent])
    print(
        f"medians of {options.rounds} rounds of {options.transfers} transfers, both loops' "
        "processor time per transfer; and that of reading the counts"
    )
    for kind, spent in times.items():
        both = statistics.median(each for each, _ in spent)
        read = statistics.median(each for _, each in spent)
        print(
            f"{kind.__name__:<9} {1e6 * both:6.0f} us ({100 * (both / without - 1):+5.1f} %), "
            f"reading {1e6 * read:5.1f} us ({100 * read / without:.1f} %)"
        )


if __name__ == "__main__":
    main()
