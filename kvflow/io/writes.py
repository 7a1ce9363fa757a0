"""One WRITE in slices: posted while allowed, polled until every handle has ended.

Rule: whoever started a write gets exactly one answer, and gets it only when no handle of the write
is outstanding any more, so "ended" always means that nothing can land.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvflow.core.effects import PostWrite
from kvflow.core.events import WriteDone, WriteFailed, WriteStopped
from kvflow.errors import TransportError
from kvflow.ids import AgentName
from kvflow.io.port import Port, PostState
from kvflow.layout import Runs


@dataclass(slots=True, kw_only=True)
class Write:
    """The progress of one `PostWrite`.

    rest     slices that have not been posted; None when all have.
    handles  posted and not ended.
    stopped  nothing more is posted.
    failure  the first error, if any; nothing more is posted then either.
    final    another attempt would fail in the same way.
    """

    order: PostWrite
    rest: Iterator[Runs] | None
    handles: list[int] = field(default_factory=list)
    stopped: bool = False
    failure: str = ""
    final: bool = False
    bytes: int = 0
    runs: int = 0

    @property
    def agent(self) -> AgentName:
        return self.order.agent

    def advance(
        self, port: Port, may_post: Callable[[], bool], in_flight_max: int
    ) -> WriteDone | WriteFailed | WriteStopped | None:
        """Poll what is in flight, post at most one slice, and answer when nothing is left."""
        self._poll(port)
        if self.can_post(in_flight_max) and may_post():
            self._post(port)
        if self.handles:
            return None
        return self._answer()

    def can_post(self, in_flight_max: int) -> bool:
        """Whether another slice would be posted if it were allowed."""
        wants = self.rest is not None and not self.stopped and not self.failure
        return wants and len(self.handles) < in_flight_max

    def _poll(self, port: Port) -> None:
        for handle in list(self.handles):
            try:
                state = port.poll(handle)
            except TransportError as error:
                # Nobody knows whether it has ended, so it has not.
                self.failure = self.failure or str(error)
                continue
            if state is PostState.PENDING:
                continue
            if state is PostState.FAILED:
                self.failure = self.failure or "the transfer library reported an error"
            self.handles.remove(handle)
            port.release(handle)

    def _post(self, port: Port) -> None:
        assert self.rest is not None
        runs = next(self.rest, None)
        if runs is None:
            self.rest = None
            return
        try:
            self.handles.append(port.post(self.agent, runs))
        except TransportError as error:
            self.failure = str(error)
            return
        self.bytes += runs.bytes
        self.runs += len(runs)
        self._poll(port)

    def _answer(self) -> WriteDone | WriteFailed | WriteStopped | None:
        part, attempt = self.order.part, self.order.attempt
        if self.failure:
            return WriteFailed(
                part=part,
                attempt=attempt,
                detail=self.failure,
                final=self.final,
            )
        if self.rest is None:
            return WriteDone(part=part, attempt=attempt, bytes=self.bytes, runs=self.runs)
        if self.stopped:
            return WriteStopped(part=part, attempt=attempt)
        return None
