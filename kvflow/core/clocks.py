"""What a consumer knows of its producers' clocks: a lower bound, never a guess.

The idea: a producer stamps `Accepted` and `Alive` with its clock. When such a stamp is heard, that
clock shows at least the stamp; later it shows at least the stamp plus the time since. From this the
consumer writes "no slice after your clock shows T" into registrations and renewals. T is never
later than `write_lease_s` after the moment of sending, however long the notice travels, however
often it is doubled, and however long the producer is paused before it reads it.

Assumption: two clocks differ in rate by at most `CLOCK_DRIFT_MAX`, and neither stops.
"""

from kvflow.ids import AgentName

CLOCK_DRIFT_MAX = 0.001
"""Seconds per second; slewing by NTP stays below half of it."""

STAMP_AGE_MAX_S = 250.0
"""An older stamp has drifted too far to be useful; the clock is asked for again."""


class Clocks:
    """Invariant: `estimate(agent, now)` is not above what the agent's clock shows at `now`."""

    def __init__(self) -> None:
        self._heard: dict[AgentName, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, agent: AgentName, clock_s: float, now: float) -> None:
        """A stamp arrived; one that was delayed says less than what is known already."""
        known = self.estimate(agent, now)
        if known is None or clock_s > known:
            self._heard[agent] = (clock_s, now)

    def estimate(self, agent: AgentName, now: float) -> float | None:
        """What the agent's clock shows at least, or None if it was not heard lately."""
        heard = self._heard.get(agent)
        if heard is None or now - heard[1] > STAMP_AGE_MAX_S:
            return None
        return heard[0] + (now - heard[1]) * (1 - CLOCK_DRIFT_MAX)

    def forget(self, agent: AgentName) -> None:
        self._heard.pop(agent, None)
