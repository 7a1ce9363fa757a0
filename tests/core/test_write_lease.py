"""S2 rests on time where a peer cannot be asked: what is assumed, what is checked, what holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core import Timings
from kvflow.core.clocks import CLOCK_DRIFT_MAX, Clocks
from kvflow.errors import ConfigurationError
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, P0, Bench, T
from kvflow.testing.scenes import acquainted, both_legs


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("fence_s", {"fence_s": 1.39}),
        ("fence_s", {"write_lease_s": 1.2}),
        ("fence_s", {"slice_max_s": 0.6}),
        ("write_lease_s", {"renew_interval_s": 0.6}),
        ("lease_s", {"lease_s": 0.9}),
        ("tombstone_s", {"tombstone_s": 2.0}),
        ("stop_deadline_s", {"stop_deadline_s": 2.0}),
        ("backoff_max_s", {"backoff_max_s": 0.1}),
        ("drain_s", {"drain_s": 0.0}),
        ("renew_misses_max", {"renew_misses_max": 0}),
        ("lease_s", {"lease_s": float("nan")}),
    ],
)
def test_timings_under_which_safety_would_not_hold_are_refused_s2(
    key: str, settings: dict[str, float]
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Timings(**settings)  # type: ignore[arg-type]
    assert raised.value.key == key


def test_with_the_defaults_a_silent_producer_is_reported_within_15_s_f1() -> None:
    assert Timings().loss_report_s < 15.0


@given(
    skew=st.floats(0, 1e6),
    drift=st.floats(-CLOCK_DRIFT_MAX, CLOCK_DRIFT_MAX),
    stamps=st.lists(st.tuples(st.floats(0, 900), st.floats(0, 60)), max_size=8),
    later=st.floats(0, 400),
)
def test_a_producers_clock_is_never_taken_for_later_than_it_is_s2(
    skew: float, drift: float, stamps: list[tuple[float, float]], later: float
) -> None:
    """Stamps travel for up to a minute and overtake each other; clocks differ and drift apart."""
    clocks = Clocks()
    arrivals = sorted((sent + delay, skew + sent * (1 + drift)) for sent, delay in stamps)
    for arrival, stamp in arrivals:
        clocks.hear(P0, stamp, arrival)
    now = (arrivals[-1][0] if arrivals else 0.0) + later
    estimate = clocks.estimate(P0, now)
    assert estimate is None or estimate <= skew + now * (1 + drift) + 1e-6


def transferring() -> Bench:
    bench = Bench()
    bench.introduce()
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register(write_until_s=bench.now + 1.0))
    return bench


def may_write(bench: Bench) -> bool:
    return bench.engine.may_write(T, 5, bench.now)


def test_slices_are_posted_only_until_the_time_that_the_consumer_names_s4() -> None:
    bench = transferring()
    assert may_write(bench)
    bench.wait(0.99)
    assert may_write(bench)
    bench.wait(0.02)
    assert not may_write(bench)
    bench.hear(C1, b.renew(write_until_s=bench.now + 0.5))
    assert may_write(bench)


def test_a_registration_without_a_time_permits_nothing_yet_s4() -> None:
    bench = Bench()
    bench.introduce()
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    assert bench.produced == "transferring"
    assert not may_write(bench)


def test_renewals_that_were_queued_while_the_producer_was_stopped_permit_nothing_s2() -> None:
    bench = transferring()
    stopped = bench.now
    bench.jump(20.0)
    for second in range(20):
        bench.hear(C1, b.renew(write_until_s=stopped + second / 2))
    assert not may_write(bench)


def test_a_time_far_ahead_is_cut_to_the_producers_own_write_lease_s2() -> None:
    bench = transferring()
    bench.hear(C1, b.renew(write_until_s=bench.now + 1000.0))
    bench.wait(bench.engine.timings.write_lease_s + 0.01)
    assert not may_write(bench)


def test_a_new_attempt_does_not_inherit_the_time_of_the_old_one_s2() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register(5, write_until_s=bench.now + 1.0), b.register(6))
    bench.take(b.finished())
    assert bench.produced == "transferring"
    assert not bench.engine.may_write(T, 6, bench.now)


def test_a_paused_write_still_ends_when_nobody_renews_f3() -> None:
    bench = transferring()
    bench.wait(bench.engine.timings.lease_s + 1)
    assert bench.produced == "draining"


@pytest.mark.parametrize("finished_after_s", [0.1, 0.5, 2.5, 4.5, 4.9, 9.0, 25.0])
def test_a_living_producer_that_cannot_be_heard_writes_nothing_into_reused_blocks_s2(
    finished_after_s: float,
) -> None:
    """Only notices are cut: its writes would still land. The world checks where they land."""
    world, producer, consumer = acquainted()
    world.faults.slow_slices = 1.0
    legs = [both_legs(producer, consumer, b.TransferId(name)) for name in "uvwxyz"]
    world.network.cut(producer.nodes[0].agent, consumer.node.agent, data=False)
    for tenth in range(300):
        if tenth == round(10 * finished_after_s):
            for prefill, _ in legs:
                producer.finish(prefill)
        world.advance(0.1)
        consumer.allocate(b.TransferId(f"t{world.next_number()}"), producer)
    assert {load.state for _, load in legs} <= {"failed", "received"}
    world.everything_ends()


@pytest.mark.parametrize("seconds", [1.1, 4.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_producer_that_was_stopped_for_a_while_writes_nothing_into_reused_blocks_s2(
    seconds: float, seed: int
) -> None:
    world, producer, consumer = acquainted()
    world.rng.seed(seed)
    world.faults.slow_slices = 0.7
    legs = [both_legs(producer, consumer, b.TransferId(name)) for name in "uvwxyz"]
    for prefill, _ in legs:
        producer.finish(prefill)
    world.advance(0.3)
    world.pause(producer.nodes[0], seconds)
    for _ in range(round(seconds) + 10):
        world.advance(1.0)
        consumer.allocate(b.TransferId(f"t{world.next_number()}"), producer)
    world.everything_ends()
