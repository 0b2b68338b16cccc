"""Sessions over a WebSocket, with the `websockets` package as client: events, errors, bounds."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Opcode

from tests.fakes import wait_until_idle
from tests.tts.engine.jobs import in_slot
from tests.tts.http.http_serving import HttpServing, http_serving, raw_connection, run_with_http
from tests.tts.serving import (
    TEXT,
    flush,
    run,
    run_conversation,
    say,
    session_config,
)
from tts.api.load import load_service
from tts.factory import Service
from tts.http.session import INBOX_BYTES, KEY_PREFIX, SUBPROTOCOL
from tts.http.websocket import MAX_FRAGMENTS
from tts.v1 import speech_pb2 as pb

PATH = "/v1/audio/speech/stream"
CONFIG = {"type": "config", "response_format": "pcm", "seed": 7}
LONG = "and on it went " * 60
END = {"type": "end"}

HANDSHAKE = (
    f"GET {PATH} HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
).encode()


class Talk:
    """A session from the client's side."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            await self.socket.send(json.dumps(message))

    async def next(self) -> dict[str, Any]:
        """Return the next event; binary audio as one."""
        data = await self.socket.recv()
        if isinstance(data, bytes):
            return {"type": "audio", "data": data}
        value: dict[str, Any] = json.loads(data)
        return value

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """Return the events up to the first of a type."""
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events

    async def rest(self) -> list[dict[str, Any]]:
        """Return all events until the server closes."""
        events = []
        try:
            while True:
                events.append(await self.next())
        except ConnectionClosed:
            return events

    @property
    def code(self) -> int | None:
        return self.socket.close_code


@asynccontextmanager
async def talk(
    served: HttpServing, *messages: dict[str, Any], **options: Any
) -> AsyncIterator[Talk]:
    """Open a session and send these messages."""
    options = {"max_size": None, "compression": None, **options}
    async with connect(f"ws://{served.http.address}{PATH}", **options) as socket:
        talking = Talk(socket)
        await talking.send(*messages)
        yield talking


def fed(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def audio_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(event["data"] for event in events if event["type"] == "audio")


async def works(served: HttpServing) -> None:
    """Speak, after a fault."""
    assert await served.grpc.server.host.calls.wait_idle(60)
    served.grpc.server.access.slots.check_integrity()
    async with talk(served, CONFIG, fed("Fine."), END) as talking:
        assert (await talking.rest())[-1]["type"] == "done"
        assert talking.code == 1000


def errors(served: HttpServing, reason: str) -> float:
    found = served.grpc.server.host.metrics.registry.collect()
    return sum(
        sample.value
        for metric in found
        for sample in metric.samples
        if sample.name == "sonant_errors_total" and sample.labels["reason"] == reason
    )


# --- speech


def test_the_audio_is_that_of_grpc(service: Service) -> None:
    """Same seed, same messages, same bytes; binary or in base64."""

    async def ask(served: HttpServing) -> None:
        pieces = [TEXT[i : i + 5] for i in range(0, len(TEXT), 5)]
        pcm = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_S16LE, sample_rate_hertz=24_000)
        first = session_config(max_tokens=None, audio_format=pcm)
        messages = [*map(say, pieces[:3]), flush("f1"), *map(say, pieces[3:])]
        answers = await run_conversation(served.grpc, first, *messages)
        expected = b"".join(answer.audio.data for answer in answers)
        own = [*map(fed, pieces[:3]), {"type": "flush", "id": "f1"}, *map(fed, pieces[3:])]
        async with talk(served, CONFIG, *own, END) as talking:
            events = await talking.rest()
            assert talking.code == 1000
        assert audio_of(events) == expected
        started, done = events[0], events[-1]
        assert started.pop("request_id")
        assert started == {
            "type": "started",
            "model": service.model,
            "media_type": "audio/pcm",
            "sample_rate": 24_000,
            "seed": 7,
            "ignored": [],
        }
        flushed = next(event for event in events if event["type"] == "flushed")
        mark = next(answer.flush_done for answer in answers if answer.HasField("flush_done"))
        assert flushed == {"type": "flushed", "id": "f1", "time": mark.sample_offset / 24_000}
        assert done["usage"]["audio_seconds"] == pytest.approx(len(expected) / 48_000, abs=1e-3)
        config = {**CONFIG, "audio": "base64", "tone": "warm"}
        async with talk(served, config, *own, END) as talking:
            events = await talking.rest()
        parts = [base64.b64decode(e["audio"]) for e in events if e["type"] == "audio"]
        assert b"".join(parts) == expected
        assert events[0]["ignored"] == ["tone"]

    run_with_http(service, ask)


