"""Limits of all calls: invalid bytes, too many bytes, slow messages, too many calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.tts.observe.test_logs import calls_logged
from tests.tts.server.raw_http2 import (
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    MAX_CONCURRENT_STREAMS,
    raw_client,
)
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    fields_of,
    health,
    reason_of,
    run_with_server,
    say,
    session_config,
)
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.server import access
from tts.server.access import RECEIVING_BYTES
from tts.server.call import REQUEST_ID_KEY, client_of
from tts.v1 import speech_pb2 as pb

SPEECH, TEXT = "tts.v1.SpeechService", "tts.v1.TextService"
RIVA = "nvidia.riva.tts.RivaSpeechSynthesis"
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
METHODS = [
    (SPEECH, "Synthesize", "unary_unary"),
    (SPEECH, "SynthesizeStream", "unary_stream"),
    (SPEECH, "StreamingSynthesize", "stream_stream"),
    (SPEECH, "ListVoices", "unary_unary"),
    (SPEECH, "CreateVoice", "unary_unary"),
    (SPEECH, "DeleteVoice", "unary_unary"),
    (SPEECH, "GetServerInfo", "unary_unary"),
    (TEXT, "Generate", "unary_unary"),
    (TEXT, "GenerateStream", "unary_stream"),
    (TEXT, "Embed", "unary_unary"),
    (RIVA, "Synthesize", "unary_unary"),
    (RIVA, "SynthesizeOnline", "stream_stream"),
    (RIVA, "GetRivaSynthesisConfig", "unary_unary"),
    (HEALTH, "Check", "unary_unary"),
    (HEALTH, "Watch", "unary_stream"),
    (REFLECTION, "ServerReflectionInfo", "stream_stream"),
]
MIB = 2**20
Status = health_pb2.HealthCheckResponse
WRONG = (b"authorization", b"Bearer wrong")
SERVING_STREAM = f"/{SPEECH}/SynthesizeStream".encode()


def call_raw(served: Serving, service: str, method: str, kind: str, *messages: bytes) -> Any:
    """Call with these bytes as messages."""
    make = getattr(served.channel, kind)(f"/{service}/{method}")
    return make(iter(messages) if kind.startswith("stream") else messages[0])


# --- bytes that are no message


@pytest.mark.parametrize(("service_name", "method", "kind"), METHODS)
def test_bytes_that_are_not_a_message_are_invalid(
    service: Service,
    caplog: pytest.LogCaptureFixture,
    service_name: str,
    method: str,
    kind: str,
) -> None:
    """Every method reports it with a request id, logs one line and counts it."""

    async def ask(served: Serving) -> None:
        error = await error_of(call_raw(served, service_name, method, kind, b"\xff"))
        assert fields_of(error) == [""]
        assert "DecodeError" not in error.details()
        (logged,) = calls_logged(caplog)
        assert logged["message"] == "call ended"
        assert (logged["method"], logged["code"]) == (method, "INVALID_ARGUMENT")
        assert logged["request_id"] == dict(error.trailing_metadata())[REQUEST_ID_KEY]
        labels = {"grpc_service": service_name, "grpc_method": method}
        code = "INVALID_ARGUMENT"
        assert served.metric("grpc_server_handled_total", **labels, grpc_code=code) == 1
        assert served.metric("sonant_errors_total", grpc_code=code, reason="INVALID_REQUEST") == 1

    with caplog.at_level(logging.INFO):
        run_with_server(service, ask)
    assert not [made for made in caplog.records if made.levelno >= logging.WARNING]


def test_an_invalid_later_message_ends_the_call(service: Service) -> None:
    async def ask(served: Serving) -> None:
        first = session_config().SerializeToString()
        error = await error_of(
            call_raw(served, SPEECH, "StreamingSynthesize", "stream_stream", first, b"\xff")
        )
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await collect_speech(served)).data

    run_with_server(service, ask)


@pytest.mark.parametrize(("service_name", "method", "kind"), METHODS)
def test_without_a_token_nothing_is_parsed(
    service: Service, service_name: str, method: str, kind: str
) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(call_raw(served, service_name, method, kind, b"\xff"))
        expected = "INVALID_ARGUMENT" if service_name == HEALTH else "UNAUTHENTICATED"
        assert error.code().name == expected

    run_with_server(service, ask, auth_token="secret")


# --- bytes that are too many, or never all there


def test_methods_with_small_requests_have_a_small_limit(service: Service) -> None:
    async def ask(served: Serving) -> None:
        request = pb.ListVoicesRequest(page_token="x" * 70_000)
        error = await error_of(served.speech.ListVoices(request))
        assert fields_of(error) == [""]
        assert "at most 65536" in error.details()

    run_with_server(service, ask)


@pytest.mark.parametrize("token", [WRONG, (b"x-nothing", b"x")])
def test_a_body_without_a_valid_token_is_not_read(
    service: Service, token: tuple[bytes, bytes]
) -> None:
    """Only the initial HTTP/2 window is received, and the call ends at once."""

    async def ask(served: Serving) -> None:
        async with raw_client(served.server.address) as client:
            client.open(1, SERVING_STREAM, token)
            assert await client.send_body(1, 15 * MIB, MIB) <= FIRST_WINDOW
            await client.until(1)
        assert _ended(served, "SynthesizeStream", "UNAUTHENTICATED") == 1

    run_with_server(service, ask, auth_token="secret")


def test_an_endless_message_times_out(service: Service) -> None:
    async def ask(served: Serving) -> None:
        async with raw_client(served.server.address) as client:
            client.open(1, SERVING_STREAM)
            assert await client.send_body(1, 15 * MIB, MIB) == MIB
            client.open(3, f"/{SPEECH}/ListVoices".encode())
            await client.until(1, 3)
        assert _ended(served, "SynthesizeStream", "DEADLINE_EXCEEDED") == 1
        assert _ended(served, "ListVoices", "DEADLINE_EXCEEDED") == 1

    run_with_server(service, ask, receive_timeout_s=0.5)


def test_a_call_without_a_message_is_invalid(service: Service) -> None:
    async def ask(served: Serving) -> None:
        async with raw_client(served.server.address) as client:
            client.open(1, SERVING_STREAM, flags=END_HEADERS | END_STREAM)
            await client.until(1)
        assert _ended(served, "SynthesizeStream", "INVALID_ARGUMENT") == 1

    run_with_server(service, ask)


def test_unfinished_messages_do_not_keep_others_waiting(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more unfinished messages than receive places, a small message is still received."""
    monkeypatch.setattr(access, "PATIENCE_S", 0.2)
    monkeypatch.setattr(access, "OWN_PATIENCE_S", 1.0)

    async def ask(served: Serving) -> None:
        async with raw_client(served.server.address) as client:
            num_slots = RECEIVING_BYTES // ServerConfig().max_message_bytes
            streams = range(1, 2 * 2 * num_slots, 2)
            for stream in streams:
                client.open(stream, SERVING_STREAM)
            await asyncio.gather(*(client.send_body(stream, 15 * MIB, MIB) for stream in streams))
            assert (await collect_speech(served)).data
            assert await health(served.channel) == Status.SERVING

    run_with_server(service, ask)


