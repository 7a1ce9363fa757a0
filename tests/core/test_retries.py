"""A WRITE that failed is tried once more: what is kept for that, for whom, and for how long."""

import pytest

from kvflow.core import Reason, Standing
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.notices import Alive, Failed, Register, Renew
from kvflow.ids import AgentName, TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, C2, P0, P1, PART, Bench, T

OTHER = TransferId("other")


def last_word(bench: Bench, agent: AgentName) -> Failed:
    notice = bench.sent(agent)[-1]
    assert isinstance(notice, Failed)
    return notice


def write_failed(attempt: int, *, final: bool = False) -> ev.WriteFailed:
    return ev.WriteFailed(part=PART, attempt=attempt, detail="EIO", final=final)


def transferring(attempt: int) -> Bench:
    """A producer that writes for C1."""
    bench = Bench()
    bench.introduce()
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register(attempt))
    return bench


def test_a_write_that_fails_while_the_producer_closes_is_not_kept_for_a_retry_f21() -> None:
    """Kept and registered anew, it was renewed for ever: nothing bounded it any more."""
    bench = transferring(attempt=5)
    bench.take(ev.Closing(), write_failed(5))
    assert bench.produced == "failed"
    assert len(bench.all(ef.ReportSent)) == 1
    bench.hear(C1, b.register(6))
    assert last_word(bench, C1).reason is Reason.WRITE_FAILED


def test_a_write_that_would_fail_in_the_same_way_again_is_not_kept_for_a_retry_f4() -> None:
    bench = transferring(attempt=5)
    bench.take(write_failed(5, final=True))
    assert bench.produced == "failed"
    assert len(bench.all(ef.ReportSent)) == 1


def failed_below_the_floor() -> Bench:
    """A WRITE for attempt 16 has failed; attempt 32 was settled and forgotten before that."""
    bench = Bench()
    bench.introduce()
    bench.take(b.started())
    bench.hear(C1, b.register(attempt=16))
    bench.hear(C1, b.register(attempt=32, of=OTHER), b.cancel(attempt=32, of=OTHER))
    for _ in range(10):
        bench.wait(bench.engine.timings.tombstone_s / 5)
        bench.hear(C1, b.renew(attempt=16))
    assert OTHER not in bench.engine.records.producers
    bench.take(b.finished(), write_failed(16))
    return bench


def test_a_retry_is_taken_though_a_later_load_was_forgotten_meanwhile_f4() -> None:
    """It is numbered like its load, which is older than the floor."""
    bench = failed_below_the_floor()
    bench.hear(C1, b.register(attempt=17))
    assert bench.produced == "transferring"


def test_a_cancel_of_such_a_retry_releases_what_was_kept_f2() -> None:
    bench = failed_below_the_floor()
    bench.hear(C1, b.cancel(attempt=17))
    assert bench.produced == "failed"
    bench.hear(C1, b.register(attempt=17))
    assert not any(each.attempt == 17 for each in bench.all(ef.PostWrite))


def test_another_load_is_no_retry_of_the_one_that_failed_s2() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register(attempt=64, of=OTHER), b.cancel(attempt=64, of=OTHER))
    bench.wait(bench.engine.timings.tombstone_s + 1)
    bench.take(b.started(), b.finished())
    bench.hear(C2, b.register(attempt=16))
    bench.take(write_failed(16))
    bench.hear(C1, b.register(attempt=17))
    bench.hear(C1, b.register(attempt=48))
    assert bench.produced == "prefilled"
    assert last_word(bench, C1).reason is Reason.STALE


@pytest.mark.parametrize("ask", [b.register(16), b.renew(16)])
def test_who_missed_that_its_write_failed_is_told_so_when_it_asks_f5(ask: Register | Renew) -> None:
    bench = transferring(attempt=16)
    bench.take(write_failed(16))
    bench.hear(C1, ask)
    said = bench.sent(C1)[-1]
    if isinstance(said, Alive):
        assert said.standings == ((T, 16, Standing.FAILED, Reason.WRITE_FAILED),)
    else:
        assert last_word(bench, C1).reason is Reason.WRITE_FAILED
    assert bench.produced == "prefilled"


def test_a_cancel_of_the_attempt_whose_write_failed_releases_what_was_kept_f2() -> None:
    bench = transferring(attempt=16)
    bench.take(write_failed(16))
    bench.hear(C1, b.cancel(15))
    assert bench.produced == "prefilled"
    bench.hear(C1, b.cancel(16))
    assert bench.produced == "failed"
    assert len(bench.all(ef.ReportSent)) == 1


def test_a_rank_that_failed_before_others_is_told_that_no_retry_comes_f4() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet()
    bench.hear(P0, b.accepted(Standing.TRANSFERRING))
    bench.hear(P1, b.accepted(Standing.TRANSFERRING))
    bench.hear(P0, b.failed(reason=Reason.WRITE_FAILED))
    assert bench.consumed == "draining"
    assert bench.sent(P0)[-1] == bench.sent(P1)[-1] == b.cancel()
    bench.hear(P0, b.failed())
    assert bench.consumed == "draining"
    bench.hear(P1, b.done())
    assert bench.consumed == "failed"


def test_a_retry_does_not_prolong_its_load_l1() -> None:
    bench = Bench()
    bench.take(b.allocated())
    bench.meet(ranks=1)
    bench.hear(P0, b.accepted())
    timings = bench.engine.timings
    for _ in range(round(timings.load_deadline_s) - 1):
        bench.wait(1.0)
        bench.hear(P0, b.alive(Standing.WAITING))
    bench.hear(P0, b.failed(reason=Reason.WRITE_FAILED))
    assert bench.consumed == "registering"
    bench.wait(1.0)
    assert bench.consumed == "draining"
    assert bench.sent(P0)[-1] == b.cancel(6)


def test_a_new_load_of_the_same_request_may_be_retried_again_f9() -> None:
    bench = Bench()
    for attempt in (16, 32):
        bench.take(b.allocated(attempt=attempt))
        bench.meet(ranks=1)
        bench.hear(P0, b.failed(attempt, Reason.WRITE_FAILED))
        assert bench.consumed == "registering"
        bench.hear(P0, b.failed(attempt + 1, Reason.WRITE_FAILED))
        assert bench.consumed == "failed"