def test_a_cancellation_drops_text_and_keeps_the_session(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with talk(served, CONFIG, fed(LONG)) as talking:
            await talking.until("audio")
            await talking.send({"type": "cancel"})
            cancelled = (await talking.until("cancelled"))[-1]
            assert cancelled["time"] > 0
            await wait_until_idle(service.client)
            await talking.send(fed("Something else."), {"type": "flush"})
            again = await talking.until("flushed")
            assert audio_of(again)
            await talking.send(END)
            assert (await talking.rest())[-1]["type"] == "done"

    run_with_http(service, ask)


def test_waiting_text_is_spoken_after_the_requested_delay(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with talk(served, {**CONFIG, "max_text_delay": 0.05}, fed("no end in")) as talking:
            await talking.until("audio")

    run_with_http(service, ask)


def test_an_eager_session_speaks_before_its_sentence_ends(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        text = fed("When the weather is fine again, we go ")
        async with talk(served, {**CONFIG, "eager": 1}, text) as talking:
            await talking.until("audio")
            await talking.send(fed("to the sea."), END)
            assert (await talking.rest())[-1]["type"] == "done"

    run_with_http(service, ask)


@pytest.fixture(scope="module")
def embedded() -> Iterator[Service]:
    service = load_service({})
    yield service
    run(service.client.close())


def test_words_and_segments(embedded: Service) -> None:
    async def ask(served: HttpServing) -> None:
        config = {**CONFIG, "timestamps": "word"}
        pieces = [fed(word + " ") for word in TEXT.split()]
        async with talk(served, config, *pieces, END) as talking:
            events = await talking.rest()
        words = [word for e in events if e["type"] == "words" for word in e["words"]]
        assert [word["word"] for word in words] == TEXT.split()
        assert words[0]["end"] <= words[1]["end"] <= events[-1]["usage"]["audio_seconds"]
        async with talk(served, {**CONFIG, "timestamps": "segment"}, *pieces, END) as talking:
            events = await talking.rest()
        segments = [e for e in events if e["type"] == "segment"]
        assert [segment["index"] for segment in segments] == [0, 1]
        assert TEXT[segments[0]["text_start"] : segments[0]["text_end"]].strip() == "Hello there."

    run_with_http(embedded, ask)


# --- refused messages


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([fed("a")], "type"),
        (["{"], None),
        (["[]"], None),
        ([b"{}"], None),
        ([{**CONFIG, "speed": 9}], "speed"),
        ([{**CONFIG, "voice": "A B"}], "voice"),
        ([{**CONFIG, "audio": "text"}], "audio"),
        ([{**CONFIG, "idle_timeout": -1}], "idle_timeout"),
        ([{**CONFIG, "eager": 3}], "eager"),
        ([{**CONFIG, "ref_text": "alone"}], "ref_text"),
        ([CONFIG, CONFIG], "config"),
        ([CONFIG, {"type": "stop"}], "type"),
        ([CONFIG, {"text": "a"}], "type"),
        ([CONFIG, {"type": "text"}], "text"),
        ([CONFIG, fed("a\0b")], "text"),
        ([CONFIG, fed("x" * 2_001)], "text"),
        ([CONFIG, *[fed("x" * 500)] * 3], "text"),
        ([CONFIG, {"type": "flush", "id": "x" * 129}], "id"),
        ([CONFIG, "{"], None),
        ([CONFIG, b"\0"], None),
    ],
)
def test_wrong_messages_end_the_session(
    service: Service, messages: list[Any], param: str | None
) -> None:
    async def ask(served: HttpServing) -> None:
        async with talk(served) as talking:
            for message in messages:
                raw = isinstance(message, str | bytes)
                await talking.socket.send(message if raw else json.dumps(message))
            last = (await talking.rest())[-1]
            assert talking.code == 1008
            assert talking.socket.close_reason == "invalid_request"
        assert last["type"] == "error"
        assert last["error"].keys() == {"message", "type", "param", "code"}
        assert last["error"]["param"] == param
        await wait_until_idle(service.client)

    run_with_http(service, ask, max_stream_characters=1_200)


def test_unknown_voices_and_words_without_an_aligner(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for values, code in (
            ({"voice": "unknown"}, "voice_not_found"),
            ({"timestamps": "word"}, "word_timestamps_unavailable"),
        ):
            async with talk(served, {**CONFIG, **values}) as talking:
                last = (await talking.rest())[-1]
                assert last["error"]["code"] == talking.socket.close_reason == code

    run_with_http(service, ask)


@pytest.mark.parametrize("messages", [[], [{**CONFIG, "idle_timeout": 0.1}]])
def test_idle_sessions_end(service: Service, messages: list[dict[str, Any]]) -> None:
    async def ask(served: HttpServing) -> None:
        async with talk(served, *messages) as talking:
            last = (await talking.rest())[-1]
            assert last["error"]["code"] == talking.socket.close_reason == "idle_timeout"

    run_with_http(service, ask, idle_timeout_s=60 if messages else 0.2)


# --- who may call


async def status_of(served: HttpServing, **options: Any) -> int:
    """Return the status of the handshake; 101 for a session."""
    try:
        async with talk(served, **options) as talking:
            assert talking.socket.subprotocol in (None, SUBPROTOCOL)
            return 101
    except InvalidStatus as refusal:
        response = refusal.response
    assert json.loads(response.body or b"{}")["error"].keys() >= {"message", "code"}
    return response.status_code


def test_tokens(service: Service) -> None:
    """In the header, or in a subprotocol, which is never sent back."""

    async def ask(served: HttpServing) -> None:
        right, wrong = "secret-1.x", "secret-2"
        assert await status_of(served) == 401
        for token, status in ((right, 101), (wrong, 401)):
            headers = {"authorization": f"Bearer {token}"}
            assert await status_of(served, additional_headers=headers) == status
            named: list[Any] = [SUBPROTOCOL, KEY_PREFIX + token]
            assert await status_of(served, subprotocols=named) == status
            assert await status_of(served, subprotocols=named[1:]) == status
        assert errors(served, "UNAUTHENTICATED") == 4

    run_with_http(service, ask, auth_token="secret-1.x")


def test_origins(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        own = f"http://{served.http.address}"
        for origin, status in {
            own: 101,
            "https://page.example": 101,
            "https://evil.example": 403,
            "null": 403,
        }.items():
            options: dict[str, Any] = {"origin": origin}
            assert await status_of(served, **options) == status, origin

    run_with_http(service, ask, http_cors_origins=["https://page.example"])


def test_refusals_before_the_session(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(served: HttpServing) -> None:
        async with talk(served, CONFIG), talk(served, CONFIG) as second:
            await second.until("started")
            assert await status_of(served) == 429
            served.grpc.server.host.drain()
            await second.send(fed("Still."), END)
            assert (await second.rest())[-1]["type"] == "done"
            assert await status_of(served) == 503
        async with raw_connection(served) as raw:
            await raw.send(HANDSHAKE.replace(b"GET", b"PUT"))
            assert (await raw.rest()).startswith((b"HTTP/1.1 400", b"HTTP/1.1 405"))
        async with raw_connection(served) as raw:
            await raw.send(HANDSHAKE.replace(PATH.encode(), b"/v1/models"))
            assert (await raw.rest()).startswith(b"HTTP/1.1 403")

    with caplog.at_level(logging.WARNING):
        run_with_http(service, ask, max_streams_per_client=2)
    assert caplog.records == []


def test_a_full_queue(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        admission = served.grpc.server.host.admission
        async with in_slot(admission, "other"), talk(served, CONFIG) as talking:
            last = (await talking.rest())[-1]
            assert last["error"]["code"] == talking.socket.close_reason == "queue_full"
            assert talking.code == 1013

    run_with_http(service, ask, max_concurrent_requests=1, max_queued_requests=0)


# --- faults


def test_a_disconnect_frees_the_pages(service: Service) -> None:
    """With and without a closing handshake, while audio comes and before the first."""

    async def ask(served: HttpServing) -> None:
        for number in range(6):
            async with talk(served, CONFIG, fed(LONG)) as talking:
                while not (await service.client.status()).used_pages:
                    await asyncio.sleep(0.005)
                if number % 3:
                    await talking.until("audio")
                if number % 2:
                    talking.socket.transport.abort()
            await wait_until_idle(service.client)
            assert await served.grpc.server.host.calls.wait_idle(60)
        assert errors(served, "CANCELLED") == 6
        await works(served)

    run_with_http(service, ask)


def test_a_disconnect_in_the_queue(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        admission = served.grpc.server.host.admission
        async with in_slot(admission, "other"):
            async with talk(served, CONFIG, *[fed("word ")] * 100) as talking:
                while not admission.waiting:
                    await asyncio.sleep(0.005)
                talking.socket.transport.abort()
            while admission.waiting:
                await asyncio.sleep(0.005)
        await works(served)

    run_with_http(service, ask, max_concurrent_requests=1)


def test_a_flood_is_not_read(service: Service) -> None:
    """A session that waits takes no more than its inbox and what the connection's buffers hold."""

    async def ask(served: HttpServing) -> None:
        admission = served.grpc.server.host.admission
        async with in_slot(admission, "other"), talk(served, CONFIG) as talking:
            message = json.dumps({"type": "flush", "id": "x" * 8_000})
            flooding = asyncio.create_task(_flood(talking.socket, message))
            (connection,) = served.http._state.connections
            while connection.transport.is_reading():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            assert not connection.transport.is_reading()
            assert len(connection._unread) <= 256 * 1024
            assert connection.queue.qsize() <= 2
            flooding.cancel()
            talking.socket.transport.abort()
        await works(served)

    run_with_http(service, ask, max_concurrent_requests=1)


async def _flood(socket: ClientConnection, message: str) -> None:
    for _ in range(20 * INBOX_BYTES // len(message)):
        await socket.send(message)


@pytest.mark.parametrize("read", [True, False])
def test_a_flood_of_pings(service: Service, read: bool) -> None:
    async def ask(served: HttpServing) -> None:
        async with raw_connection(served) as raw:
            await raw.send(HANDSHAKE)
            await raw.reader.readuntil(b"\r\n\r\n")
            ping = b"\x89\xfd" + b"\0\0\0\0" + b"x" * 125
            if not read:
                raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            (connection,) = served.http._state.connections
            for _ in range(200):
                await raw.send(ping * 500)
                if read:
                    await raw.reader.readexactly(127 * 500)
                assert connection.transport.get_write_buffer_size() < 256 * 1024
        await works(served)

    run_with_http(service, ask)


def frame(data: bytes, opcode: int = Opcode.TEXT, is_last: bool = True) -> bytes:
    """Return a frame with a mask of zeros."""
    size = len(data)
    length = bytes([0x80 | size]) if size < 126 else b"\xff" + size.to_bytes(8, "big")
    return bytes([opcode | 0x80 * is_last]) + length + b"\0\0\0\0" + data


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(b"x" * 5_000), 1009),
        (frame(b" ", is_last=False) + frame(b"", Opcode.CONT, False) * 2 * MAX_FRAGMENTS, 1008),
        (frame(b" " * 4_000, is_last=False) + frame(b" " * 4_000, Opcode.CONT), 1009),
        (frame(b"\xff"), 1007),
        (b"\xff\xff\xff\xff", 1002),
        (frame(b"no mask").replace(b"\x87", b"\x07"), 1002),
    ],
    ids=["large", "fragments", "large in fragments", "no UTF-8", "no frame", "no mask"],
)
def test_broken_and_oversized_messages(
    service: Service, data: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(served: HttpServing) -> None:
        async with raw_connection(served) as raw:
            await raw.send(HANDSHAKE)
            await raw.reader.readuntil(b"\r\n\r\n")
            await raw.send(data + frame(b"rest") * 10)
            answer = await raw.rest()
            assert answer[0] == 0x80 | Opcode.CLOSE
            assert int.from_bytes(answer[2:4], "big") == code
        await works(served)

    with caplog.at_level(logging.WARNING):
        run_with_http(service, ask, max_message_bytes=4_096)
    assert caplog.records == []


def test_a_large_first_message_needs_a_slot(service: Service) -> None:
    """A part of it does not keep the session: the time is that of a request's body."""

    async def ask(served: HttpServing) -> None:
        slots = served.grpc.server.access.slots
        async with raw_connection(served) as raw:
            await raw.send(HANDSHAKE)
            await raw.reader.readuntil(b"\r\n\r\n")
            await raw.send(frame(b" " * 100_000)[:-1])
            await raw.reader.readuntil(b"idle_timeout")
            slots.check_integrity()
        config = {**CONFIG, "tone": "x" * 1_000_000}
        async with talk(served, config, fed("Fine."), END) as talking:
            assert (await talking.rest())[-1]["type"] == "done"

    run_with_http(service, ask, receive_timeout_s=0.5)


def test_a_later_message_may_not_be_large(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with talk(served, CONFIG) as talking:
            await talking.until("started")
            await talking.send(fed("x" * 100_000))
            await talking.rest()
            assert talking.code == 1009
        await works(served)

    run_with_http(service, ask)


def test_a_slow_reader_is_cut_off(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with raw_connection(served, limit=1024) as raw:
            await raw.send(HANDSHAKE)
            await raw.reader.readuntil(b"\r\n\r\n")
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            config = {**CONFIG, "sample_rate": 48_000, "audio": "base64"}
            for message in (config, *[fed(LONG)] * 20):
                await raw.send(frame(json.dumps(message).encode()))
            while not errors(served, "SLOW_READER"):
                await asyncio.sleep(0.05)
            assert await served.grpc.server.host.calls.wait_idle(60)
        await works(served)

    run_with_http(service, ask, slow_reader_timeout_s=0.5)


def test_sessions_end_with_the_server(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with http_serving(service) as served:
            async with talk(served, CONFIG, fed(LONG)) as talking, talk(served) as waiting:
                await talking.until("audio")
                assert await served.grpc.server.drain(0, 0.05) is False
                await served.http.stop()
                await talking.rest()
                await waiting.rest()
                assert talking.code == waiting.code == 1012
            assert served.http.num_connections == 0

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert [record for record in caplog.records if record.name != "tts.server"] == []
