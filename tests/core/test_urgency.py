"""How soon news is looked for, by what the records wait for."""

import pytest

from kvflow.core import Urgency, consumer, peer, producer
from kvflow.core.urgency import of_population


@pytest.mark.parametrize(
    ("states", "urgency"),
    [
        ((), Urgency.IDLE),
        (("peer met",), Urgency.IDLE),
        (("producer sent", "consumer received"), Urgency.IDLE),
        (("producer kept",), Urgency.IDLE),
        (("producer allocated",), Urgency.EXPECTANT),
        (("producer registered",), Urgency.EXPECTANT),
        (("producer prefilled",), Urgency.AWAITING),
        (("producer lent",), Urgency.AWAITING),
        (("consumer registered",), Urgency.AWAITING),
        (("consumer transferring", "producer allocated"), Urgency.AWAITING),
        (("producer transferring", "consumer registered"), Urgency.QUICK),
        (("consumer reading",), Urgency.QUICK),
        (("peer meeting",), Urgency.QUICK),
    ],
)
def test_what_is_waited_for_says_how_soon_to_look(
    states: tuple[str, ...], urgency: Urgency
) -> None:
    population = {tuple(each.split()): 1 for each in states}
    over = {("producer", "transferring"): 0, ("consumer", "reading"): 0}
    assert of_population({**over, **population}) is urgency


@pytest.mark.parametrize("machine", [producer, consumer, peer])
def test_every_state_is_known_here(machine: object) -> None:
    for state in machine.STATES:  # type: ignore[attr-defined]
        assert of_population({(machine.NAME, state): 1}) in Urgency  # type: ignore[attr-defined]
