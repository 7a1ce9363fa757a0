"""The trace's lines against `kvflow.observe.schema`."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvflow.core import TABLES, Reason
from kvflow.core.effects import Moved
from kvflow.errors import ConfigurationError
from kvflow.ids import AgentName, Rank, RequestId
from kvflow.observe import schema
from kvflow.observe.observer import Carried
from kvflow.observe.trace import (
    ENVIRONMENT,
    ENVIRONMENT_MB_MAX,
    TraceWriter,
    from_environment,
)

RANK = Rank(0, 1)
START = Moved(
    machine="consumer",
    key="t",
    attempt=3,
    request_id=RequestId("r"),
    trigger="blocks_allocated",
    source="new",
    dest="allocated",
    at=100.0,
    peer="host:5600",
)
END = Moved(
    machine="producer",
    key="t",
    attempt=3,
    request_id=RequestId("r"),
    trigger="write_failed",
    source="transferring",
    dest="failed",
    at=101.5,
    reason=Reason.WRITE_FAILED,
    detail="the far side said: no",
    bytes=4096,
    runs=2,
    peer="agent",
    spent_ms={"prefilled": 12.34567, "transferring": 1.0},
)
ALWAYS = {"v", "t", "engine", "rank", "machine", "id", "attempt", "request", "trigger"}
ALWAYS |= {"from", "to"}


def documented() -> dict[str, bool]:
    """Every key in the docstring, and whether it is optional."""
    assert schema.__doc__ is not None
    entries = re.findall(
        r"^([a-z][\w, ]*?)(?: {2,}|\n {2,})(.*?)(?=^\S|\Z)",
        schema.__doc__,
        re.MULTILINE | re.DOTALL,
    )
    return {
        key: "(optional)" in meaning
        for keys, meaning in entries
        for key in keys.replace(" ", "").split(",")
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *moves: Moved) -> list[dict[str, Any]]:
    writer = TraceWriter(str(path), engine_id="engine", rank=RANK)
    for moved in moves:
        writer.moved(moved)
    writer.close()
    return lines_of(path)


ORDER = Carried(
    kind="write",
    key="t",
    attempt=3,
    request_id=RequestId("r"),
    peer=AgentName("agent"),
    outcome="done",
    began=100.0,
    at=100.5,
    plan_s=0.001,
    post_s=0.25,
    bytes=4096,
    runs=2,
    posts=1,
)


def test_the_schema_documents_every_key_and_no_other(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace"), engine_id="engine", rank=RANK)
    writer.moved(START)
    writer.moved(END)
    writer.carried(ORDER)
    writer.request("t", "r", "", "arrived", {"role": "consumer", "tokens": 3, "arrival": 99.0})
    lines = lines_of(tmp_path / "trace")
    assert {key for key, optional in documented().items() if not optional} == ALWAYS
    assert all(line.keys() >= ALWAYS for line in lines)
    assert set().union(*lines) == documented().keys()


def test_an_order_says_when_it_was_taken_and_where_its_time_went(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace"), engine_id="engine", rank=RANK)
    writer.carried(ORDER)
    (line,) = lines_of(tmp_path / "trace")
    assert line["t"] - line["began"] == pytest.approx(0.5, abs=1e-5)
    told = {key: line[key] for key in ("machine", "id", "trigger", "from", "to", "ms", "posts")}
    assert told == {
        "machine": "write",
        "id": "t",
        "trigger": "done",
        "from": "posted",
        "to": "done",
        "ms": {"plan": 1.0, "post": 250.0},
        "posts": 1,
    }


def test_a_request_is_told_by_the_scheduler(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace"), engine_id="engine", rank="scheduler")
    before = time.time()
    writer.request("t", "r", "arrived", "scheduled", {})
    (line,) = lines_of(tmp_path / "trace")
    assert line.pop("t") == pytest.approx(before, abs=5.0)
    assert line == {
        "v": 2,
        "engine": "engine",
        "rank": "scheduler",
        "machine": "request",
        "id": "t",
        "attempt": 0,
        "request": "r",
        "trigger": "scheduled",
        "from": "arrived",
        "to": "scheduled",
    }


def test_a_trace_ends_at_its_limit_and_says_so(
    tmp_path: Path, kvflow_log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace"
    writer = TraceWriter(str(path), engine_id="engine", rank=RANK, mb_max=0.002)
    for _ in range(100):
        writer.moved(START)
    *lines, last = lines_of(path)
    assert 0 < len(lines) < 100
    assert all(line["machine"] == "consumer" for line in lines)
    assert (last["machine"], last["trigger"]) == ("trace", "truncated")
    assert path.stat().st_size < 2500
    assert not writer.is_open
    assert "KVFLOW_TRACE_MB_MAX" in kvflow_log.records[-1].getMessage()
    # What is there already counts.
    again = TraceWriter(str(path), engine_id="engine", rank=RANK, mb_max=0.002)
    again.moved(START)
    assert not again.is_open


@pytest.mark.parametrize("given", ["none", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_no_size_is_an_error_at_start(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "trace"))
    monkeypatch.setenv(ENVIRONMENT_MB_MAX, given)
    with pytest.raises(ConfigurationError, match=ENVIRONMENT_MB_MAX):
        from_environment("engine", RANK)


def test_a_line_says_who_what_and_when(tmp_path: Path) -> None:
    (line,) = write(tmp_path / "trace", START)
    assert line.pop("t") == pytest.approx(time.time() - time.monotonic() + 100.0, abs=5.0)
    assert line == {
        "v": 2,
        "engine": "engine",
        "rank": "pp0.tp1",
        "machine": "consumer",
        "id": "t",
        "attempt": 3,
        "request": "r",
        "trigger": "blocks_allocated",
        "from": "new",
        "to": "allocated",
        "peer": "host:5600",
    }


def test_an_end_says_why_and_how_much(tmp_path: Path) -> None:
    (line,) = write(tmp_path / "trace", END)
    told = {key: line[key] for key in ("reason", "detail", "bytes", "runs", "ms")}
    assert told == {
        "reason": "write_failed",
        "detail": "the far side said: no",
        "bytes": 4096,
        "runs": 2,
        "ms": {"prefilled": 12.346, "transferring": 1.0},
    }


def test_differences_of_time_are_those_of_the_clock(tmp_path: Path) -> None:
    start, end = write(tmp_path / "trace", START, END)
    assert end["t"] - start["t"] == pytest.approx(1.5, abs=1e-5)


def test_a_line_is_there_as_soon_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    writer = TraceWriter(str(path), engine_id="engine", rank=RANK)
    for count in (1, 2, 3):
        writer.moved(START)
        assert len(lines_of(path)) == count
    writer.close()


def test_a_file_that_exists_is_added_to(tmp_path: Path) -> None:
    write(tmp_path / "trace", START)
    assert len(write(tmp_path / "trace", START)) == 2


def test_any_text_stays_within_its_line(tmp_path: Path) -> None:
    odd = Moved(**{**fields_of(END), "detail": 'line\nfeed " ä \u2028 end'})
    (line,) = write(tmp_path / "trace", odd)
    assert line["detail"] == odd.detail
    assert (tmp_path / "trace").read_text().isascii()


def fields_of(moved: Moved) -> dict[str, Any]:
    return {name: getattr(moved, name) for name in Moved.__dataclass_fields__}


def test_percent_p_is_the_process_id(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace-%p.ndjson"), engine_id="engine", rank=RANK)
    writer.close()
    assert (tmp_path / f"trace-{os.getpid()}.ndjson").exists()


def test_the_environment_asks_for_a_trace_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert from_environment("engine", RANK) is None
    monkeypatch.setenv(ENVIRONMENT, "")
    assert from_environment("engine", RANK) is None
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "trace"))
    writer = from_environment("engine", RANK)
    assert writer is not None
    writer.moved(START)
    writer.close()
    assert lines_of(tmp_path / "trace")[0]["engine"] == "engine"


def test_a_path_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        TraceWriter(str(tmp_path / "missing" / "trace"), engine_id="engine", rank=RANK)


def test_the_machines_named_in_the_schema_are_those_that_there_are() -> None:
    assert schema.__doc__ is not None
    for table in TABLES:
        assert f'"{table.name}"' in schema.__doc__
