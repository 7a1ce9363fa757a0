"""The peer's machine: one record per remote engine (as its consumer) or worker (as its producer).

Rules: only a `met` or `introduced` peer is spoken to; a peer that stays silent while something is
awaited from it is lost, and whatever depends on it is told in the same turn; a restarted engine
has a new incarnation, hence is met anew.

The idea: a producer engine is met through its side channel, on demand, with back-off. A consumer
worker introduces itself with its first registration. Renewals are the heartbeat, and they flow
only while a transfer is under way. A consumer that stays silent then is sent something: if its
process is gone, the transfer library says so; if not, leases decide.

Invariant: an introduced worker with live transfers has its deadline within `probe_silent_s`.
"""

from dataclasses import dataclass, field

from kvflow.core.effects import DropPeer, Meet
from kvflow.core.events import MeetingFailed, MeetingSucceeded, NoticeReceived, PeerIntroduced
from kvflow.core.notices import Probe
from kvflow.core.table import Table, never, row
from kvflow.core.turn import PeerGone, PeerMet, Record, RenewalDue, Turn, Wanted
from kvflow.ids import Address, AgentName, Incarnation, Rank, RequestId

NAME = "peer"

STATES = {
    "unmet": "nothing is known of this peer",
    "meeting": "its side channel is being asked who its workers are, or whether they still are",
    "met": "a producer engine whose workers can be reached",
    "introduced": "a consumer worker that can be reached",
    "backing_off": "it could not be met, or was lost; it is met again when wanted, after a while",
    "forgotten": "the record is deleted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A peer's deadline is due. `awaited`: its ranks from which some load waits for a word."""

    awaited: frozenset[Rank]


@dataclass(slots=True, kw_only=True)
class PeerRecord(Record):
    """One remote engine or worker.

    address   set for a producer engine, None for a consumer worker.
    agents    its workers by rank.
    waiting   loads that wait until it is met.
    using     live transfers that depend on it (request ids, or transfer ids of a consumer's).
    heard_at  when any of its workers was last heard.
    misses    by rank: intervals, while a word was awaited, since it was last heard.
    part, parts
              of a consumer worker: as in `PeerIntroduced`.
    """

    address: Address | None = None
    engine_id: str = ""
    incarnation: Incarnation = Incarnation("")
    agents: dict[Rank, AgentName] = field(default_factory=dict)
    refusal: str | None = None
    waiting: set[RequestId] = field(default_factory=set)
    using: set[str] = field(default_factory=set)
    last_used: float = 0.0
    heard_at: float = 0.0
    misses: dict[Rank, int] = field(default_factory=dict)
    failures: int = 0
    part: int = 0
    parts: int = 1

    @property
    def key(self) -> str:
        """How logs and traces name it."""
        return str(self.address) if self.address else next(iter(self.agents.values()), "")


R = PeerRecord

# -- guards --------------------------------------------------------------------------------------


def is_wanted(record: R, event: object, turn: Turn) -> bool:
    return bool(record.waiting)


def is_not_wanted(record: R, event: object, turn: Turn) -> bool:
    return not record.waiting


def is_stale(record: R, event: object, turn: Turn) -> bool:
    """Nothing depends on it, and it was not heard lately: it may have been restarted."""
    silent_s = turn.now - record.heard_at
    return not record.using and silent_s >= turn.timings.verify_after_s


def is_fresh(record: R, event: object, turn: Turn) -> bool:
    return not is_stale(record, event, turn)


def is_silent(record: R, event: Tick, turn: Turn) -> bool:
    """A rank of which something is awaited has not been heard for too long."""
    return bool(_silent(record, event, turn))


def _silent(record: R, event: Tick, turn: Turn) -> list[Rank]:
    most = turn.timings.renew_misses_max
    return sorted(rank for rank in event.awaited if record.misses.get(rank, 0) >= most)


def is_unused(record: R, event: object, turn: Turn) -> bool:
    """Nothing has depended on it for a long time.

    A producer remembers a consumer for twice as long as the consumer the producer: else a consumer
    might speak to one that has forgotten its coordinates.
    """
    idle_s = turn.timings.peer_idle_s * (1 if record.address else 2)
    return not record.using and turn.now - record.last_used >= idle_s


def is_quiet(record: R, event: object, turn: Turn) -> bool:
    """A consumer whose transfers are under way has not even renewed them."""
    return bool(record.using) and record.heard_at + turn.timings.probe_silent_s <= turn.now


def is_in_order(record: R, event: Tick, turn: Turn) -> bool:
    return not is_silent(record, event, turn) and not is_unused(record, event, turn)


def is_neither_unused_nor_quiet(record: R, event: object, turn: Turn) -> bool:
    return not is_unused(record, event, turn) and not is_quiet(record, event, turn)


# -- actions -------------------------------------------------------------------------------------


def _deadline_key(record: R) -> tuple[str, str]:
    return (NAME, record.key)


def _tell_waiting(record: R, turn: Turn, refusal: str | None) -> None:
    for request_id in sorted(record.waiting):
        met = PeerMet(request_id=request_id, refusal=refusal, agents=record.agents)
        turn.follow_ups.append(met)
    record.waiting.clear()


def wait(record: R, event: Wanted, turn: Turn) -> None:
    record.waiting.add(event.request_id)


def meet(record: R, event: object, turn: Turn) -> None:
    assert record.address is not None
    turn.effects.append(Meet(address=record.address))
    turn.arm(_deadline_key(record), 2 * turn.timings.meet_deadline_s)


def wait_and_meet(record: R, event: Wanted, turn: Turn) -> None:
    wait(record, event, turn)
    meet(record, event, turn)


def use(record: R, event: Wanted, turn: Turn) -> None:
    record.last_used = turn.now
    if not record.using:
        record.misses.clear()
        turn.arm(_deadline_key(record), turn.timings.renew_interval_s)
    turn.follow_ups.append(PeerMet(request_id=event.request_id, agents=record.agents))


def know(record: R, event: MeetingSucceeded, turn: Turn) -> None:
    for agent in sorted(set(record.agents.values()) - set(event.agents.values())):
        turn.effects.append(DropPeer(agent=agent))
    record.engine_id = event.engine_id
    record.incarnation = event.incarnation
    record.agents = dict(event.agents)
    record.failures = 0
    record.misses.clear()
    record.last_used = record.heard_at = turn.now
    record.detail = ""
    turn.arm(_deadline_key(record), turn.timings.renew_interval_s)
    _tell_waiting(record, turn, None)


def back_off(record: R, event: object, turn: Turn) -> None:
    """Whoever could be reached before is not any more."""
    _drop(record, turn, record.detail)
    record.agents = {}
    timings = turn.timings
    wait_s = min(timings.backoff_first_s * 2**record.failures, timings.backoff_max_s)
    record.failures = min(record.failures + 1, 32)
    turn.arm(_deadline_key(record), wait_s)


def back_off_from(record: R, event: MeetingFailed, turn: Turn) -> None:
    record.detail = event.detail
    back_off(record, event, turn)
    if event.final:
        _tell_waiting(record, turn, event.detail)


def _drop(record: R, turn: Turn, detail: str) -> None:
    record.detail = detail
    for _, agent in sorted(record.agents.items()):
        turn.effects.append(DropPeer(agent=agent))


def lose(record: R, event: Tick, turn: Turn) -> None:
    """The transfers are told by the engine, which knows them."""
    silent = _silent(record, event, turn)
    turn.tally.misses += len(silent)
    rank = silent[0]
    detail = f"{rank} was silent for {record.misses[rank]} renewals"
    turn.follow_ups.append(PeerGone(agent=record.agents[rank], detail=detail))
    turn.arm(_deadline_key(record), turn.timings.renew_interval_s)


def drop_and_back_off(record: R, event: PeerGone, turn: Turn) -> None:
    record.detail = event.detail
    back_off(record, event, turn)


def drop(record: R, event: object, turn: Turn) -> None:
    _drop(record, turn, event.detail if isinstance(event, PeerGone) else "unused")


def renew(record: R, event: Tick, turn: Turn) -> None:
    assert record.address is not None
    if record.using:
        turn.tally.misses += len(record.misses.keys() & event.awaited)
        record.misses = {rank: record.misses.get(rank, 0) + 1 for rank in event.awaited}
        turn.follow_ups.append(RenewalDue(address=record.address))
        turn.arm(_deadline_key(record), turn.timings.renew_interval_s)
    else:
        record.misses.clear()
        turn.arm(_deadline_key(record), turn.timings.peer_idle_s)


def note_heard(record: R, event: NoticeReceived, turn: Turn) -> None:
    for rank, agent in record.agents.items():
        if agent == event.sender:
            record.misses.pop(rank, None)
    record.last_used = record.heard_at = turn.now


def note_consumer_heard(record: R, event: NoticeReceived, turn: Turn) -> None:
    """What it says may be its first live transfer; from then on it must not stay silent."""
    if not record.using:
        turn.arm(_deadline_key(record), turn.timings.probe_silent_s)
    note_heard(record, event, turn)


def introduce(record: R, event: PeerIntroduced, turn: Turn) -> None:
    record.agents = {event.rank: event.agent}
    record.incarnation = event.incarnation
    record.refusal = event.refusal
    record.part, record.parts = event.part, event.parts
    record.last_used = record.heard_at = turn.now
    turn.arm(_deadline_key(record), turn.timings.probe_silent_s)


def probe(record: R, event: object, turn: Turn) -> None:
    for agent in record.agents.values():
        turn.send(agent, Probe())
    turn.arm(_deadline_key(record), turn.timings.probe_silent_s)


def look_later(record: R, event: object, turn: Turn) -> None:
    timings = turn.timings
    turn.arm(_deadline_key(record), timings.probe_silent_s if record.using else timings.peer_idle_s)


def ignore_answer(record: R, event: MeetingSucceeded, turn: Turn) -> None:
    """The answer to a meeting that had timed out; its agents are made unreachable again."""
    for agent in event.agents.values():
        if agent not in record.agents.values():
            turn.effects.append(DropPeer(agent=agent))


ROWS = (
    row("peer_wanted", "unmet", "meeting", wait_and_meet,
        why="a load needs this producer"),
    row("peer_wanted", "meeting backing_off", "=", wait,
        why="the load waits, within its own deadline"),
    row("peer_wanted", "met", "=", use, is_fresh,
        why="the producer can be reached already"),
    row("peer_wanted", "met", "meeting", wait_and_meet, is_stale,
        why="not heard for a while: ask who it is, rather than find out by silence"),
    row("outdated", "met", "meeting", wait_and_meet,
        why="another engine id is named at this address: it was restarted, or the router is wrong"),
    row("meeting_succeeded", "meeting", "met", know,
        why="every worker rank that owes us a part can be reached"),
    row("meeting_succeeded", "met backing_off", "=", ignore_answer,
        why="the answer to a meeting that was given up"),
    row("meeting_failed", "meeting", "backing_off", back_off_from,
        why="try again after a while; if the two are incompatible, waiting loads are told"),
    row("meeting_failed", "met backing_off", "=",
        why="the answer to a meeting that was given up"),
    row("introduced", "unmet introduced", "introduced", introduce,
        why="a consumer's registration brought its coordinates"),
    row("heard", "meeting met", "=", note_heard,
        why="it lives"),
    row("heard", "introduced", "=", note_consumer_heard,
        why="it lives"),
    row("gone", "meeting met", "backing_off", drop_and_back_off,
        why="lost: it is made unreachable, and its transfers are told"),
    row("gone", "introduced", "forgotten", drop,
        why="lost: it is made unreachable, and its transfers are told"),
    row("expired", "meeting", "backing_off", back_off,
        why="the meeting took too long"),
    row("expired", "backing_off", "meeting", meet, is_wanted,
        why="somebody waits: try again"),
    row("expired", "backing_off", "forgotten", None, is_not_wanted,
        why="nobody waits"),
    row("expired", "met", "=", lose, is_silent,
        why="too many renewals went unanswered: the engine takes it as gone in the same turn"),
    row("expired", "met", "forgotten", drop, is_unused,
        why="nothing has depended on it for a long time"),
    row("expired", "met", "=", renew, is_in_order,
        why="renew what is registered with it, if anything"),
    row("expired", "introduced", "forgotten", drop, is_unused,
        why="it has asked for nothing for a long time"),
    row("expired", "introduced", "=", probe, is_quiet,
        why="its transfers are live, and it is silent: send something, which a dead process shows"),
    row("expired", "introduced", "=", look_later, is_neither_unused_nor_quiet,
        why="it renews its transfers, or has asked for something not long ago"),
)  # fmt: skip

IMPOSSIBLE = (
    never("forgotten", " ".join(dict.fromkeys(r.trigger for r in ROWS)),
          "a forgotten record is not in any table")
    | never("introduced", "peer_wanted outdated meeting_succeeded meeting_failed",
            "a consumer worker is not met, it introduces itself")
    | never("meeting met backing_off", "introduced",
            "a producer engine is met, it does not introduce itself")
    | never("unmet backing_off", "heard gone",
            "it has no agents, so nothing can come from it or be lost with it")
    | never("unmet meeting backing_off", "outdated",
            "it is asked for its engine id anyway")
    | never("unmet", "expired meeting_succeeded meeting_failed", "nothing was asked yet")
)  # fmt: skip

TABLE = Table(
    name=NAME,
    initial="unmet",
    states=STATES,
    terminal=frozenset(),
    rows=ROWS,
    impossible=IMPOSSIBLE,
)
