"""Chats over HTTP whose text is spoken while it is generated: OpenAI's `modalities` and `audio`."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile

from tests.fakes import wait_until_idle
from tests.tts.http.http_serving import HttpServing, error_of, post, raw_connection, run_with_http
from tests.tts.http.text_requests import CHAT, USER, chat, choice_of, chunks_of, loaded
from tests.tts.serving import grouped, run_conversation, say, session_config
from tts.factory import Service
from tts.v1 import speech_pb2

STORY = "The sun went down behind the old hill, and all was still. Then came the rain, at last."
LONG_STORY = " ".join([STORY] * 3)
SPOKEN = ["text", "audio"]


@pytest.fixture(scope="module")
def speaking(tiny_checkpoint: Path) -> Iterator[Service]:
    yield from loaded(tiny_checkpoint, sampling={"enable_structured_output": True})


def telling(text: str) -> dict[str, Any]:
    """Return fields of a request whose text is known: random weights write no words."""
    wanted = {"type": "json_schema", "json_schema": {"name": "story", "schema": {"const": text}}}
    return {"response_format": wanted, "max_tokens": len(text) + 10}


def voice(**values: Any) -> dict[str, Any]:
    return {"voice": "owen", "format": "pcm16", "sample_rate": 16_000, "seed": 7, **values}


async def spoken(served: HttpServing, text: str = STORY, **values: Any) -> httpx.Response:
    audio = values.pop("audio", voice())
    return await chat(served, **{**telling(text), "modalities": SPOKEN, "audio": audio, **values})


async def expected_pcm(served: HttpServing, text: str) -> bytes:
    """Return the audio of the text in a session that speaks clauses."""
    clause = speech_pb2.SEGMENT_MODE_CLAUSE
    owen = speech_pb2.VoiceSelection(name="owen")
    first = session_config(voice=owen, segment_mode=clause, max_tokens=None)
    return grouped(await run_conversation(served.grpc, first, say(text))).data


def audio_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the audio fields of chunks; all have one id."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    found = [delta["audio"] for delta in deltas if "audio" in delta]
    assert len({audio.pop("id") for audio in found}) == 1
    return found


def test_a_stream_has_the_text_and_its_audio(speaking: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await spoken(served, stream=True, stream_options={"include_usage": True})
        *chunks, last, usage = chunks_of(response)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
        audio = audio_of(chunks)
        text = "".join(part.get("transcript", "") for part in audio)
        assert json.loads(text) == STORY
        pcm = b"".join(b64decode(part.get("data", "")) for part in audio)
        assert pcm == await expected_pcm(served, text)
        assert "expires_at" in audio[-1]
        (choice,) = last["choices"]
        assert (choice["delta"], choice["finish_reason"]) == ({}, "stop")
        details = usage["usage"]["completion_tokens_details"]
        assert details["audio_tokens"] > 0
        assert usage["usage"]["completion_tokens"] == sum(details.values())

    run_with_http(speaking, ask)


def test_audio_begins_before_the_text_has_ended(speaking: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await spoken(served, LONG_STORY, stream=True)
        audio = audio_of(chunks_of(response))
        first = next(index for index, part in enumerate(audio) if "data" in part)
        before = "".join(part["transcript"] for part in audio[:first])
        assert len(before) < len(LONG_STORY) / 2

    run_with_http(speaking, ask)


def test_a_whole_response_has_the_audio_of_the_stream(speaking: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await spoken(served)
        choice = choice_of(response)
        message, audio = choice["message"], choice["message"].pop("audio")
        assert message == {"role": "assistant", "content": None, "refusal": None}
        assert json.loads(audio["transcript"]) == STORY
        assert audio["id"] == f"audio_{response.headers['x-request-id']}"
        assert audio["expires_at"] == response.json()["created"]
        assert b64decode(audio["data"]) == await expected_pcm(served, audio["transcript"])

    run_with_http(speaking, ask)


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus"])
def test_formats(speaking: Service, name: str) -> None:
    async def ask(served: HttpServing) -> None:
        message = choice_of(await spoken(served, audio={"format": name}))["message"]
        samples, rate = soundfile.read(BytesIO(b64decode(message["audio"]["data"])))
        assert len(samples) > rate / 2

    run_with_http(speaking, ask)


def test_times_of_segments(speaking: Service) -> None:
    async def ask(served: HttpServing) -> None:
        timed = voice(timestamps="segment")
        whole = choice_of(await spoken(served, audio=timed))["message"]["audio"]
        assert len(whole["segments"]) > 1
        streamed = audio_of(chunks_of(await spoken(served, audio=timed, stream=True)))
        assert [s for part in streamed for s in part.get("segments", ())] == whole["segments"]

    run_with_http(speaking, ask)


def test_audio_that_is_cut_has_the_reason_length(speaking: Service) -> None:
    async def ask(served: HttpServing) -> None:
        choice = choice_of(await spoken(served, LONG_STORY))
        assert choice["finish_reason"] == "length"
        assert json.loads(choice["message"]["audio"]["transcript"]) == LONG_STORY

    run_with_http(speaking, ask, max_message_bytes=100_000)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_ends_both_halves(speaking: Service, stream: bool) -> None:
    async def ask(served: HttpServing) -> None:
        values = {"modalities": SPOKEN, "max_tokens": 900, "min_tokens": 900, "ignore_eos": True}
        body = {"messages": USER, "stream": stream, **values}
        async with raw_connection(served) as connection:
            await connection.send(post(json.dumps(body).encode(), CHAT))
            while not (await speaking.client.status()).running:
                await asyncio.sleep(0.005)
        await wait_until_idle(speaking.client)
        assert await served.grpc.server.host.calls.wait_idle(60)

    run_with_http(speaking, ask)


def test_an_error_of_either_half_reaches_the_client(speaking: Service) -> None:
    loop = {"$ref": "#/properties/again"}
    schema = {"type": "object", "properties": {"again": loop}, "required": ["again"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    async def ask(served: HttpServing) -> None:
        response = await chat(served, modalities=SPOKEN, response_format=wanted)
        assert error_of(response)["param"] == "response_format"
        streamed = await chat(served, modalities=SPOKEN, response_format=wanted, stream=True)
        last = streamed.text.rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["param"] == "response_format"
        assert "[DONE]" not in streamed.text
        await wait_until_idle(speaking.client)

    run_with_http(speaking, ask)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"modalities": []}, "modalities"),
        ({"modalities": ["video"]}, "modalities"),
        ({"audio": voice()}, "audio"),
        ({"modalities": SPOKEN, "audio": voice(format="aac")}, "audio"),
        ({"modalities": SPOKEN, "audio": voice(speed=9)}, "audio.speed"),
        ({"modalities": SPOKEN, "audio": voice(sample_rate=1)}, "audio.sample_rate"),
        ({"modalities": SPOKEN, "audio": voice(ref_audio="?")}, "audio.ref_audio"),
        ({"modalities": SPOKEN, "audio": voice(), "temperature": 3}, "temperature"),
    ],
)
def test_wrong_fields_are_named_as_in_json(
    speaking: Service, values: dict[str, Any], param: str
) -> None:
    async def ask(served: HttpServing) -> None:
        for stream in (False, True):
            response = await chat(served, stream=stream, **values)
            assert response.status_code == 400
            error = error_of(response)
            assert error["param"] == param
            assert error["message"].startswith(param)

    run_with_http(speaking, ask)


def test_names_without_an_effect_are_named(speaking: Service) -> None:
    async def ask(served: HttpServing) -> None:
        audio = voice(instructions="Whisper.", other=1)
        response = await spoken(served, audio=audio, user="ann")
        assert response.headers["x-ignored-fields"] == "user, instructions, other"

    run_with_http(speaking, ask)


def test_an_unknown_voice_is_not_found(speaking: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await chat(served, modalities=SPOKEN, audio={"voice": "unknown"})
        assert response.status_code == 404
        assert error_of(response)["code"] == "voice_not_found"

    run_with_http(speaking, ask)


def test_a_text_model_does_not_speak(text_checkpoint: Path) -> None:
    async def ask(served: HttpServing) -> None:
        error = error_of(await chat(served, modalities=SPOKEN))
        assert error["param"] == "modalities"
        assert "no voice" in error["message"]

    for texts in loaded(text_checkpoint):
        run_with_http(texts, ask)
