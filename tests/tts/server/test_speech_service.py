"""SpeechService over a real connection: responses for known texts."""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import soundfile
from google.protobuf.duration_pb2 import Duration

from tests.tts.serving import (
    TEXT,
    Serving,
    collect_speech,
    error_of,
    run_with_server,
    unary_request,
)
from tts.factory import Service
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

RATE = 16_000
BOUND = 64 * 1024
LONG_TEXT = " ".join([TEXT] * 3)
LONGER_TEXT = " ".join([TEXT] * 30)


def test_a_stream_has_started_audio_and_done_events(service: Service) -> None:
    async def ask(served: Serving) -> None:
        spoken = await collect_speech(served, request_id="mine")
        assert spoken.started.request_id == "mine"
        assert spoken.started.model == service.model
        assert spoken.started.seed == 7
        assert spoken.started.audio_format == pb.AudioFormat(
            encoding=pb.AUDIO_ENCODING_PCM_S16LE, sample_rate_hertz=RATE, channel_count=1
        )
        assert spoken.done.finish_reason in (1, 2)
        assert spoken.done.usage.input_characters == len(TEXT)
        assert spoken.done.usage.output_tokens > 0
        assert spoken.done.timings.HasField("time_to_first_audio")

    run_with_server(service, ask)


def test_chunks_join_without_gap(service: Service) -> None:
    async def ask(served: Serving) -> None:
        spoken = await collect_speech(served, LONG_TEXT, max_tokens=None)
        samples = codes = 0
        for index, chunk in enumerate(spoken.audio):
            assert chunk.sequence == index
            assert chunk.sample_offset == samples
            assert len(chunk.data) == 2 * chunk.sample_count
            assert chunk.token_offset == codes
            assert chunk.ByteSize() < BOUND
            samples += chunk.sample_count
            codes += chunk.token_count
        duration = spoken.done.usage.audio_duration
        assert duration.seconds + duration.nanos / 1e9 == pytest.approx(samples / RATE)
        assert len({chunk.segment_index for chunk in spoken.audio}) == 6
        assert spoken.audio[-1].text_end == len(LONG_TEXT)

    run_with_server(service, ask)


def test_unary_and_streamed_are_the_same_samples(service: Service) -> None:
    async def ask(served: Serving) -> None:
        streamed = await collect_speech(served)
        whole = await served.speech.Synthesize(unary_request())
        assert whole.audio == streamed.data
        assert whole.started.seed == 7
        assert whole.done.usage == streamed.done.usage
        other = await served.speech.Synthesize(unary_request(seed=8))
        assert other.audio != whole.audio

    run_with_server(service, ask)


def test_a_seed_is_chosen_and_reported(service: Service) -> None:
    async def ask(served: Serving) -> None:
        first = await collect_speech(served, seed=None)
        again = await collect_speech(served, seed=first.started.seed)
        assert again.data == first.data

    run_with_server(service, ask)


def test_a_decimal_has_the_same_effect_over_the_wire(service: Service) -> None:
    """0.7 as float32 is 0.699999988; in process and over the wire must sound alike."""
    seen = []

    async def ask(served: Serving) -> None:
        sampling = common_pb2.SamplingParams(temperature=0.7, seed=7)
        values: dict[str, Any] = {"sampling": sampling, "speaking_rate": 1.1, "seed": None}
        seen.append((await collect_speech(served, **values)).data)

    run_with_server(service, ask)
    assert service.synthesizer is not None
    from tts.speech.types import SamplingOverrides, SpeechRequest

    request = SpeechRequest(
        TEXT, speaking_rate=1.1, sampling=SamplingOverrides(temperature=0.7, seed=7)
    )
    assert asyncio.run(service.synthesizer.synthesize(request)).audio == seen[0]


def test_unspeakable_text_ends_without_audio_or_error(service: Service) -> None:
    async def ask(served: Serving) -> None:
        spoken = await collect_speech(served, "🎉🎉🎉")
        assert spoken.audio == ()
        assert spoken.done.finish_reason == common_pb2.FINISH_REASON_STOP
        assert spoken.done.warnings == ["the text holds nothing that can be spoken"]

    run_with_server(service, ask)


