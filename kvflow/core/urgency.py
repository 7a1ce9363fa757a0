"""How soon a worker should look for news: by what its records wait for.

The idea: looking costs processor time (some 0.1 ms in a busy process), and gains at most the time
between two looks, once. So it is done often only while that is for milliseconds. A load waits for
as long as its prompt is computed, and a prompt that is computed waits for nobody.
"""

import enum
from collections.abc import Mapping

from kvflow.core import consumer, peer, producer

_MOVING = {
    producer.NAME: frozenset({"streaming", "recalled", "transferring", "draining"}),
    consumer.NAME: frozenset({"reading", "stopping"}),
    peer.NAME: frozenset({"meeting"}),
}
_AWAITING = {
    producer.NAME: frozenset({"prefilled", "lent"}),
    consumer.NAME: consumer.LIVE,
    peer.NAME: frozenset(),
}
_EXPECTANT = producer.LIVE - {"kept"}


class Urgency(enum.Enum):
    """How soon the driver should look for news."""

    QUICK = "KV is being moved by us, which takes milliseconds"
    AWAITING = "a peer's word ends a wait"
    EXPECTANT = "a prompt is being computed, and a consumer may say something of it"
    IDLE = "nothing is expected"


def of_population(population: Mapping[tuple[str, str], int]) -> Urgency:
    """What so many records by (machine, state) call for."""
    awaiting = expectant = False
    for (machine, state), count in population.items():
        if not count:
            continue
        if state in _MOVING[machine]:
            return Urgency.QUICK
        awaiting = awaiting or state in _AWAITING[machine]
        expectant = expectant or (machine == producer.NAME and state in _EXPECTANT)
    if awaiting:
        return Urgency.AWAITING
    return Urgency.EXPECTANT if expectant else Urgency.IDLE
