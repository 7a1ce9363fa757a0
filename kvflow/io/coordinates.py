"""Who a worker is and how its memory lies: our own, and what a peer told us of its."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvflow.errors import RemoteProtocolError
from kvflow.ids import AgentName, Incarnation, Rank
from kvflow.layout import Facts, Region, check_compatible
from kvflow.wire import messages as m


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This worker, as it is for the life of its agent.

    prompt_tokens_max  tokens of the longest prompt that its vLLM takes; None: any. No peer is told.
    """

    engine_id: str
    incarnation: Incarnation
    rank: Rank
    facts: Facts
    regions: tuple[Region, ...]
    prompt_tokens_max: int | None = None

    def hello(self, agent: AgentName, metadata: bytes) -> m.Hello:
        """The coordinates to send to a peer."""
        return m.Hello(
            agent=agent,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            pp_rank=self.rank.pp,
            tp_rank=self.rank.tp,
            metadata=metadata,
            facts=m.Facts(**dataclasses.asdict(self.facts)),
            regions=_regions_to_wire(self.regions),
        )

    def check(self, hello: m.Hello) -> tuple[Region, ...]:
        """The peer's regions, if KV can move between it and us.

        Raises `IncompatiblePeersError`, naming the field, or `RemoteProtocolError`.
        """
        theirs = Facts(**msgspec.structs.asdict(hello.facts))
        regions = _regions_from_wire(hello.regions)
        check_compatible(self.facts, self.regions, theirs, regions)
        return regions


def rank_of(hello: m.Hello) -> Rank:
    return Rank(hello.pp_rank, hello.tp_rank)


def _regions_to_wire(regions: Iterable[Region]) -> tuple[m.Region, ...]:
    return tuple(m.Region(**dataclasses.asdict(region)) for region in regions)


def _regions_from_wire(regions: Iterable[m.Region]) -> tuple[Region, ...]:
    try:
        return tuple(Region(**msgspec.structs.asdict(region)) for region in regions)
    except ValueError as error:
        raise RemoteProtocolError(f"region table: {error}") from error
