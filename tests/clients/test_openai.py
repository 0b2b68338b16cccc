"""OpenAI's Python package against the HTTP server: speech, streams, events, errors, retries."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.tts.engine.jobs import in_slot
from tests.tts.http.http_serving import HttpServing, http_serving
from tests.tts.serving import TEXT, hum, run, wav
from tts.factory import Service

SPEECH: dict[str, Any] = {"model": "tts-1", "voice": "alloy", "input": TEXT}
PCM: dict[str, Any] = {"response_format": "pcm", "extra_body": {"seed": 7}}


@asynccontextmanager
async def client_of(served: HttpServing, **values: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    options = {"api_key": "secret", "max_retries": 0, **values}
    async with openai.AsyncOpenAI(base_url=f"http://{served.http.address}/v1", **options) as client:
        yield client


def run_with_client(service: Service, ask: Any, **values: Any) -> None:
    async def scenario() -> None:
        async with http_serving(service, **values) as served, client_of(served) as client:
            await ask(served, client)

    run(scenario())


def test_speech_whole_and_streamed(service: Service) -> None:
    async def ask(served: HttpServing, client: openai.AsyncOpenAI) -> None:
        whole = (await client.audio.speech.create(**SPEECH, **PCM)).content
        assert whole == (await served.speak()).content
        streaming = client.audio.speech.with_streaming_response.create(**SPEECH, **PCM)
        async with streaming as response:
            parts = [part async for part in response.iter_bytes()]
        assert b"".join(parts) == whole
        mp3 = await client.audio.speech.create(**SPEECH, speed=1.5, instructions="Be glad.")
        assert mp3.content.startswith(b"\xff")
        assert mp3.response.headers["x-ignored-fields"] == "instructions"

    run_with_client(service, ask)


def test_events(service: Service) -> None:
    async def ask(served: HttpServing, client: openai.AsyncOpenAI) -> None:
        streaming = client.audio.speech.with_streaming_response.create(
            **SPEECH, **PCM, stream_format="sse"
        )
        async with streaming as response:
            lines = [line async for line in response.iter_lines() if line]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert events[-1]["type"] == "speech.audio.done"
        deltas = [e["audio"] for e in events if e["type"] == "speech.audio.delta"]
        audio = b"".join(map(base64.b64decode, deltas))
        assert audio == (await served.speak()).content

    run_with_client(service, ask)


def test_models(service: Service) -> None:
    async def ask(served: HttpServing, client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == [service.model]
        assert (await client.models.retrieve(service.model)).owned_by == "sonant"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")

    run_with_client(service, ask)


def test_errors_are_those_of_the_package(service: Service) -> None:
    async def ask(served: HttpServing, client: openai.AsyncOpenAI) -> None:
        async def fails(kind: type[openai.APIStatusError], **values: Any) -> openai.APIStatusError:
            with pytest.raises(kind) as caught:
                await client.audio.speech.create(**{**SPEECH, **values})
            return caught.value

        wrong = await fails(openai.BadRequestError, speed=9)
        assert (wrong.param, wrong.code, wrong.type) == (
            "speed",
            "invalid_request",
            "invalid_request_error",
        )
        assert (await fails(openai.NotFoundError, voice="none")).code == "voice_not_found"
        assert (await fails(openai.NotFoundError, model="gpt-9")).param == "model"
        served.grpc.server.host.drain()
        assert (await fails(openai.InternalServerError)).status_code == 503

    run_with_client(service, ask)


def test_tokens(service: Service) -> None:
    async def ask(served: HttpServing, client: openai.AsyncOpenAI) -> None:
        assert (await client.audio.speech.create(**SPEECH)).content
        async with client_of(served, api_key="wrong") as other:
            with pytest.raises(openai.AuthenticationError):
                await other.audio.speech.create(**SPEECH)
        clip = {"audio_sample": base64.b64encode(wav(hum(1.2))).decode(), "name": "mine"}
        with pytest.raises(openai.PermissionDeniedError):
            await client.post("/audio/voices", cast_to=object, body=clip)

    run_with_client(service, ask, auth_token="secret", admin_token="other")


def test_a_full_queue_is_retried_by_the_package(service: Service) -> None:
    async def ask(served: HttpServing, client: openai.AsyncOpenAI) -> None:
        labels = {"grpc_code": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL"}
        async with client_of(served, max_retries=20) as patient:
            async with in_slot(served.grpc.server.host.admission, "other"):
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.audio.speech.create(**SPEECH)
                assert caught.value.code == "queue_full"
                waiting = asyncio.create_task(patient.audio.speech.create(**SPEECH))
                while served.grpc.metric("sonant_errors_total", **labels) < 2:
                    await asyncio.sleep(0.01)
            assert (await waiting).content

    run_with_client(service, ask, max_concurrent_requests=1, max_queued_requests=0)
