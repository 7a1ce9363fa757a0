"""What a worker counts, as readings: nothing lost, nothing twice."""

import re
from pathlib import Path

import pytest

from kvflow.core import TABLES, Reason
from kvflow.core.effects import Moved
from kvflow.core.tally import FATES
from kvflow.ids import AgentName, RequestId
from kvflow.observe import metrics
from kvflow.observe.meter import Meter
from kvflow.observe.metrics import BY_NAME, METRICS, Metric
from kvflow.observe.observer import Carried
from kvflow.observe.watch import Watch

ROOT = Path(__file__).resolve().parents[2]
RANK = "pp0.tp1"


def over(machine: str, dest: str, spent_ms: dict[str, float]) -> Moved:
    return Moved(
        machine=machine,
        key="t",
        attempt=1,
        request_id=RequestId("r"),
        trigger="trigger",
        source="before",
        dest=dest,
        at=1.0,
        spent_ms=spent_ms,
    )


def order(**fields: object) -> Carried:
    values: dict[str, object] = {
        "kind": "write",
        "key": "t",
        "attempt": 1,
        "request_id": None,
        "peer": AgentName("agent"),
        "outcome": "done",
        "began": 1.0,
        "at": 1.25,
        "plan_s": 0.001,
        "post_s": 0.1,
        "bytes": 4096,
        "runs": 3,
        "posts": 2,
    }
    return Carried(**{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"kvflow_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.endswith("_seconds") or metric.kind != "histogram"
    assert metric.help.endswith(".")
    assert "\n" not in metric.help
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(len(labels) == len(metric.labels) for labels in metric.known)


def test_no_name_is_there_twice() -> None:
    assert len(BY_NAME) == len(METRICS)


def test_what_is_known_from_the_start_is_what_the_tables_and_vocabularies_have() -> None:
    live = set(BY_NAME["kvflow_transfers_live"].known)
    ended = {labels[:2] for labels in BY_NAME["kvflow_transfers_ended_total"].known}
    for table in TABLES:
        for state in table.states:
            is_over = state in table.terminal
            assert ((table.name, state) in ended) == is_over
            if table.terminal:
                is_live = not is_over and state not in (table.initial, "forgotten")
                assert ((table.name, state) in live) == is_live
    assert {fate for (fate,) in BY_NAME["kvflow_registrations_settled_total"].known} == set(FATES)


def test_the_document_is_fresh() -> None:
    path = ROOT / "specs" / "metrics.md"
    assert path.read_text(encoding="utf-8") == metrics.as_markdown(), "kvflow states --write specs"


def test_a_reading_has_what_is_new_since_the_one_before() -> None:
    meter = Meter(RANK)
    meter.carried(order())
    meter.tally.sent = 3
    first = meter.read({})
    assert first.counts["kvflow_bytes_total", RANK, "write"] == 4096
    assert first.counts["kvflow_registrations_sent_total", RANK] == 3
    assert first.seen["kvflow_order_seconds", RANK, "write"] == [0.25]
    assert not meter.read({})
    meter.carried(order(kind="read", bytes=10))
    meter.tally.sent = 4
    second = meter.read({})
    assert second.counts["kvflow_bytes_total", RANK, "read"] == 10
    assert ("kvflow_bytes_total", RANK, "write") not in second.counts
    assert second.counts["kvflow_registrations_sent_total", RANK] == 1


def test_rows_starts_ends_and_fates_come_from_the_tally() -> None:
    meter = Meter(RANK)
    tally = meter.tally
    tally.rows["producer", "registered_again", "held", "held"] += 2
    tally.rows["producer", "registered_stale", "sent", "sent"] += 1
    tally.rows["consumer", "stale", "received", "received"] += 4
    tally.started["consumer"] += 5
    tally.ended["consumer", "failed", Reason.DEADLINE] += 2
    tally.ended["consumer", "received", None] += 3
    tally.registrations["matched"] += 7
    counts = meter.read({}).counts
    assert counts["kvflow_registrations_repeated_total", RANK] == 2
    assert counts["kvflow_messages_stale_total", RANK, "producer"] == 1
    assert counts["kvflow_messages_stale_total", RANK, "consumer"] == 4
    assert counts["kvflow_transfers_started_total", RANK, "consumer"] == 5
    ended = "kvflow_transfers_ended_total"
    assert counts[ended, RANK, "consumer", "failed", "deadline"] == 2
    assert counts[ended, RANK, "consumer", "received", "none"] == 3
    assert counts["kvflow_registrations_settled_total", RANK, "matched"] == 7
    rows = "kvflow_transitions_total"
    assert counts[rows, RANK, "consumer", "stale", "received", "received"] == 4


def test_a_level_is_told_when_it_has_changed_also_back_to_nothing() -> None:
    meter = Meter(RANK)
    series = ("kvflow_transfers_live", RANK, "producer", "held")
    assert meter.read({("producer", "held"): 2}).levels[series] == 2
    assert series not in meter.read({("producer", "held"): 2}).levels
    assert meter.read({("producer", "held"): 0}).levels[series] == 0


def test_the_time_in_each_state_is_seen_once_when_a_transfer_is_over() -> None:
    meter = Meter(RANK)
    meter.moved(over("producer", "sent", {"registered": 10.0, "transferring": 2.5}))
    seen = meter.read({}).seen
    assert seen["kvflow_state_seconds", RANK, "producer", "registered"] == [0.01]
    assert seen["kvflow_state_seconds", RANK, "producer", "transferring"] == [0.0025]
    assert not meter.read({}).seen


def test_how_late_looks_come_is_added_up_and_the_worst_is_told_of_each_reading() -> None:
    meter = Meter(RANK)
    for late_s in (0.0, 0.002, 0.005, 0.0):
        meter.polled(late_s)
    reading = meter.read({})
    assert reading.counts["kvflow_polls_total", RANK] == 4
    assert reading.counts["kvflow_poll_delay_seconds_total", RANK] == pytest.approx(0.007)
    assert reading.levels["kvflow_poll_delay_max_seconds", RANK] == 0.005
    meter.polled(0.0)
    assert meter.read({}).levels["kvflow_poll_delay_max_seconds", RANK] == 0.0


def test_a_watch_counts_what_it_tells() -> None:
    meter = Meter(RANK)
    watch = Watch(None, meter)
    watch.ignored("done_of_unknown_load", "t")
    watch.refused("frame", "too long")
    watch.failed("look", ValueError("odd"))
    watch.carried(order(outcome="failed"))
    counts = meter.read({}).counts
    assert counts["kvflow_messages_ignored_total", RANK, "done_of_unknown_load"] == 1
    assert counts["kvflow_messages_refused_total", RANK, "frame"] == 1
    assert counts["kvflow_internal_errors_total", RANK] == 1
    assert counts["kvflow_orders_total", RANK, "write", "failed"] == 1


def test_observations_that_nobody_reads_do_not_pile_up() -> None:
    meter = Meter(RANK)
    for _ in range(70_000):
        meter.moved(over("producer", "sent", {"held": 1.0}))
    (values,) = meter.read({}).seen.values()
    assert len(values) == 65_536


def test_every_series_is_of_a_metric_with_its_labels() -> None:
    meter = Meter(RANK)
    meter.carried(order())
    meter.ignored("kind")
    meter.refused("kind")
    meter.failed()
    meter.polled(1.0)
    meter.moved(over("producer", "sent", {"held": 1.0}))
    meter.tally.rows["producer", "registered_again", "held", "held"] += 1
    meter.tally.ended["producer", "sent", None] += 1
    meter.tally.started["producer"] += 1
    meter.tally.registrations["matched"] += 1
    reading = meter.read({("producer", "held"): 1, ("peer", "met"): 1})
    for series in (*reading.counts, *reading.levels, *reading.seen):
        name, rank, *labels = series
        assert rank == RANK
        assert len(labels) == len(BY_NAME[name].labels)
    kinds = {"counter": reading.counts, "gauge": reading.levels, "histogram": reading.seen}
    for kind, series_of in kinds.items():
        assert {BY_NAME[series[0]].kind for series in series_of} == {kind}
