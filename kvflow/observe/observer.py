"""What a driver tells an observer: for logs, traces and metrics."""

from dataclasses import dataclass
from typing import Protocol

from kvflow.core.effects import Moved
from kvflow.ids import AgentName, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What became of one WRITE or READ order; a transfer may take several.

    kind      "write" or "read".
    key       the transfer id, of a producer's: its part.
    outcome   "done", "stopped" or "failed".
    began     when the order was taken, by the driver's clock; `at` when its last handle had ended.
    plan_s    seconds of planning.
    post_s    seconds inside the transfer library's calls that post and poll.
    posts     slices that were posted.
    """

    kind: str
    key: str
    attempt: int
    request_id: RequestId | None
    peer: AgentName
    outcome: str
    began: float
    at: float
    plan_s: float
    post_s: float
    bytes: int
    runs: int
    posts: int


class Observer(Protocol):
    """What happens in one worker. Called in the loop thread."""

    def moved(self, moved: Moved) -> None:
        """A record took a row."""

    def carried(self, carried: Carried) -> None:
        """A WRITE or READ order is over."""

    def ignored(self, kind: str, key: str) -> None:
        """Something was ignored, by kind."""

    def refused(self, kind: str, detail: str) -> None:
        """A peer, or a message of one, was refused."""

    def failed(self, what: str, error: BaseException) -> None:
        """A bug of ours."""
