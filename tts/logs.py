"""The service's log: plain lines or JSON, each with the id of the request it is about.

A call's task and all it starts know the id through `request_id`; nobody has to hand it on. User
text is not part of any message unless the configuration asks for it. What is not printable is
escaped, so that no value can end a line, begin another, or command a terminal.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any, Literal

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task works for; empty outside of one."""

HTTP_LIBRARIES = ("httpx", "httpx2")
"""They tell every request that a download makes, into its progress bar."""

GRPC_LOGGER, METADATA_TOLD = "grpc._cython.cygrpc", "Invalid encoding on"
"""Where gRPC tells metadata that is not UTF-8, as it came; it may be a token."""

NOT_UTF8 = "'utf-8' codec can't decode"
NOT_SENT = "ExecuteBatchError raised in core"
"""How gRPC begins to tell that a client left before it heard that there is no such method."""

INDENT = "    "
DECIMALS = 6  # of numbers in JSON: microseconds

Fields = tuple[tuple[str, object], ...]
LogFormat = Literal["text", "json"]


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Log everything of at least this level to standard error, and nothing twice.

    Single requests of HTTP libraries are told at level debug only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    own = logging.getLogger().level
    logging.getLogger(GRPC_LOGGER).addFilter(_is_of_use)
    for name in (GRPC_LOGGER, "asyncio"):
        logging.getLogger(name).addFilter(_tells_no_path)
    for name in HTTP_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING if own == logging.INFO else own)


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for what a client's metadata was, and for that a client has left."""
    return not str(record.msg).startswith((METADATA_TOLD, NOT_SENT))


def _tells_no_path(record: logging.LogRecord) -> bool:
    """False for how a call's path is not UTF-8, which `tts.listener` tells, without the path."""
    error = record.exc_info[1] if record.exc_info else None
    is_told = record.name == GRPC_LOGGER and NOT_UTF8 in str(record.msg)
    return not (is_told or isinstance(error, UnicodeDecodeError))


class TextFormatter(logging.Formatter):
    """A line to read: time, level, logger, message, fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without a traceback."""
        fields = fields_of(record)
        shown = "".join(f" {name}={_plain(value)}" for name, value in fields)
        return _visible(super().formatMessage(record) + shown)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """A traceback, indented: none of its lines looks like a line of the log."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(INDENT + _visible(line) for line in lines)


class JsonFormatter(logging.Formatter):
    """A line to parse: one JSON object with time (UTC), level, logger, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a traceback is its "exception"."""
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
    """For a logging call's `extra`: values that stand beside the message, by name."""
    return {"fields": fields}


def fields_of(record: logging.LogRecord) -> Fields:
    """A record's own fields, the request's id first where there is one."""
    own: Fields = getattr(record, "fields", ())
    current = request_id.get()
    if current and all(name != "request_id" for name, _ in own):
        return (("request_id", current), *own)
    return own


def _visible(text: str) -> str:
    """The text, with escapes for what is not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _json_character(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _short(value: object) -> object:
    return round(value, DECIMALS) if isinstance(value, float) else value


def _plain(value: object) -> str:
    """As it is, in quotation marks where it would not be one word."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    is_word = text and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if is_word else json.dumps(text, ensure_ascii=False)
