"""What a producer keeps after its WRITE, one worker at a time: for whom, how long, who is told."""

from dataclasses import replace

import pytest

from kvflow.core import Reason, Standing, Timings, Urgency
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.notices import Alive, Cancel, Done, Failed, Register
from kvflow.errors import ConfigurationError
from kvflow.ids import TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, C2, P0, P1, Bench, T
from kvflow.testing.producer_ways import KEEP_S, NAME, p_kept, p_transferring_to_keep
from kvflow.testing.ways import c_received_and_kept, meet_others


def kept() -> Bench:
    """A producer that keeps the prefill `r`, written for attempt 5 of C1."""
    bench = Bench()
    p_kept(bench)
    assert bench.produced == "kept"
    return bench


def received() -> Bench:
    """A consumer whose load was received from two ranks that keep it."""
    bench = Bench()
    c_received_and_kept(bench)
    assert bench.consumed == "received"
    return bench


# -- the producer ----------------------------------------------------------------------------------


def test_done_says_for_how_long_it_is_kept_from_now_on() -> None:
    bench = kept()
    bench.wait(5.0)
    bench.hear(C1, b.register(keep=True), b.renew())
    first, again, after_renewal = (n for n in bench.sent(C1) if isinstance(n, Done))
    assert first == b.done(prefill=NAME, kept_s=KEEP_S)
    assert again == after_renewal == b.done(prefill=NAME, kept_s=KEEP_S - 5.0)
    bench.wait(KEEP_S)
    assert bench.produced == "sent"
    bench.hear(C1, b.register(keep=True))
    assert bench.sent(C1)[-1] == b.done(prefill=NAME)


def test_a_renewal_of_what_is_kept_is_told_that_it_is_done_f5() -> None:
    bench = kept()
    bench.hear(C1, b.renew())
    done, alive = bench.sent(C1)[-2:]
    assert isinstance(done, Done)
    assert isinstance(alive, Alive)
    assert alive.standings == ((T, 5, Standing.DONE, None),)


def test_vllm_gets_the_blocks_back_once_and_not_before_they_are_let_go_s3_s5() -> None:
    bench = kept()
    assert not bench.all(ef.ReportSent)
    assert bench.engine.live == 1
    assert not bench.engine.ledger.empty
    bench.hear(C1, b.cancel(), b.cancel())
    assert bench.all(ef.ReportSent) == [ef.ReportSent(request_id="r")]
    assert (bench.engine.live, bench.engine.ledger.empty) == (0, True)
    assert bench.sent(C1)[-2:] == [b.failed()] * 2


def test_nobody_is_looked_for_quickly_because_something_is_kept() -> None:
    """It lasts for long, and hardly anybody comes back."""
    assert kept().engine.urgency() is Urgency.IDLE


def test_a_prefill_that_is_not_asked_to_be_kept_is_not_kept() -> None:
    bench = Bench(Timings(keep_sent_s=KEEP_S))
    bench.introduce()
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    bench.take(b.written())
    assert bench.produced == "sent"
    assert bench.sent(C1)[-1] == b.done(prefill=NAME)


def test_a_write_that_ends_during_a_shutdown_is_not_kept_f21() -> None:
    bench = Bench()
    p_transferring_to_keep(bench)
    bench.take(ev.Closing(), b.written())
    assert bench.produced == "sent"
    assert len(bench.all(ef.ReportSent)) == 1


def test_a_second_write_that_ends_after_the_time_is_not_kept_any_longer_l1() -> None:
    bench = kept()
    bench.wait(KEEP_S - 1)
    bench.hear(C1, b.register(6, prefill=NAME, keep=True, write_until_s=bench.now + 5))
    assert bench.produced == "transferring"
    bench.wait(2.0)
    bench.take(b.written(6))
    assert bench.produced == "sent"
    assert bench.sent(C1)[-1] == b.done(6, prefill=NAME)


def test_a_second_time_only_what_the_prefill_has_is_written_f8() -> None:
    bench = kept()
    bench.hear(C1, b.register(6, prefill=NAME, tokens=b.TOKENS + 1))
    assert bench.produced == "kept"
    assert bench.sent(C1)[-1] == b.failed(6, Reason.MISMATCH)
    bench.hear(C1, b.register(7, prefill=NAME))
    assert bench.produced == "transferring"


def test_who_names_the_prefill_without_having_had_it_is_refused_f7() -> None:
    bench = kept()
    bench.hear(C2, b.register(prefill=NAME))
    assert bench.sent(C2) == [b.failed(reason=Reason.FORGOTTEN)]
    assert bench.produced == "kept"


def test_a_cancel_of_another_consumer_or_an_older_attempt_lets_nothing_go_f7() -> None:
    bench = kept()
    bench.hear(C2, b.cancel(6))
    bench.hear(C1, b.cancel(4))
    assert bench.produced == "kept"


def test_a_preempted_request_that_nobody_knows_leaves_no_record() -> None:
    """Else it would be held like a registration for a prefill to come."""
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register(6, prefill=NAME))
    assert bench.sent(C1) == [b.failed(6, Reason.FORGOTTEN)]
    assert not bench.engine.records.producers
    bench.hear(C1, b.register(6))
    assert bench.sent(C1)[-1] == b.failed(6, Reason.STALE)


