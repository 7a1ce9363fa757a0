"""The driver: gives an `Engine` its events and does what its effects say.

Rules: called from the loop thread only; decides nothing that a table could decide; asks
`Engine.may_write` before every slice of a write; answers `Meet`, `PostWrite` and `PostRead` exactly
once.

The idea: one turn is `take` (commands of vLLM) or `look` (news of the port, posts, deadlines).
Notices that a turn produces are collected per peer and leave in one frame each.

Known limit: an unexpected exception inside a turn loses that turn's effects. It is logged with its
event, a load or a prefill that vLLM waits for is reported as ended, and the others go on.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from kvflow.core import Engine, Reason
from kvflow.core import events as ev
from kvflow.core.effects import (
    DropPeer,
    Effect,
    Ignored,
    Meet,
    Moved,
    PostRead,
    PostWrite,
    ReportReceived,
    ReportSent,
    SendNotice,
    StopRead,
    StopWrite,
)
from kvflow.core.notices import FROM_CONSUMER, Notice
from kvflow.core.tally import Tally
from kvflow.errors import (
    IncompatiblePeersError,
    KVFlowError,
    PeerDeadError,
    RemoteProtocolError,
    TransportError,
)
from kvflow.ids import Address, AgentName, Incarnation, Rank, RequestId
from kvflow.io.coordinates import Identity, rank_of
from kvflow.io.port import Port
from kvflow.io.seal import Seal
from kvflow.io.writes import Ended, Transfer, blocks_of
from kvflow.layout import Pairing, slices
from kvflow.observe.observer import Carried, Observer
from kvflow.settings import Settings
from kvflow.wire import codec
from kvflow.wire import messages as m

_PINNED = frozenset({"prefilled", "transferring", "lent", "draining", "kept"})
"""States of a producer's record in which vLLM waits for `ReportSent`."""


class Results(Protocol):
    """Where reports for vLLM go."""

    def sent(self, request_id: RequestId) -> None:
        """The prefill's blocks may be freed."""

    def received(self, request_id: RequestId, reason: Reason | None) -> None:
        """The load has ended, with its KV if `reason` is None."""


