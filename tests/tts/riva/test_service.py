"""RivaSpeechSynthesis over a real connection, compared with SpeechService."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from shutil import copytree
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.fakes import tiny_config, wait_until_idle
from tests.tts.riva.requests import SERVICE, audio_of, online, request, riva, whole
from tests.tts.serving import (
    SMALL_WINDOW,
    TEXT,
    Serving,
    checked_server,
    collect_speech,
    error_of,
    error_of_reading,
    fields_of,
    flush,
    health,
    hum,
    reason_of,
    run,
    run_conversation,
    run_with_server,
    say,
    serving,
    session_config,
    unary_request,
    wav,
)
from tts.factory import Service, create_service
from tts.riva.service import MAX_PHRASES_AHEAD
from tts.riva.stubs import common_pb2
from tts.riva.stubs import tts_pb2 as pb
from tts.server.call import REQUEST_ID_KEY
from tts.speech import session
from tts.v1 import speech_pb2

LONG_TEXT = " ".join([TEXT] * 40)
Status = health_pb2.HealthCheckResponse


# --- the same audio as SpeechService


@pytest.mark.parametrize(
    ("encoding", "rate", "same"),
    [
        (common_pb2.ENCODING_UNSPECIFIED, 0, speech_pb2.AUDIO_ENCODING_PCM_S16LE),
        (common_pb2.LINEAR_PCM, 44_100, speech_pb2.AUDIO_ENCODING_PCM_S16LE),
        (common_pb2.MULAW, 8_000, speech_pb2.AUDIO_ENCODING_MULAW),
        (common_pb2.ALAW, 8_000, speech_pb2.AUDIO_ENCODING_ALAW),
        (common_pb2.FLAC, 22_050, speech_pb2.AUDIO_ENCODING_FLAC),
        (common_pb2.OGGOPUS, 48_000, speech_pb2.AUDIO_ENCODING_OGG_OPUS),
    ],
)
def test_the_bytes_are_those_of_speech_service(
    service: Service, encoding: int, rate: int, same: int
) -> None:
    """Ogg pages have random stream numbers; their lengths are compared."""
    theirs = {"encoding": encoding, "sample_rate_hz": rate}
    audio_format = speech_pb2.AudioFormat(encoding=same, sample_rate_hertz=rate)  # type: ignore[arg-type]

    async def ask(served: Serving) -> None:
        expected = await served.speech.Synthesize(unary_request(audio_format=audio_format))
        streamed = await collect_speech(served, audio_format=audio_format)
        found = (
            (await whole(served, **theirs)).audio,
            audio_of(await online(served, request(**theirs))),
        )
        wanted = expected.audio, streamed.data
        if encoding == common_pb2.OGGOPUS:
            assert [audio[:4] for audio in found] == [b"OggS"] * 2
            assert [*map(len, found)] == [*map(len, wanted)]
        else:
            assert found == wanted

    run_with_server(service, ask)


def test_clients_without_request_streaming_are_served(service: Service) -> None:
    """Until 2026 SynthesizeOnline took one request; the bytes on the wire are the same."""

    async def ask(served: Serving) -> None:
        stub = served.channel.unary_stream(
            f"/{SERVICE}/SynthesizeOnline",
            request_serializer=pb.SynthesizeSpeechRequest.SerializeToString,
            response_deserializer=pb.SynthesizeSpeechResponse.FromString,
        )
        responses = [response async for response in stub(request())]
        assert len(responses) > 1
        assert audio_of(responses) == (await collect_speech(served)).data

    run_with_server(service, ask)


def test_phrases_are_the_flushed_texts_of_a_conversation(service: Service) -> None:
    phrases = ["Hello there", "", "This is a test. And", "the end"]

    async def ask(served: Serving) -> None:
        messages = [m for phrase in phrases if phrase for m in (say(phrase), flush())]
        expected = await run_conversation(served, session_config(max_tokens=300), *messages)
        requests = [request(phrase, max_tokens=300) for phrase in phrases]
        spoken = audio_of(await online(served, *requests))
        assert spoken == b"".join(response.audio.data for response in expected)
        plain = [pb.SynthesizeSpeechRequest(text=phrase) for phrase in phrases[1:]]
        assert audio_of(await online(served, requests[0], *plain)) == spoken

    run_with_server(service, ask)


def test_a_phrase_is_spoken_before_the_next_one_arrives(service: Service) -> None:
    """Although it ends without a full stop, and after a request without text."""

    async def ask(served: Serving) -> None:
        call = riva(served).SynthesizeOnline()
        await call.write(request("", max_tokens=300))
        await call.write(request("no end in sight", max_tokens=300))
        assert (await call.read()).audio
        await call.write(request("and on", max_tokens=300))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK

    run_with_server(service, ask)


def test_many_phrases_may_be_sent_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read as earlier ones are spoken, so a session's limit is not reached."""
    monkeypatch.setattr(session, "MAX_WAITING_FLUSHES", MAX_PHRASES_AHEAD)
    phrases = [request("Hi", max_tokens=None) for _ in range(2 * MAX_PHRASES_AHEAD + 1)]

    async def ask(served: Serving) -> None:
        one = audio_of(await online(served, phrases[0]))
        assert len(audio_of(await online(served, *phrases))) > len(phrases) * len(one) / 2

    run_with_server(service, ask)


