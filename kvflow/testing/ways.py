"""How to get to each state of each table, and which events mean each trigger: real events only.

`WAYS[machine][state]` are scripts that leave a record of the machine in that state on a fresh
`Bench`; `EVENTS[machine][trigger]` are scripts that, in the right state, fire that trigger. Here
are the consumer's and the peer's; the producer's are in `kvflow.testing.producer_ways`.
"""

from kvflow.core import Reason, Standing
from kvflow.core import events as ev
from kvflow.ids import Address, AgentName, Incarnation, TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import ADDRESS, C1, P0, P1, RANKS, Bench
from kvflow.testing.producer_ways import (
    KEEP_S,
    PRODUCER_EVENTS,
    PRODUCER_WAYS,
    Script,
    hears,
    lose_consumer,
    p_held,
    p_unknown,
    takes,
    until_due,
    until_over,
)

__all__ = ["EVENTS", "WAYS", "Script"]

# -- the consumer ----------------------------------------------------------------------------------


def c_new(bench: Bench) -> None:
    """Nothing."""


def c_rival_new(bench: Bench) -> None:
    bench.take(b.allocated("other", blocks=((9,),)))


def c_allocated(bench: Bench) -> None:
    bench.take(b.allocated())


def c_allocated_to_read(bench: Bench) -> None:
    bench.take(b.allocated(reads=True))


def c_allocated_to_read_at_once(bench: Bench) -> None:
    bench.take(b.allocated(reads=True, offer=b.offer()))


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


def c_expecting(bench: Bench) -> None:
    bench.take(b.allocated(reads=True))
    bench.meet()


def c_reading(bench: Bench) -> None:
    """The router has told of the prefill; both ranks are read from, neither has spoken."""
    bench.take(b.allocated(reads=True, offer=b.offer()))
    bench.meet()


def c_reading_what_was_said(bench: Bench) -> None:
    c_reading(bench)
    bench.hear(P0, b.readable())
    bench.hear(P1, b.readable())


def c_reading_one_rank(bench: Bench) -> None:
    c_expecting(bench)
    bench.hear(P0, b.readable())


def c_reading_but_all_has_ended(bench: Bench) -> None:
    c_expecting(bench)
    bench.hear(P0, b.readable())
    bench.take(b.read())


def c_reading_one_done(bench: Bench) -> None:
    c_reading_but_all_has_ended(bench)
    bench.hear(P0, b.done())


def c_reading_one_done_one_read(bench: Bench) -> None:
    c_reading_one_done(bench)
    bench.hear(P1, b.readable())
    bench.take(b.read(RANKS[1]))


def c_reading_a_mixture(bench: Bench) -> None:
    c_reading_one_done(bench)
    bench.hear(P1, b.readable(prefill="another"))
    bench.take(b.read(RANKS[1]))


def c_reading_one_done_one_open(bench: Bench) -> None:
    c_reading_one_done(bench)
    bench.hear(P1, b.readable())


def c_reading_another(bench: Bench) -> None:
    """What rank 0 holds is not what is being read from it."""
    c_reading(bench)
    bench.hear(P0, b.readable(prefill="another", blocks=((7, 8, 9),)))


def c_reading_after_a_failure(bench: Bench) -> None:
    c_reading(bench)
    bench.take(b.read_failed(RANKS[1]))
    bench.hear(P1, b.readable())


def c_stopping(bench: Bench) -> None:
    c_reading_one_rank(bench)
    bench.take(b.load_aborted())


def c_stopping_two(bench: Bench) -> None:
    c_reading(bench)
    bench.take(b.load_aborted())


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


def c_received_and_kept(bench: Bench) -> None:
    c_registered(bench)
    bench.hear(P0, b.done(kept_s=KEEP_S))
    bench.hear(P1, b.done(kept_s=KEEP_S))


def c_releasing_what_is_kept(bench: Bench) -> None:
    """The producer was not heard for a while: it is asked first who it is."""
    c_received_and_kept(bench)
    bench.wait(bench.engine.timings.verify_after_s)
    bench.take(b.request_ended())


def c_failed(bench: Bench) -> None:
    c_draining_one_settled(bench)
    bench.hear(P0, b.failed())


def c_released(bench: Bench) -> None:
    c_releasing_one_rank(bench)
    bench.hear(P0, b.failed())


CONSUMER_WAYS: dict[str, list[Script]] = {
    "new": [c_new, c_rival_new],
    "allocated": [c_allocated, c_again, c_allocated_to_read, c_allocated_to_read_at_once],
    "registering": [
        c_registering,
        c_registering_one_done,
        c_registering_one_answered,
        c_registering_one_rank,
    ],
    "registered": [c_registered, c_registered_one_rank],
    "transferring": [c_transferring, c_transferring_one_done],
    "expecting": [c_expecting],
    "reading": [
        c_reading,
        c_reading_what_was_said,
        c_reading_one_rank,
        c_reading_but_all_has_ended,
        c_reading_one_done,
        c_reading_one_done_one_read,
        c_reading_one_done_one_open,
        c_reading_a_mixture,
        c_reading_another,
        c_reading_after_a_failure,
    ],
    "stopping": [c_stopping, c_stopping_two],
    "draining": [c_draining, c_draining_one_settled, c_draining_other_settled],
    "fencing": [c_fencing],
    "releasing": [
        c_releasing,
        c_releasing_met,
        c_releasing_one_rank,
        c_releasing_what_is_kept,
    ],
    "received": [c_received, c_received_and_kept],
    "failed": [c_failed],
    "released": [c_released],
}


def lose_producer(bench: Bench) -> None:
    bench.take(ev.NoticeFailed(agent=P0, detail="no such agent"))


def other_engine(bench: Bench) -> None:
    """The meeting cannot help: it is refused for good."""
    bench.take(ev.MeetingFailed(address=ADDRESS, final=True, detail="another page size"))


def meet_others(bench: Bench) -> None:
    """The engine was restarted."""
    bench.take(
        ev.MeetingSucceeded(
            address=ADDRESS,
            engine_id="engine-2",
            incarnation=Incarnation("i-engine-2"),
            agents=dict(zip(b.RANKS, (AgentName("q0"), AgentName("q1")), strict=True)),
        )
    )


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
    "allocated_again": [takes(b.allocated(attempt=6, again=True))],
    "request_ended": [takes(b.request_ended())],
    "load_refused": [takes(b.refused())],
    "release_wanted": [takes(b.release())],
    "rival_allocated": [takes(b.allocated("rival", 7, blocks=((8,),)))],
    "load_aborted": [takes(b.load_aborted())],
    "peer_met": [lambda bench: bench.meet(), meet_others],
    "peer_unreachable": [other_engine],
    "peer_lost": [lose_producer],
    "accepted": [
        hears(P0, b.accepted()),
        hears(P1, b.accepted()),
        hears(P1, b.accepted(Standing.TRANSFERRING)),
        hears(P1, b.alive(Standing.STOPPING)),
    ],
    "readable": [hears(P0, b.readable()), hears(P1, b.readable())],
    "read_done": [takes(b.read()), takes(b.read(RANKS[1]))],
    "read_failed": [
        takes(b.read_failed()),
        takes(b.read_failed(final=True)),
        takes(b.read_failed(RANKS[1])),
    ],
    "read_stopped": [takes(b.read_stopped())],
    "done": [
        hears(P0, b.done()),
        hears(P1, b.done()),
        hears(P1, b.done(prefill="another")),
        hears(P0, b.done(prompt=b.OTHER)),
        hears(P1, b.done(prompt=b.OTHER)),
    ],
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
    "introduced": [p_unknown, p_held],
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