# --- too many calls


def test_a_connection_has_128_streams(service: Service) -> None:
    async def ask(served: Serving) -> None:
        async with raw_client(served.server.address) as client:
            assert client.settings[MAX_CONCURRENT_STREAMS] == 128

    run_with_server(service, ask)


OPENINGS: dict[str, Callable[[Serving], Any]] = {
    "no message": lambda served: served.speech.StreamingSynthesize(),
    "a watch": lambda served: HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest()),
}


@pytest.mark.parametrize("opening", OPENINGS)
def test_every_open_call_counts(service: Service, opening: str) -> None:
    """Calls that wait for their first message count; health checks are always answered."""

    async def ask(served: Serving) -> None:
        calls = [OPENINGS[opening](served) for _ in range(3)]
        await _until_open(served, 3)
        error = await error_of(served.speech.ListVoices(pb.ListVoicesRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(error) == "STREAM_LIMIT"
        assert await health(served.channel) == Status.SERVING
        for call in calls:
            call.cancel()
        await _until_open(served, 0)
        assert (await served.speech.ListVoices(pb.ListVoicesRequest())).voices

    run_with_server(service, ask, max_streams_per_client=3)


async def _until_open(served: Serving, num_calls: int) -> None:
    """Wait until the server counts this number of open calls."""
    for _ in range(6000):
        if f"calls={num_calls}," in repr(served.server.access):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(served.server.access)


def test_a_first_message_may_come_late(service: Service) -> None:
    """A call that streams its text in may be opened in advance."""

    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await _until_open(served, 1)
        await asyncio.sleep(0.5)
        await call.write(session_config())
        await call.write(say("Hello there."))
        await call.done_writing()
        kinds = [response.WhichOneof("event") async for response in call]
        assert kinds[-1] == "done"

    run_with_server(service, ask, receive_timeout_s=0.1)


def _ended(served: Serving, method: str, code: str) -> float:
    labels = {"grpc_service": SPEECH, "grpc_method": method, "grpc_code": code}
    return served.metric("grpc_server_handled_total", **labels)


def test_an_idle_connection_is_closed(service: Service) -> None:
    async def ask(served: Serving) -> None:
        host, _, port = served.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        while await reader.read(1000):
            pass  # the server's settings, then the end
        writer.close()
        await writer.wait_closed()

    run_with_server(service, ask, receive_timeout_s=0.5)


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:192.0.2.7:50123", "ipv4:192.0.2.7"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:50123", "ipv4:192.0.2.7"),
        ("ipv6:%5B2001:db8:1:2::7%5D:50123", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff:ffff:ffff:ffff]:9", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:3::7%5D:50123", "ipv6:2001:db8:1:3::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50123", "ipv6:fe80::/64"),
        ("ipv6:%5B::1%5D:50123", "ipv6:::/64"),
        ("unix:", "unix:"),
        ("unix:/run/sonant:1", "unix:/run/sonant:1"),
    ],
)
def test_one_client_may_have_many_addresses(peer: str, client: str) -> None:
    assert client_of(peer) == client
