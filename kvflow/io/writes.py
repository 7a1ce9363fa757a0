"""One WRITE or READ in slices: posted while allowed, polled until every handle has ended.

Rule: whoever started one gets exactly one answer, and gets it only when no handle of it is
outstanding any more, so "ended" always means that nothing can land.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvflow.core.effects import PostRead, PostWrite, StopRead, StopWrite
from kvflow.core.events import (
    ReadDone,
    ReadFailed,
    ReadStopped,
    WriteDone,
    WriteFailed,
    WriteStopped,
)
from kvflow.errors import TransportError
from kvflow.ids import AgentName, RequestId
from kvflow.io.port import Port, PostState
from kvflow.layout import GroupBlocks, Runs
from kvflow.observe.observer import Carried
from kvflow.observe.schema import READ, WRITE

_OUTCOMES = {
    WriteDone: "done",
    WriteFailed: "failed",
    WriteStopped: "stopped",
    ReadDone: "done",
    ReadFailed: "failed",
    ReadStopped: "stopped",
}
Ended = WriteDone | WriteFailed | WriteStopped | ReadDone | ReadFailed | ReadStopped


@dataclass(slots=True, kw_only=True)
class Transfer:
    """The progress of one `PostWrite` or `PostRead`.

    rest     slices that have not been posted; None when all have.
    began    when the order was taken.
    handles  posted and not ended.
    stopped  nothing more is posted.
    failure  the first error, if any; nothing more is posted then either.
    final    another attempt would fail in the same way.
    plan_s   seconds of planning; `post_s` in the library's calls that post and poll.
    """

    order: PostWrite | PostRead
    rest: Iterator[Runs] | None
    began: float
    handles: list[int] = field(default_factory=list)
    stopped: bool = False
    failure: str = ""
    final: bool = False
    bytes: int = 0
    runs: int = 0
    posts: int = 0
    plan_s: float = 0.0
    post_s: float = 0.0

    @property
    def agent(self) -> AgentName:
        return self.order.agent

    @property
    def name(self) -> str:
        """How logs name it."""
        order = self.order
        return order.part if isinstance(order, PostWrite) else order.request_id

    def is_of(self, stop: StopWrite | StopRead) -> bool:
        """Whether this is what is to be stopped."""
        order = self.order
        if isinstance(stop, StopWrite):
            return isinstance(order, PostWrite) and order.part == stop.part
        if isinstance(order, PostWrite):
            return False
        return (order.request_id, order.rank) == (stop.request_id, stop.rank)

    def advance(self, port: Port, may_post: Callable[[], bool], in_flight_max: int) -> Ended | None:
        """Poll what is in flight, post at most one slice, and answer when nothing is left."""
        start = time.perf_counter()
        self._poll(port)
        if self.can_post(in_flight_max) and may_post():
            self._post(port)
        self.post_s += time.perf_counter() - start
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
            reads = isinstance(self.order, PostRead)
            self.handles.append(port.post(self.agent, runs, reads=reads))
        except TransportError as error:
            self.failure = str(error)
            return
        self.posts += 1
        self.bytes += runs.bytes
        self.runs += len(runs)
        self._poll(port)

    def carried(
        self, answer: Ended, at: float, *, key: str, attempt: int, request_id: RequestId | None
    ) -> Carried:
        """What observers are told when it is over."""
        return Carried(
            kind=READ if isinstance(self.order, PostRead) else WRITE,
            key=key,
            attempt=attempt,
            request_id=request_id,
            peer=self.order.agent,
            outcome=_OUTCOMES[type(answer)],
            began=self.began,
            at=at,
            plan_s=self.plan_s,
            post_s=self.post_s,
            bytes=self.bytes,
            runs=self.runs,
            posts=self.posts,
        )

    def _answer(self) -> Ended | None:
        order = self.order
        if self.failure:
            return _failed(order, self.failure, self.final)
        if self.rest is None:
            return _done(order, self.bytes, self.runs)
        return _stopped(order) if self.stopped else None


def _done(order: PostWrite | PostRead, bytes_: int, runs: int) -> Ended:
    if isinstance(order, PostRead):
        return ReadDone(request_id=order.request_id, rank=order.rank, bytes=bytes_, runs=runs)
    return WriteDone(part=order.part, attempt=order.attempt, bytes=bytes_, runs=runs)


def _failed(order: PostWrite | PostRead, detail: str, final: bool) -> Ended:
    if isinstance(order, PostRead):
        return ReadFailed(request_id=order.request_id, rank=order.rank, detail=detail, final=final)
    return WriteFailed(part=order.part, attempt=order.attempt, detail=detail, final=final)


def _stopped(order: PostWrite | PostRead) -> Ended:
    if isinstance(order, PostRead):
        return ReadStopped(request_id=order.request_id, rank=order.rank)
    return WriteStopped(part=order.part, attempt=order.attempt)


def blocks_of(order: PostWrite | PostRead) -> list[GroupBlocks]:
    """What is planned for, per cache group."""
    return [
        GroupBlocks(
            source=np.asarray(source, dtype=np.int64),
            destination=np.asarray(destination, dtype=np.int64),
            start=start,
            tokens=order.tokens,
            moved=order.moved if isinstance(order, PostWrite) else 0,
        )
        for source, destination, start in zip(
            order.source, order.destination, order.starts, strict=True
        )
    ]
