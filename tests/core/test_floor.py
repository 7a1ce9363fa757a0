"""Found by the TLA+ model: what was settled stays so, also when its consumer is gone."""

from kvflow.core.notices import Failed
from kvflow.core.reasons import Reason
from kvflow.testing import bench as b
from kvflow.testing import producer_ways as ways
from kvflow.testing.bench import C1, Bench, T


def forgotten(bench: Bench) -> None:
    """Attempt 5 was settled, told, and forgotten with its tombstone."""
    ways.p_registered(bench)
    bench.take(b.aborted())
    bench.wait(bench.engine.timings.tombstone_s + 1)
    assert bench.produced == "unknown"


def test_a_settled_attempt_stays_stale_when_its_consumer_was_forgotten_meanwhile_s2() -> None:
    bench = Bench()
    forgotten(bench)
    ways.lose_consumer(bench)
    bench.introduce(C1)
    bench.hear(C1, b.register())
    assert bench.produced == "unknown", "a delayed duplicate of a registration is not kept"
    assert bench.sent()[-1] == Failed(transfer_id=T, attempt=5, reason=Reason.STALE)
    bench.take(b.started(), b.finished())
    assert bench.produced == "prefilled", "and what comes under its id is not written to it"


def test_an_attempt_settled_after_its_consumer_was_lost_is_remembered_too_s2() -> None:
    bench = Bench()
    ways.p_registered(bench)
    ways.lose_consumer(bench)
    bench.wait(bench.engine.timings.tombstone_s + 1)
    bench.introduce(C1)
    bench.hear(C1, b.register())
    assert bench.produced == "unknown"


def test_a_delayed_cancel_of_a_settled_attempt_releases_no_later_prefill_f5() -> None:
    bench = Bench()
    forgotten(bench)
    bench.take(b.started("later"), b.finished("later"))
    bench.hear(C1, b.cancel())
    assert bench.produced == "prefilled"
    assert not bench.engine.ledger.empty
