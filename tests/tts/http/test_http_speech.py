"""POST /v1/audio/speech: the same samples as gRPC, formats, events, JSON, and refused requests."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests.tts.http.http_serving import (
    SPEECH,
    HttpServing,
    error_of,
    events_of,
    run_with_http,
)
from tests.tts.serving import TEXT, collect_speech, hum, run, wav
from tts.factory import Service
from tts.http.speech_body import OPENAI_VOICES, SpeechBody, to_request
from tts.v1 import speech_pb2 as pb


async def expected_pcm(served: HttpServing, rate: int = 24_000, **values: Any) -> bytes:
    """Return the samples that gRPC sends for the text and the seed of `speech()`."""
    audio_format = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_S16LE, sample_rate_hertz=rate)
    values = {"max_tokens": None, "audio_format": audio_format, **values}
    return (await collect_speech(served.grpc, **values)).data


def test_the_same_seed_gives_the_samples_of_grpc(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak()
        assert response.status_code == 200
        assert response.headers["content-type"] == "audio/pcm"
        assert response.headers["transfer-encoding"] == "chunked"
        assert response.content == await expected_pcm(served)
        native = await served.speak(sample_rate=16_000)
        assert native.content == await expected_pcm(served, 16_000)

    run_with_http(service, ask)


@pytest.mark.parametrize(
    ("name", "media_type", "container"),
    [
        ("mp3", "audio/mpeg", "MP3"),
        ("opus", "audio/ogg", "OGG"),
        ("flac", "audio/flac", "FLAC"),
        ("wav", "audio/wav", "WAV"),
    ],
)
def test_formats(service: Service, name: str, media_type: str, container: str) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak(response_format=name)
        assert response.headers["content-type"] == media_type
        with soundfile.SoundFile(BytesIO(response.content)) as file:
            assert file.format == container
            assert file.read(1000).any()

    run_with_http(service, ask)


def test_the_default_is_mp3_of_the_default_voice(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.client.post(SPEECH, json={"input": TEXT, "voice": None})
        assert response.headers["content-type"] == "audio/mpeg"
        assert response.content

    run_with_http(service, ask)


def test_audio_arrives_while_it_is_generated(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with served.client.stream("POST", SPEECH, json=long_speech()) as response:
            parts = response.aiter_raw()
            assert await anext(parts)
            assert served.num_open == 1, "the call still runs"
            async for _ in parts:
                pass

    run_with_http(service, ask)


def long_speech() -> dict[str, Any]:
    return {"input": "and on it went " * 60, "response_format": "pcm", "sample_rate": 48_000}


def test_markup(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        plain = await served.speak(input="Hello. ", sample_rate=16_000)
        for kind, text in (
            ("ssml", "<speak>Hello. <break time='1s'/></speak>"),
            ("tags", "Hello. [pause:1s]"),
        ):
            marked = await served.speak(input=text, markup=kind, sample_rate=16_000)
            assert marked.content == plain.content + bytes(2 * 16_000)
        wrong = await served.speak(input="<speak><b/></speak>", markup="ssml")
        assert wrong.status_code == 400
        error = wrong.json()["error"]
        assert error["param"] == "input"
        assert "line 1, column 8: <b> is no element of SSML" in error["message"]
        unknown = await served.speak(markup="html")
        assert unknown.json()["error"]["param"] == "markup"

    run_with_http(service, ask)


def test_voices_by_name_by_id_and_by_openais_names(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        ours = [
            await expected_pcm(served, voice=_voice(name)) for name in ("hazel", "owen", "edith")
        ]
        assert len(set(ours)) == 3
        assert (await served.speak(voice="owen")).content == ours[1]
        assert (await served.speak(voice={"id": "owen"})).content == ours[1]
        for index, name in enumerate(OPENAI_VOICES[:4]):
            assert (await served.speak(voice=name)).content == ours[index % 3], name
        for model in ("tts-1", "gpt-4o-mini-tts", service.model):
            assert (await served.speak(model=model)).content == ours[0]

    run_with_http(service, ask)


def _voice(name: str) -> pb.VoiceSelection:
    return pb.VoiceSelection(name=name)


def test_speed_language_and_chunk_sizes_arrive(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        plain = await expected_pcm(served)
        faster = (await served.speak(speed=2.0)).content
        assert faster == await expected_pcm(served, speaking_rate=2.0)
        assert len(faster) < 0.6 * len(plain)
        sizes = (await served.speak(chunk_size=[3, 5])).content
        assert sizes == await expected_pcm(served, chunking=pb.ChunkingConfig(chunk_sizes=[3, 5]))
        assert (await served.speak(language="en")).content == plain

    run_with_http(service, ask)


def test_a_recording_is_imitated(service: Service) -> None:
    clip = wav(hum(1.5))

    async def ask(served: HttpServing) -> None:
        prompt = pb.VoicePrompt(audio=clip, transcript="hello there")
        expected = await expected_pcm(served, voice=pb.VoiceSelection(prompt=prompt))
        audio = base64.b64encode(clip).decode()
        spoken = await served.speak(ref_audio=audio, ref_text="hello there", voice="owen")
        assert spoken.content == expected

    run_with_http(service, ask)


def test_ignored_fields_are_named(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak(instructions="Be glad.", **{"x y": 1, "other": None, "z": 2})
        assert response.headers["x-ignored-fields"] == "instructions, z"
        assert "x-ignored-fields" not in (await served.speak()).headers

    run_with_http(service, ask)


# --- events and JSON


def test_server_sent_events(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak(stream_format="sse", timestamps="segment")
        *events, done = events_of(response)
        kinds = [event["type"] for event in events]
        assert kinds[0] == "speech.audio.delta"
        deltas = [base64.b64decode(e["audio"]) for e in events if "audio" in e]
        assert b"".join(deltas) == await expected_pcm(served)
        segments = [e for e in events if e["type"] == "speech.audio.segment"]
        assert TEXT[segments[0]["text_start"] : segments[0]["text_end"]].strip() == "Hello there."
        assert done["type"] == "speech.audio.done"
        usage = done["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
        assert done["finish_reason"] in ("stop", "length")

    run_with_http(service, ask)


def test_whole_speech_in_json(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        values = {"stream_format": "json", "timestamps": "segment", "response_format": "wav"}
        found = (await served.speak(**values)).json()
        samples, rate = soundfile.read(BytesIO(base64.b64decode(found["audio"])))
        assert rate == found["sample_rate"] == 16_000
        assert found["seed"] == 7
        assert found["media_type"] == "audio/wav"
        assert found["segments"][-1]["end"] == pytest.approx(len(samples) / rate, abs=0.1)
        assert found["usage"]["audio_seconds"] == pytest.approx(len(samples) / rate, abs=1e-3)

    run_with_http(service, ask)


def test_marks_are_events_and_in_json(service: Service) -> None:
    source = "<speak><s>Hi.</s><break time='1s'/><mark name='end'/></speak>"
    values = {"input": source, "markup": "ssml", "sample_rate": 16_000}

    async def ask(served: HttpServing) -> None:
        found = (await served.speak(stream_format="json", **values)).json()
        end_s = len(base64.b64decode(found["audio"])) / 2 / 16_000
        sentence, end = found["marks"]
        assert sentence == {
            "kind": "sentence",
            "name": "",
            "time": 0.0,
            "text_start": source.index("Hi."),
            "text_end": source.index("</s>"),
        }
        assert (end["kind"], end["name"]) == ("mark", "end")
        assert end["time"] == pytest.approx(end_s, abs=1e-6)
        events = events_of(await served.speak(stream_format="sse", **values))
        marks = [event for event in events if event["type"] == "speech.audio.mark"]
        assert marks == [{"type": "speech.audio.mark", **mark} for mark in found["marks"]]
        plain = await served.speak(**values)
        assert plain.content == base64.b64decode(found["audio"])

    run_with_http(service, ask)


def test_a_dialogue(service: Service) -> None:
    hello, oh = {"voice": "hazel", "text": "Hi."}, {"voice": {"id": "owen"}, "text": "Oh."}
    turns, rate = [hello, oh, {"text": "Ah."}], 16_000
    values = {"turns": turns, "voice": "edith", "response_format": "pcm", "sample_rate": rate}

    async def ask(served: HttpServing) -> None:
        async def said(**more: Any) -> dict[str, Any]:
            body = {"seed": 7, "stream_format": "json", **values, **more}
            found: dict[str, Any] = (await served.client.post(SPEECH, json=body)).json()
            return found

        usual, pausing = await said(), await said(pause=1.0)
        assert [mark["name"] for mark in usual["marks"]] == ["hazel", "owen", "edith"]
        assert {mark["kind"] for mark in usual["marks"]} == {"turn"}
        more = len(base64.b64decode(pausing["audio"])) - len(base64.b64decode(usual["audio"]))
        assert more == 2 * round(0.6 * rate) * 2
        clip = base64.b64encode(wav(hum(1.5))).decode()
        cloned = await said(turns=[{"ref_audio": clip, "ref_text": "hello", "text": "Hi."}, oh])
        assert [mark["name"] for mark in cloned["marks"]] == ["prompt", "owen"]

    run_with_http(service, ask)


TURN = {"voice": "hazel", "text": "Hi."}


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "input"),
        ({"pause": 1.0, "input": "Hi."}, "pause"),
        ({"turns": [TURN], "input": "Hi."}, "input"),
        ({"turns": [TURN], "markup": "tags"}, "markup"),
        ({"turns": []}, "turns"),
        ({"turns": [TURN, {"text": ""}]}, "turns[1]"),
        ({"turns": [TURN] * 1001}, "turns"),
        ({"turns": [{"voice": "hazel"}]}, "turns"),
        ({"turns": ["Hi."]}, "turns"),
        ({"turns": [{"text": "Hi.", "voice": "../x"}]}, "turns[0]"),
        ({"turns": [{"text": "Hi.", "ref_audio": "no base64!"}]}, "turns[0].ref_audio"),
        ({"turns": [{"text": "Hi.", "ref_text": "alone"}]}, "turns[0].ref_text"),
        ({"turns": [TURN], "pause": 11}, "pause"),
        ({"turns": [TURN], "pause": 1e300}, "pause"),
        ({"turns": [TURN], "pause": "long"}, "pause"),
    ],
)
def test_wrong_dialogues_are_named_as_in_json(
    service: Service, values: dict[str, Any], param: str
) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.client.post(SPEECH, json=values)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")

    run_with_http(service, ask)


def test_the_check_is_on_request(service: Service) -> None:
    """With these weights and this seed the first attempt does not end."""

    async def ask(served: HttpServing) -> None:
        async def retried(**values: Any) -> int:
            body = {"input": "No.", "stream_format": "json", **values}
            return (await served.speak(**body)).json()["retried_segments"]

        assert await retried(check=True) == 1
        assert await retried(check=False) == await retried(check=None) == await retried() == 0

    run_with_http(service, ask)


@pytest.mark.parametrize(
    ("given", "check"),
    [
        ({}, pb.SPEECH_CHECK_UNSPECIFIED),
        ({"check": None}, pb.SPEECH_CHECK_UNSPECIFIED),
        ({"check": False}, pb.SPEECH_CHECK_OFF),
        ({"check": True}, pb.SPEECH_CHECK_ON),
    ],
)
def test_the_check_can_be_left_to_the_server(
    service: Service, given: dict[str, Any], check: pb.SpeechCheck
) -> None:
    assert service.synthesizer is not None
    body = SpeechBody.model_validate({"input": "No.", **given})
    assert to_request(body, service.synthesizer).config.speech_check == check


# --- refused requests


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": "x" * 10_001}, "input"),
        ({"input": "a\x00b"}, "input"),
        ({"voice": "../etc"}, "voice"),
        ({"voice": 7}, "voice"),
        ({"voice": {"name": "hazel"}}, "voice"),
        ({"response_format": "aac"}, "response_format"),
        ({"response_format": "opus", "sample_rate": 22_050}, "response_format"),
        ({"speed": 0.1}, "speed"),
        ({"speed": 1e308}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"stream_format": "ndjson"}, "stream_format"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"language": "?"}, "language"),
        ({"language": "de", "voice": "hazel"}, "language"),
        ({"timestamps": "word"}, "timestamps"),
        ({"timestamps": "all", "stream_format": "sse"}, "timestamps"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": [1] * 65}, "chunk_size"),
        ({"chunk_size": [1, "2"]}, "chunk_size"),
        ({"sample_rate": 1}, "sample_rate"),
        ({"sample_rate": 2**31}, "sample_rate"),
        ({"ref_audio": "no base64!"}, "ref_audio"),
        ({"ref_audio": base64.b64encode(b"no audio").decode(), "ref_text": "a"}, "ref_audio"),
        ({"ref_text": "alone"}, "ref_text"),
        ({"check": "often"}, "check"),
    ],
)
def test_wrong_fields_are_named_as_in_json(
    service: Service, values: dict[str, Any], param: str
) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak(**values)
        error = error_of(response)
        assert response.status_code == 400
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"].startswith(param)
        assert "config." not in error["message"]

    run_with_http(service, ask)


@pytest.mark.parametrize(
    ("values", "param"), [({"voice": "unknown"}, "voice"), ({"model": "gpt-9"}, "model")]
)
def test_unknown_names_are_not_found(service: Service, values: dict[str, str], param: str) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak(**values)
        assert response.status_code == 404
        assert error_of(response)["param"] == param
        assert error_of(response)["code"] == f"{param}_not_found"

    run_with_http(service, ask)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"hello",
        b'{"input": "hello"',
        b'{"input": "\xff\xfe"}',
        b'{"input": "\\ud800"}',
        b'{"input": "hello", "speed": NaN}',
        b'{"input": ' + b"[" * 10_000,
        b"[" + b"[]," * 200_000 + b"[]]",
    ],
)
def test_broken_json_is_refused(service: Service, body: bytes) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.client.post(SPEECH, content=body)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_request"

    run_with_http(service, ask)


def test_word_times_that_the_model_lacks(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak(timestamps="word", stream_format="sse")
        assert response.status_code == 400
        assert error_of(response)["code"] == "word_timestamps_unavailable"

    run_with_http(service, ask)


def test_a_text_only_model_does_not_speak(text_checkpoint: Path) -> None:
    from tests.fakes import tiny_config
    from tests.tts.http.http_serving import http_serving
    from tts.factory import create_service

    async def scenario() -> None:
        service = create_service(tiny_config(text_checkpoint))
        async with http_serving(service) as served:
            response = await served.speak()
            assert response.status_code == 400
            assert error_of(response)["code"] == "speech_unavailable"
            assert (await served.client.get("/v1/models")).status_code == 200
        await service.client.close()

    run(scenario())


def test_json_of_an_error_holds_no_text_of_the_request(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.speak(speed="sesame")
        assert "sesame" not in json.dumps(response.json())

    run_with_http(service, ask)
