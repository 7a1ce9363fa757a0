"""structlog inside vLLM's logging, without configuring either.

Rules: never `structlog.configure()`; the loggers are children of `vllm.kvflow`, so vLLM's handlers
and levels apply; fields are rendered into the message as `key=value`.
"""

import logging
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

_STACKLEVEL = 4
"""Frames between the caller's line and `logging`: structlog's method and its proxy."""


def _render(_logger: WrappedLogger, _method: str, event: EventDict) -> tuple[Any, dict[str, Any]]:
    """One line: the event, then its fields in the order in which they were given."""
    text = str(event.pop("event"))
    error = event.pop("exc_info", None)
    fields = " ".join(f"{key}={_show(value)}" for key, value in event.items())
    message = f"kvflow: {text} {fields}".rstrip()
    return ("%s", message), {"stacklevel": _STACKLEVEL, "exc_info": error}


def _show(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _as_call(
    logger: WrappedLogger, method: str, event: EventDict
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = _render(logger, method, event)
    return args, kwargs


def get_logger(name: str, **fields: object) -> structlog.stdlib.BoundLogger:
    """A logger below `vllm.kvflow` with `fields` bound to it."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"vllm.kvflow.{name}"),
        processors=[structlog.stdlib.filter_by_level, _as_call],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    return logger.bind(**fields)
