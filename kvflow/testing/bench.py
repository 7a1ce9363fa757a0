"""One engine on a bench: real events in, everything that came out is kept.

For tests that drive one worker by hand, without a network or a second engine.
"""

from typing import Any

from kvflow.core import Engine, Standing, Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.notices import (
    Accepted,
    Alive,
    Blocks,
    Cancel,
    Done,
    Failed,
    Fetched,
    Notice,
    Offer,
    Readable,
    Register,
    Renew,
)
from kvflow.core.reasons import Reason
from kvflow.ids import (
    NO_DIGEST,
    Address,
    AgentName,
    Incarnation,
    PromptDigest,
    Rank,
    RequestId,
    TransferId,
    part_id,
)

T = TransferId("t")
PART = part_id(T, 0)
ADDRESS = Address("producer", 5600)
RANKS = (Rank(0, 0), Rank(0, 1))
P0, P1 = AgentName("p0"), AgentName("p1")
C1, C2 = AgentName("c1"), AgentName("c2")
BLOCKS: Blocks = ((4, 5, 6),)
OTHER = PromptDigest(b"of another prompt")
TOKENS = 48
"""Also the longest prompt that the bench's vLLM takes."""


class Bench:
    """One engine and its clock."""

    def __init__(self, timings: Timings | None = None) -> None:
        self.engine = Engine(timings, prompt_tokens_max=TOKENS)
        self.now = 100.0
        self.effects: list[ef.Effect] = []

    def take(self, *events: ev.Event) -> list[ef.Effect]:
        """Receive events; return what came out of the last."""
        out: list[ef.Effect] = []
        for event in events:
            out = self.engine.receive(event, self.now)
            self.effects += out
        return out

    def hear(self, sender: AgentName, *notices: Notice) -> list[ef.Effect]:
        return self.take(*(ev.NoticeReceived(sender=sender, notice=each) for each in notices))

    def wait(self, seconds: float) -> None:
        """Let time pass, firing each deadline when it is due."""
        until = self.now + seconds
        while (at := self.engine.next_deadline()) is not None and at <= until:
            self.now = max(self.now, at)
            self.effects += self.engine.expire(self.now)
        self.now = until

    def jump(self, seconds: float) -> None:
        """Let time pass as for a process that was stopped: all deadlines fire late, at once."""
        self.now += seconds
        self.effects += self.engine.expire(self.now)

    def sent(self, agent: AgentName | None = None) -> list[Notice]:
        """Notices sent so far, to one agent or to all."""
        return [
            effect.notice
            for effect in self.effects
            if isinstance(effect, ef.SendNotice) and agent in (None, effect.agent)
        ]

    def all(self, kind: type[Any]) -> list[Any]:
        """Effects of one kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    # -- a producer's worker ---------------------------------------------------------------------

    def introduce(self, *agents: AgentName) -> None:
        for agent in agents or (C1, C2):
            self.take(
                ev.PeerIntroduced(
                    agent=agent, incarnation=Incarnation(f"i-{agent}"), rank=Rank(0, 0)
                )
            )

    @property
    def produced(self) -> str:
        """State of the producer's record of `T`."""
        record = self.engine.records.producers.get(PART)
        return record.state if record else "unknown"

    # -- a consumer's worker ---------------------------------------------------------------------

    def meet(self, ranks: int = 2, engine_id: str = "engine-1") -> None:
        agents = dict(zip(RANKS[:ranks], (P0, P1)[:ranks], strict=True))
        self.take(
            ev.MeetingSucceeded(
                address=ADDRESS,
                engine_id=engine_id,
                incarnation=Incarnation(f"i-{engine_id}"),
                agents=agents,
            )
        )

    @property
    def consumed(self) -> str:
        """State of the consumer's record of request `c`."""
        record = self.engine.records.consumers.get(RequestId("c"))
        return record.state if record else "new"


# -- events, with everything that a test does not care about filled in ---------------------------


def started(request: str = "r", of: TransferId = T) -> ev.PrefillStarted:
    return ev.PrefillStarted(transfer_id=of, request_id=RequestId(request))


def preempted(request: str = "r", of: TransferId = T) -> ev.PrefillPreempted:
    return ev.PrefillPreempted(transfer_id=of, request_id=RequestId(request))


def aborted(request: str = "r", of: TransferId = T) -> ev.PrefillAborted:
    return ev.PrefillAborted(transfer_id=of, request_id=RequestId(request))


def advanced(request: str = "r", of: TransferId = T, tokens: int = TOKENS - 1) -> ev.Event:
    return ev.PrefillAdvanced(
        transfer_id=of, request_id=RequestId(request), blocks=((1, 2, 3),), tokens=tokens
    )


