"""A seeded network between named agents.

Rules: it decides only *whether and when* a frame arrives; the world delivers it. Frames in flight
are beyond its reach: `heal` does not call back a straggler.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvflow.core.notices import Notice
from kvflow.ids import AgentName, Incarnation, Rank
from kvflow.testing.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A sender's coordinates, sent along until it has heard from the receiver.

    ranks  how many its engine has.
    """

    incarnation: Incarnation
    rank: Rank
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One notification on its way."""

    sender: AgentName
    receiver: AgentName
    notice: Notice
    hello: Hello | None = None

    def __str__(self) -> str:
        named = getattr(self.notice, "transfer_id", "")
        what = f"{type(self.notice).__name__} {named}".strip()
        return f"({what}, {self.sender} to {self.receiver})"


@dataclass(slots=True, kw_only=True)
class Weather:
    """How bad the network is: probabilities, and delays in seconds.

    straggle  probability that a frame, or the second copy of a doubled one, takes up to
              `straggle_s` instead of `delay_s`.
    """

    loss: float = 0.0
    double: float = 0.0
    straggle: float = 0.0
    delay_s: float = 0.001
    straggle_s: float = 3.0


FAIR = Weather()
Matches = Callable[[Frame], bool]
Strike = Callable[[Fault, Frame], None]


class Network:
    """Says when frames arrive, and which pairs of agents can reach each other."""

    def __init__(
        self,
        rng: random.Random,
        weather: Weather = FAIR,
        strike: Strike = lambda fault, frame: None,
    ) -> None:
        """`strike` is told of each fault that a frame meets with."""
        self.weather = weather
        self._strike = strike
        self._rng = rng
        self._notices_cut: set[frozenset[AgentName]] = set()
        self._data_cut: set[frozenset[AgentName]] = set()
        self._cut_one_way: set[tuple[AgentName, AgentName]] = set()
        self._losing: list[tuple[Matches, float]] = []

    # -- faults ----------------------------------------------------------------------------------

    def cut(self, one: AgentName, other: AgentName, *, data: bool) -> None:
        """No notice passes between these two any more, and if `data`, no write either."""
        self._notices_cut.add(frozenset((one, other)))
        if data:
            self._data_cut.add(frozenset((one, other)))

    def cut_one_way(self, sender: AgentName, receiver: AgentName) -> None:
        """No notice from `sender` reaches `receiver` any more; the other way all is well."""
        self._cut_one_way.add((sender, receiver))

    def cut_data(self, one: AgentName, other: AgentName) -> None:
        """Writes between these two fail; notices pass."""
        self._data_cut.add(frozenset((one, other)))

    def lose(self, matches: Matches, count: float = 1) -> None:
        """The next `count` frames that match are lost."""
        self._losing.append((matches, count))

    def lose_all(self, matches: Matches) -> None:
        self.lose(matches, math.inf)

    def heal(self) -> None:
        """From now on everything arrives, once and soon."""
        self.weather = FAIR
        self._notices_cut.clear()
        self._cut_one_way.clear()
        self._data_cut.clear()
        self._losing.clear()

    # -- questions of the world ------------------------------------------------------------------

    def arrivals(self, frame: Frame) -> list[float]:
        """After how many seconds copies of this frame arrive; none when it is lost."""
        pair = (frame.sender, frame.receiver)
        if frozenset(pair) in self._notices_cut or pair in self._cut_one_way:
            self._strike(Fault.NOTICE_CUT_OFF, frame)
            return []
        if self._is_lost(frame):
            self._strike(Fault.NOTICE_LOST, frame)
            return []
        copies = 1 + (self._rng.random() < self.weather.double)
        if copies > 1:
            self._strike(Fault.NOTICE_DOUBLED, frame)
        return [self._delay(frame) for _ in range(copies)]

    def carries_data(self, one: AgentName, other: AgentName) -> bool:
        """Whether a write between these two can land."""
        return frozenset((one, other)) not in self._data_cut

    def is_cut(self, one: AgentName, other: AgentName) -> bool:
        """Whether notices between these two are lost, in at least one direction."""
        one_way = (one, other) in self._cut_one_way or (other, one) in self._cut_one_way
        return one_way or frozenset((one, other)) in self._notices_cut

    def _is_lost(self, frame: Frame) -> bool:
        for index, (matches, count) in enumerate(self._losing):
            if matches(frame):
                if count <= 1:
                    del self._losing[index]
                else:
                    self._losing[index] = (matches, count - 1)
                return True
        return self._rng.random() < self.weather.loss

    def _delay(self, frame: Frame) -> float:
        straggles = self._rng.random() < self.weather.straggle
        if straggles:
            self._strike(Fault.NOTICE_DELAYED, frame)
        most = self.weather.straggle_s if straggles else self.weather.delay_s
        return most if self.weather is FAIR else self._rng.uniform(0.0, most)
