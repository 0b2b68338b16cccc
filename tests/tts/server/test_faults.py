"""Faults of clients: disconnects, floods, slow readers; later requests are served."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from llm import FinishReason
from tests.fakes import wait_until_idle
from tests.tts.serving import (
    CHANNEL_OPTIONS,
    SMALL_WINDOW,
    TEXT,
    Serving,
    checked_server,
    collect_speech,
    error_of,
    error_of_reading,
    grouped,
    reason_of,
    retry_s,
    run,
    say,
    session_config,
    stream_request,
    unary_request,
)
from tts.factory import Service
from tts.v1 import common_pb2, text_pb2
from tts.v1 import speech_pb2 as pb

LONG_TEXT = " ".join([TEXT] * 40)


# --- clients that go away


async def disconnect(served: Serving, draw: random.Random) -> None:
    """Read a few messages of a stream, or none, and disconnect."""
    kind = draw.randrange(3)
    if kind == 0:
        call = served.speech.SynthesizeStream(stream_request(LONG_TEXT, max_tokens=None))
    elif kind == 1:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config(max_tokens=None))
        await call.write(say(LONG_TEXT))
    else:
        sampling = common_pb2.SamplingParams(max_tokens=900, min_tokens=900)
        request = text_pb2.GenerateStreamRequest(
            config=text_pb2.GenerationConfig(sampling=sampling),
            input=text_pb2.GenerationInput(prompt="hello"),
        )
        call = served.text.GenerateStream(request)
    for _ in range(draw.randrange(5)):
        await call.read()
    call.cancel()


def test_a_hundred_clients_disconnect_mid_stream(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        draw = random.Random(2)
        before = await service.client.status()
        async with checked_server(service) as served:
            for _ in range(10):
                await asyncio.gather(*(disconnect(served, draw) for _ in range(10)))
            await wait_until_idle(service.client)
            after = await service.client.status()
            assert (after.used_pages, after.audio_streams) == (0, 0)
            assert (before.used_pages, before.audio_streams) == (0, 0)
            cancelled = sum(
                served.metric(
                    "grpc_server_handled_total",
                    grpc_service=name,
                    grpc_method=method,
                    grpc_code="CANCELLED",
                )
                for name, method in (
                    ("tts.v1.SpeechService", "SynthesizeStream"),
                    ("tts.v1.SpeechService", "StreamingSynthesize"),
                    ("tts.v1.TextService", "GenerateStream"),
                )
            )
            assert cancelled > 50
            assert not served.metric("sonant_errors_total", grpc_code="INTERNAL", reason="INTERNAL")

    run(scenario())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_connection_breaks_mid_stream(service: Service) -> None:
    """The client's channel closes while it has several streams."""

    async def scenario() -> None:
        async with checked_server(service) as served:
            other = grpc.aio.insecure_channel(
                served.server.address, (("grpc.use_local_subchannel_pool", 1),)
            )
            doomed = Serving(served.server, other)
            calls = [
                doomed.speech.SynthesizeStream(stream_request(LONG_TEXT, max_tokens=None))
                for _ in range(4)
            ]
            for call in calls:
                await call.read()
                await call.read()
            await other.close(None)

    run(scenario())


def test_cancelling_frees_the_pages_of_running_requests(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service, SMALL_WINDOW) as served:
            before = await _num_cancelled(service)
            call = served.speech.SynthesizeStream(long_request())
            await call.read()
            await _paused(service)
            call.cancel()
            await wait_until_idle(service.client)
            assert await _num_cancelled(service) == before + 1

    run(scenario())


async def _num_cancelled(service: Service) -> int:
    stats = (await service.client.status()).stats
    assert stats is not None
    return stats.sequences.finished[FinishReason.CANCELLED]


async def _num_running(service: Service) -> int:
    status = await service.client.status()
    return status.running + status.audio_streams


# --- too many


