"""The lines of one transfer, of both sides, on one clock; and the requests that it was for.

A *transfer* is everything with one transfer id. A *request* is one consumer request of it with
whatever the producer's ranks did for it, or, when no consumer's lines are there, the producer's
side alone. A vLLM request that moves no KV is a request of its own, with "" as its transfer id.

Known limit: a transfer id that is used again, after its transfer has ended, is still one transfer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvflow.observe.schema import ORDERS, REQUEST
from kvflow.tracing.clocks import Clocks
from kvflow.tracing.lines import Line, is_of

MOVED = frozenset({"sent", "kept"})
"""States of a producer's record whose part is with the consumer."""

Name = tuple[str, str]
"""A request: its engine, and vLLM's name of it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line, and when it was by the reference's clock."""

    at: int
    line: Line


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """All lines with one transfer id, in the order of their time."""

    id: str
    events: tuple[Event, ...]
    clocks: Clocks = field(repr=False)

    def of(self, machine: str) -> list[Event]:
        return [event for event in self.events if event.line.machine == machine]

    @property
    def start(self) -> int:
        return self.events[0].at

    @cached_property
    def prefilling(self) -> frozenset[Name]:
        """The requests, by engine and vLLM's name, that are prefill legs.

        A request's first line says so; where it is missing, the producer machine's lines do.
        """
        roles = {_name(event.line): "producer" for event in self.of("producer")}
        roles |= {_name(event.line): "consumer" for event in self.of("consumer")}
        roles |= {_name(e.line): e.line.role for e in self.of(REQUEST) if e.line.role}
        return frozenset(name for name, role in roles.items() if role == "producer")

    def began(self, order: Event) -> int:
        """When an order was taken."""
        began = order.line.began
        if began is None:
            return order.at
        return min(self.clocks.at(order.line.engine, began), order.at)

    def arrived(self, step: Event) -> int | None:
        """When vLLM's API server received the request, if this line says so."""
        arrival = step.line.arrival
        if arrival is None:
            return step.at if step.line.trigger == "arrived" else None
        return min(self.clocks.at(step.line.engine, arrival), step.at)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. `consumer` and `request_id` are "" if no consumer's lines are there."""

    transfer: Transfer
    consumer: str
    request_id: str

    @property
    def id(self) -> str:
        """How it is shown."""
        return self.transfer.id or self.request_id

    @cached_property
    def loads(self) -> list[Event]:
        """The consumer machine's lines of this request, of all ranks."""
        return [e for e in self.transfer.of("consumer") if self._is_mine(e.line)]

    @cached_property
    def prefills(self) -> list[Event]:
        """The producer machine's lines that are not about another consumer."""
        events = self.transfer.of("producer")
        return [e for e in events if not self._is_for_another(e.line.peer)]

    @cached_property
    def steps(self) -> list[Event]:
        """vLLM's lines of this request on the consumer."""
        return [e for e in self.transfer.of(REQUEST) if self._is_mine(e.line)]

    @cached_property
    def prefill_steps(self) -> list[Event]:
        """vLLM's lines on the producer."""
        legs = self.transfer.prefilling
        steps = self.transfer.of(REQUEST)
        return [e for e in steps if _name(e.line) in legs and not self._is_mine(e.line)]

    @cached_property
    def orders(self) -> list[Event]:
        """WRITEs for this consumer, and its own READs."""
        return [
            e
            for e in self.transfer.events
            if e.line.machine in ORDERS
            and (self._is_mine(e.line) or not self._is_for_another(e.line.peer))
        ]

    @cached_property
    def moved(self) -> int | None:
        """When the last of the producer's ranks was done."""
        lines = ((e.at, e.line) for e in self.prefills)
        done = [at for at, line in lines if line.dest in MOVED and line.source not in MOVED]
        return max(done, default=None)

    @cached_property
    def producers(self) -> list[str]:
        """Engines that computed, or were to compute, its KV."""
        of = [*self.prefills, *self.prefill_steps]
        return list(dict.fromkeys(event.line.engine for event in of))

    @cached_property
    def attempts(self) -> int:
        """How many registrations there were."""
        return len({e.line.attempt for e in (self.loads or self.prefills) if e.line.attempt})

    @property
    def end(self) -> int:
        """When the last line was that is known of it."""
        return max((e.at for e in self.all_events()), default=self.transfer.start)

    def all_events(self) -> list[Event]:
        mine = [*self.loads, *self.prefills, *self.steps, *self.prefill_steps, *self.orders]
        return sorted(mine, key=lambda event: event.at)

    def arrival(self, steps: Sequence[Event]) -> int | None:
        """When vLLM's API server received that leg, if its lines say so."""
        known = (self.transfer.arrived(step) for step in steps)
        return next((at for at in known if at is not None), None)

    def _is_mine(self, line: Line) -> bool:
        return _name(line) == (self.consumer, self.request_id)

    def _is_for_another(self, peer: str | None) -> bool:
        if not peer or not self.loads:
            return False
        ranks = {(e.line.engine, e.line.rank) for e in self.loads}
        if any(is_of(peer, *rank) for rank in ranks):
            return False
        others = {(e.line.engine, e.line.rank) for e in self.transfer.of("consumer")} - ranks
        return any(is_of(peer, *rank) for rank in others)


def gather(lines: Iterable[Line], clocks: Clocks) -> list[Transfer]:
    """All transfers, in the order in which they began."""
    grouped: dict[tuple[str, str, str], list[Event]] = {}
    for line in lines:
        if line.machine == "peer":
            continue
        # Without a transfer id, a request is known by its engine's name of it alone.
        alone = ("", "") if line.id else (line.engine, line.request or "")
        event = Event(at=clocks.at(line.engine, line.t), line=line)
        grouped.setdefault((line.transfer, *alone), []).append(event)
    transfers = [
        Transfer(
            id=transfer_id,
            events=tuple(sorted(events, key=lambda event: event.at)),
            clocks=clocks,
        )
        for (transfer_id, *_), events in grouped.items()
    ]
    return sorted(transfers, key=lambda transfer: transfer.start)


def requests_of(transfer: Transfer) -> Iterator[Request]:
    """One for each consumer request; one for the producer's side alone if there is none."""
    legs = transfer.prefilling if transfer.id else frozenset()
    consumers = [
        _name(event.line)
        for event in transfer.events
        if event.line.machine == "consumer"
        or (event.line.machine == REQUEST and _name(event.line) not in legs)
    ]
    for engine, request_id in dict.fromkeys(consumers) or [("", "")]:
        yield Request(transfer=transfer, consumer=engine, request_id=request_id)


def _name(line: Line) -> Name:
    return line.engine, line.request or ""
