"""One short test for each bug that was found in the tables, by reading or by simulation."""

import pytest

from kvflow.core import Reason, Standing, Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.notices import Cancel, Failed, Register, Renew
from kvflow.errors import LocalProtocolError
from kvflow.ids import Address, AgentName, Incarnation, Rank, TransferId, part_id
from kvflow.testing import bench as b
from kvflow.testing.bench import ADDRESS, C1, C2, P0, P1, Bench, T
from kvflow.testing.scenes import acquainted, both_legs, prefilled
from kvflow.testing.world import World

OTHER = TransferId("other")


def last_word(bench: Bench, agent: AgentName) -> Failed:
    notice = bench.sent(agent)[-1]
    assert isinstance(notice, Failed)
    return notice


def test_a_duplicate_registration_of_a_finished_attempt_stays_dead_when_its_id_is_reused_s2() -> (
    None
):
    bench = Bench()
    bench.introduce()
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    bench.take(b.written())
    bench.take(b.started("next"), b.finished("next"))
    bench.hear(C1, b.register())
    assert bench.produced == "prefilled"
    assert last_word(bench, C1).reason is Reason.STALE
    assert len(bench.all(ef.PostWrite)) == 1


def test_a_duplicate_of_a_refused_registration_stays_refused_when_its_id_is_reused_s2() -> None:
    bench = Bench()
    bench.introduce()
    bench.take(b.started())
    bench.hear(C1, b.register())
    bench.hear(C1, b.cancel())
    bench.hear(C2, b.register())
    bench.take(b.started("next"), b.finished("next"))
    bench.hear(C2, b.register())
    assert last_word(bench, C2).reason is Reason.STALE
    assert not bench.all(ef.PostWrite)


def test_a_duplicate_cancel_of_an_old_attempt_leaves_the_next_transfer_alone_f5() -> None:
    bench = Bench()
    bench.introduce()
    bench.take(b.started())
    bench.hear(C1, b.register(), b.cancel())
    bench.take(b.started("next"))
    bench.hear(C1, b.cancel())
    assert bench.produced == "allocated"
    assert last_word(bench, C1).attempt == 5


def test_an_ambiguous_id_stays_refused_when_vllm_allocates_twice_for_a_rival_f7() -> None:
    bench = Bench()
    bench.introduce()
    bench.take(b.started(), b.started("rival"), b.started("rival"), b.finished("rival"))
    assert bench.produced == "failed"
    bench.hear(C1, b.register())
    assert last_word(bench, C1).reason is Reason.AMBIGUOUS


def test_a_silent_rank_is_lost_though_another_rank_of_its_engine_answers_f1() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.accepted())
    bench.hear(P1, b.accepted())
    timings = bench.engine.timings
    for _ in range(timings.renew_misses_max + 2):
        bench.hear(P0, b.alive(Standing.WAITING))
        bench.wait(timings.renew_interval_s)
    assert bench.consumed == "fencing"


def test_a_rank_that_says_that_it_is_stopping_is_not_lost_f2() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet(ranks=1)
    bench.hear(P0, b.accepted(Standing.TRANSFERRING))
    bench.take(b.load_aborted())
    timings = bench.engine.timings
    for _ in range(round(2 * timings.cancel_deadline_s)):
        bench.hear(P0, b.accepted(Standing.STOPPING))
        bench.wait(1.0)
    assert bench.consumed == "draining"
    for _ in range(round(timings.stop_deadline_s)):
        bench.hear(P0, b.accepted(Standing.STOPPING))
        bench.wait(1.0)
    assert bench.consumed == "fencing"
    bench.wait(timings.fence_silent_s)
    assert bench.consumed == "failed"


def test_renewals_do_not_prolong_a_shutdown_f21() -> None:
    bench = Bench()
    bench.introduce()
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    bench.take(ev.Closing())
    for _ in range(round(bench.engine.timings.drain_s) + 1):
        bench.hear(C1, b.renew())
        bench.wait(1.0)
    assert bench.produced == "draining"


def test_a_prefill_preempted_late_does_not_end_its_registration_f9() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register())
    bench.take(b.started())
    for _ in range(10):
        bench.wait(bench.engine.timings.hold_max_s / 5)
        bench.hear(C1, b.renew())
    bench.take(b.preempted())
    bench.wait(1.0)
    assert bench.produced == "held"


def test_a_request_that_loads_under_another_id_later_leaves_no_entry_behind_f23() -> None:
    bench = Bench()
    bench.take(b.allocated(), ev.MeetingFailed(address=ADDRESS, final=True, detail="no"))
    bench.take(b.allocated(attempt=6, of=OTHER))
    assert list(bench.engine.records.load_of) == [OTHER]
    bench.wait(1000.0)
    assert not bench.engine.records.load_of


def test_a_producer_remembers_a_consumer_for_longer_than_the_consumer_the_producer_f10() -> None:
    world, producer, consumer = acquainted()
    idle_s = world.timings.peer_idle_s
    for fraction in (0.6, 1.1, 1.7):
        world.advance(fraction * idle_s)
        prefill, load = both_legs(producer, consumer, TransferId(f"t{fraction}"))
        producer.finish(prefill)
        world.advance(0.1)
        assert load.state == "received"
        consumer.leave(load)


