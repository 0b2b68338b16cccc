"""Log lines: text or JSON, with the request's id, and text of users only when configured."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    run_with_server,
    stream_request,
    unary_request,
)
from tts.factory import Service
from tts.observe.logs import (
    JsonFormatter,
    TextFormatter,
    configure_logging,
    request_id,
    with_fields,
)
from tts.v1 import text_pb2


def record(message: str = "hello", **values: Any) -> logging.LogRecord:
    made = logging.LogRecord("tts.test", logging.INFO, "file.py", 1, message, (), None)
    made.__dict__.update(values)
    return made


def parsed(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(made)
    assert "\n" not in line
    return dict(json.loads(line))


def test_a_json_line_has_time_level_logger_message_and_fields() -> None:
    made = record("two\nlines", created=0.25, msecs=250.0, **with_fields(("a", 1), ("b", "x y")))
    assert parsed(made) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "tts.test",
        "message": "two\nlines",
        "a": 1,
        "b": "x y",
    }


def test_a_json_line_has_the_traceback() -> None:
    try:
        raise OSError("no disk")
    except OSError:
        made = record(exc_info=sys.exc_info())
    assert "OSError: no disk" in parsed(made)["exception"]


def test_a_text_line_shows_fields_as_words() -> None:
    fields = with_fields(("n", 3), ("s", 0.12345), ("t", 'a "b"'), ("e", ""), ("w", "word"))
    line = TextFormatter().format(record(**fields))
    assert line.endswith('INFO tts.test: hello n=3 s=0.123 t="a \\"b\\"" e="" w=word')


FORGED = "x\n2026 INFO tts.rpc: call ended\r \x1b[31m \x7f \x9b \u2028 \u202e \udcff"


def test_text_lines_have_no_line_breaks_or_terminal_escapes() -> None:
    line = TextFormatter().format(record(FORGED, **with_fields(("a", FORGED))))
    assert line.isprintable()
    assert line.count("\\n2026 INFO") == 2
    assert "\\x1b[31m" in line


def test_json_lines_have_no_line_breaks_or_terminal_escapes() -> None:
    made = record(FORGED, **with_fields(("a", FORGED)))
    assert JsonFormatter().format(made).isprintable()
    assert parsed(made)["message"] == parsed(made)["a"] == FORGED


def test_lines_of_a_traceback_cannot_imitate_log_lines() -> None:
    try:
        raise OSError(FORGED)
    except OSError:
        line = TextFormatter().format(record(exc_info=sys.exc_info()))
    first, *others = line.split("\n")
    assert first.endswith("INFO tts.test: hello")
    assert others[0] == "    Traceback (most recent call last):"
    assert all(other.startswith("    ") and other.isprintable() for other in others)


def test_lines_of_a_request_have_its_id_once() -> None:
    outer = request_id.set("id-1")
    try:
        assert parsed(record())["request_id"] == "id-1"
        assert parsed(record(**with_fields(("request_id", "id-2"))))["request_id"] == "id-2"
        assert TextFormatter().format(record()).endswith("hello request_id=id-1")
    finally:
        request_id.reset(outer)
    assert "request_id" not in parsed(record())


@pytest.mark.usefixtures("restored_logging")
def test_messages_of_grpc_that_clients_can_cause_are_not_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """grpcio logs an error when a client disconnects before it gets the UNIMPLEMENTED status."""
    configure_logging("info", "text")
    library = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise cygrpc.ExecuteBatchError("gone")
    except cygrpc.ExecuteBatchError:
        library.exception("ExecuteBatchError raised in core by servicer method [/x/None]")
    library.error("Unexpected [OSError] raised by servicer method [/x/None]")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "Unexpected [OSError] raised by servicer method [/x/None]"
    ]


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Restore the handlers and level of the root logger after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(("log_format", "expected"), [("text", " "), ("json", '{"time": ')])
def test_configuring(log_format: Any, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", log_format)
    logging.getLogger("tts.test").info("not shown")
    logging.getLogger("tts.test").warning("shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert expected in lines[0]
    assert "shown" in lines[0]


def calls_logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [parsed(made) for made in caplog.records if made.name == "tts.rpc"]


async def ask_secrets(served: Serving) -> None:
    """Make one call of each kind that gets text, and one that is refused."""
    await collect_speech(served, "Confidential matter.", request_id="id-7")
    error = await error_of(
        served.speech.Synthesize(unary_request("Confidential\0", request_id="id-8"))
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    written = text_pb2.GenerateRequest(input={"prompt": "Confidential plan"})
    written.config.sampling.max_tokens = 2
    await served.text.Generate(written)


def test_calls_are_logged_with_ids_and_numbers_but_no_text(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run_with_server(service, ask_secrets)
    spoken, refused, written = calls_logged(caplog)
    assert (spoken["request_id"], spoken["method"]) == ("id-7", "SynthesizeStream")
    assert (spoken["message"], spoken["code"], spoken["characters"]) == ("call ended", "OK", 20)
    assert spoken["duration_s"] >= spoken["first_audio_s"] > 0
    assert spoken["audio_s"] > 0
    assert spoken["output_tokens"] > 0
    assert (refused["request_id"], refused["code"]) == ("id-8", "INVALID_ARGUMENT")
    assert refused["reason"] == "INVALID_REQUEST"
    assert written["characters"] == 17
    assert not any("Confidential" in str(parsed(made)) for made in caplog.records)


def test_text_is_logged_when_configured(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_with_server(service, ask_secrets, log_user_text=True)
    texts = [line.get("text") for line in calls_logged(caplog)]
    assert texts == ["Confidential matter.", None, "Confidential plan"]


def test_calls_at_the_same_time_keep_their_ids_apart(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Records of other modules get the request id of the task that logs them."""

    async def ask(served: Serving) -> None:
        calls = [
            served.speech.SynthesizeStream(stream_request(request_id=f"id-{index}"))
            for index in range(3)
        ]
        await asyncio.gather(*(error_free(call) for call in calls))

    async def error_free(call: Any) -> None:
        async for _ in call:
            pass

    seen: list[str] = []

    class Spy(logging.Handler):
        def emit(self, made: logging.LogRecord) -> None:
            seen.append(parsed(made)["request_id"])

    spy = Spy()
    logger = logging.getLogger("tts.rpc")
    logger.addHandler(spy)
    try:
        with caplog.at_level(logging.INFO):
            run_with_server(service, ask)
    finally:
        logger.removeHandler(spy)
    assert sorted(seen) == ["id-0", "id-1", "id-2"]