def test_two_hundred_at_once(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(
            service,
            max_concurrent_requests=8,
            max_queued_requests=16,
            max_streams_per_client=1_000,
        ) as served:
            # A connection has at most 128 calls at once.
            other = grpc.aio.insecure_channel(served.server.address, CHANNEL_OPTIONS)
            both = (served, replace(served, channel=other))
            answers = await asyncio.gather(
                *(collect_speech(one) for _ in range(100) for one in both), return_exceptions=True
            )
            await other.close()
            errors = [a for a in answers if isinstance(a, grpc.aio.AioRpcError)]
            spoken = [a for a in answers if not isinstance(a, BaseException)]
            assert len(errors) + len(spoken) == 200
            assert len(spoken) >= 24
            assert len(errors) >= 100
            assert {answer.data for answer in spoken} == {served.expected}
            for error in errors:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert reason_of(error) == "QUEUE_FULL"
                assert retry_s(error) > 0

    run(scenario())


def test_one_client_has_a_limit(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service, max_streams_per_client=3) as served:
            calls = [served.speech.StreamingSynthesize() for _ in range(3)]
            for call in calls:
                await call.write(session_config())
                await call.read()
            error = await error_of(served.speech.SynthesizeStream(stream_request()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "STREAM_LIMIT"
            assert retry_s(error) > 0
            for call in calls:
                call.cancel()

    run(scenario())


# --- too slow


def test_a_deadline_of_50_ms(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service) as served:
            calls: list[Any] = [
                served.speech.SynthesizeStream(
                    stream_request(LONG_TEXT, max_tokens=None), timeout=0.05
                ),
                served.speech.Synthesize(unary_request(LONG_TEXT, max_tokens=None), timeout=0.05),
                served.speech.StreamingSynthesize(timeout=0.05),
            ]
            with suppress(grpc.aio.AioRpcError):  # the deadline may come before this
                await calls[2].write(session_config())
            for call in calls[:2]:
                assert (await error_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            late = await error_of_reading(calls[2])
            assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await wait_until_idle(service.client)

    run(scenario())


def test_a_deadline_in_the_queue(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service, max_concurrent_requests=1) as served:
            holder = served.speech.StreamingSynthesize()
            await holder.write(session_config())
            await holder.read()
            waiting = served.speech.SynthesizeStream(stream_request(), timeout=0.1)
            assert (await error_of(waiting)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            while served.server.host.admission.waiting:
                await asyncio.sleep(0.01)
            holder.cancel()

    run(scenario())


def test_a_call_that_waits_for_a_slot_uses_nothing_of_the_model(service: Service) -> None:
    """It has no answer either, and speaks when it has the slot."""

    async def scenario() -> None:
        async with checked_server(service, max_concurrent_requests=1) as served:
            holder = served.speech.StreamingSynthesize()
            await holder.write(session_config())
            await holder.read()
            waiting: Any = served.speech.SynthesizeStream(stream_request())
            first = asyncio.create_task(anext(aiter(waiting)))
            while not served.server.host.admission.waiting:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert not first.done()
            assert await _num_running(service) == 0
            holder.cancel()
            answers = [await first, *[answer async for answer in waiting]]
            assert grouped(answers).data == served.expected
            assert served.server.host.admission.running == 0

    run(scenario())


def test_a_text_that_cannot_be_read_gives_its_slot_back(service: Service) -> None:
    """Also the place in the queue: it does not wait for a slot before its text is read."""

    async def scenario() -> None:
        async with checked_server(service, max_concurrent_requests=1) as served:
            admission = served.server.host.admission
            whole = pb.SEGMENT_MODE_NONE  # the text is too long for it
            unreadable = stream_request(LONG_TEXT, segment_mode=whole)
            for _ in range(2):
                error = await error_of(served.speech.SynthesizeStream(unreadable))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert (admission.running, admission.waiting) == (0, 0)
            holder = served.speech.StreamingSynthesize()
            await holder.write(session_config())
            await holder.read()
            error = await error_of(served.speech.SynthesizeStream(unreadable))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (admission.running, admission.waiting) == (1, 0)
            holder.cancel()

    run(scenario())


def long_request() -> pb.SynthesizeStreamRequest:
    """Return a request of 18 s: more than the engine generates ahead, so its pages stay in use."""
    loud = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_F32LE, sample_rate_hertz=48_000)
    sampling = common_pb2.SamplingParams(seed=7, min_tokens=450)
    return stream_request("and on it went " * 12, sampling=sampling, audio_format=loud, seed=None)


def test_a_reader_that_stops_reading_is_paused(service: Service) -> None:
    """It is paused when its window is full; another stream continues."""

    async def scenario() -> None:
        async with checked_server(service, SMALL_WINDOW, slow_reader_timeout_s=600) as served:
            stuck = served.speech.SynthesizeStream(long_request())
            first = await stuck.read()
            assert first.WhichOneof("event") == "started"
            await _paused(service)
            assert (await collect_speech(served)).data == served.expected
            await _paused(service)  # the buffers on the way may have filled a little more
            assert not stuck.done()
            stuck.cancel()

    run(scenario())


def test_a_reader_that_stops_reading_is_cancelled(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service, SMALL_WINDOW, slow_reader_timeout_s=1) as served:
            stuck = served.speech.SynthesizeStream(long_request())
            first = await stuck.read()
            assert first.WhichOneof("event") == "started"
            while not await _num_running(service):
                await asyncio.sleep(0.01)
            await wait_until_idle(service.client)
            given_up = await error_of_reading(stuck)
            assert given_up.code() is grpc.StatusCode.ABORTED
            assert reason_of(given_up) == "SLOW_READER"

    run(scenario())


async def _paused(service: Service) -> int:
    """Wait until nothing changes any more for the only request; the pages it holds."""
    pages, steady = 0, 0
    for _ in range(6000):
        now = (await service.client.status()).used_pages
        steady = steady + 1 if now == pages and now else 0
        pages = now
        if steady >= 40:
            return pages
        await asyncio.sleep(0.01)
    raise AssertionError("it was never paused")
