"""What `Watch` makes of what a driver reports."""

import logging
from pathlib import Path

import pytest

from kvflow.core import REASONS, TABLES, Reason, Table
from kvflow.core.effects import Moved
from kvflow.ids import Rank, RequestId
from kvflow.observe.meter import Meter
from kvflow.observe.trace import TraceWriter
from kvflow.observe.watch import Watch


def moved(machine: str, dest: str, **fields: object) -> Moved:
    values: dict[str, object] = {
        "machine": machine,
        "key": "t",
        "attempt": 1,
        "request_id": RequestId("r"),
        "trigger": "trigger",
        "source": "before",
        "dest": dest,
        "at": 1.0,
    }
    return Moved(**{**values, **fields})


def messages(kvflow_log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in kvflow_log.records if record.levelno == level]


def test_every_transition_is_one_debug_line(kvflow_log: pytest.LogCaptureFixture) -> None:
    Watch(engine="e").moved(moved("consumer", "allocated"))
    (line,) = messages(kvflow_log, logging.DEBUG)
    told = "engine=e trigger=trigger transfer=t request=r attempt=1"
    assert line == f"kvflow: consumer before -> allocated {told}"
    assert len(kvflow_log.records) == 1


def test_a_good_end_is_one_info_line_with_the_time_in_each_state(
    kvflow_log: pytest.LogCaptureFixture,
) -> None:
    Watch().moved(
        moved("producer", "sent", bytes=10, runs=2, peer="p", spent_ms={"transferring": 1.26})
    )
    (line,) = messages(kvflow_log, logging.INFO)
    for word in ("producer sent", "bytes=10", "runs=2", "peer=p", "transferring_ms=1.3"):
        assert word in line


@pytest.mark.parametrize("reason", Reason)
def test_a_bad_end_is_told_with_its_meaning(
    kvflow_log: pytest.LogCaptureFixture, reason: Reason
) -> None:
    """As a warning, unless somebody here has asked for it."""
    asked_for = {Reason.ABORTED, Reason.CANCELLED, Reason.RELEASED, Reason.SHUTDOWN}
    Watch().moved(moved("consumer", "failed", reason=reason, detail="so said the peer"))
    level = logging.INFO if reason in asked_for else logging.WARNING
    (line,) = messages(kvflow_log, level)
    assert f"reason={reason}" in line
    assert REASONS[reason] in line
    assert "so said the peer" in line


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_only_ends_are_told_above_debug(kvflow_log: pytest.LogCaptureFixture, table: Table) -> None:
    watch = Watch()
    for state in table.states:
        watch.moved(moved(table.name, state))
    told = [record for record in kvflow_log.records if record.levelno > logging.DEBUG]
    assert len(told) == len(table.terminal) + (table.name == "peer")


def test_a_lost_peer_is_warned_of(kvflow_log: pytest.LogCaptureFixture) -> None:
    Watch().moved(moved("peer", "backing_off", key="host:5600", detail="silent"))
    (line,) = messages(kvflow_log, logging.WARNING)
    assert "peer=host:5600" in line
    assert "detail=silent" in line


def test_what_is_ignored_is_counted_by_kind_and_warned_of_never(
    kvflow_log: pytest.LogCaptureFixture,
) -> None:
    watch = Watch(meter=(meter := Meter("")))
    for kind in ("late", "late", "stranger"):
        watch.ignored(kind, "t")
    ignored = "kvflow_messages_ignored_total"
    assert meter.counts == {(ignored, ("late",)): 2, (ignored, ("stranger",)): 1}
    assert {record.levelno for record in kvflow_log.records} == {logging.DEBUG}


def test_what_is_refused_is_counted_and_warned_of_ever_more_rarely(
    kvflow_log: pytest.LogCaptureFixture,
) -> None:
    watch = Watch(meter=(meter := Meter("")))
    for _ in range(20_000):
        watch.refused("frame", "noise")
    watch.refused("peer", "other dtype")
    refused = "kvflow_messages_refused_total"
    assert meter.counts == {(refused, ("frame",)): 20_000, (refused, ("peer",)): 1}
    counts = [line.rpartition("count=")[2] for line in messages(kvflow_log, logging.WARNING)]
    assert counts == ["1", "10", "100", "1000", "10000", "20000", "1"]


def test_a_bug_is_an_error_with_its_traceback(kvflow_log: pytest.LogCaptureFixture) -> None:
    error = KeyError("a bug")
    Watch().failed("event Closing()", error)
    (record,) = kvflow_log.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    assert "event Closing()" in record.getMessage()


def test_every_move_is_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    writer = TraceWriter(str(path), engine_id="e", rank=Rank(0, 0))
    watch = Watch(writer)
    watch.moved(moved("consumer", "allocated"))
    watch.moved(moved("consumer", "failed", reason=Reason.ABORTED, spent_ms={}))
    assert len(path.read_text().splitlines()) == 2
    writer.close()


def test_a_trace_that_cannot_be_written_ends_with_one_warning(
    kvflow_log: pytest.LogCaptureFixture,
) -> None:
    watch = Watch(TraceWriter("/dev/full", engine_id="e", rank=Rank(0, 0)))
    for _ in range(3):
        watch.moved(moved("consumer", "allocated"))
    (line,) = messages(kvflow_log, logging.WARNING)
    assert "trace ends here" in line
    assert "No space left" in line