def test_an_unused_consumer_is_known_for_as_long_as_something_is_kept_for_it() -> None:
    bench = Bench()
    bench.engine.timings = Timings(keep_sent_s=3000.0)
    bench.introduce(C1)
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register(keep=True))
    bench.take(b.written())
    bench.wait(2900.0)
    assert C1 in bench.engine.records.workers
    bench.wait(200.0)
    assert bench.produced == "unknown"
    bench.wait(3000.0)
    assert C1 not in bench.engine.records.workers


# -- the consumer ----------------------------------------------------------------------------------


def test_a_load_once_more_names_the_prefill_that_it_had_f7() -> None:
    bench = received()
    bench.take(b.allocated(attempt=21, again=True, keep=True))
    for agent in (P0, P1):
        asked = bench.sent(agent)[-1]
        assert isinstance(asked, Register)
        assert (asked.attempt, asked.prefill, asked.keep) == (21, "r", True)


def test_a_first_load_names_none() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    asked = bench.sent(P0)[-1]
    assert isinstance(asked, Register)
    assert (asked.prefill, asked.keep) == ("", False)


def test_one_rank_that_keeps_nothing_spoils_it_for_all_and_the_other_is_told_f4() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.done(kept_s=KEEP_S))
    bench.hear(P1, b.done())
    bench.take(b.allocated(attempt=21, again=True))
    assert bench.consumed == "failed"
    assert bench.all(ef.ReportReceived)[-1].reason is Reason.FORGOTTEN
    assert bench.sent(P0)[-1] == b.cancel()
    assert b.cancel() not in bench.sent(P1)


@pytest.mark.parametrize("last", [b.failed(reason=Reason.CANCELLED), b.done(prefill="another")])
def test_a_load_that_fails_lets_go_of_what_a_rank_keeps_for_it_f4(last: Failed | Done) -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.done(kept_s=KEEP_S))
    bench.hear(P1, last)
    assert bench.consumed == "failed"
    assert bench.sent(P0)[-1] == b.cancel()


def test_a_completion_that_comes_while_giving_up_lets_go_of_what_is_kept_f2() -> None:
    """The cancel may be lost, and is not sent again: the rank has settled."""
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.take(b.load_aborted())
    before = bench.sent(P0).count(b.cancel())
    bench.hear(P0, b.done(kept_s=KEEP_S))
    bench.hear(P1, b.done())
    assert bench.consumed == "failed"
    assert bench.sent(P0).count(b.cancel()) == before + 1


def test_a_request_whose_producer_keeps_nothing_ends_without_a_word() -> None:
    bench = received()
    bench.wait(KEEP_S)
    before = len(bench.sent())
    bench.take(b.request_ended())
    assert bench.consumed == "received"
    assert len(bench.sent()) == before


def test_only_the_rank_that_keeps_something_is_told_of_the_end() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.done(kept_s=KEEP_S))
    bench.hear(P1, b.done())
    bench.take(b.request_ended())
    assert bench.sent(P0)[-1] == b.cancel()
    assert b.cancel() not in bench.sent(P1)
    bench.hear(P0, b.failed())
    assert bench.consumed == "released"


def test_workers_that_took_the_place_of_those_that_kept_it_are_not_told_f11() -> None:
    """They would be taken for lost, since they know nothing to answer."""
    bench = received()
    bench.wait(bench.engine.timings.verify_after_s)
    bench.take(b.request_ended())
    before = len(bench.sent())
    meet_others(bench)
    assert bench.consumed == "released"
    assert len(bench.sent()) == before


def test_a_received_load_is_remembered_for_as_long_as_it_is_kept() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet(ranks=1)
    tombstone_s = bench.engine.timings.tombstone_s
    bench.hear(P0, b.done(kept_s=3 * tombstone_s))
    bench.wait(2 * tombstone_s)
    assert bench.consumed == "received"
    bench.wait(tombstone_s)
    assert bench.consumed == "new"


def test_the_blocks_of_an_ended_request_are_nobodys_while_its_producer_is_told_s1() -> None:
    bench = received()
    bench.take(b.request_ended())
    assert bench.consumed == "releasing"
    bench.take(b.allocated("other", 6, TransferId("o")))
    assert bench.engine.records.consumers["other"].state == "registering"


def test_a_load_once_more_leaves_another_requests_load_with_the_id_alone_f7() -> None:
    bench = received()
    bench.take(b.allocated("new", 21, blocks=((9,),)))
    bench.take(b.allocated(attempt=37, again=True))
    assert bench.all(ef.ReportReceived)[-1] == ef.ReportReceived(
        request_id="c", reason=Reason.AMBIGUOUS
    )
    assert bench.engine.records.consumers["new"].state == "registering"


def test_what_was_not_told_in_time_is_left_to_the_producers_own_time_l1() -> None:
    bench = received()
    bench.take(b.request_ended())
    cancels = [n for n in bench.sent(P0) if isinstance(n, Cancel)]
    assert cancels
    bench.hear(P0, b.failed())
    bench.wait(bench.engine.timings.cancel_deadline_s)
    assert bench.consumed == "released"
    assert bench.sent(P1).count(b.cancel()) > bench.sent(P0).count(b.cancel())


# -- the setting -----------------------------------------------------------------------------------


def test_keeping_is_off_unless_it_is_set_and_never_below_nothing() -> None:
    assert Timings().keep_sent_s == 0
    with pytest.raises(ConfigurationError, match="keep_sent_s"):
        replace(Timings(), keep_sent_s=-0.1)
