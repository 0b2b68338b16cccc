"""Faults of clients and of the server: disconnects, slow readers, floods, and a lost engine."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes import wait_until_idle
from tests.tts.engine.jobs import in_slot
from tests.tts.http.http_serving import (
    SPEECH,
    HttpServing,
    error_of,
    events_of,
    http_serving,
    post,
    raw_connection,
    run_with_http,
)
from tests.tts.serving import run
from tts.errors import SynthesisError
from tts.factory import Service
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import SpeechEvent, SpeechRequest

LONG = {"input": "and on it went " * 60, "response_format": "pcm", "sample_rate": 48_000}


async def is_running(served: HttpServing, service: Service) -> None:
    """Wait until a request is in the engine."""
    while not (await service.client.status()).used_pages:
        await asyncio.sleep(0.005)


def cancelled(served: HttpServing) -> float:
    """Return the number of speech requests that were cancelled."""
    labels = {"grpc_service": "http", "grpc_method": f"POST {SPEECH}", "grpc_code": "CANCELLED"}
    return served.grpc.metric("grpc_server_handled_total", **labels)


def test_a_disconnect_frees_the_pages(service: Service) -> None:
    """At any time: before the first audio, while audio comes, and while it waits to run."""

    async def ask(served: HttpServing) -> None:
        body = post(json.dumps(LONG).encode())
        for number in range(6):
            async with raw_connection(served) as raw:
                await raw.send(body)
                await is_running(served, service)
                if number % 2:
                    assert await raw.reader.readuntil(b"\r\n\r\n")
            await wait_until_idle(service.client)
            assert await served.grpc.server.host.calls.wait_idle(60)
        assert cancelled(served) == 6
        assert (await served.speak()).status_code == 200

    run_with_http(service, ask)


def test_a_disconnect_in_the_queue_and_in_the_body(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        admission = served.grpc.server.host.admission
        async with in_slot(admission, "other"):
            async with raw_connection(served) as raw:
                await raw.send(post(json.dumps(LONG).encode()))
                while not admission.waiting:
                    await asyncio.sleep(0.005)
            while admission.waiting:
                await asyncio.sleep(0.005)
        async with raw_connection(served) as raw:
            await raw.send(post(b"{", length=100))
            while not served.num_open:
                await asyncio.sleep(0.005)
        assert await served.grpc.server.host.calls.wait_idle(60)
        served.grpc.server.access.slots.check_integrity()

    run_with_http(service, ask, max_concurrent_requests=1)


def test_a_slow_reader_is_cut_off(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        with raw:
            await loop.sock_connect(raw, ("127.0.0.1", served.http.port))
            await loop.sock_sendall(raw, post(json.dumps(LONG).encode()))
            await is_running(served, service)
            await wait_until_idle(service.client)
            assert await served.grpc.server.host.calls.wait_idle(60)
        labels = {"grpc_code": "ABORTED", "reason": "SLOW_READER"}
        errors = served.grpc.metric("sonant_errors_total", **labels)
        assert errors == 1

    run_with_http(service, ask, slow_reader_timeout_s=0.5)


def test_a_connection_serves_several_requests(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        first, second = [(await served.speak()).content for _ in range(2)]
        assert first == second
        assert served.http.num_connections == 1

    run_with_http(service, ask)


def test_pipelined_requests_are_answered_in_order(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        last = request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        async with raw_connection(served) as raw:
            await raw.send(post(json.dumps({"input": ""}).encode()) + request + last)
            answer = await raw.rest()
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.startswith(b"HTTP/1.1 400")

    run_with_http(service, ask)


def test_many_requests_at_once(service: Service) -> None:
    """Each is served or refused with a time to try again; none is lost."""
    count = 60

    async def ask(served: HttpServing) -> None:
        expected = (await served.speak()).content
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=f"http://{served.http.address}", timeout=HANG_S, limits=limits
        ) as client:
            body = {"input": "Hello there. This is a short test.", "seed": 7}
            values = {**body, "response_format": "pcm"}
            answers = await asyncio.gather(
                *(client.post(SPEECH, json=values) for _ in range(count))
            )
        spoken = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(spoken) + len(refused) == count
        assert len(spoken) >= 12
        assert refused
        assert {answer.content for answer in spoken} == {expected}
        for answer in refused:
            assert error_of(answer)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1

    run_with_http(service, ask, max_concurrent_requests=4, max_queued_requests=8)


# --- errors of the server


@pytest.fixture
def failing(service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A service whose engine fails after the first audio."""
    plain = Synthesizer.stream

    async def stream(
        self: Synthesizer, request: SpeechRequest, *slot: Any
    ) -> AsyncGenerator[SpeechEvent, None]:
        events = plain(self, request, *slot)
        yield await anext(events)
        yield await anext(events)
        await events.aclose()
        raise SynthesisError("/secret/path")

    monkeypatch.setattr(Synthesizer, "stream", stream)
    return service


def test_an_error_after_the_first_byte_breaks_the_body_off(
    failing: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(served: HttpServing) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await served.speak()
        response = await served.speak(stream_format="sse")
        *_, last = events_of(response)
        assert last["type"] == "error"
        assert last["error"]["type"] == "server_error"
        assert "secret" not in response.text

    run_with_http(failing, ask)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_clients_cause_no_log_lines_of_the_http_library(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(served: HttpServing) -> None:
        for data in (b"\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\n\r\n"):
            async with raw_connection(served) as raw:
                await raw.send(data)
                await raw.reader.read(1)
        async with raw_connection(served) as raw:
            await raw.send(post(json.dumps(LONG).encode()))
            await is_running(served, service)
            await raw.send(b"\x00 no request \r\n\r\n")
        await wait_until_idle(service.client)

    with caplog.at_level(logging.WARNING):
        run_with_http(service, ask)
    assert caplog.records == []


def test_running_requests_end_with_the_server(service: Service) -> None:
    async def scenario() -> None:
        async with http_serving(service) as served:
            async with served.client.stream("POST", SPEECH, json=LONG) as response:
                parts = response.aiter_raw()
                await anext(parts)
                assert await served.grpc.server.drain(0, 0.05) is False
                await served.http.stop()
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in parts:
                        pass
            assert served.http.num_connections == 0

    run(scenario())