@pytest.mark.parametrize(
    ("encoding", "rate"),
    [
        (pb.AUDIO_ENCODING_WAV, 0),
        (pb.AUDIO_ENCODING_WAV, 8_000),
        (pb.AUDIO_ENCODING_FLAC, 24_000),
        (pb.AUDIO_ENCODING_OGG_OPUS, 48_000),
        (pb.AUDIO_ENCODING_MP3, 0),
    ],
)
def test_containers_are_whole_files(service: Service, encoding: int, rate: int) -> None:
    async def ask(served: Serving) -> None:
        audio_format = pb.AudioFormat(encoding=encoding, sample_rate_hertz=rate)
        whole = await served.speech.Synthesize(unary_request(audio_format=audio_format))
        samples, got_rate = soundfile.read(BytesIO(whole.audio))
        assert got_rate == whole.started.audio_format.sample_rate_hertz == (rate or RATE)
        plain = await served.speech.Synthesize(unary_request())
        seconds = len(plain.audio) / 2 / RATE
        assert len(samples) / got_rate == pytest.approx(seconds, abs=0.1)

    run_with_server(service, ask)


@pytest.mark.parametrize(
    ("encoding", "sample_bytes"),
    [
        (pb.AUDIO_ENCODING_UNSPECIFIED, 2),
        (pb.AUDIO_ENCODING_PCM_F32LE, 4),
        (pb.AUDIO_ENCODING_MULAW, 1),
        (pb.AUDIO_ENCODING_ALAW, 1),
    ],
)
def test_headerless_encodings_have_their_size(
    service: Service, encoding: int, sample_bytes: int
) -> None:
    async def ask(served: Serving) -> None:
        audio_format = pb.AudioFormat(encoding=encoding)
        spoken = await collect_speech(served, audio_format=audio_format)
        assert all(len(c.data) == sample_bytes * c.sample_count for c in spoken.audio)
        assert spoken.started.audio_format.encoding == (encoding or 1)

    run_with_server(service, ask)


def test_per_request_options_reach_the_audio(service: Service) -> None:
    async def ask(served: Serving) -> None:
        plain = await collect_speech(served)
        fast = await collect_speech(served, speaking_rate=2.0)
        assert len(fast.data) == pytest.approx(len(plain.data) / 2, rel=0.02)
        quiet = await collect_speech(served, volume_gain_db=-96)
        assert np.abs(np.frombuffer(quiet.data, "<i2")).max() <= 1
        chunked = await collect_speech(served, chunking=pb.ChunkingConfig(chunk_sizes=[3]))
        first = chunked.audio[0]
        assert (first.token_offset, first.token_count) == (0, 3)
        short = await collect_speech(served, max_audio_duration=Duration(nanos=200_000_000))
        assert len(short.data) <= 2 * 0.2 * RATE
        assert short.done.finish_reason == common_pb2.FINISH_REASON_LENGTH

    run_with_server(service, ask)


def test_unary_audio_that_does_not_fit_ends_early(service: Service) -> None:
    """The response is one message: the audio that fits, and the finish reason."""

    async def ask(served: Serving) -> None:
        whole = await served.speech.Synthesize(
            unary_request(
                LONGER_TEXT, max_tokens=None, audio_format=pb.AudioFormat(sample_rate_hertz=48_000)
            )
        )
        assert whole.done.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert 96_000 <= len(whole.audio) < 256 * 1024
        assert whole.done.warnings

    run_with_server(service, ask, max_message_bytes=256 * 1024)


def test_a_carry_continues_another_request(service: Service) -> None:
    async def ask(served: Serving) -> None:
        chunking = pb.ChunkingConfig(buffer=4)
        first = await collect_speech(served, chunking=chunking)
        carry = first.audio[-1].buffer_speech_tokens
        assert len(carry.tokens) == 4
        again = await collect_speech(served, chunking=chunking, buffer_speech_tokens=carry)
        fresh = await collect_speech(served, chunking=chunking)
        assert again.data != fresh.data
        assert len(again.data) == len(fresh.data)

    run_with_server(service, ask)


def test_request_ids_are_returned(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.Synthesize(unary_request(request_id="a-1"))
        response = await call
        trailing = dict(await call.trailing_metadata())
        assert trailing["x-request-id"] == response.started.request_id == "a-1"
        made = served.speech.Synthesize(unary_request())
        response = await made
        trailing = dict(await made.trailing_metadata())
        assert trailing["x-request-id"] == response.started.request_id
        failed = await error_of(served.speech.Synthesize(unary_request("", request_id="a-2")))
        assert dict(failed.trailing_metadata())["x-request-id"] == "a-2"

    run_with_server(service, ask)


def test_two_requests_may_use_one_id(service: Service) -> None:
    async def ask(served: Serving) -> None:
        one, two = await asyncio.gather(
            *(collect_speech(served, request_id="same") for _ in range(2))
        )
        assert one.data == two.data

    run_with_server(service, ask)
