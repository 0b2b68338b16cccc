"""Invalid texts, voices and numbers, and components that fail; later requests are served."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tests.fakes import tiny_config
from tests.tts.serving import (
    TEXT,
    checked_server,
    collect_speech,
    error_of,
    fields_of,
    hum,
    reason_of,
    run,
    say,
    session_config,
    stream_request,
    unary_request,
    wav,
)
from tts.config.server import ServerConfig
from tts.factory import Service, create_service
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

RATE = 16_000

# --- texts


TEXTS: list[tuple[str, list[str]]] = [
    ("", ["input.text"]),
    ("   ", ["input.text"]),
    ("word " * 200_000, ["input.text"]),
    ("bell \x07", ["input.text"]),
    ("null \0", ["input.text"]),
]


def test_texts_that_are_refused(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service) as served:
            for text, fields in TEXTS:
                for call in (
                    served.speech.SynthesizeStream(stream_request(text)),
                    served.speech.Synthesize(unary_request(text)),
                ):
                    assert fields_of(await error_of(call)) == fields
            for text in ("x" * 100_000, "bell \x07"):
                call = served.speech.StreamingSynthesize(iter([session_config(), say(text)]))
                assert fields_of(await error_of(call)) == ["text"]

    run(scenario())


def test_control_tokens_in_the_text_are_text(service: Service) -> None:
    """Every "<|s_12|>" reaches the model as characters, never as a speech token."""

    async def scenario() -> None:
        async with checked_server(service) as served:
            plain = await collect_speech(served, "ab")
            marked = await collect_speech(served, "ab <|s_12|> <|end_of_speech|> <|voice_1|>")
            assert marked.data != plain.data
            assert marked.done.usage.prompt_tokens > plain.done.usage.prompt_tokens + 20

    run(scenario())


def test_only_emoji(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service) as served:
            spoken = await collect_speech(served, "🎉 🥳 ❤️")
            assert spoken.audio == ()
            whole = await served.speech.Synthesize(unary_request("🎉"))
            assert whole.audio == b""
            assert whole.done.finish_reason == common_pb2.FINISH_REASON_STOP

    run(scenario())


# --- voices


def test_unknown_voice(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service) as served:
            voice = pb.VoiceSelection(name="unknown")
            error = await error_of(served.speech.SynthesizeStream(stream_request(voice=voice)))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert reason_of(error) == "VOICE_NOT_FOUND"

    run(scenario())


def wav_with_size(num_bytes: int) -> bytes:
    """Return a WAV with 100 bytes of samples whose header states `num_bytes`."""
    fmt = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    data = b"\0" * 100
    sizes = struct.pack("<I", 36 + num_bytes), struct.pack("<I", num_bytes)
    head = b"RIFF" + sizes[0] + b"WAVEfmt " + struct.pack("<I", 16) + fmt
    return head + b"data" + sizes[1] + data


def prompts() -> Iterator[tuple[str, bytes, pb.AudioFormat | None]]:
    raw = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_S16LE, sample_rate_hertz=RATE)
    quiet_10_minutes = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_MULAW, sample_rate_hertz=8_000)
    yield "not audio", b"This is a letter, not a recording." * 100, None
    yield "empty", b"", None
    yield "no samples", wav(np.zeros(0, dtype=np.float32)), None
    yield "raw, no samples", b"", raw
    yield "half a sample", b"\0" * 32_001, raw
    yield "10 minutes", wav(np.tile(hum(1, 8_000), 600), 8_000), None
    yield "10 minutes raw", b"\x10" * (600 * 8_000), quiet_10_minutes
    yield "too short", wav(hum(0.3)), None
    yield "silent", wav(np.zeros(2 * RATE, dtype=np.float32)), None
    yield (
        "not a number",
        np.full(2 * RATE, np.nan, "<f4").tobytes(),
        pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_F32LE, sample_rate_hertz=RATE),
    )
    yield "forged, long", wav_with_size(2**31 - 64), None
    yield "forged, plausible", wav_with_size(5 * 2 * RATE), None
    yield "cut header", wav(hum(2))[:30], None
    yield "over 10 MB", wav(np.tile(hum(1, 48_000), 120), 48_000), None


def test_voice_prompts_that_are_refused(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service) as served:
            for name, audio, audio_format in prompts():
                prompt = pb.VoicePrompt(audio=audio, transcript="Hello.", format=audio_format)
                voice = pb.VoiceSelection(prompt=prompt)
                call = served.speech.SynthesizeStream(stream_request(voice=voice))
                assert fields_of(await error_of(call)) == ["config.voice.prompt.audio"], name
                request = pb.CreateVoiceRequest(voice_id="bad", prompt=prompt)
                created = served.speech.CreateVoice(request)
                assert fields_of(await error_of(created)) == ["prompt.audio"], name
            voices = (await served.speech.ListVoices(pb.ListVoicesRequest())).voices
            assert "bad" not in {voice.name for voice in voices}

    run(scenario())


# --- numbers, and the order of messages


def test_numbers_out_of_range(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service) as served:
            for values, field in (
                ({"speaking_rate": 0.0}, "config.speaking_rate"),
                ({"speaking_rate": 100.0}, "config.speaking_rate"),
                ({"volume_gain_db": 1e30}, "config.volume_gain_db"),
            ):
                call = served.speech.SynthesizeStream(stream_request(**values))
                assert fields_of(await error_of(call)) == [field]
            # The wire's seed has exactly the seeds' range: the largest is one, more do not parse.
            assert (await collect_speech(served, seed=2**64 - 1)).started.seed == 2**64 - 1

    run(scenario())


def test_config_twice_or_not_first(service: Service) -> None:
    async def scenario() -> None:
        async with checked_server(service) as served:
            for messages in (
                [say("Hello."), session_config()],
                [session_config(), session_config()],
                [session_config(), say(TEXT * 10), session_config()],
            ):
                call = served.speech.StreamingSynthesize(iter(messages))
                assert fields_of(await error_of(call)) == ["config"]

    run(scenario())


# --- the inside breaks


def test_a_failing_decoder_fails_its_requests_only(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        service = create_service(tiny_config(tiny_checkpoint), ServerConfig())
        decoder = service.client._decoder  # type: ignore[attr-defined]
        works, broken = decoder.decode, False

        def decode(windows: Any) -> Any:
            if broken:
                raise RuntimeError("out of luck at /secret/path")
            return works(windows)

        decoder.decode = decode
        try:
            async with checked_server(service) as served:
                broken = True
                error = await error_of(served.speech.SynthesizeStream(stream_request()))
                assert error.code() is grpc.StatusCode.INTERNAL
                assert reason_of(error) == "SYNTHESIS_FAILED"
                assert "secret" not in error.details()
                broken = False
        finally:
            await service.client.close()

    run(scenario())


def test_a_pool_with_too_few_pages_gives_the_same_bytes(tiny_checkpoint: Path) -> None:
    """More streams than the pool can hold give the same bytes without deadlock."""

    async def scenario() -> None:
        small = {"model": {"kv_cache": {"kv_cache_page_size": 16, "num_pages": 16}}}
        service = create_service(tiny_config(tiny_checkpoint, **small))
        try:
            async with checked_server(service) as served:
                spoken = await asyncio.gather(*(collect_speech(served) for _ in range(12)))
                assert {answer.data for answer in spoken} == {served.expected}
        finally:
            await service.client.close()

    run(scenario())
