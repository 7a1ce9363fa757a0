"""A modelled worker: an engine, and what its driver does with effects, on virtual time.

It keeps the real driver's obligations: `Meet` and `PostWrite` are answered exactly once; a slice is
posted only after `may_write`; a write that may not go on waits until it may or is told to stop;
dropping a peer settles what is written to it; coordinates travel until something was heard.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflow.core import Engine, Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.ledger import Block
from kvflow.ids import AgentName, Incarnation, PartId, Rank, TransferId, transfer_of
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
    group: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """One posted piece of a write: it reads and writes at any time until it has ended."""

    part: PartId
    attempt: int
    sender: AgentName
    receiver: AgentName
    source: tuple[Block, ...]
    destination: tuple[Block, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Write:
    """One `PostWrite` being worked off."""

    effect: ef.PostWrite
    source: tuple[Block, ...]
    destination: tuple[Block, ...]
    posted: int = 0
    under_way: int = 0
    stop: bool = False
    failed: str = ""
    answered: bool = False
    waits: bool = False


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
    writes: dict[PartId, Write] = field(default_factory=dict)
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
                case ef.PostWrite():
                    self._post(effect)
                case ef.StopWrite():
                    self._stop(effect)
                case ef.ReportSent():
                    self.world.report_sent(self, effect.request_id)
                case ef.ReportReceived():
                    self.world.report_received(self, effect)
                case ef.Moved() | ef.Ignored():
                    self.world.note(self, effect)
        for write in list(self.writes.values()):
            self._go_on(write)

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
        for write in self.writes.values():
            if write.effect.agent == agent:
                write.failed = write.failed or "its peer was dropped"

    # -- writes ----------------------------------------------------------------------------------

    def _post(self, effect: ef.PostWrite) -> None:
        assert effect.part not in self.writes, "one write per transfer at a time"
        transfer_id = transfer_of(effect.part)
        moved = complete_blocks(transfer_id, effect.moved)
        stops = complete_blocks(transfer_id, effect.tokens)
        source: list[Block] = []
        destination: list[Block] = []
        for group, start in enumerate(effect.starts):
            skipped = start // BLOCK_TOKENS
            for nth in range(max(skipped, moved[group]), stops[group]):
                source.append((group, effect.source[group][nth]))
                destination.append((group, effect.destination[group][nth - skipped]))
        self.writes[effect.part] = Write(
            effect=effect, source=tuple(source), destination=tuple(destination)
        )

    def _stop(self, effect: ef.StopWrite) -> None:
        write = self.writes[effect.part]
        assert write.effect.attempt == effect.attempt
        write.stop = True

    def _go_on(self, write: Write) -> None:
        """Post what may be posted; answer when nothing is under way and nothing is to come."""
        if write.answered or self.paused or not self.alive:
            return
        if not (write.stop or write.failed):
            self._post_slices(write)
        over = write.stop or write.failed or write.posted == len(write.source)
        if over and not write.under_way:
            write.answered = True
            answer = self._answer(write)
            self.world.soon(lambda: self._close(write, answer))

    def _post_slices(self, write: Write) -> None:
        effect = write.effect
        while write.under_way < SLICES_AT_ONCE and write.posted < len(write.source):
            if not self.engine.may_write(effect.part, effect.attempt, self.clock):
                self._wait(write)
                return
            if self.world.refuses_post(self):
                write.failed = "the transfer library refused the post"
                return
            stop = write.posted + SLICE_BLOCKS
            each = Slice(
                part=effect.part,
                attempt=effect.attempt,
                sender=self.agent,
                receiver=effect.agent,
                source=write.source[write.posted : stop],
                destination=write.destination[write.posted : stop],
            )
            write.posted = min(stop, len(write.source))
            write.under_way += 1
            self.world.post(
                self,
                each,
                lambda detail: self._slice_ended(write, detail),
                lambda detail: self._slice_troubled(write, detail),
            )

    def _wait(self, write: Write) -> None:
        if write.waits:
            return
        write.waits = True

        def ask_again() -> None:
            write.waits = False
            self._go_on(write)

        self.world.later(RETRY_S, ask_again)

    def _slice_troubled(self, write: Write, detail: str) -> None:
        """Nobody knows whether the slice has ended, so it has not; nothing more is posted."""
        write.failed = write.failed or detail

    def _slice_ended(self, write: Write, detail: str) -> None:
        write.under_way -= 1
        write.failed = write.failed or detail
        self._go_on(write)

    def _answer(self, write: Write) -> ev.Event:
        of, attempt = write.effect.part, write.effect.attempt
        if write.failed and not write.stop:
            return ev.WriteFailed(part=of, attempt=attempt, detail=write.failed)
        if write.stop and (write.posted < len(write.source) or write.failed):
            return ev.WriteStopped(part=of, attempt=attempt)
        runs = len(write.source)
        return ev.WriteDone(part=of, attempt=attempt, bytes=runs, runs=runs)

    def _close(self, write: Write, answer: ev.Event) -> None:
        """The answer reaches the engine, and from then on another write may be asked for."""
        if self.paused:
            self.world.later(self.paused_until - self.world.now, lambda: self._close(write, answer))
            return
        if self.alive:
            del self.writes[write.effect.part]
            self.take(answer)
