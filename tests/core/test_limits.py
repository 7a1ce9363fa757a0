"""Named limits, and a producer that was quiet: driven by hand, one worker at a time."""

from kvflow.core import Reason, Standing, Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.notices import Alive, Failed
from kvflow.ids import AgentName, Incarnation, Rank, TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import ADDRESS, C1, C2, P0, P1, Bench, T

OTHER = TransferId("other")
ELSEWHERE = ((9,),)


def last_word(bench: Bench, agent: AgentName) -> Failed:
    notice = bench.sent(agent)[-1]
    assert isinstance(notice, Failed)
    return notice


def test_a_registration_refused_for_capacity_outdates_no_older_one_f17() -> None:
    """At a first meeting, loads register in the order of their names, not of their attempts."""
    bench = Bench(Timings(held_max=1))
    bench.introduce()
    bench.take(b.started())
    bench.hear(C2, b.register(of=TransferId("another")))
    bench.hear(C1, b.register(attempt=32, of=OTHER))
    assert last_word(bench, C1).reason is Reason.CAPACITY
    assert [each.kind for each in bench.all(ef.Ignored)] == ["registration_beyond_limit"]
    bench.hear(C1, b.register(attempt=16))
    assert bench.produced == "registered"


def test_a_duplicate_of_what_was_refused_for_capacity_stays_refused_s2() -> None:
    bench = Bench(Timings(held_max=1))
    bench.introduce()
    bench.hear(C2, b.register(of=OTHER))
    bench.hear(C1, b.register())
    bench.hear(C2, b.cancel(of=OTHER))
    for _ in range(3):
        bench.hear(C1, b.register())
        assert last_word(bench, C1).transfer_id == T
        bench.take(b.started(), b.finished())
        bench.wait(bench.engine.timings.tombstone_s)
    assert not bench.all(ef.PostWrite)


def test_what_ended_first_is_forgotten_first_and_late_words_about_it_do_no_harm_f17() -> None:
    bench = Bench(Timings(tombstones_max=2))
    bench.introduce()
    names = [TransferId(f"t{number}") for number in range(4)]
    for number, name in enumerate(names, 1):
        bench.hear(C1, b.register(attempt=16 * number, of=name))
    for number in (2, 1, 3, 4):
        bench.hear(C1, b.cancel(attempt=16 * number, of=names[number - 1]))
    assert list(bench.engine.records.producers) == names[2:]
    bench.hear(C1, b.register(attempt=32, of=names[1]))
    assert last_word(bench, C1).reason is Reason.STALE
    bench.hear(C1, b.renew(attempt=32))
    assert bench.sent(C1)[-1] == Alive(
        standings=((T, 32, Standing.UNKNOWN, None),), clock_s=bench.now
    )
    bench.hear(C1, b.cancel(attempt=32, of=names[1]))
    assert last_word(bench, C1).attempt == 32
    assert len(bench.engine.records.tombs) == 2
    assert bench.engine.live == 0


def test_loads_that_ended_are_forgotten_beyond_the_limit_too_f17() -> None:
    bench = Bench(Timings(tombstones_max=2))
    for number in range(5):
        request = f"c{number}"
        bench.take(b.refused(request, attempt=16 * (number + 1), of=TransferId(request)))
    assert list(bench.engine.records.consumers) == ["c3", "c4"]
    assert len(bench.all(ef.ReportReceived)) == 5
    bench.wait(2 * bench.engine.timings.tombstone_s)
    assert not bench.engine.records.consumers
    assert bench.engine.next_deadline() is None


def test_a_tomb_that_is_used_again_is_not_forgotten_f17() -> None:
    bench = Bench(Timings(tombstones_max=1))
    bench.take(b.refused("c", of=T), b.allocated("c", attempt=16))
    bench.take(b.refused("d", of=OTHER))
    assert bench.consumed == "allocated"


def test_a_consumer_beyond_the_limit_is_dropped_unless_it_is_a_producer_of_ours_f17() -> None:
    bench = Bench(Timings(peers_max=1))
    bench.introduce(C1, C2)
    assert [each.agent for each in bench.all(ef.DropPeer)] == [C2]
    bench.take(b.allocated())
    bench.meet(ranks=1)
    bench.introduce(P0)
    bench.introduce(C1)
    assert [each.agent for each in bench.all(ef.DropPeer)] == [C2]
    assert list(bench.engine.records.workers) == [C1]


