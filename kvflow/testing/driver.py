"""A modelled worker: an engine, and what its driver does with effects, on virtual time.

It keeps the real driver's obligations: `Meet`, `PostWrite` and `PostRead` are answered exactly
once; a slice of a write is posted only after `may_write`; a write that may not go on waits until it
may or is told to stop; dropping a peer settles what is moved to or from it; coordinates travel
until something was heard.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflow.core import Engine, Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.ledger import Block
from kvflow.ids import (
    AgentName,
    Incarnation,
    PartId,
    PromptDigest,
    Rank,
    RequestId,
    TransferId,
    part_id,
    transfer_of,
)
from kvflow.testing.network import Frame, Hello
from kvflow.testing.sizes import BLOCK_TOKENS, complete_blocks

if TYPE_CHECKING:
    from kvflow.testing.world import World

SLICE_BLOCKS = 2
SLICES_AT_ONCE = 2
RETRY_S = 0.05
"""A paused write asks again after this, as well as after each event."""


def writes_to(rank: int, ranks: int, consumer_rank: int, consumer_ranks: int) -> bool:
    """Whether one of a producer's ranks owes something to one of a consumer's: heads in common."""
    return rank * consumer_ranks < (consumer_rank + 1) * ranks and (
        consumer_rank * ranks < (rank + 1) * consumer_ranks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """What one block holds of one rank: a position in one prefill's KV."""

    transfer_id: TransferId
    request_id: str
    prompt: PromptDigest
    group: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """One posted piece of a write or read: it may touch both sides at any time until it has ended.

    reads  it was posted by the receiver.
    """

    part: PartId
    attempt: int
    sender: AgentName
    receiver: AgentName
    source: tuple[Block, ...]
    destination: tuple[Block, ...]
    reads: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Move:
    """One `PostWrite` or `PostRead` being worked off."""

    effect: ef.PostWrite | ef.PostRead
    source: tuple[Block, ...]
    destination: tuple[Block, ...]
    posted: int = 0
    under_way: int = 0
    stop: bool = False
    failed: str = ""
    answered: bool = False
    waits: bool = False


MoveKey = PartId | tuple[RequestId, Rank]
"""The part that is written, or the request and the rank from which it reads."""