def test_a_long_text_is_one_request(service: Service) -> None:
    """It may have as many characters as in SpeechService.SynthesizeStream."""

    async def ask(served: Serving) -> None:
        text = LONG_TEXT[:70]
        assert (
            audio_of(await online(served, request(text)))
            == (await collect_speech(served, text)).data
        )
        error = await error_of(riva(served).SynthesizeOnline(iter([request("x" * 71)])))
        assert fields_of(error) == ["text"]

    run_with_server(service, ask, max_text_characters=70, max_fragment_characters=9)


# --- fields


def test_a_response_has_the_text_and_the_id(service: Service) -> None:
    mine = common_pb2.RequestId(value="mine")

    async def ask(served: Serving) -> None:
        call = riva(served).Synthesize(request("I have 5 cats.", id=mine))
        response = await call
        assert response.id == mine
        assert dict(await call.trailing_metadata())[REQUEST_ID_KEY] == "mine"
        assert response.meta.text == "I have 5 cats."
        assert response.meta.processed_text == "I have five cats."
        assert not response.meta.words
        assert not (await whole(served)).HasField("id")
        assert {r.id.value for r in await online(served, request(id=mine))} == {"mine"}

    run_with_server(service, ask)


def test_a_voice_is_named_with_and_without_the_model(service: Service) -> None:
    async def ask(served: Serving) -> None:
        voice = speech_pb2.VoiceSelection(name="owen")
        expected = (await collect_speech(served, voice=voice)).data
        assert expected != (await collect_speech(served)).data
        for name in ("owen", f"{service.model}.owen"):
            assert (await whole(served, voice_name=name)).audio == expected
        for name in ("nova", "Magpie-Multilingual.EN-US.Leo", "../x"):
            error = await error_of(riva(served).Synthesize(request(voice_name=name)))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert f"no voice '{name}'; there are: edith, hazel, owen" in error.details()

    run_with_server(service, ask)