def finished(
    request: str = "r",
    of: TransferId = T,
    blocks: Blocks = ((1, 2, 3),),
    tokens: int = TOKENS,
) -> ev.Event:
    return ev.PrefillFinished(
        transfer_id=of, request_id=RequestId(request), blocks=blocks, tokens=tokens
    )


def register(
    attempt: int = 5,
    of: TransferId = T,
    blocks: Blocks = BLOCKS,
    write_until_s: float | None = None,
    tokens: int = TOKENS,
    prefill: str = "",
    keep: bool = False,
    reads: bool = False,
) -> Register:
    return Register(
        transfer_id=of,
        attempt=attempt,
        blocks=blocks,
        starts=(0,) * len(blocks),
        tokens=tokens,
        lease_s=30.0,
        write_until_s=write_until_s,
        keep=keep,
        prefill=prefill,
        reads=reads,
    )


def cancel(attempt: int = 5, of: TransferId = T) -> Cancel:
    return Cancel(transfer_id=of, attempt=attempt)


def written(attempt: int = 5) -> ev.WriteDone:
    return ev.WriteDone(part=PART, attempt=attempt, bytes=3, runs=1)


def allocated(
    request: str = "c",
    attempt: int = 5,
    of: TransferId = T,
    blocks: Blocks = BLOCKS,
    engine_id: str | None = None,
    address: Address = ADDRESS,
    keep: bool = False,
    again: bool = False,
    reads: bool = False,
    offer: Offer | None = None,
) -> ev.BlocksAllocated:
    return ev.BlocksAllocated(
        transfer_id=of,
        request_id=RequestId(request),
        attempt=attempt,
        address=address,
        engine_id=engine_id,
        blocks=blocks,
        starts=(0,) * len(blocks),
        tokens=TOKENS,
        keep=keep,
        again=again,
        reads=reads,
        offer=offer,
    )


def refused(request: str = "c", attempt: int = 6, of: TransferId = T) -> ev.LoadRefused:
    return ev.LoadRefused(
        transfer_id=of, request_id=RequestId(request), attempt=attempt, detail="no such key"
    )


def release(
    request: str = "c", attempt: int = 6, of: TransferId = T, engine_id: str | None = None
) -> ev.ReleaseWanted:
    return ev.ReleaseWanted(
        transfer_id=of,
        request_id=RequestId(request),
        attempt=attempt,
        address=ADDRESS,
        engine_id=engine_id,
    )


def load_aborted(request: str = "c") -> ev.LoadAborted:
    return ev.LoadAborted(request_id=RequestId(request))


def request_ended(request: str = "c") -> ev.RequestEnded:
    return ev.RequestEnded(request_id=RequestId(request))


def accepted(
    standing: Standing = Standing.WAITING, attempt: int = 5, clock_s: float = 0.0
) -> Accepted:
    return Accepted(transfer_id=T, attempt=attempt, standing=standing, clock_s=clock_s)


def done(
    attempt: int = 5, prefill: str = "r", kept_s: float = 0.0, prompt: PromptDigest = NO_DIGEST
) -> Done:
    return Done(transfer_id=T, attempt=attempt, prefill=prefill, kept_s=kept_s, prompt=prompt)


def offer(prefill: str = "r", blocks: Blocks = ((1, 2, 3),)) -> Offer:
    return Offer(blocks=blocks, tokens=TOKENS, prefill=prefill)


def readable(attempt: int = 5, prefill: str = "r", blocks: Blocks = ((1, 2, 3),)) -> Readable:
    return Readable(transfer_id=T, attempt=attempt, blocks=blocks, tokens=TOKENS, prefill=prefill)


def fetched(attempt: int = 5, of: TransferId = T) -> Fetched:
    return Fetched(transfer_id=of, attempt=attempt)


def read(rank: Rank = RANKS[0]) -> ev.ReadDone:
    return ev.ReadDone(request_id=RequestId("c"), rank=rank, bytes=3, runs=1)


def read_failed(rank: Rank = RANKS[0], final: bool = False) -> ev.ReadFailed:
    return ev.ReadFailed(request_id=RequestId("c"), rank=rank, detail="EIO", final=final)


def read_stopped(rank: Rank = RANKS[0]) -> ev.ReadStopped:
    return ev.ReadStopped(request_id=RequestId("c"), rank=rank)


def failed(attempt: int = 5, reason: Reason = Reason.CANCELLED) -> Failed:
    return Failed(transfer_id=T, attempt=attempt, reason=reason)


def alive(standing: Standing, attempt: int = 5, clock_s: float = 0.0) -> Alive:
    return Alive(standings=((T, attempt, standing, None),), clock_s=clock_s)


def renew(attempt: int = 5, write_until_s: float | None = None) -> Renew:
    return Renew(wanted=((T, attempt),), write_until_s=write_until_s)