def test_a_peer_in_two_roles_is_not_dropped_while_one_of_them_is_in_use_f11() -> None:
    bench = Bench(Timings(peer_idle_s=5.0))
    bench.take(
        ev.PeerIntroduced(agent=P0, incarnation=Incarnation("i"), rank=Rank(0, 0)), b.allocated()
    )
    bench.meet(ranks=1)
    bench.hear(P0, b.done())
    for _ in range(20):
        bench.hear(P0, b.register(of=OTHER))
        bench.wait(1.0)
    assert not bench.engine.records.engines
    assert P0 in bench.engine.records.workers
    assert not bench.all(ef.DropPeer)


def test_a_request_preempted_while_its_release_is_unanswered_may_load_f9() -> None:
    bench = Bench()
    bench.take(b.release(attempt=5))
    bench.meet()
    bench.take(b.allocated(attempt=6))
    assert bench.consumed == "registering"
    bench.hear(P0, b.failed(5))
    assert bench.consumed == "registering"


def test_ranks_that_wrote_different_prefills_make_no_load_s6() -> None:
    """One rank gave the first prefill to a consumer that is gone, the other had it still."""
    world, producer, consumer = acquainted(ranks=2)
    first = producer.nodes[0].agent
    prefilled(producer)
    gone = world.add_consumer("D")
    world.network.lose_all(lambda frame: {frame.sender, frame.receiver} == {first, gone.node.agent})
    gone.allocate(T, producer)
    world.advance(6.0)
    world.network.heal()
    load = consumer.allocate(T, producer)
    world.advance(0.5)
    prefilled(producer)
    world.advance(0.5)
    assert load is not None
    assert (load.state, load.reason) == ("failed", Reason.AMBIGUOUS)
    world.everything_ends()


def test_dones_that_name_different_prefills_fail_the_load_s6() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.done(prefill="one"))
    bench.hear(P1, b.done(prefill="other"))
    assert bench.all(ef.ReportReceived)[-1].reason is Reason.AMBIGUOUS


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_done_of_another_prompt_fails_the_load_whatever_came_before_s6(answers: int) -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    for agent in (P0, P1)[:answers]:
        bench.hear(agent, b.accepted())
    bench.hear(P0, b.done())
    bench.hear(P1, b.done(prompt=b.OTHER))
    assert bench.all(ef.ReportReceived)[-1].reason is Reason.AMBIGUOUS
    assert "another prompt" in bench.all(ef.Moved)[-1].detail


def test_a_rank_that_answered_is_renewed_while_another_has_not_f6() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.accepted())
    bench.wait(1.0)
    assert any(isinstance(notice, Renew) for notice in bench.sent(P0))
    assert not any(isinstance(notice, Renew) for notice in bench.sent(P1))


def test_a_rank_that_is_done_cannot_fail_any_more_f5() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.done())
    bench.hear(P0, b.failed(reason=Reason.STALE))
    bench.hear(P1, b.accepted())
    bench.hear(P1, b.done())
    assert bench.consumed == "received"


def test_an_answer_to_a_write_that_is_not_open_is_a_bug_of_ours_s4() -> None:
    bench = Bench()
    bench.introduce()
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    with pytest.raises(LocalProtocolError, match="no such write"):
        bench.take(b.written(attempt=4))
    with pytest.raises(LocalProtocolError, match="no such write"):
        bench.take(ev.WriteDone(part=part_id(OTHER, 0), attempt=5, bytes=1, runs=1))


def test_the_second_registration_of_a_blind_rank_is_the_last_s2() -> None:
    """A registration that named no time is sent again when the clock is known, and once only."""
    bench = Bench()
    bench.take(b.allocated())
    bench.meet(ranks=1)
    for _ in range(3):
        bench.hear(P0, b.accepted(clock_s=7.0))
    times = [each.write_until_s for each in bench.sent(P0) if isinstance(each, Register)]
    assert times == [None, 7.0 + bench.engine.timings.write_lease_s]


def test_a_late_cancel_of_an_unknown_transfer_is_answered_and_forgotten_f23() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, Cancel(transfer_id=OTHER, attempt=9))
    assert last_word(bench, C1).attempt == 9
    bench.wait(2 * bench.engine.timings.tombstone_s)
    assert not bench.engine.records.producers
    assert T not in bench.engine.records.producers


def test_two_worlds_of_one_seed_are_the_same() -> None:
    """What makes a failing seed worth writing down."""

    def run() -> list[str]:
        world = World(seed=7)
        producer, consumer = world.add_producer("P", ranks=2), world.add_consumer("C")
        world.faults.slow_slices = 0.5
        prefill, _ = both_legs(producer, consumer)
        producer.finish(prefill)
        world.everything_ends()
        return [repr(entry) for entry in world.log]

    assert run() == run()


def test_a_request_that_turns_to_another_producer_does_not_use_the_first_any_more_f9() -> None:
    bench = Bench()
    bench.take(b.release(attempt=5))
    bench.meet()
    bench.take(b.allocated(attempt=6, address=Address("another", 5600)))
    assert [sorted(each.using) for each in bench.engine.records.engines.values()] == [[], []]


def test_a_second_release_of_one_request_replaces_the_first_f23() -> None:
    bench = Bench()
    bench.take(b.release(attempt=5))
    bench.meet()
    bench.take(b.release(attempt=6, of=OTHER))
    assert bench.sent(P0)[-1] == Cancel(transfer_id=OTHER, attempt=6)
    assert list(bench.engine.records.load_of) == [OTHER]