def test_voices_without_a_language_speak_any(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Riva's clients send a language in every request."""
    folder = Path(copytree(tiny_checkpoint, tmp_path / "tiny"))
    described = json.loads((folder / "voices.json").read_text())
    for voice in described["voices"]:
        del voice["language_codes"]
    (folder / "voices.json").write_text(json.dumps(described))

    async def scenario() -> None:
        service = create_service(tiny_config(folder))
        async with serving(service) as served:
            expected = (await collect_speech(served)).data
            assert (await whole(served, language_code="fr-FR")).audio == expected
            asked = pb.RivaSynthesisConfigRequest()
            (found,) = (await riva(served).GetRivaSynthesisConfig(asked)).model_config
            assert found.parameters["language_code"] == ""
        await service.client.close()

    run(scenario())


def test_a_language_without_a_voice_is_refused(service: Service) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(riva(served).Synthesize(request(language_code="fr-FR")))
        assert error.code() is grpc.StatusCode.NOT_FOUND

    run_with_server(service, ask)


def test_a_recording_is_imitated(service: Service) -> None:
    """A file and headerless samples are; the name of a voice and the quality have no effect."""
    file = wav(hum(1.2))
    text = "This is what I said."

    async def ask(served: Serving) -> None:
        prompt = speech_pb2.VoicePrompt(audio=file, transcript=text)
        voice = speech_pb2.VoiceSelection(prompt=prompt)
        expected = (await collect_speech(served, voice=voice)).data
        of_file = pb.ZeroShotData(audio_prompt=file, transcript=text, quality=20)
        assert (await whole(served, zero_shot_data=of_file, voice_name="owen")).audio == expected
        raw = pb.ZeroShotData(
            audio_prompt=file[44:],
            transcript=text,
            encoding=common_pb2.LINEAR_PCM,
            sample_rate_hz=16_000,
        )
        assert audio_of(await online(served, request(zero_shot_data=raw))) == expected

    run_with_server(service, ask)


def test_a_respelling_in_the_dictionary(service: Service) -> None:
    async def ask(served: Serving) -> None:
        respelled = (await collect_speech(served, "We speak sequel here.")).data
        spelled = request("We speak SQL here.", custom_dictionary="X  y,SQL  sequel")
        response = await riva(served).Synthesize(spelled)
        assert response.audio == audio_of(await online(served, spelled)) == respelled
        assert response.meta.processed_text == "We speak sequel here."

    run_with_server(service, ask)


def test_the_configuration_of_a_request(service: Service) -> None:
    async def ask(served: Serving) -> None:
        expected = await collect_speech(served, speaking_rate=1.5, volume_gain_db=-6.0)
        options = {"speaking_rate": "1.5", "volume_gain_db": "-6"}
        assert (await whole(served, custom_configuration=options)).audio == expected.data

    run_with_server(service, ask)


def test_the_voices_are_listed(service: Service) -> None:
    async def ask(served: Serving) -> None:
        stub = riva(served)
        for name in ("", service.model):
            asked = pb.RivaSynthesisConfigRequest(model_name=name)
            (found,) = (await stub.GetRivaSynthesisConfig(asked)).model_config
            assert found.model_name == service.model
            assert dict(found.parameters) == {
                "language_code": "en-US",
                "voice_name": service.model,
                "subvoices": "hazel:0,owen:1,edith:2",
                "sample_rate": "16000",
            }
        asked = pb.RivaSynthesisConfigRequest(model_name="magpie")
        error = await error_of(stub.GetRivaSynthesisConfig(asked))
        assert error.code() is grpc.StatusCode.NOT_FOUND

    run_with_server(service, ask)


def test_word_times_of_the_built_in_voice(built_in_service: Service) -> None:
    text = "One two. I have 5 cats."
    asked = request(text, max_tokens=None, enable_word_time_offsets=True)

    async def ask(served: Serving) -> tuple[Any, list[Any], bytes]:
        response = await riva(served).Synthesize(asked)
        responses = [part async for part in riva(served).SynthesizeOnline(iter([asked]))]
        return response, responses, (await collect_speech(served, text, max_tokens=None)).data

    response, responses, expected = run_with_server(built_in_service, ask)
    assert response.audio == b"".join(r.audio for r in responses) == expected
    words = response.meta.words
    assert [word.word for word in words] == ["One", "two.", "I", "have", "5", "cats."]
    assert response.meta.processed_text == "One two. I have five cats."
    edges = [edge for word in words for edge in (word.start_time, word.end_time)]
    assert edges == sorted(edges)
    assert 0 < edges[-1] <= len(expected) / 2 / 24_000 * 1000
    lengths = [(word.end_time - word.start_time) / 1000 for word in words]
    assert list(response.meta.predicted_durations) == pytest.approx(lengths, abs=0.0011)
    assert [word for r in responses for word in r.meta.words] == list(words)


# --- refusals


REFUSALS: list[tuple[dict[str, Any], list[str]]] = [
    ({"text": ""}, ["text"]),
    ({"text": " \n"}, ["text"]),
    ({"text": "a\0b"}, ["text"]),
    ({"text": "x" * 10_001}, ["text"]),
    ({"encoding": 5}, ["encoding"]),
    ({"sample_rate_hz": -1}, ["sample_rate_hz"]),
    ({"sample_rate_hz": 96_000}, ["sample_rate_hz"]),
    ({"encoding": common_pb2.OGGOPUS, "sample_rate_hz": 44_100}, ["sample_rate_hz"]),
    ({"language_code": "e n"}, ["language_code"]),
    ({"voice_name": "owen", "language_code": "fr"}, ["language_code"]),
    ({"id": common_pb2.RequestId(value="line\nfeed")}, ["id.value"]),
    ({"custom_dictionary": "SQL sequel"}, ["custom_dictionary[0]"]),
    ({"custom_dictionary": f"a  b,c  {'d' * 201}"}, ["custom_dictionary[1]"]),
    ({"custom_dictionary": "a  b," * 201}, ["custom_dictionary"]),
    ({"custom_dictionary": "🎉  b"}, ["custom_dictionary[0]"]),
    ({"custom_dictionary": "a  b,tomato  təˈmeɪ日"}, ["custom_dictionary[1]"]),
    ({"custom_dictionary": "a  b,tomato  {@T}{@XX1}"}, ["custom_dictionary[1]"]),
    ({"custom_configuration": {"exaggeration_factor": "1"}}, [
        "custom_configuration[exaggeration_factor]"
    ]),
    ({"custom_configuration": {"top_k": "many"}}, ["custom_configuration[top_k]"]),
    ({"custom_configuration": {"top_p": "nan"}}, ["custom_configuration[top_p]"]),
    ({"custom_configuration": {"speaking_rate": "9"}}, ["custom_configuration[speaking_rate]"]),
    ({"custom_configuration": {"pitch": "-1"}}, ["custom_configuration[pitch]"]),
    ({"zero_shot_data": pb.ZeroShotData()}, ["zero_shot_data.transcript"]),
    (
        {"zero_shot_data": pb.ZeroShotData(audio_prompt=b"x", transcript="Hello.")},
        ["zero_shot_data.audio_prompt"],
    ),
    (
        {"zero_shot_data": pb.ZeroShotData(audio_prompt=wav(hum(1.2)))},
        ["zero_shot_data.transcript"],
    ),
    (
        {"zero_shot_data": pb.ZeroShotData(encoding=1, sample_rate_hz=5, transcript="Hello.")},
        ["zero_shot_data.sample_rate_hz"],
    ),
    ({"encoding": 5, "sample_rate_hz": 5, "custom_dictionary": "x"}, [
        "encoding", "custom_dictionary[0]", "sample_rate_hz"
    ]),
]  # fmt: skip


def test_wrong_fields_are_named_as_the_client_knows_them(service: Service) -> None:
    async def ask(served: Serving) -> None:
        for values, fields in REFUSALS:
            asked = request(**values)
            error = await error_of(riva(served).Synthesize(asked))
            assert fields_of(error) == fields, values
            error = await error_of(riva(served).SynthesizeOnline(iter([asked])))
            assert fields_of(error) == fields, values

    run_with_server(service, ask)


@pytest.mark.parametrize(
    ("values", "code", "reason", "message"),
    [
        ({"text": "<speak>" + "a" * 20_000}, "INVALID_ARGUMENT", "INVALID_REQUEST", "has 20007 "),
        (
            {"enable_word_time_offsets": True},
            "FAILED_PRECONDITION",
            "WORD_TIMESTAMPS_UNAVAILABLE",
            "enable_word_time_offsets: ",
        ),
    ],
)
def test_what_this_model_cannot_do_is_refused(
    service: Service, values: dict[str, Any], code: str, reason: str, message: str
) -> None:
    async def ask(served: Serving) -> None:
        stub, asked = riva(served), request(**values)
        for call in (stub.Synthesize(asked), stub.SynthesizeOnline(iter([asked]))):
            error = await error_of(call)
            assert (error.code().name, reason_of(error)) == (code, reason)
            assert message in error.details()

    run_with_server(service, ask)


def test_ssml_is_spoken_where_the_whole_text_is_known(service: Service) -> None:
    document = '<speak>Hello <break time="1s"/> there.</speak>'

    async def ask(served: Serving) -> None:
        spoken = await whole(served, document)
        same = unary_request()
        same.input.ssml = document
        assert spoken.audio == (await served.speech.Synthesize(same)).audio
        assert spoken.meta.processed_text == "Hello there."
        error = await error_of(riva(served).Synthesize(request("<speak><b/></speak>")))
        assert fields_of(error) == ["text"]
        assert "line 1, column 8: <b> is no element of SSML" in error.details()
        error = await error_of(riva(served).SynthesizeOnline(iter([request(document)])))
        assert (error.code().name, reason_of(error)) == ("UNIMPLEMENTED", "NOT_AVAILABLE")

    run_with_server(service, ask)


def test_settings_hold_for_the_whole_call(service: Service) -> None:
    async def ask(served: Serving) -> None:
        later = request("More.", voice_name="owen", custom_configuration={"top_k": "3"})
        error = await error_of(riva(served).SynthesizeOnline(iter([request(), later])))
        assert fields_of(error) == ["voice_name", "custom_configuration"]
        error = await error_of(riva(served).SynthesizeOnline(iter([])))
        assert fields_of(error) == [""]

    run_with_server(service, ask)


def test_a_text_only_model_does_not_speak(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        service = create_service(tiny_config(text_checkpoint))
        async with serving(service) as served:
            assert await health(served.channel, SERVICE) == Status.NOT_SERVING
            stub = riva(served)
            for call in (
                stub.Synthesize(request()),
                stub.SynthesizeOnline(iter([request()])),
                stub.GetRivaSynthesisConfig(pb.RivaSynthesisConfigRequest()),
            ):
                error = await error_of(call)
                assert reason_of(error) == "SPEECH_UNAVAILABLE"
        await service.client.close()

    run(scenario())


# --- what all protocols share


def test_the_service_is_healthy(service: Service) -> None:
    async def ask(served: Serving) -> None:
        assert await health(served.channel, SERVICE) == Status.SERVING

    run_with_server(service, ask)


def test_a_token_is_required(service: Service) -> None:
    async def ask(served: Serving) -> None:
        stub = riva(served)
        for call in (
            stub.Synthesize(request()),
            stub.SynthesizeOnline(),
            stub.GetRivaSynthesisConfig(pb.RivaSynthesisConfigRequest()),
        ):
            assert (await error_of(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer secret"), ("function-id", "x"))
        assert (await stub.Synthesize(request(), metadata=metadata)).audio

    run_with_server(service, ask, auth_token="secret")


def test_calls_of_both_protocols_share_the_limits(service: Service) -> None:
    async def ask(served: Serving) -> None:
        running = served.speech.StreamingSynthesize()
        await running.write(session_config())
        await running.read()
        for call in (
            riva(served).Synthesize(request()),
            riva(served).SynthesizeOnline(iter([request()])),
        ):
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "QUEUE_FULL"
        running.cancel()

    run_with_server(service, ask, max_concurrent_requests=1, max_queued_requests=0)


async def disconnect(served: Serving, num_read: int) -> None:
    """Read some messages of a long speech, and disconnect."""
    call = riva(served).SynthesizeOnline()
    await call.write(request(LONG_TEXT, max_tokens=None))
    for _ in range(num_read):
        assert (await call.read()).audio
    call.cancel()


def test_a_hundred_clients_disconnect(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service, SMALL_WINDOW) as served:
            for _ in range(10):
                await asyncio.gather(*(disconnect(served, count % 5) for count in range(10)))
            await wait_until_idle(service.client)
            after = await service.client.status()
            assert (after.used_pages, after.audio_streams) == (0, 0)
            labels = {"grpc_service": SERVICE, "grpc_method": "SynthesizeOnline"}
            ended = served.metric("grpc_server_handled_total", grpc_code="CANCELLED", **labels)
            assert ended >= 80  # of those that had read nothing, some never reached the server

    run(scenario())


def test_a_client_that_sends_nothing_more_times_out(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = riva(served).SynthesizeOnline()
        await call.write(request("Hi.", max_tokens=300))
        error = await error_of_reading(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason_of(error) == "IDLE_TIMEOUT"

    run_with_server(service, ask, idle_timeout_s=0.3)


def test_calls_are_counted_under_their_own_names(service: Service) -> None:
    async def ask(served: Serving) -> None:
        await whole(served)
        await online(served, request())
        for method in ("Synthesize", "SynthesizeOnline"):
            labels = {"grpc_service": SERVICE, "grpc_method": method, "grpc_code": "OK"}
            assert served.metric("grpc_server_handled_total", **labels) == 1
        assert served.metric("sonant_input_characters_total") == 2 * len(TEXT)
        assert served.metric("sonant_time_to_first_audio_seconds_count") == 1
        assert served.metric("sonant_audio_seconds_total") > 0

    run_with_server(service, ask)


def test_calls_in_parallel_do_not_mix(service: Service) -> None:
    async def ask(served: Serving) -> None:
        expected = [(await collect_speech(served, seed=seed)).data for seed in range(6)]
        found = await asyncio.gather(*(online(served, request(seed=seed)) for seed in range(6)))
        assert [*map(audio_of, found)] == expected

    run_with_server(service, ask)
