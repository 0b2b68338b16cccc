"""Clients that try to hold a server's memory, connections and processor over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from pydantic import ValidationError

from tests.tts.http.http_serving import HttpServing, error_of, post, raw_connection, run_with_http
from tests.tts.http.test_http_faults import LONG
from tts.factory import Service
from tts.http.connection import MAX_CHUNKS
from tts.http.exchange import JsonBody
from tts.http.speech_body import SessionFrame, SpeechBody
from tts.http.text_body import ChatBody, CompletionBody, EmbeddingBody
from tts.http.voices import VoiceBody

PAGE = b"GET /app.js HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING = PAGE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
WHOLE = post(json.dumps({**LONG, "stream_format": "json"}).encode())
UPGRADE = (
    b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@asynccontextmanager
async def unread_connection(served: HttpServing) -> AsyncIterator[socket.socket]:
    """Open a connection whose client reads nothing."""
    loop = asyncio.get_running_loop()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await loop.sock_connect(raw, ("127.0.0.1", served.http.port))
        yield raw


async def is_answered(raw: socket.socket) -> None:
    """Wait until the first byte of a response is there."""
    while True:
        with suppress(BlockingIOError):
            raw.recv(1, socket.MSG_PEEK)
            return
        await asyncio.sleep(0.01)


async def is_closed(served: HttpServing) -> None:
    """Wait until the server has no connection; fail if that takes as long as a broken server."""
    async with asyncio.timeout(30):
        while served.http.num_connections:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_half_closed", [False, True])
@pytest.mark.parametrize("data", [PAGE * 100, PAGE * 30 + CLOSING, WHOLE], ids=len)
def test_a_response_that_is_never_read_is_cut_off(
    service: Service, data: bytes, is_half_closed: bool
) -> None:
    async def ask(served: HttpServing) -> None:
        async with unread_connection(served) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, data)
            await is_answered(raw)
            if is_half_closed:
                raw.shutdown(socket.SHUT_WR)
            await is_closed(served)
        if data is WHOLE and not is_half_closed:
            labels = {"grpc_code": "ABORTED", "reason": "SLOW_READER"}
            assert served.grpc.metric("sonant_errors_total", **labels) == 1

    run_with_http(service, ask, slow_reader_timeout_s=0.25)


def test_a_session_does_not_begin_behind_an_unread_response(service: Service) -> None:
    """Its connection would not notice when the client reads nothing."""

    async def ask(served: HttpServing) -> None:
        async with unread_connection(served) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, PAGE * 100 + UPGRADE)
            await is_answered(raw)
            await is_closed(served)

    run_with_http(service, ask, slow_reader_timeout_s=0.25)


def test_a_large_response_is_complete_for_a_client_that_reads(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with raw_connection(served, limit=2**12) as raw:
            await raw.send(WHOLE)
            head = await raw.reader.readuntil(b"\r\n\r\n")
            size = int(head.partition(b"content-length: ")[2].split()[0])
            assert size > 2**20
            assert json.loads(await raw.reader.readexactly(size))["finish_reason"] == "stop"

    run_with_http(service, ask)


def test_a_body_of_very_many_chunks_is_refused(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        for count, status in ((1000, b"400"), (MAX_CHUNKS + 1, b"")):
            async with raw_connection(served) as raw:
                await raw.send(head + b"1\r\n \r\n" * count + b"0\r\n\r\n")
                answer = await raw.reader.read(1000)
                assert answer[9:12] == status

    run_with_http(service, ask)


# --- values of JSON, and forms


LISTS = [
    (SpeechBody, {"input": "x"}, "chunk_size", ""),
    (SpeechBody, {}, "turns", {}),
    (SpeechBody, {"input": "x"}, "pronunciations", {}),
    (VoiceBody, {"name": "x"}, "pronunciations", {}),
    (ChatBody, {}, "messages", {}),
    (ChatBody, {}, "messages", {"role": "user", "content": [{}] * 1000}),
    (ChatBody, {"messages": []}, "modalities", "video"),
    (ChatBody, {"messages": []}, "stop", 0),
    (ChatBody, {"messages": []}, "stop_token_ids", ""),
    (CompletionBody, {}, "prompt", {}),
    (CompletionBody, {}, "prompt", [""]),
    (EmbeddingBody, {}, "input", {}),
    (EmbeddingBody, {}, "input", [""]),
]


@pytest.mark.parametrize(("kind", "values", "field", "wrong"), LISTS)
def test_a_list_of_wrong_items_is_reported_once(
    kind: type[JsonBody], values: dict[str, Any], field: str, wrong: Any
) -> None:
    """250,000 reports take a second of the event loop and 300 MiB."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**values, field: [wrong] * 1000})
    assert caught.value.error_count() <= 4


def test_every_list_is_tried() -> None:
    def has_list(kind: type[JsonBody], field: str) -> bool:
        return "list[" in str(kind.model_fields[field].annotation)

    tried = {(kind, field) for kind, _, field, _ in LISTS}
    kinds = (SpeechBody, SessionFrame, ChatBody, CompletionBody, EmbeddingBody, VoiceBody)
    found = {
        (kind, field) for kind in kinds for field in kind.model_fields if has_list(kind, field)
    }
    shared = {(SessionFrame, field) for field in ("chunk_size", "pronunciations")}
    shared.add((CompletionBody, "stop"))
    assert found - tried == shared | {(CompletionBody, "stop_token_ids")}


def test_more_messages_than_a_chat_may_have_are_not_read() -> None:
    message = {"role": "user", "content": "x"}
    for messages in ([message] * 4097, [{"role": "user", "content": [{"type": "text"}] * 4097}]):
        with pytest.raises(ValidationError, match="at most 4096 items"):
            ChatBody.model_validate({"messages": messages})


FIELD = b'--b\r\ncontent-disposition: form-data; name="name"\r\n\r\n'


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined", "utf-16", "hex"])
def test_a_form_in_another_charset_is_refused(
    service: Service, charset: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Python takes minutes for a megabyte of punycode; other codecs raise any error."""

    async def ask(served: HttpServing) -> None:
        headers = {"content-type": f"Multipart/Form-Data; boundary=b; charset={charset}"}
        body = FIELD + b"\xff" + b"x" * 2000 + b"\r\n--b--\r\n"
        response = await served.client.post("/v1/audio/voices", content=body, headers=headers)
        assert response.status_code == 400
        assert "UTF-8" in error_of(response)["message"]
        headers = {"content-type": 'multipart/form-data; boundary="b"; charset=UTF-8'}
        response = await served.client.post("/v1/audio/voices", content=b"-b", headers=headers)
        assert "the form is broken" in error_of(response)["message"]

    with caplog.at_level(logging.WARNING):
        run_with_http(service, ask)
    assert caplog.records == []
