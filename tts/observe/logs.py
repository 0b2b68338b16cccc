"""Logging of the service: plain lines or JSON, with the id of the current request.

The context variable `request_id` passes the id to a call's task and all tasks that it starts. User
text is logged only if the configuration allows it. Unprintable characters are escaped, so that
values cannot forge lines or control a terminal.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any, Literal

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current task's request; empty outside of requests."""

HTTP_LIBRARIES = ("httpx", "httpx2")
"""Libraries that log every request of a download, which would break its progress bar."""

GRPC_LOGGER, METADATA_TOLD = "grpc._cython.cygrpc", "Invalid encoding on"
"""Logger and message with which gRPC logs metadata that is not UTF-8; it may contain a token."""

NOT_UTF8 = "'utf-8' codec can't decode"
NOT_SENT = "ExecuteBatchError raised in core"
"""Message of gRPC when a client has disconnected before the status for an unknown method."""

INDENT = "    "
DECIMALS = 6  # of numbers in JSON: microseconds

Fields = tuple[tuple[str, object], ...]
LogFormat = Literal["text", "json"]


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Log all records of at least this level to standard error, once each.

    Requests of HTTP libraries are logged at level debug only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    own = logging.getLogger().level
    logging.getLogger(GRPC_LOGGER).addFilter(_is_relevant)
    for name in (GRPC_LOGGER, "asyncio"):
        logging.getLogger(name).addFilter(_has_no_path)
    for name in HTTP_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING if own == logging.INFO else own)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for records of gRPC with a client's metadata or about disconnected clients."""
    return not str(record.msg).startswith((METADATA_TOLD, NOT_SENT))


def _has_no_path(record: logging.LogRecord) -> bool:
    """Return False for records with a call's path that is not UTF-8.

    The listener logs that error without the path."""
    error = record.exc_info[1] if record.exc_info else None
    is_told = record.name == GRPC_LOGGER and NOT_UTF8 in str(record.msg)
    return not (is_told or isinstance(error, UnicodeDecodeError))


class TextFormatter(logging.Formatter):
    """Formatter of plain lines: time, level, logger, message, and fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without a traceback."""
        fields = fields_of(record)
        shown = "".join(f" {name}={_plain(value)}" for name, value in fields)
        return _visible(super().formatMessage(record) + shown)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return an indented traceback, whose lines cannot be mistaken for log lines."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(INDENT + _visible(line) for line in lines)


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines: an object with time (UTC), level, logger, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback becomes the value "exception"."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        values: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: _short(value) for name, value in fields_of(record)},
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        line = json.dumps(values, ensure_ascii=False, default=str)
        return line if line.isprintable() else "".join(map(_json_character, line))


def with_fields(*fields: tuple[str, object]) -> dict[str, Fields]:
    """Return the `extra` argument of a logging call that adds named fields to the message."""
    return {"fields": fields}


def fields_of(record: logging.LogRecord) -> Fields:
    """Return a record's fields, with the current request's id first."""
    own: Fields = getattr(record, "fields", ())
    current = request_id.get()
    if current and all(name != "request_id" for name, _ in own):
        return (("request_id", current), *own)
    return own


def _visible(text: str) -> str:
    """Return the text with unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _json_character(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _short(value: object) -> object:
    return round(value, DECIMALS) if isinstance(value, float) else value


def _plain(value: object) -> str:
    """Return a value as one word, in quotation marks if necessary."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    is_word = text and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if is_word else json.dumps(text, ensure_ascii=False)