def test_whoever_asks_again_for_a_prompt_that_is_too_long_is_told_the_same_f1() -> None:
    bench = Bench()
    bench.introduce()
    for _ in range(2):
        bench.hear(C1, b.register(tokens=b.TOKENS + 1))
        assert last_word(bench, C1) == b.failed(reason=Reason.TOO_LONG)
    bench.hear(C1, b.renew())
    assert bench.sent(C1)[-1] == Alive(
        standings=((T, 5, Standing.FAILED, Reason.TOO_LONG),), clock_s=bench.now
    )
    assert bench.engine.live == 0


def test_a_known_prefill_is_not_too_long_whatever_is_asked_for_f8() -> None:
    """Two prompts under one id: what the prefill has decides, as for any other size."""
    bench = Bench()
    bench.introduce()
    bench.take(b.started())
    bench.hear(C1, b.register(tokens=b.TOKENS + 1))
    assert bench.produced == "registered"
    bench.take(b.finished())
    assert last_word(bench, C1).reason is Reason.MISMATCH


# -- quiet peers ---------------------------------------------------------------------------------


def quiet() -> Bench:
    """A producer was met and used, and has not been heard for a while."""
    bench = Bench()
    bench.take(b.allocated())
    bench.meet(ranks=1)
    bench.hear(P0, b.done())
    bench.wait(bench.engine.timings.verify_after_s)
    bench.take(b.allocated("next", 16, OTHER, ELSEWHERE))
    return bench


def test_a_quiet_producer_that_is_the_same_is_not_dropped_f11() -> None:
    bench = quiet()
    assert len(bench.all(ef.Meet)) == 2
    bench.meet(ranks=1)
    assert not bench.all(ef.DropPeer)
    assert bench.sent(P0)[-1].transfer_id == OTHER


def test_a_quiet_producer_that_was_restarted_is_dropped_when_that_is_known_f11() -> None:
    bench = quiet()
    bench.take(
        ev.MeetingSucceeded(
            address=ADDRESS,
            engine_id="engine-2",
            incarnation=Incarnation("i-2"),
            agents={Rank(0, 0): P1},
        )
    )
    assert [each.agent for each in bench.all(ef.DropPeer)] == [P0]
    assert bench.sent(P1)[-1].transfer_id == OTHER
    assert list(bench.engine.records.engine_of) == [P1]


def test_a_producer_that_is_in_use_is_not_asked_again_f11() -> None:
    """Its renewals are what tells whether it lives."""
    bench = Bench()
    bench.take(b.allocated())
    bench.meet(ranks=1)
    bench.hear(P0, b.accepted())
    bench.wait(bench.engine.timings.renew_interval_s * 8)
    bench.engine.records.engines[ADDRESS].heard_at -= bench.engine.timings.verify_after_s
    bench.take(b.allocated("next", 16, OTHER, ELSEWHERE))
    assert len(bench.all(ef.Meet)) == 1
    assert bench.sent(P0)[-1].transfer_id == OTHER


def test_a_quiet_producer_that_speaks_while_it_is_asked_is_heard_f11() -> None:
    bench = quiet()
    bench.hear(P0, b.done())
    assert not any(each.kind == "unknown_sender" for each in bench.all(ef.Ignored))
    bench.meet(ranks=1)
    assert not bench.all(ef.DropPeer)


def test_a_quiet_producer_lost_while_it_is_asked_is_dropped_and_met_again_f11() -> None:
    bench = quiet()
    bench.take(ev.NoticeFailed(agent=P0, detail="no such agent"))
    assert [each.agent for each in bench.all(ef.DropPeer)] == [P0]
    bench.meet(ranks=1)  # the answer to the meeting that was given up
    assert not bench.engine.records.engine_of
    bench.wait(bench.engine.timings.backoff_first_s)
    bench.meet(ranks=1)
    assert bench.sent(P0)[-1].transfer_id == OTHER
