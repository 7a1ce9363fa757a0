"""Who a worker is and how its memory lies: our own, and what a peer told us of its."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kvflow.errors import IncompatiblePeersError, RemoteProtocolError
from kvflow.ids import AgentName, Incarnation, Rank
from kvflow.layout import (
    Facts,
    Pairing,
    Plane,
    Region,
    check_compatible,
    check_layers,
    check_pair,
    owed,
    pair,
    served,
    writers,
)
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
        regions = regions_of(hello)
        check_compatible(self.facts, facts_of(hello))
        check_pair(self.regions, regions)
        return regions

    def writers(self, ranks: Sequence[m.Hello]) -> dict[Rank, m.Hello]:
        """Of a producer engine's ranks, those that write to this worker.

        Raises `IncompatiblePeersError` if one of them, or a layer, is missing; and as `check`.
        """
        regions = {rank_of(hello): self.check(hello) for hello in ranks}
        hellos = {rank_of(hello): hello for hello in ranks}
        theirs = facts_of(ranks[0]).side
        expected = writers(theirs, self.facts.side, self.rank, self._heads_totals)
        missing = sorted(expected - hellos.keys())
        if missing:
            has, lacks = (", ".join(map(str, ranks)) for ranks in (sorted(hellos), missing))
            raise IncompatiblePeersError("ranks", f"{self.rank} needs {lacks}", has)
        check_layers(self.regions, [regions[rank] for rank in sorted(expected)])
        return {rank: hellos[rank] for rank in sorted(expected)}

    def pairing(self, hello: m.Hello) -> tuple[int, int, Pairing]:
        """How this worker writes to a consumer's: part, parts (see `PeerIntroduced`), and the plan.

        Raises `IncompatiblePeersError`, also if nothing is owed to it, and as `check`.
        """
        regions = self.check(hello)
        ours, theirs, rank = self.facts.side, facts_of(hello).side, rank_of(hello)
        mine = served(ours, self.rank, theirs, self._heads_totals)
        if rank not in mine:
            raise IncompatiblePeersError("rank", f"{self.rank} owes {rank} nothing", rank)

        def owed_heads(heads_total: int) -> range:
            return owed(ours, self.rank, theirs, rank, heads_total)

        return mine.index(rank), len(mine), pair(self.regions, regions, owed_heads)

    def read_pairing(self, hello: m.Hello) -> Pairing:
        """How this worker reads from a producer's: what that one would write to it.

        Raises as `check`.
        """
        regions = self.check(hello)
        ours, theirs, rank = self.facts.side, facts_of(hello).side, rank_of(hello)

        def owed_heads(heads_total: int) -> range:
            return owed(theirs, rank, ours, self.rank, heads_total)

        return pair(regions, self.regions, owed_heads)

    @property
    def _heads_totals(self) -> set[int]:
        return {region.heads_total for region in self.regions}


def rank_of(hello: m.Hello) -> Rank:
    return Rank(hello.pp_rank, hello.tp_rank)


def facts_of(hello: m.Hello) -> Facts:
    return Facts(**msgspec.structs.asdict(hello.facts))


def regions_of(hello: m.Hello) -> tuple[Region, ...]:
    """Raises `RemoteProtocolError` if they make no sense."""
    try:
        return tuple(_region_from_wire(region) for region in hello.regions)
    except ValueError as error:
        raise RemoteProtocolError(f"region table: {error}") from error


def _regions_to_wire(regions: Iterable[Region]) -> tuple[m.Region, ...]:
    return tuple(_region_to_wire(region) for region in regions)


def _region_to_wire(region: Region) -> m.Region:
    fields = dataclasses.asdict(region)
    fields["planes"] = tuple(m.Plane(**plane) for plane in fields["planes"])
    return m.Region(**fields)


def _region_from_wire(region: m.Region) -> Region:
    fields = msgspec.structs.asdict(region)
    fields["planes"] = tuple(Plane(**msgspec.structs.asdict(plane)) for plane in region.planes)
    return Region(**fields)