def key_of(effect: ef.PostWrite | ef.StopWrite | ef.PostRead | ef.StopRead) -> MoveKey:
    if isinstance(effect, ef.PostWrite | ef.StopWrite):
        return effect.part
    return effect.request_id, effect.rank


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One worker process.

    changed    something happened to its engine since it was last checked.
    ranks      how many its engine has.
    skew_s, rate
               its clock shows `skew_s + rate * world.now`.
    prompt_tokens_max
               tokens of the longest prompt that its vLLM takes.
    memory     (block, rank) -> what it holds.
    reachable  agents whose coordinates it has.
    heard      agents that it has heard anything from.
    """

    world: "World"
    agent: AgentName
    incarnation: Incarnation
    rank: Rank
    ranks: int
    timings: Timings
    engine: Engine = field(init=False)
    alive: bool = True
    paused_until: float = 0.0
    inbox: deque[ev.Event | Frame] = field(default_factory=deque)
    memory: dict[tuple[Block, Rank], Tag] = field(default_factory=dict)
    reachable: set[AgentName] = field(default_factory=set)
    heard: set[AgentName] = field(default_factory=set)
    moves: dict[MoveKey, Move] = field(default_factory=dict)
    changed: bool = False
    skew_s: float = 0.0
    rate: float = 1.0
    prompt_tokens_max: int | None = None

    def __post_init__(self) -> None:
        self.engine = Engine(self.timings, self.prompt_tokens_max)

    @property
    def clock(self) -> float:
        """What this process takes for the time."""
        return self.skew_s + self.rate * self.world.now

    @property
    def next_deadline(self) -> float | None:
        """The engine's next deadline, in the world's time."""
        at = self.engine.next_deadline()
        return None if at is None else (at - self.skew_s) / self.rate

    @property
    def paused(self) -> bool:
        return self.world.now < self.paused_until

    # -- events ----------------------------------------------------------------------------------

    def take(self, event: ev.Event | Frame) -> None:
        """An event or a frame arrives: at once, or when the process runs again."""
        if not self.alive:
            return
        if self.paused or self.inbox:
            self.inbox.append(event)
        else:
            self._take(event)

    def _take(self, event: ev.Event | Frame) -> None:
        if isinstance(event, Frame):
            self._hear(event)
            return
        if isinstance(event, ev.MeetingSucceeded):
            self.reachable.update(event.agents.values())
        self.execute(self.engine.receive(event, self.clock))

    def _hear(self, frame: Frame) -> None:
        self.heard.add(frame.sender)
        if frame.hello is not None:
            self.reachable.add(frame.sender)
            of = frame.hello
            mine = [
                tp for tp in range(of.ranks) if writes_to(self.rank.tp, self.ranks, tp, of.ranks)
            ]
            introduced = ev.PeerIntroduced(
                agent=frame.sender,
                incarnation=of.incarnation,
                rank=of.rank,
                part=mine.index(of.rank.tp),
                parts=len(mine),
            )
            self.execute(self.engine.receive(introduced, self.clock))
        received = ev.NoticeReceived(sender=frame.sender, notice=frame.notice)
        self.execute(self.engine.receive(received, self.clock))

    def expire(self) -> None:
        """Deadlines are due, give or take the rounding between two clocks."""
        self.execute(self.engine.expire(self.clock + 1e-6))

    def wake(self, *, deadlines_first: bool) -> None:
        """The process runs again: late deadlines and late notices, in either order."""
        if deadlines_first:
            self.expire()
        while self.inbox:
            self._take(self.inbox.popleft())
        self.expire()

    # -- effects ---------------------------------------------------------------------------------

    def execute(self, effects: list[ef.Effect]) -> None:
        self.changed = True
        for effect in effects:
            match effect:
                case ef.Meet():
                    self.world.meet(self, effect.address)
                case ef.DropPeer():
                    self._drop(effect.agent)
                case ef.SendNotice():
                    self._send(effect)
                case ef.PostWrite() | ef.PostRead():
                    self._post(effect)
                case ef.StopWrite() | ef.StopRead():
                    self._stop(effect)
                case ef.ReportSent():
                    self.world.report_sent(self, effect.request_id)
                case ef.ReportReceived():
                    self.world.report_received(self, effect)
                case ef.Moved() | ef.Ignored():
                    self.world.note(self, effect)
        for move in list(self.moves.values()):
            self._go_on(move)

    def _send(self, effect: ef.SendNotice) -> None:
        if effect.agent not in self.reachable:
            failed = ev.NoticeFailed(agent=effect.agent, detail="not reachable")
            self.world.soon(lambda: self.take(failed))
            return
        hello = None
        if effect.agent not in self.heard:
            hello = Hello(incarnation=self.incarnation, rank=self.rank, ranks=self.ranks)
        frame = Frame(sender=self.agent, receiver=effect.agent, notice=effect.notice, hello=hello)
        self.world.send(self, frame)

    def _drop(self, agent: AgentName) -> None:
        self.reachable.discard(agent)
        self.heard.discard(agent)
        for move in self.moves.values():
            if move.effect.agent == agent:
                move.failed = move.failed or "its peer was dropped"

    # -- writes and reads --------------------------------------------------------------------------

    def _post(self, effect: ef.PostWrite | ef.PostRead) -> None:
        key = key_of(effect)
        assert key not in self.moves, "one write of a part, one read from a rank at a time"
        transfer_id = self._transfer_of(effect)
        moved = effect.moved if isinstance(effect, ef.PostWrite) else 0
        begins = complete_blocks(transfer_id, moved)
        stops = complete_blocks(transfer_id, effect.tokens)
        source: list[Block] = []
        destination: list[Block] = []
        for group, start in enumerate(effect.starts):
            skipped = start // BLOCK_TOKENS
            for nth in range(max(skipped, begins[group]), stops[group]):
                source.append((group, effect.source[group][nth]))
                destination.append((group, effect.destination[group][nth - skipped]))
        self.moves[key] = Move(effect=effect, source=tuple(source), destination=tuple(destination))

    def _transfer_of(self, effect: ef.PostWrite | ef.PostRead) -> TransferId:
        if isinstance(effect, ef.PostWrite):
            return transfer_of(effect.part)
        return self.engine.records.consumers[effect.request_id].transfer_id

    def _stop(self, effect: ef.StopWrite | ef.StopRead) -> None:
        move = self.moves[key_of(effect)]
        if isinstance(effect, ef.StopWrite):
            assert isinstance(move.effect, ef.PostWrite)
            assert move.effect.attempt == effect.attempt
        move.stop = True

    def _go_on(self, move: Move) -> None:
        """Post what may be posted; answer when nothing is under way and nothing is to come."""
        if move.answered or self.paused or not self.alive:
            return
        if not (move.stop or move.failed):
            self._post_slices(move)
        over = move.stop or move.failed or move.posted == len(move.source)
        if over and not move.under_way:
            move.answered = True
            answer = self._answer(move)
            self.world.soon(lambda: self._close(move, answer))

    def _post_slices(self, move: Move) -> None:
        while move.under_way < SLICES_AT_ONCE and move.posted < len(move.source):
            if not self._may_post(move.effect):
                self._wait(move)
                return
            if self.world.refuses_post(self):
                move.failed = "the transfer library refused the post"
                return
            stop = move.posted + SLICE_BLOCKS
            each = self._slice(
                move.effect, move.source[move.posted : stop], move.destination[move.posted : stop]
            )
            move.posted = min(stop, len(move.source))
            move.under_way += 1
            self.world.post(
                self,
                each,
                lambda detail: self._slice_ended(move, detail),
                lambda detail: self._slice_troubled(move, detail),
            )

    def _may_post(self, effect: ef.PostWrite | ef.PostRead) -> bool:
        if isinstance(effect, ef.PostRead):
            return True
        return self.engine.may_write(effect.part, effect.attempt, self.clock)

    def _slice(
        self,
        effect: ef.PostWrite | ef.PostRead,
        source: tuple[Block, ...],
        destination: tuple[Block, ...],
    ) -> Slice:
        if isinstance(effect, ef.PostWrite):
            return Slice(
                part=effect.part,
                attempt=effect.attempt,
                sender=self.agent,
                receiver=effect.agent,
                source=source,
                destination=destination,
            )
        load = self.engine.records.consumers[effect.request_id]
        return Slice(
            part=part_id(load.transfer_id, 0),
            attempt=load.attempt,
            sender=effect.agent,
            receiver=self.agent,
            source=source,
            destination=destination,
            reads=True,
        )

    def _wait(self, move: Move) -> None:
        if move.waits:
            return
        move.waits = True

        def ask_again() -> None:
            move.waits = False
            self._go_on(move)

        self.world.later(RETRY_S, ask_again)

    def _slice_troubled(self, move: Move, detail: str) -> None:
        """Nobody knows whether the slice has ended, so it has not; nothing more is posted."""
        move.failed = move.failed or detail

    def _slice_ended(self, move: Move, detail: str) -> None:
        move.under_way -= 1
        move.failed = move.failed or detail
        self._go_on(move)

    def _answer(self, move: Move) -> ev.Event:
        runs = len(move.source)
        failed = bool(move.failed) and not move.stop
        stopped = move.stop and (move.posted < runs or bool(move.failed))
        effect = move.effect
        if isinstance(effect, ef.PostRead):
            request_id, rank = effect.request_id, effect.rank
            if failed:
                return ev.ReadFailed(request_id=request_id, rank=rank, detail=move.failed)
            if stopped:
                return ev.ReadStopped(request_id=request_id, rank=rank)
            return ev.ReadDone(request_id=request_id, rank=rank, bytes=runs, runs=runs)
        part, attempt = effect.part, effect.attempt
        if failed:
            return ev.WriteFailed(part=part, attempt=attempt, detail=move.failed)
        if stopped:
            return ev.WriteStopped(part=part, attempt=attempt)
        return ev.WriteDone(part=part, attempt=attempt, bytes=runs, runs=runs)

    def _close(self, move: Move, answer: ev.Event) -> None:
        """The answer reaches the engine, and from then on another move may be asked for."""
        if self.paused:
            self.world.later(self.paused_until - self.world.now, lambda: self._close(move, answer))
            return
        if self.alive:
            del self.moves[key_of(move.effect)]
            self.take(answer)
