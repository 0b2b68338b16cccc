"""Voices over a real connection: cloned, created, listed, deleted; and the server info."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    fields_of,
    hum,
    reason_of,
    run_with_server,
    session_config,
    unary_request,
    wav,
)
from tts import __version__
from tts.factory import Service
from tts.v1 import speech_pb2 as pb

RATE = 16_000


def clip(seconds: float = 1.2, **values: Any) -> pb.VoicePrompt:
    audio = values.pop("audio", None)
    return pb.VoicePrompt(
        audio=wav(hum(seconds)) if audio is None else audio,
        transcript=values.pop("transcript", "This is what I said."),
        **values,
    )


def said(phrase: str = "a", spoken: str = "b", alphabet: Any = 0) -> pb.Pronunciation:
    return pb.Pronunciation(phrase=phrase, pronunciation=spoken, alphabet=alphabet)


def test_a_clip_is_a_voice_prompt(service: Service) -> None:
    async def ask(served: Serving) -> None:
        plain = await collect_speech(served)
        cloned = await collect_speech(served, voice=pb.VoiceSelection(prompt=clip()))
        raw = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_F32LE, sample_rate_hertz=RATE)
        samples = np.frombuffer(wav(hum(1.2))[44:], "<i2").astype(np.float32) / 32768
        same = clip(audio=samples.astype("<f4").tobytes(), format=raw)
        again = await collect_speech(served, voice=pb.VoiceSelection(prompt=same))
        assert cloned.data == again.data != plain.data

    run_with_server(service, ask)


@pytest.mark.parametrize(
    ("rate", "channels", "field"),
    [
        (8_000, 1, None),
        (192_000, 2, None),
        (RATE, 0, None),
        (7_999, 1, "sample_rate_hertz"),
        (192_001, 1, "sample_rate_hertz"),
        (RATE, 3, "channel_count"),
        (RATE, -1, "channel_count"),
    ],
)
def test_a_raw_clip_has_limits(
    service: Service, rate: int, channels: int, field: str | None
) -> None:
    samples = np.repeat(hum(1.2, rate).astype("<f4"), max(channels, 1))
    raw = pb.AudioFormat(
        encoding=pb.AUDIO_ENCODING_PCM_F32LE, sample_rate_hertz=rate, channel_count=channels
    )

    async def ask(served: Serving) -> None:
        voice = pb.VoiceSelection(prompt=clip(audio=samples.tobytes(), format=raw))
        if field is None:
            assert (await collect_speech(served, voice=voice)).data
        else:
            error = await error_of(served.speech.Synthesize(unary_request(voice=voice)))
            assert fields_of(error) == [f"config.voice.prompt.format.{field}"]

    run_with_server(service, ask)


def test_codes_give_a_voice_when_the_codec_has_them(service: Service) -> None:
    async def ask(served: Serving) -> None:
        known = pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=[0, 63]))
        assert (await collect_speech(served, voice=known)).data
        for token in (-1, 64, 65):
            unknown = pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=[1, token]))
            error = await error_of(served.speech.Synthesize(unary_request(voice=unknown)))
            assert fields_of(error) == ["config.voice.prompt_tokens"]
            assert "must be speech tokens in [0, 64)" in error.details()

    run_with_server(service, ask)


def test_voices_are_created_listed_and_deleted(service: Service) -> None:
    async def ask(served: Serving) -> None:
        created = await served.speech.CreateVoice(
            pb.CreateVoiceRequest(
                voice_id="mine", prompt=clip(), language_code="en-GB", consent="Me, 2 May"
            )
        )
        assert service.synthesizer is not None
        assert service.synthesizer.voices.get("mine").consent == "Me, 2 May"
        assert created.voice == pb.Voice(
            name="mine", display_name="mine", language_codes=["en-GB"], model=service.model
        )
        again = served.speech.CreateVoice(pb.CreateVoiceRequest(voice_id="mine", prompt=clip()))
        assert (await error_of(again)).code() is grpc.StatusCode.ALREADY_EXISTS
        listed = (await served.speech.ListVoices(pb.ListVoicesRequest())).voices
        assert [voice.name for voice in listed] == ["hazel", "owen", "edith", "mine"]
        assert [voice.builtin for voice in listed] == [True, True, True, False]
        british = await served.speech.ListVoices(pb.ListVoicesRequest(language_code="en-GB"))
        assert [voice.name for voice in british.voices] == ["mine"]
        spoken = await collect_speech(served, voice=pb.VoiceSelection(name="mine"))
        inline = await collect_speech(served, voice=pb.VoiceSelection(prompt=clip()))
        assert spoken.data == inline.data
        await served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="mine"))
        gone = served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="mine"))
        assert (await error_of(gone)).code() is grpc.StatusCode.NOT_FOUND
        builtin = await error_of(served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="hazel")))
        assert builtin.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(builtin) == "BUILTIN_VOICE"

    run_with_server(service, ask)


def test_a_voice_keeps_its_pronunciations(service: Service) -> None:
    sequel = pb.Pronunciation(phrase="SQL", pronunciation="sequel")
    made = pb.CreateVoiceRequest(voice_id="mine", prompt=clip(), pronunciations=[sequel])

    async def ask(served: Serving) -> None:
        await served.speech.CreateVoice(made)
        try:
            voice = pb.VoiceSelection(name="mine")
            found = await collect_speech(served, "We speak SQL, not sql.", voice=voice)
            same = await collect_speech(served, "We speak sequel, not sql.", voice=voice)
            assert found.data == same.data
            applied = pb.AppliedPronunciation(phrase="SQL", spoken="sequel")
            assert list(found.done.pronunciations) == [applied]
        finally:
            await served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="mine"))

    run_with_server(service, ask)


def test_voices_are_listed_in_pages(service: Service) -> None:
    async def ask(served: Serving) -> None:
        names, token = [], ""
        for _ in range(3):
            page = await served.speech.ListVoices(
                pb.ListVoicesRequest(page_size=2, page_token=token)
            )
            names += [voice.name for voice in page.voices]
            token = page.next_page_token
            if not token:
                break
        assert names == ["hazel", "owen", "edith"]
        for request, field in (
            (pb.ListVoicesRequest(page_size=-1), "page_size"),
            (pb.ListVoicesRequest(page_token="nonsense"), "page_token"),
            (pb.ListVoicesRequest(language_code="??"), "language_code"),
        ):
            assert fields_of(await error_of(served.speech.ListVoices(request))) == [field]

    run_with_server(service, ask)


def test_invalid_voices_are_refused(service: Service) -> None:
    async def ask(served: Serving) -> None:
        for values, field in (
            ({"voice_id": "Mine"}, "voice_id"),
            ({"voice_id": "../x"}, "voice_id"),
            ({"voice_id": ""}, "voice_id"),
            ({"display_name": "x" * 201}, "display_name"),
            ({"display_name": "a\nb"}, "display_name"),
            ({"consent": "x" * 1_001}, "consent"),
            ({"language_code": "-"}, "language_code"),
            ({"pronunciations": [said("🎉")]}, "pronunciations[0].phrase"),
            ({"pronunciations": [said(), said(spoken="")]}, "pronunciations[1].pronunciation"),
            ({"pronunciations": [said(alphabet=2)]}, "pronunciations[0].pronunciation"),
            ({"pronunciations": [said()] * 201}, "pronunciations"),
            ({"prompt": clip(transcript="")}, "prompt.transcript"),
            ({"prompt": clip(audio=b"not audio")}, "prompt.audio"),
            ({"prompt": clip(format=pb.AudioFormat(encoding=77))}, "prompt.format.encoding"),
        ):
            request = pb.CreateVoiceRequest(**{"voice_id": "new", "prompt": clip(), **values})
            assert fields_of(await error_of(served.speech.CreateVoice(request))) == [field]

    run_with_server(service, ask)


def test_the_language_of_a_request_must_match_the_voice(service: Service) -> None:
    """A voice that was created without a language accepts any."""

    async def ask(served: Serving) -> None:
        plain = await collect_speech(served, voice=pb.VoiceSelection(name="owen"))
        for language in ("en", "en-US", "EN-us"):
            voice = pb.VoiceSelection(name="owen", language_code=language)
            assert (await collect_speech(served, voice=voice)).data == plain.data
        await served.speech.CreateVoice(pb.CreateVoiceRequest(voice_id="any", prompt=clip()))
        try:
            assert (
                await collect_speech(
                    served, voice=pb.VoiceSelection(name="any", language_code="fr")
                )
            ).data
        finally:
            await served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="any"))
        first = session_config(voice=pb.VoiceSelection(name="owen", language_code="de"))
        error = await error_of(served.speech.StreamingSynthesize(iter([first])))
        assert fields_of(error) == ["config.synthesis.voice.language_code"]
        assert "'owen' speaks en-US" in (error.details() or "")

    run_with_server(service, ask)


def test_the_server_describes_itself(service: Service) -> None:
    async def ask(served: Serving) -> None:
        info = await served.speech.GetServerInfo(pb.GetServerInfoRequest())
        assert info.version == __version__
        (model,) = info.models
        assert (model.name, model.family) == (service.model, "embedded")
        assert model.native_sample_rate_hertz == RATE
        assert model.speech_tokens_per_second == pytest.approx(25)
        assert model.voice_cloning
        assert model.text_generation
        assert not model.word_timestamps
        assert not any((model.embeddings, model.echo, model.structured_output, model.adapters))
        assert list(model.default_chunking.chunk_sizes) == [2, 4, 8]
        assert info.limits.max_text_characters == 10_000
        assert info.limits.max_queued_requests == 5
        assert info.limits.max_prompt_duration.seconds == 30
        assert {pb.AUDIO_ENCODING_PCM_S16LE, pb.AUDIO_ENCODING_WAV} <= set(info.encodings)
        assert pb.AUDIO_ENCODING_UNSPECIFIED not in info.encodings

    run_with_server(service, ask, max_queued_requests=5)
