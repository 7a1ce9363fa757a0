"""What an action may use: the time, the books, and a list of effects to append to."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from kvflow.core.clocks import Clocks
from kvflow.core.deadlines import Deadlines
from kvflow.core.effects import Effect, SendNotice
from kvflow.core.ledger import Ledger
from kvflow.core.notices import Notice
from kvflow.core.reasons import Reason
from kvflow.core.tally import Tally
from kvflow.core.timings import Timings
from kvflow.ids import Address, AgentName, Rank, RequestId


@dataclass(slots=True, kw_only=True)
class Record:
    """What every machine's record has.

    state     name of the current state.
    since     when it was entered.
    spent_ms  milliseconds spent in each state so far.
    detail    free text for people: what the far side or a library said.
    """

    state: str
    since: float
    spent_ms: dict[str, float] = field(default_factory=dict)
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Follow-up: a load needs its producer to be met."""

    address: Address
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMet:
    """Follow-up: the producer of a load can be reached (or never will: `refusal`)."""

    request_id: RequestId
    refusal: str | None = None
    agents: Mapping[Rank, AgentName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """Follow-up: one agent is lost; everything that depends on it must know."""

    agent: AgentName
    detail: str
    is_dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalDue:
    """Follow-up: renew everything that is registered with this engine."""

    address: Address


FollowUp = Wanted | PeerMet | PeerGone | RenewalDue


@dataclass(slots=True, kw_only=True)
class Turn:
    """One call into the engine: what it sees, and what comes out of it.

    prompt_tokens_max  tokens of the longest prompt that this engine's vLLM takes; None: any.
    """

    now: float
    timings: Timings
    ledger: Ledger
    deadlines: Deadlines
    clocks: Clocks
    tally: Tally
    prompt_tokens_max: int | None = None
    effects: list[Effect] = field(default_factory=list)
    follow_ups: list[FollowUp] = field(default_factory=list)

    def send(self, agent: AgentName, notice: Notice) -> None:
        self.effects.append(SendNotice(agent=agent, notice=notice))

    def write_until(self, agent: AgentName) -> float | None:
        """Until when a producer may post slices, by its own clock; None if that is not known."""
        clock_s = self.clocks.estimate(agent, self.now)
        return None if clock_s is None else clock_s + self.timings.write_lease_s

    def arm(self, key: Hashable, seconds: float) -> None:
        self.deadlines.arm(key, self.now + seconds)
