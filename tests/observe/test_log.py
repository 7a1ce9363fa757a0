"""Log lines: fields in the message, the caller's file, and nobody else's configuration touched."""

import inspect
import logging
from pathlib import Path

import pytest
import structlog

from kvflow.core import Reason
from kvflow.observe.log import get_logger

HERE = Path(__file__).name


def test_fields_are_rendered_into_the_message_in_their_order(
    kvflow_log: pytest.LogCaptureFixture,
) -> None:
    get_logger("test", engine="e1").info("met", peer="a:1", attempt=2, reason=Reason.STALE)
    assert (
        kvflow_log.records[0].getMessage()
        == "kvflow: met engine=e1 peer=a:1 attempt=2 reason=stale"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a b", "'a b'"),
        ("", "''"),
        ("100%s", "100%s"),
        ("one\ntwo", r"'one\ntwo'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        (None, "None"),
        (1.5, "1.5"),
    ],
)
def test_a_value_cannot_break_out_of_its_line(
    kvflow_log: pytest.LogCaptureFixture, value: object, shown: str
) -> None:
    get_logger("test").warning("refused", detail=value)
    assert kvflow_log.records[0].getMessage() == f"kvflow: refused detail={shown}"


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_a_line_shows_the_callers_file_and_line(
    kvflow_log: pytest.LogCaptureFixture, level: str
) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    getattr(get_logger("test"), level)("here")
    line = frame.f_lineno - 1
    assert (kvflow_log.records[0].filename, kvflow_log.records[0].lineno) == (HERE, line)
    assert kvflow_log.records[0].levelname == level.upper()


def test_a_bound_logger_shows_the_callers_file_too(kvflow_log: pytest.LogCaptureFixture) -> None:
    get_logger("test", engine="e").bind(rank="pp0.tp0").info("here")
    assert kvflow_log.records[0].filename == HERE


def test_loggers_are_below_vllms(kvflow_log: pytest.LogCaptureFixture) -> None:
    get_logger("transfers").info("here")
    assert kvflow_log.records[0].name == "vllm.kvflow.transfers"


def test_levels_are_those_of_the_logging_module(kvflow_log: pytest.LogCaptureFixture) -> None:
    kvflow_log.set_level(logging.WARNING, logger="vllm.kvflow")
    get_logger("test").info("unseen")
    get_logger("test").warning("seen")
    assert [record.getMessage() for record in kvflow_log.records] == ["kvflow: seen"]


def test_an_exception_travels_as_exc_info(kvflow_log: pytest.LogCaptureFixture) -> None:
    error = ValueError("a bug")
    get_logger("test").error("failed: event", error=error, exc_info=error)
    assert kvflow_log.records[0].exc_info is not None
    assert kvflow_log.records[0].exc_info[1] is error
    assert kvflow_log.records[0].getMessage() == "kvflow: failed: event error='a bug'"


def test_neither_structlog_nor_logging_is_configured() -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    get_logger("test", engine="e").info("here")
    assert not structlog.is_configured()
    assert (root.level, list(root.handlers)) == before
    assert logging.getLogger("vllm.kvflow.test").handlers == []
    assert logging.getLogger("vllm.kvflow").propagate
