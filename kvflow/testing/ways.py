"""How to get to each state of each table, and which events mean each trigger: real events only.

`WAYS[machine][state]` are scripts that leave a record of the machine in that state on a fresh
`Bench`; `EVENTS[machine][trigger]` are scripts that, in the right state, fire that trigger.
"""

from collections.abc import Callable
from dataclasses import replace

from kvflow.core import Reason, Standing
from kvflow.core import events as ev
from kvflow.core.notices import Notice
from kvflow.ids import Address, AgentName, TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import ADDRESS, C1, C2, P0, P1, Bench, T

Script = Callable[[Bench], object]

# -- the producer ----------------------------------------------------------------------------------


def write_failed(attempt: int) -> ev.WriteFailed:
    return ev.WriteFailed(transfer_id=T, attempt=attempt, detail="EIO")


def p_unknown(bench: Bench) -> None:
    bench.introduce()


def p_allocated(bench: Bench) -> None:
    p_unknown(bench)
    bench.take(b.started())


def p_held(bench: Bench) -> None:
    p_unknown(bench)
    bench.hear(C1, b.register())


def p_registered(bench: Bench) -> None:
    p_held(bench)
    bench.take(b.started())


def p_preempted(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.preempted())


def p_prefilled(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.finished())


def p_transferring(bench: Bench) -> None:
    p_prefilled(bench)
    bench.hear(C1, b.register())


def p_transferring_again(bench: Bench) -> None:
    """The first WRITE failed, and the consumer has registered once more."""
    p_transferring(bench)
    bench.take(write_failed(5))
    bench.hear(C1, b.register(6))


def p_draining(bench: Bench) -> None:
    p_transferring(bench)
    bench.hear(C1, b.cancel())


def p_sent(bench: Bench) -> None:
    p_transferring(bench)
    bench.take(b.written())


def p_failed(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.aborted())


def p_failed_registered(bench: Bench) -> None:
    p_registered(bench)
    bench.take(b.aborted())


def p_failed_ambiguous(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.started("rival"))


def p_reused(bench: Bench) -> None:
    """The id is used again: by the prefill `r`, after another's transfer was cancelled."""
    p_unknown(bench)
    bench.take(b.started("before"))
    bench.hear(C1, b.register(), b.cancel())
    bench.take(b.started())


def p_reused_preempted(bench: Bench) -> None:
    p_reused(bench)
    bench.take(b.preempted())


def p_reused_prefilled(bench: Bench) -> None:
    p_reused(bench)
    bench.take(b.finished())


def p_floor(bench: Bench) -> None:
    """An attempt 5 of another transfer was settled here, and forgotten."""
    p_unknown(bench)
    bench.hear(C1, b.register(of=TransferId("before")), b.cancel(of=TransferId("before")))
    bench.wait(bench.engine.timings.tombstone_s + 1)


PRODUCER_WAYS: dict[str, list[Script]] = {
    "unknown": [p_unknown, p_floor],
    "allocated": [p_allocated, p_reused],
    "held": [p_held],
    "registered": [p_registered],
    "preempted": [p_preempted, p_reused_preempted],
    "prefilled": [p_prefilled, p_reused_prefilled],
    "transferring": [p_transferring, p_transferring_again],
    "draining": [p_draining],
    "sent": [p_sent],
    "failed": [p_failed, p_failed_registered, p_failed_ambiguous],
}


def until_due(bench: Bench) -> None:
    """Exactly the next deadline."""
    at = bench.engine.next_deadline()
    assert at is not None
    bench.wait(at - bench.now)


def until_over(bench: Bench) -> None:
    """Long enough for each deadline of a transfer, one after the other."""
    bench.wait(700.0)


def lose_consumer(bench: Bench) -> None:
    bench.take(ev.NoticeFailed(agent=C1, detail="no such agent"))


def takes(*events: ev.Event) -> Script:
    return lambda bench: bench.take(*events)


def hears(sender: AgentName, *notices: Notice) -> Script:
    return lambda bench: bench.hear(sender, *notices)


def register_beyond(bench: Bench) -> None:
    """One registration for an unknown id may be kept, and is; then comes this one."""
    bench.engine.timings = replace(bench.engine.timings, held_max=1)
    bench.hear(C2, b.register(of=TransferId("another")))
    bench.hear(C1, b.register(6))


