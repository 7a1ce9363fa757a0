"""kvflow's log, whether or not vLLM has configured its own loggers in this process."""

import logging

import pytest


@pytest.fixture
def kvflow_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Everything that is logged below `vllm.kvflow`, from debug on."""
    logger = logging.getLogger("vllm.kvflow")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.DEBUG, logger="vllm.kvflow")
    return caplog
