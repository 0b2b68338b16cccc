"""Faults of Wyoming's clients: disconnects, half events, floods, slow readers, idle connections."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from contextlib import suppress
from typing import Any

import pytest

from llm import FinishReason
from tests.fakes import wait_until_idle
from tests.tts.serving import TEXT, error_of, reason_of, run, session_config, stream_request
from tests.tts.wyoming.client import Client, WyomingServing, frame, wyoming_server
from tts.factory import Service
from tts.wyoming import server as wyoming_module

LONG_TEXT = " ".join([TEXT] * 40)


async def disconnect(served: WyomingServing, draw: random.Random) -> None:
    """Read a few events of a request, or none, and disconnect."""
    client = await served.connect()
    if draw.randrange(2):
        await client.send("synthesize", text=LONG_TEXT)
    else:
        await client.send("synthesize-start")
        await client.send("synthesize-chunk", text=LONG_TEXT)
    for _ in range(draw.randrange(5)):
        assert await client.read() is not None
    if draw.randrange(2):
        client.writer.transport.abort()
    else:
        await client.close()


def test_a_hundred_clients_disconnect_mid_stream(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        draw = random.Random(2)
        async with wyoming_server(service) as served:
            for _ in range(10):
                await asyncio.gather(*(disconnect(served, draw) for _ in range(10)))
            await wait_until_idle(service.client)
            after = await service.client.status()
            assert (after.used_pages, after.audio_streams) == (0, 0)
            cancelled = sum(
                served.grpc.metric(
                    "grpc_server_handled_total",
                    grpc_service="wyoming",
                    grpc_method=method,
                    grpc_code="CANCELLED",
                )
                for method in ("synthesize", "synthesize-start")
            )
            assert cancelled > 50
            internal = {"grpc_code": "INTERNAL", "reason": "INTERNAL"}
            assert not served.grpc.metric("sonant_errors_total", **internal)

    run(scenario())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("is_whole_text", [True, False])
def test_a_disconnect_frees_the_pages_while_nothing_is_written(
    service: Service, is_whole_text: bool
) -> None:
    """The reader finds the end: the text stream waits for text, or the request in the queue."""

    async def scenario() -> None:
        async with wyoming_server(service, max_concurrent_requests=1) as served:
            holder = served.grpc.speech.StreamingSynthesize()
            if is_whole_text:
                await holder.write(session_config())
                await holder.read()
            client = await served.connect()
            if is_whole_text:
                await client.send("synthesize", text=LONG_TEXT)
                await _until(lambda: served.grpc.server.host.admission.waiting == 1)
            else:
                await client.send("synthesize-start")
                await client.until("audio-start")
            await client.close()
            await _until(lambda: served.server.num_connections == 0)
            assert served.grpc.server.host.admission.waiting == 0
            holder.cancel()

    run(scenario())


def test_a_disconnect_cancels_the_running_request(service: Service) -> None:
    async def scenario() -> None:
        async with wyoming_server(service) as served:
            before = await _num_cancelled(service)
            client = await served.connect()
            await client.send("synthesize", text=LONG_TEXT)
            await client.send("synthesize", text=LONG_TEXT)
            await client.until("audio-chunk")
            client.writer.transport.abort()
            await wait_until_idle(service.client)
            assert await _num_cancelled(service) == before + 1

    run(scenario())


async def _num_cancelled(service: Service) -> int:
    stats = (await service.client.status()).stats
    assert stats is not None
    return stats.sequences.finished[FinishReason.CANCELLED]


async def _until(holds: Any) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never held")


# --- events that do not arrive, or are not events


@pytest.mark.parametrize(
    "block",
    [
        b'{"type": "synthesize", "data_le',
        b'{"type": "synthesize", "data_length": 100}\n{"text": ',
        frame("synthesize-start") + b'{"type": "synthesize-chunk"',
    ],
)
def test_half_an_event_has_a_time_limit(service: Service, block: bytes) -> None:
    async def scenario() -> None:
        server = wyoming_server(service, receive_timeout_s=0.2)
        async with server as served, served.client() as client:
            client.writer.write(block)
            error = await client.last()
            assert error.data["code"] == "IDLE_TIMEOUT"

    run(scenario())


@pytest.mark.parametrize(
    "block",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n" + frame("synthesize", text=TEXT),
        b'{"type": "synthesize", "data_length": 1000000000000}\n' + bytes(100_000),
        b'{"type": "synthesize", "payload_length": 1000000000000}\n' + bytes(100_000),
        b'{"type": "synthesize", "data_length": 14}\n{"text": "\xff\xfe"}',
        b"{" * 1_000_000,
        bytes(random.Random(3).randrange(256) for _ in range(10_000)) + b"\n",
    ],
)
def test_what_is_no_event_is_refused_at_once(service: Service, block: bytes) -> None:
    async def scenario() -> None:
        async with wyoming_server(service) as served, served.client() as client:
            client.writer.write(block)
            error = await client.last()
            assert error.type == "error"
            assert error.data["code"] == "INVALID_REQUEST"
            started = {"grpc_service": "wyoming", "grpc_method": "synthesize"}
            assert not served.grpc.metric("grpc_server_started_total", **started)

    run(scenario())


def test_a_client_that_sends_more_before_it_reads_gets_the_error(service: Service) -> None:
    """Home Assistant writes the text of an answer while it is generated."""

    async def scenario() -> None:
        async with wyoming_server(service) as served, served.client() as client:
            await client.send("synthesize-start", voice={"name": "ghost"})
            for _ in range(20):
                await client.send("synthesize-chunk", text="a" * 1_000)
                await asyncio.sleep(0.01)
            assert (await client.last()).data["code"] == "VOICE_NOT_FOUND"

    run(scenario())


def test_an_invalid_event_cancels_the_running_request(service: Service) -> None:
    async def scenario() -> None:
        async with wyoming_server(service) as served, served.client() as client:
            await client.send("synthesize", text=LONG_TEXT)
            await client.until("audio-chunk")
            client.writer.write(b"what?\n")
            assert (await client.last()).data["code"] == "INVALID_REQUEST"

    run(scenario())


def test_idle_connections_are_closed(service: Service) -> None:
    """One that waits for text of a stream is not idle, but the stream ends after the same time."""

    async def scenario() -> None:
        server = wyoming_server(service, idle_timeout_s=1)
        async with server as served, served.client() as idle, served.client() as streaming:
            await streaming.send("synthesize-start")
            await idle.send("ping")
            await idle.until("pong")
            assert await idle.read() is None
            error = await streaming.last()
            assert error.data["code"] == "IDLE_TIMEOUT"
            assert "no text arrived for 1 s" in error.data["text"]

    run(scenario())


# --- floods: other calls continue


async def _ticks(waiting: asyncio.Future[Any]) -> int:
    """Return how often the event loop runs until a future is done."""
    count = 0
    while not waiting.done():
        count += 1
        await asyncio.sleep(0)
    return count


@pytest.mark.parametrize("event", [b'{"type":"x"}\n', frame("ping")])
def test_events_that_arrive_together_do_not_stop_other_calls(
    service: Service, event: bytes
) -> None:
    async def scenario() -> None:
        async with wyoming_server(service) as served, served.client() as client:
            client.writer.write(event * 5_000 + frame("describe"))
            assert await _ticks(asyncio.ensure_future(client.until("info"))) >= 5_000

    run(scenario())


def test_chunks_that_waited_together_do_not_stop_other_calls(service: Service) -> None:
    chunk = b'{"type":"synthesize-chunk","data":{"text":" "}}\n'

    async def scenario() -> None:
        async with wyoming_server(service, max_concurrent_requests=1) as served:
            holder = served.grpc.speech.StreamingSynthesize()
            await holder.write(session_config())
            await holder.read()
            async with served.client() as client:
                text = frame("synthesize-start") + chunk * 20_000 + frame("synthesize-stop")
                client.writer.write(text + frame("ping"))
                await client.until("pong")
                stopped = asyncio.ensure_future(client.until("synthesize-stopped"))
                holder.cancel()
                assert await _ticks(stopped) >= 20_000

    run(scenario())


@pytest.mark.parametrize("num_ticks", [0, 1, 3, 4, 8])  # after 2, asyncio has it half accepted
def test_a_connection_that_arrives_while_the_server_stops_is_closed(
    service: Service, num_ticks: int
) -> None:
    async def scenario() -> None:
        async with wyoming_server(service) as served:
            with socket.create_connection(("127.0.0.1", served.server.port)) as late:
                for _ in range(num_ticks):
                    await asyncio.sleep(0)
                await served.server.stop()
                late.setblocking(False)
                loop = asyncio.get_running_loop()
                with suppress(ConnectionResetError):
                    assert await asyncio.wait_for(loop.sock_recv(late, 1), 30) == b""
            assert served.server.num_connections == 0

    run(scenario())


# --- too slow, too many


def test_a_reader_that_stops_reading_is_cut_off(service: Service) -> None:
    async def scenario() -> None:
        async with wyoming_server(service, slow_reader_timeout_s=0.5) as served:
            reader, writer = await _small_connection(served)
            stuck = Client(reader, writer)
            await stuck.send("synthesize", text="and on it went " * 600)
            await _until(lambda: _slow_readers(served) == 1)
            await _until(lambda: served.server.num_connections == 0)
            await wait_until_idle(service.client)
            writer.transport.abort()

    run(scenario())


async def _small_connection(
    served: WyomingServing,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with a small receive buffer, which little audio fills."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", served.server.port))
    return await asyncio.open_connection(sock=raw, limit=1024)


def _slow_readers(served: WyomingServing) -> float:
    labels = {"grpc_code": "ABORTED", "reason": "SLOW_READER"}
    return served.grpc.metric("sonant_errors_total", **labels)


def test_a_client_that_never_reads_its_answers_is_cut_off(service: Service) -> None:
    async def scenario() -> None:
        async with wyoming_server(service, slow_reader_timeout_s=0.5) as served:
            reader, writer = await _small_connection(served)
            block = frame("ping", text="x" * 10_000)
            while not reader.at_eof() and not _slow_readers(served):
                writer.write(block)
                await asyncio.sleep(0)
                if writer.transport.get_write_buffer_size() > 2**20:
                    await asyncio.sleep(0.05)
            assert _slow_readers(served) == 1
            writer.transport.abort()
            await _until(lambda: served.server.num_connections == 0)

    run(scenario())


def test_the_connections_of_one_client_are_open_calls(service: Service) -> None:
    async def scenario() -> None:
        async with wyoming_server(service, max_streams_per_client=2) as served:
            clients = [await served.connect() for _ in range(2)]
            for client in clients:
                await client.send("ping")
                await client.until("pong")
            error = await error_of(served.grpc.speech.SynthesizeStream(stream_request()))
            assert reason_of(error) == "STREAM_LIMIT"
            async with served.client() as third:
                assert (await third.last()).data["code"] == "STREAM_LIMIT"
            for client in clients:
                await client.close()
            await _until(lambda: served.server.num_connections == 0)

    run(scenario())


def test_the_server_has_a_limit_of_connections(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(wyoming_module, "MAX_CONNECTIONS", 2)
        async with wyoming_server(service) as served:
            clients = [await served.connect() for _ in range(2)]
            await _until(lambda: served.server.num_connections == 2)
            async with served.client() as third:
                assert "2 Wyoming connections" in (await third.last()).data["text"]
            for client in clients:
                await client.close()

    run(scenario())


def test_two_hundred_at_once(service: Service) -> None:
    """Each is served or refused with a code; none is lost."""

    async def ask(served: WyomingServing) -> str:
        async with served.client() as client:
            await client.send("synthesize", text="Hello.")
            last = None
            while (event := await client.read()) is not None:
                last = event
                if event.type == "audio-stop":
                    break
            assert last is not None
            return last.type if last.type == "audio-stop" else str(last.data["code"])

    async def scenario() -> None:
        async with wyoming_server(
            service,
            max_concurrent_requests=8,
            max_queued_requests=16,
            max_streams_per_client=1_000,
        ) as served:
            answers = await asyncio.gather(*(ask(served) for _ in range(200)))
            assert set(answers) == {"audio-stop", "QUEUE_FULL"}
            assert answers.count("audio-stop") >= 24

    run(scenario())


def test_the_server_stops_with_open_connections(service: Service) -> None:
    async def scenario() -> None:
        async with wyoming_server(service) as served:
            idle, speaking = await served.connect(), await served.connect()
            await speaking.send("synthesize", text=LONG_TEXT)
            await speaking.until("audio-chunk")
            late = await served.connect()
            await served.server.stop()
            for client in (idle, late):
                assert await client.read() is None
            while await speaking.read() is not None:
                pass
            for client in (idle, speaking, late):
                await client.close()

    run(scenario())