TOO_MANY = ((4, 5, 6, 7),)
PRODUCER_EVENTS: dict[str, list[Script]] = {
    "prefill_started": [takes(b.started())],
    "prefill_finished": [takes(b.finished()), takes(b.finished(blocks=((1, 2),)))],
    "prefill_aborted": [takes(b.aborted())],
    "prefill_preempted": [takes(b.preempted())],
    "rival_started": [takes(b.started("rival"))],
    "rival_finished": [takes(b.finished("rival"))],
    "rival_ended": [takes(b.aborted("rival")), takes(b.preempted("rival"))],
    "registered": [hears(C1, b.register(6)), hears(C1, b.register(6, blocks=TOO_MANY))],
    "registered_again": [hears(C1, b.register())],
    "registered_anew": [hears(C1, b.register(6))],
    "registered_stale": [hears(C1, b.register(4)), hears(C1, b.register(0))],
    "registered_rival": [hears(C2, b.register())],
    "cancel_asked": [hears(C1, b.cancel(6))],
    "cancel_stale": [hears(C1, b.cancel(4))],
    "release_asked": [takes(ev.ReleaseAsked(transfer_id=T))],
    "registered_beyond": [register_beyond],
    "renewed": [hears(C1, b.renew())],
    "write_done": [takes(b.written())],
    "write_failed": [takes(write_failed(5)), takes(write_failed(6))],
    "write_stopped": [takes(ev.WriteStopped(transfer_id=T, attempt=5))],
    "peer_lost": [lose_consumer],
    "expired": [until_over],
    "closing": [takes(ev.Closing())],
}

# -- the consumer ----------------------------------------------------------------------------------


def c_new(bench: Bench) -> None:
    """Nothing."""


def c_rival_new(bench: Bench) -> None:
    bench.take(b.allocated("other", blocks=((9,),)))


def c_allocated(bench: Bench) -> None:
    bench.take(b.allocated())


def c_again(bench: Bench) -> None:
    """A second attempt waits for a meeting elsewhere; the first one's producer can be heard."""
    c_failed(bench)
    bench.take(b.allocated(attempt=6, address=Address("another", 5600)))


def c_registering(bench: Bench) -> None:
    c_allocated(bench)
    bench.meet()


def c_registering_one_done(bench: Bench) -> None:
    c_registering(bench)
    bench.hear(P0, b.done())


def c_registering_one_answered(bench: Bench) -> None:
    c_registering(bench)
    bench.hear(P0, b.accepted())


def c_registering_one_rank(bench: Bench) -> None:
    c_allocated(bench)
    bench.meet(ranks=1)


def c_registered(bench: Bench) -> None:
    c_registering(bench)
    bench.hear(P0, b.accepted())
    bench.hear(P1, b.accepted())


def c_registered_one_rank(bench: Bench) -> None:
    c_registering_one_rank(bench)
    bench.hear(P0, b.accepted())


def c_transferring(bench: Bench) -> None:
    c_registered(bench)
    bench.hear(P0, b.accepted(Standing.TRANSFERRING))


def c_transferring_one_done(bench: Bench) -> None:
    c_transferring(bench)
    bench.hear(P0, b.done())


def c_draining(bench: Bench) -> None:
    c_registered(bench)
    bench.take(b.load_aborted())


def c_draining_one_settled(bench: Bench) -> None:
    c_draining(bench)
    bench.hear(P1, b.failed())


def c_draining_other_settled(bench: Bench) -> None:
    c_draining(bench)
    bench.hear(P0, b.failed())


def c_fencing(bench: Bench) -> None:
    """The producer is lost, and met again for another load: it can still be heard."""
    c_registered(bench)
    bench.take(ev.NoticeFailed(agent=P0, detail="gone"))
    bench.take(b.allocated("other", 6, TransferId("o"), ((9,),)))
    bench.wait(0.3)
    bench.meet()


def c_releasing(bench: Bench) -> None:
    bench.take(b.release(attempt=5))


def c_releasing_met(bench: Bench) -> None:
    c_releasing(bench)
    bench.meet()


def c_releasing_one_rank(bench: Bench) -> None:
    c_releasing(bench)
    bench.meet(ranks=1)


def c_received(bench: Bench) -> None:
    c_transferring_one_done(bench)
    bench.hear(P1, b.done())


def c_failed(bench: Bench) -> None:
    c_draining_one_settled(bench)
    bench.hear(P0, b.failed())


def c_released(bench: Bench) -> None:
    c_releasing_one_rank(bench)
    bench.hear(P0, b.failed())


CONSUMER_WAYS: dict[str, list[Script]] = {
    "new": [c_new, c_rival_new],
    "allocated": [c_allocated, c_again],
    "registering": [
        c_registering,
        c_registering_one_done,
        c_registering_one_answered,
        c_registering_one_rank,
    ],
    "registered": [c_registered, c_registered_one_rank],
    "transferring": [c_transferring, c_transferring_one_done],
    "draining": [c_draining, c_draining_one_settled, c_draining_other_settled],
    "fencing": [c_fencing],
    "releasing": [c_releasing, c_releasing_met, c_releasing_one_rank],
    "received": [c_received],
    "failed": [c_failed],
    "released": [c_released],
}


