"""GenerateSpeech over a real connection: a text that is spoken while it is generated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from decoder import AudioEncoding
from tests.fakes import StepLog, tiny_config, wait_until_idle
from tests.tts.server.test_text_service import generation, pieces
from tests.tts.serving import (
    Serving,
    config,
    error_of,
    error_of_reading,
    fields_of,
    grouped,
    reason_of,
    run_conversation,
    run_with_server,
    say,
    session_config,
)
from tts.engine.client import EngineInfo
from tts.engine.local_client import LocalEngineClient
from tts.factory import Service, connect_service, create_service
from tts.v1 import speech_pb2
from tts.v1 import text_pb2 as pb

STORY = "The sun went down behind the old hill, and all was still. Then came the rain, at last."
LONG_STORY = " ".join([STORY] * 3)
ENDLESS = generation(max_tokens=900, min_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def speaking(tiny_checkpoint: Path) -> Iterator[Service]:
    """A model that generates text and speaks it, with structured output."""
    service = create_service(
        tiny_config(tiny_checkpoint, sampling={"enable_structured_output": True})
    )
    yield service
    asyncio.run(wait_until_idle(service.client))
    asyncio.run(service.client.close())


def telling(text: str) -> dict[str, Any]:
    """Return fields of a request whose text is known: random weights write no words."""
    schema = json.dumps({"const": text})
    return generation(json_schema=schema, max_tokens=len(text) + 10)


def spoken(fields: dict[str, Any], **synthesis: Any) -> pb.GenerateSpeechRequest:
    return pb.GenerateSpeechRequest(**fields, synthesis=config(**{"max_tokens": None, **synthesis}))


async def collect(served: Serving, request: pb.GenerateSpeechRequest) -> list[Any]:
    return [response async for response in served.text.GenerateSpeech(request)]


def text_events(responses: list[Any]) -> list[pb.GenerateStreamResponse]:
    return [r.text for r in responses if r.WhichOneof("event") == "text"]


def speech_events(responses: list[Any]) -> list[speech_pb2.SynthesizeStreamResponse]:
    return [r.speech for r in responses if r.WhichOneof("event") == "speech"]


def test_both_halves_are_those_of_their_own_calls(speaking: Service) -> None:
    """The text is that of GenerateStream, its audio that of StreamingSynthesize by clauses."""

    async def ask(served: Serving) -> None:
        responses = await collect(served, spoken(telling(STORY)))
        written, heard = text_events(responses), grouped(speech_events(responses))
        text = "".join(event.delta.text for event in written)
        assert json.loads(text) == STORY
        call = served.text.GenerateStream(pb.GenerateStreamRequest(**telling(STORY)))
        alone = [response async for response in call]
        assert [e.WhichOneof("event") for e in written][-1] == "done"
        assert written[0].started.seed == alone[0].started.seed
        assert text == "".join(event.delta.text for event in alone)
        assert written[-1].done.usage.output_tokens == alone[-1].done.usage.output_tokens
        by_clause = session_config(segment_mode=speech_pb2.SEGMENT_MODE_CLAUSE, max_tokens=None)
        expected = grouped(await run_conversation(served, by_clause, say(text)))
        assert heard.data == expected.data
        assert heard.done.usage.input_characters == len(text)
        assert heard.audio[-1].text_end == len(text)
        assert heard.audio[-1].segment_index > 1
        assert heard.started.request_id == written[0].started.request_id

    run_with_server(speaking, ask)


def test_audio_begins_before_the_text_has_ended(speaking: Service) -> None:
    async def ask(served: Serving) -> None:
        responses = await collect(served, spoken(telling(LONG_STORY)))
        kinds = [r.text.WhichOneof("event") or r.speech.WhichOneof("event") for r in responses]
        first_audio = kinds.index("audio")
        before = "".join(r.text.delta.text for r in responses[:first_audio])
        assert len(before) < len(LONG_STORY) / 2
        assert kinds.count("done") == 2
        assert kinds[-1] == "done"
        assert responses[-1].WhichOneof("event") == "speech"
        assert served.metric("sonant_time_to_first_audio_seconds_count") == 1

    run_with_server(speaking, ask)


def test_a_segment_mode_is_kept(speaking: Service) -> None:
    async def ask(served: Serving) -> None:
        request = spoken(telling(STORY), segment_mode=speech_pb2.SEGMENT_MODE_SENTENCE)
        heard = grouped(speech_events(await collect(served, request)))
        assert heard.audio[-1].segment_index == 1

    run_with_server(speaking, ask)


def test_text_and_its_speech_share_batches(
    own_client: Callable[..., LocalEngineClient], tiny_checkpoint: Path
) -> None:
    log = StepLog()
    client = own_client(step_log=log)
    info = EngineInfo(client.codec, 1024, AudioEncoding.PCM_S16LE)
    service = connect_service(tiny_config(tiny_checkpoint), None, client, info)

    async def ask(served: Serving) -> None:
        await collect(served, spoken(ENDLESS))
        assert any(len(rows) == 2 for rows in log.steps)
        await wait_until_idle(client)

    run_with_server(service, ask)


def test_tokens_of_both_halves_are_counted(speaking: Service) -> None:
    async def ask(served: Serving) -> None:
        responses = await collect(served, spoken(telling(STORY)))
        dones = text_events(responses)[-1].done, speech_events(responses)[-1].done
        for name in ("prompt_tokens", "output_tokens"):
            used = sum(getattr(done.usage, name) for done in dones)
            assert served.metric(f"sonant_{name}_total") == used

    run_with_server(speaking, ask)


def test_a_text_without_words_has_no_audio(speaking: Service) -> None:
    async def ask(served: Serving) -> None:
        heard = grouped(speech_events(await collect(served, spoken(telling("")))))
        assert heard.audio == ()

    run_with_server(speaking, ask)


def test_speech_that_reaches_its_limit_lets_the_text_end(speaking: Service) -> None:
    async def ask(served: Serving) -> None:
        request = spoken(telling(LONG_STORY))
        request.synthesis.max_audio_duration.FromMilliseconds(500)
        responses = await collect(served, request)
        text = "".join(event.delta.text for event in text_events(responses))
        assert json.loads(text) == LONG_STORY
        assert text_events(responses)[-1].WhichOneof("event") == "done"
        assert grouped(speech_events(responses)).done.finish_reason == 2

    run_with_server(speaking, ask)


@pytest.mark.parametrize("awaited", ["text", "audio"])
def test_a_cancellation_ends_both_halves(speaking: Service, awaited: str) -> None:
    async def ask(served: Serving) -> None:
        fields = telling(LONG_STORY) if awaited == "audio" else ENDLESS
        call = served.text.GenerateSpeech(spoken(fields))
        while (response := await call.read()).speech.WhichOneof("event") != "audio":
            if awaited == "text" and response.text.WhichOneof("event") == "delta":
                break
        call.cancel()
        await wait_until_idle(speaking.client)
        assert await served.server.host.calls.wait_idle(60)
        method = {"grpc_service": "tts.v1.TextService", "grpc_method": "GenerateSpeech"}
        ended = served.metric("grpc_server_handled_total", **method, grpc_code="CANCELLED")
        assert ended == 1

    run_with_server(speaking, ask)


def test_a_deadline_ends_both_halves(speaking: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.text.GenerateSpeech(spoken(ENDLESS), timeout=0.3)
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until_idle(speaking.client)

    run_with_server(speaking, ask)


def test_an_error_of_the_text_ends_the_speech(speaking: Service) -> None:
    """No document ends with this schema, which is found while the text is generated."""
    loop = {"$ref": "#/properties/again"}
    schema = {"type": "object", "properties": {"again": loop}, "required": ["again"]}
    fields = generation(json_schema=json.dumps(schema))

    async def ask(served: Serving) -> None:
        error = await error_of(served.text.GenerateSpeech(spoken(fields)))
        assert fields_of(error) == ["config.json_schema"]
        await wait_until_idle(speaking.client)

    run_with_server(speaking, ask)


def test_an_error_of_the_speech_ends_the_text(speaking: Service) -> None:
    """The text is longer than one segment, which is found while it is generated."""
    whole = speech_pb2.SEGMENT_MODE_NONE

    async def ask(served: Serving) -> None:
        text = " ".join([LONG_STORY] * 2)
        call = served.text.GenerateSpeech(spoken(telling(text), segment_mode=whole))
        assert (await call.read()).text.started.seed == 5
        error = await error_of_reading(call)
        assert fields_of(error) == ["text"]
        await wait_until_idle(speaking.client)

    run_with_server(speaking, ask)


@pytest.mark.parametrize(
    ("generated", "synthesis", "expected"),
    [
        ({"temperature": 3.0}, {}, "config.sampling"),
        ({"prompt": ""}, {}, "input.prompt"),
        ({}, {"speaking_rate": 9.0}, "synthesis.speaking_rate"),
        ({}, {"priority": 10**6}, "synthesis.priority"),
    ],
)
def test_wrong_fields_are_named(
    speaking: Service, generated: dict[str, Any], synthesis: dict[str, Any], expected: str
) -> None:
    async def ask(served: Serving) -> None:
        request = spoken(generation(**generated), **synthesis)
        (field,) = fields_of(await error_of(served.text.GenerateSpeech(request)))
        assert field.startswith(expected)

    run_with_server(speaking, ask)


def test_unknown_voices_and_models_are_not_found(speaking: Service) -> None:
    async def ask(served: Serving) -> None:
        unknown = speech_pb2.VoiceSelection(name="unknown")
        error = await error_of(served.text.GenerateSpeech(spoken(generation(), voice=unknown)))
        assert reason_of(error) == "VOICE_NOT_FOUND"
        for fields, synthesis in ((generation(model="x"), {}), (generation(), {"model": "x"})):
            error = await error_of(served.text.GenerateSpeech(spoken(fields, **synthesis)))
            assert reason_of(error) == "MODEL_NOT_FOUND"

    run_with_server(speaking, ask)


def test_a_text_model_does_not_speak(text_checkpoint: Path) -> None:
    service = create_service(tiny_config(text_checkpoint))

    async def ask(served: Serving) -> None:
        error = await error_of(served.text.GenerateSpeech(spoken(generation())))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "SPEECH_UNAVAILABLE"
        assert await pieces(served)

    run_with_server(service, ask)
    asyncio.run(service.client.close())
