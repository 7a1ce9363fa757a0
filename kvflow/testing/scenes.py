"""Where scenarios start: two engines that know each other, and a request with both its legs."""

from kvflow.core import Timings
from kvflow.ids import TransferId
from kvflow.testing.decode_engine import Consumer
from kvflow.testing.prefill_engine import Producer
from kvflow.testing.prompts import Load, Prefill
from kvflow.testing.world import World

T = TransferId("t")


def strangers(
    ranks: int = 1, timings: Timings | None = None, *, registers: bool = False
) -> tuple[World, Producer, Consumer]:
    """A producer `P` and a consumer `C` that have never met, in a fair world."""
    world = World(skewed=False, timings=timings)
    producer = world.add_producer("P", ranks=ranks)
    return world, producer, world.add_consumer("C", registers=registers)


def acquainted(
    ranks: int = 1, timings: Timings | None = None, *, registers: bool = False
) -> tuple[World, Producer, Consumer]:
    """One second has passed, in which a first transfer made the two known to each other."""
    world, producer, consumer = strangers(ranks, timings, registers=registers)
    prefill, load = both_legs(producer, consumer, TransferId("warm"))
    producer.finish(prefill)
    world.advance(0.9)
    consumer.finish(load)
    world.advance(0.09)
    return world, producer, consumer


def both_legs(
    producer: Producer, consumer: Consumer, transfer_id: TransferId = T
) -> tuple[Prefill, Load]:
    """A router dispatches both legs at once; ten milliseconds pass."""
    prefill = producer.begin(transfer_id)
    load = consumer.allocate(transfer_id, producer)
    assert prefill is not None
    assert load is not None
    producer.world.advance(0.01)
    return prefill, load


def prefilled(producer: Producer, transfer_id: TransferId = T) -> Prefill:
    """A prefill whose KV is complete and pinned."""
    prefill = producer.begin(transfer_id)
    assert prefill is not None
    producer.finish(prefill)
    return prefill


Scene = tuple[World, Producer, Consumer, Prefill, Load]


def landed(timings: Timings, *, ranks: int = 1, registers: bool = True) -> Scene:
    """A load was received at 1.013; now it is 2.0."""
    world, producer, consumer = acquainted(ranks, timings, registers=registers)
    prefill, load = both_legs(producer, consumer)
    producer.finish(prefill)
    world.advance(0.99)
    assert load.state == "received"
    return world, producer, consumer, prefill, load


def again(consumer: Consumer, producer: Producer, load: Load, skip: int = 0) -> Load:
    """vLLM preempts the request, and allocates for it once more."""
    consumer.preempt(load)
    loading = consumer.allocate(load.transfer_id, producer, again=load, skip=skip)
    assert loading is not None
    return loading