def lose_producer(bench: Bench) -> None:
    bench.take(ev.NoticeFailed(agent=P0, detail="no such agent"))


def other_engine(bench: Bench) -> None:
    """The meeting cannot help: it is refused for good."""
    bench.take(ev.MeetingFailed(address=ADDRESS, final=True, detail="another page size"))


def answer_for_long(bench: Bench) -> None:
    """Both ranks live, but nothing comes of it."""
    for _ in range(301):
        for agent in (P0, P1):
            bench.hear(agent, b.alive(Standing.WAITING))
        bench.wait(1.0)


def talk_for_long(bench: Bench) -> None:
    """One rank lives, but has nothing to say of this attempt."""
    for _ in range(301):
        bench.hear(P0, b.alive(Standing.WAITING))
        bench.hear(P1, b.done(4))
        bench.wait(1.0)


def stale_after_meeting(bench: Bench) -> None:
    """A word of attempt 4, from a producer that is known by way of another load."""
    bench.hear(P0, b.done(4))


CONSUMER_EVENTS: dict[str, list[Script]] = {
    "blocks_allocated": [takes(b.allocated(attempt=6))],
    "load_refused": [takes(b.refused())],
    "release_wanted": [takes(b.release())],
    "rival_allocated": [takes(b.allocated("rival", 7, blocks=((8,),)))],
    "load_aborted": [takes(b.load_aborted())],
    "peer_met": [lambda bench: bench.meet()],
    "peer_unreachable": [other_engine],
    "peer_lost": [lose_producer],
    "accepted": [
        hears(P0, b.accepted()),
        hears(P1, b.accepted()),
        hears(P1, b.accepted(Standing.TRANSFERRING)),
        hears(P1, b.alive(Standing.STOPPING)),
    ],
    "done": [hears(P0, b.done()), hears(P1, b.done()), hears(P1, b.done(prefill="another"))],
    "rank_failed": [
        hears(P0, b.failed()),
        hears(P1, b.failed()),
        hears(P0, b.alive(Standing.UNKNOWN)),
        hears(P0, b.failed(reason=Reason.WRITE_FAILED)),
        hears(P1, b.failed(reason=Reason.WRITE_FAILED)),
    ],
    "stale": [stale_after_meeting],
    "resend_due": [until_due],
    "expired": [until_over, answer_for_long, talk_for_long],
    "closing": [takes(ev.Closing())],
}

# -- the peer --------------------------------------------------------------------------------------


def r_backing_off(bench: Bench) -> None:
    c_allocated(bench)
    bench.take(ev.MeetingFailed(address=ADDRESS, final=False, detail="refused"))


def r_backing_off_alone(bench: Bench) -> None:
    r_backing_off(bench)
    bench.take(b.load_aborted())


OTHER = TransferId("o")
want_again = takes(b.allocated("other", 6, OTHER, ((9,),)))


def r_met_and_quiet(bench: Bench) -> None:
    """A load was received, and nothing was heard for a while."""
    c_received(bench)
    bench.wait(bench.engine.timings.verify_after_s)


def r_meeting_again(bench: Bench) -> None:
    """The same, and the next load asks who it is."""
    r_met_and_quiet(bench)
    want_again(bench)


PEER_WAYS: dict[str, list[Script]] = {
    "unmet": [c_new],
    "meeting": [c_allocated, r_meeting_again],
    "met": [c_registering, c_received, r_met_and_quiet],
    "introduced": [p_unknown],
    "backing_off": [r_backing_off, r_backing_off_alone],
}
PEER_EVENTS: dict[str, list[Script]] = {
    "peer_wanted": [want_again],
    "outdated": [takes(b.allocated("other", 6, OTHER, ((9,),), engine_id="engine-2"))],
    "meeting_succeeded": [lambda bench: bench.meet()],
    "meeting_failed": [other_engine],
    "introduced": [lambda bench: bench.introduce()],
    "heard": [hears(P0, b.accepted()), hears(C1, b.register())],
    "gone": [lose_producer, lose_consumer],
    "expired": [lambda bench: bench.wait(3000.0)],
}

WAYS = {"producer": PRODUCER_WAYS, "consumer": CONSUMER_WAYS, "peer": PEER_WAYS}
EVENTS = {"producer": PRODUCER_EVENTS, "consumer": CONSUMER_EVENTS, "peer": PEER_EVENTS}