class Driver:
    """One worker's engine at work.

    Invariant: `_remotes` has exactly the agents that the port can reach; of those that introduced
    themselves, and that can be written to, `_pairings` knows how. `_met` has the coordinates of
    those that were met as producers, `_read_pairings` how to read from those that were read from.
    `_answered` says when an agent last answered us as a producer, hence knew us as a consumer.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        port: Port,
        settings: Settings,
        clock: Callable[[], float],
        start_meeting: Callable[[Address], None],
        results: Results,
        observer: Observer,
        seal: Seal | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.engine = Engine(settings.timings, identity.prompt_tokens_max, tally)
        self.identity = identity
        self._port = port
        self._settings = settings
        self._clock = clock
        self._seal = seal or Seal()
        self._start_meeting = start_meeting
        self._results = results
        self._observer = observer
        self._hello = identity.hello(port.name, port.metadata())
        self._remotes: set[AgentName] = set()
        self._pairings: dict[AgentName, Pairing] = {}
        self._met: dict[AgentName, m.Hello] = {}
        self._read_pairings: dict[AgentName, Pairing] = {}
        self._answered: dict[AgentName, float] = {}
        self._outgoing: dict[AgentName, list[Notice]] = {}
        self._transfers: list[Transfer] = []

    @property
    def hello(self) -> m.Hello:
        """This worker's coordinates."""
        return self._hello

    @property
    def can_post(self) -> bool:
        """Whether a write or read has a slice that may be posted now."""
        in_flight_max = self._settings.posts_in_flight_max
        return any(
            each.can_post(in_flight_max) and self._may_post(each) for each in self._transfers
        )

    @property
    def under_way(self) -> tuple[Transfer, ...]:
        """The writes and reads that have not ended."""
        return tuple(self._transfers)

    def reads(self, requests: Iterable[RequestId]) -> bool:
        """Whether some write may still read one of these prefills' blocks."""
        return any(self.engine.ledger.reads(request) for request in requests)

    # -- turns -------------------------------------------------------------------------------------

    def take(self, event: ev.Event) -> None:
        """One event, from vLLM's thread or from a meeting."""
        self._turn(event)
        self._flush()

    def look(self) -> bool:
        """Whatever is new: notices, ended handles, deadlines; and one slice of every transfer.

        Whether there was anything, or something is being moved.
        """
        arrived = self._receive()
        for sender, payload in arrived:
            self._arrived(sender, payload)
        moving = bool(self._transfers)
        self._advance()
        now = self._clock()
        due = self.engine.next_deadline()
        is_due = due is not None and due <= now
        if is_due:
            self._guarded("deadlines", None, lambda: self.engine.expire(now))
        self._flush()
        return bool(arrived) or moving or is_due

    def met(self, address: Address, reply: m.MeetReply) -> None:
        """A producer engine's side channel answered."""
        self.take(self._meeting(address, reply))

    def not_met(self, address: Address, error: KVFlowError) -> None:
        """A meeting failed."""
        final = isinstance(error, IncompatiblePeersError)
        self.take(ev.MeetingFailed(address=address, final=final, detail=str(error)))

    def abandon(self) -> None:
        """Once the port is closed nothing can land or be read: report what vLLM still waits for."""
        records, ledger = self.engine.records, self.engine.ledger
        for load in records.consumers.values():
            if ledger.holds(load.request_id):
                self._results.received(load.request_id, Reason.SHUTDOWN)
        for transfer in records.producers.values():
            if transfer.state in _PINNED and transfer.request_id is not None:
                self._results.sent(transfer.request_id)

    # -- events ------------------------------------------------------------------------------------

    def _turn(self, event: ev.Event, *told: Carried) -> None:
        """`told`: what the observer hears before what comes of the event."""
        self._guarded("event", event, lambda: [*told, *self.engine.receive(event, self._clock())])

    def _guarded(
        self, what: str, event: ev.Event | None, step: Callable[[], Iterable[Effect | Carried]]
    ) -> None:
        """Here, and only here, a bug becomes a report instead of a dead thread."""
        try:
            effects = step()
        except Exception as error:
            self._observer.failed(f"{what} {event}", error)
            if isinstance(event, ev.BlocksAllocated | ev.LoadRefused):
                self._results.received(event.request_id, Reason.ABORTED)
            if isinstance(event, ev.PrefillFinished):
                self._results.sent(event.request_id)
            return
        for effect in effects:
            try:
                self._perform(effect)
            except Exception as error:
                self._observer.failed(f"effect {effect}", error)

    def _receive(self) -> list[tuple[AgentName, bytes]]:
        try:
            return self._port.receive()
        except TransportError as error:
            self._observer.failed("receive", error)
            return []

    def _arrived(self, sender: AgentName, payload: bytes) -> None:
        try:
            notices, hello = codec.decode_frame(self._seal.open(payload, sender))
            if hello is not None:
                self._introduce(sender, hello)
        except (RemoteProtocolError, TransportError) as error:
            self._observer.refused("frame", f"from {sender}: {error}")
            return
        for notice in notices:
            if sender in self._remotes and not isinstance(notice, FROM_CONSUMER):
                self._answered[sender] = self._clock()
            self._turn(ev.NoticeReceived(sender=sender, notice=notice))

    def _introduce(self, sender: AgentName, hello: m.Hello) -> None:
        """A peer's coordinates: make it reachable, then tell the engine."""
        if hello.agent != sender:
            raise RemoteProtocolError(f"introduces itself as {hello.agent}")
        if sender in self._remotes and sender in self.engine.records.workers:
            return
        refusal, part, parts, pairing = None, 0, 1, None
        try:
            part, parts, pairing = self.identity.pairing(hello)
        except IncompatiblePeersError as error:
            refusal = str(error)
            self._observer.refused("peer", f"{sender}: {error}")
        self._add(sender, hello.metadata)
        if pairing is not None:
            self._pairings[sender] = pairing
        introduced = ev.PeerIntroduced(
            agent=sender,
            incarnation=Incarnation(hello.incarnation),
            rank=rank_of(hello),
            refusal=refusal,
            part=part,
            parts=parts,
        )
        self._turn(introduced)

    def _meeting(
        self, address: Address, reply: m.MeetReply
    ) -> ev.MeetingSucceeded | ev.MeetingFailed:
        """Make the ranks reachable that owe this worker a part."""
        agents: dict[Rank, AgentName] = {}
        try:
            for rank, hello in self.identity.writers(reply.ranks).items():
                agents[rank] = AgentName(hello.agent)
                self._add(agents[rank], hello.metadata)
                self._met[agents[rank]] = hello
        except KVFlowError as error:
            self._observer.refused("peer", f"{address}: {error}")
            final = isinstance(error, IncompatiblePeersError)
            return ev.MeetingFailed(address=address, final=final, detail=str(error))
        return ev.MeetingSucceeded(
            address=address,
            engine_id=reply.engine_id,
            incarnation=Incarnation(reply.incarnation),
            agents=agents,
        )

    def _add(self, agent: AgentName, metadata: bytes) -> None:
        if agent in self._remotes:
            return
        name = self._port.add_peer(metadata)
        if name != agent:
            if name not in self._remotes:
                self._port.remove_peer(name)
            raise RemoteProtocolError(f"{agent} is called {name} in its own metadata")
        self._remotes.add(agent)

    # -- effects -----------------------------------------------------------------------------------

    def _perform(self, effect: Effect | Carried) -> None:
        match effect:
            case Moved():
                self._observer.moved(effect)
            case Carried():
                self._observer.carried(effect)
            case SendNotice():
                self._outgoing.setdefault(effect.agent, []).append(effect.notice)
            case PostWrite() | PostRead():
                self._post(effect)
            case StopWrite() | StopRead():
                self._stop(effect)
            case ReportSent():
                self._results.sent(effect.request_id)
            case ReportReceived():
                self._results.received(effect.request_id, effect.reason)
            case Meet():
                self._start_meeting(effect.address)
            case DropPeer():
                self._drop(effect.agent)
            case Ignored():
                self._observer.ignored(effect.kind, effect.key)

    def _drop(self, agent: AgentName) -> None:
        self._outgoing.pop(agent, None)
        self._answered.pop(agent, None)
        for known in (self._pairings, self._read_pairings, self._met):
            known.pop(agent, None)
        if agent not in self._remotes:
            return
        self._remotes.discard(agent)
        for each in self._transfers:
            if each.agent == agent:
                each.failure = each.failure or "the peer was torn down"
        self._port.remove_peer(agent)

    def _post(self, order: PostWrite | PostRead) -> None:
        """Plan a write or read; its first slice leaves with the next `_advance`."""
        transfer = Transfer(order=order, rest=iter(()), began=self._clock())
        try:
            planned = self._pairing(order).plan(blocks_of(order))
        except Exception as error:
            self._observer.failed(f"plan of {transfer.name}", error)
            transfer.failure = f"no plan: {error!r}"
            transfer.final = True
        else:
            settings = self._settings
            transfer.rest = (
                piece
                for runs in planned
                for piece in slices(runs, settings.post_bytes_max, settings.post_runs_max)
            )
        transfer.plan_s = self._clock() - transfer.began
        self._transfers.append(transfer)

    def _pairing(self, order: PostWrite | PostRead) -> Pairing:
        """How to write to a consumer's worker, or read from a producer's."""
        agent = order.agent
        if isinstance(order, PostWrite):
            return self._pairings[agent]
        if agent not in self._read_pairings:
            self._read_pairings[agent] = self.identity.read_pairing(self._met[agent])
        return self._read_pairings[agent]

    def _stop(self, effect: StopWrite | StopRead) -> None:
        for each in self._transfers:
            each.stopped = each.stopped or each.is_of(effect)

    def _advance(self) -> None:
        for transfer in list(self._transfers):
            may_post = functools.partial(self._may_post, transfer)
            try:
                answer = transfer.advance(self._port, may_post, self._settings.posts_in_flight_max)
            except Exception as error:
                self._observer.failed(f"transfer of {transfer.name}", error)
                transfer.failure = transfer.failure or repr(error)
                continue
            if answer is not None:
                self._transfers.remove(transfer)
                self._turn(answer, self._carried(transfer, answer))

    def _carried(self, transfer: Transfer, answer: Ended) -> Carried:
        """What became of a write or read, named as its record is."""
        order, records, at = transfer.order, self.engine.records, self._clock()
        if isinstance(order, PostRead):
            load = records.consumers.get(order.request_id)
            key, attempt = (load.transfer_id, load.attempt) if load else ("", 0)
            return transfer.carried(
                answer, at, key=key, attempt=attempt, request_id=order.request_id
            )
        prefill = records.producers.get(order.part)
        request_id = prefill.request_id if prefill else None
        return transfer.carried(
            answer, at, key=order.part, attempt=order.attempt, request_id=request_id
        )

    def _may_post(self, transfer: Transfer) -> bool:
        order = transfer.order
        if isinstance(order, PostRead):
            return True
        return self.engine.may_write(order.part, order.attempt, self._clock())

    def _flush(self) -> None:
        """Send what the turn has collected; a peer that cannot be sent to is lost."""
        while self._outgoing:
            agent, notices = self._outgoing.popitem()
            try:
                self._send(agent, notices)
            except TransportError as error:
                is_dead = isinstance(error, PeerDeadError)
                failed = ev.NoticeFailed(agent=agent, detail=str(error), is_dead=is_dead)
                self._turn(failed)
            except Exception as error:
                self._observer.failed(f"notices to {agent}", error)

    def _send(self, agent: AgentName, notices: list[Notice]) -> None:
        """One frame, or more if it is too long.

        Our coordinates go along with what a consumer says, unless the producer has answered just
        now: it may be new to us, or have forgotten us.
        """
        if agent not in self._remotes:
            raise TransportError(f"{agent} is not known (any more)")
        asks = any(isinstance(notice, FROM_CONSUMER) for notice in notices)
        hello = self._hello if asks and not self._knows_us(agent) else None
        payload = codec.encode_frame(notices, hello)
        if len(notices) > 1 and not codec.is_sendable(len(notices), len(payload)):
            half = len(notices) // 2
            self._send(agent, notices[:half])
            self._send(agent, notices[half:])
            return
        self._port.send(agent, self._seal.close(payload, self._port.name))

    def _knows_us(self, agent: AgentName) -> bool:
        known_s = 2 * self._settings.timings.renew_interval_s
        return self._clock() - self._answered.get(agent, -math.inf) < known_s
