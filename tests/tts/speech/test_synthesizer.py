"""The synthesizer: one continuous stream over all segments, reproducible by seed, any format."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from decoder import (
    AudioEncoding,
    AudioFormat,
    CodeRangeError,
    encode_samples,
    supported_encodings,
    to_s16,
)
from llm import FinishReason, SamplingParams
from tests.tts.ramp import (
    RATE,
    SAMPLES_PER_CODE,
    SEEDED,
    STREAMING,
    TEXT,
    RampClient,
    build,
    collect_speech,
    ramp_of,
    run,
)
from tests.vocabulary import END_OF_SPEECH, FIRST_CODE, FIRST_VOICE, START_OF_SPEECH
from tts.engine.client import EngineClient, Speak
from tts.errors import InvalidRequestError, ServerBusyError, SynthesisError
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import ChunkingOverrides, SamplingOverrides, SpeechRequest, Started
from tts.text.lexicon.entries import Pronunciation

# --- one stream


def test_the_audio_is_one_unbroken_rendering_of_all_codes(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    heard = collect_speech(synthesizer)
    assert len(client.jobs) == 4
    expected = encode_samples(ramp_of(client, client.spoken), AudioEncoding.PCM_S16LE)
    assert heard.data == expected


def test_event_fields_describe_the_audio(client: RampClient, synthesizer: Synthesizer) -> None:
    heard = collect_speech(synthesizer, request_id="mine")
    format_ = AudioFormat(AudioEncoding.PCM_S16LE, RATE)
    assert heard.started == Started("mine", "tiny", format_, seed=7)
    usage, timings = heard.result.usage, heard.result.timings
    assert heard.result.finish_reason is FinishReason.STOP
    assert heard.result.warnings == ()
    assert usage.input_characters == len(TEXT)
    assert usage.output_tokens == len(client.spoken)
    assert usage.prompt_tokens == sum(len(job.request.prompt_ids) for job in client.jobs)
    assert usage.cached_prompt_tokens == 4
    assert usage.audio_s == heard.num_samples / RATE
    assert (timings.queue_s, timings.prefill_s) == (0.25, 0.5)
    assert timings.first_audio_s is not None
    assert 0 < timings.first_audio_s <= timings.total_s


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sample_rate": 24_000},
        {"sample_rate": 8_000, "encoding": AudioEncoding.MULAW},
        {"speaking_rate": 1.7},
        {"speaking_rate": 0.5, "sample_rate": 44_100, "encoding": AudioEncoding.WAV},
        {"encoding": AudioEncoding.FLAC},
        {"encoding": AudioEncoding.OGG_OPUS, "sample_rate": 48_000},
    ],
)
def test_offsets_join_without_gap_or_overlap(
    client: RampClient, synthesizer: Synthesizer, values: dict[str, Any]
) -> None:
    heard = collect_speech(synthesizer, **values)
    samples = tokens = 0
    for index, chunk in enumerate(heard.chunks):
        assert chunk.sequence == index
        assert (chunk.sample_offset, chunk.token_offset) == (samples, tokens)
        assert chunk.data
        samples, tokens = samples + chunk.sample_count, tokens + chunk.token_count
    assert tokens == len(client.spoken)
    seconds = tokens * SAMPLES_PER_CODE / RATE / values.get("speaking_rate", 1.0)
    assert abs(samples - seconds * heard.started.audio_format.sample_rate) <= 3


def test_text_ranges_name_each_chunks_segment(synthesizer: Synthesizer) -> None:
    chunks = collect_speech(synthesizer).chunks
    ranges = dict.fromkeys((c.segment_index, c.text_start, c.text_end) for c in chunks)
    assert [index for index, _, _ in ranges] == [0, 1, 2, 3]
    assert TEXT[: next(iter(ranges))[2]].strip() == "The first sentence is here."
    ends = [end for _, _, end in ranges]
    assert [start for _, start, _ in ranges] == [0, *ends[:-1]]


def test_later_segments_continue_the_codec_stream(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    collect_speech(synthesizer)
    first, second, third, _ = client.jobs
    lengths = [len(client.codes_of(job.request)) for job in client.jobs]
    assert (first.carry, first.token_offset) == (None, 0)
    assert first.streaming == STREAMING
    assert second.streaming == replace(STREAMING, chunk_sizes=(8,))
    assert second.carry == tuple(client.codes_of(first.request)[-3:])
    assert second.token_offset == lengths[0]
    assert third.token_offset == lengths[0] + lengths[1]


def test_a_job_requests_speech_tokens_only(client: RampClient, synthesizer: Synthesizer) -> None:
    collect_speech(synthesizer, "Hi there.", priority=3)
    request = client.jobs[0].request
    sampling = request.sampling
    assert request.prompt_ids == (FIRST_VOICE, *b"Hi there.", START_OF_SPEECH)
    assert request.priority == 3
    assert sampling.stop_token_ids == (END_OF_SPEECH,)
    assert sampling.allowed_ranges == ((FIRST_CODE, FIRST_CODE + 64),)
    assert (sampling.min_tokens, sampling.max_tokens) == (4, 107)


def test_the_models_defaults_and_the_requests_overrides(
    client: RampClient, tiny_checkpoint: Path
) -> None:
    defaults = SamplingParams(temperature=0.8, top_k=50, repetition_penalty=1.1)
    synthesizer = build(client, tiny_checkpoint, sampling=defaults)
    collect_speech(
        synthesizer, "Hi.", sampling=SamplingOverrides(top_k=5, repetition_window=9, seed=1)
    )
    sampling = client.jobs[0].request.sampling
    assert (sampling.temperature, sampling.top_k) == (0.8, 5)
    assert (sampling.repetition_penalty, sampling.penalty_window) == (1.1, 9)


def test_control_tokens_in_the_text_are_read_as_text(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    collect_speech(synthesizer, "Say <|s_12|> and <|end_of_speech|> please.")
    ids = client.jobs[0].request.prompt_ids
    assert all(i < 256 for i in ids[1:-1])


# --- the same for the same seed


def test_a_seed_repeats_and_segments_draw_apart(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    first = collect_speech(synthesizer, "Same words. Same words.")
    assert collect_speech(synthesizer, "Same words. Same words.").data == first.data
    assert (
        collect_speech(synthesizer, "Same words. Same words.", sampling=SamplingOverrides(seed=8))
        != first
    )
    one, two = client.jobs[:2]
    assert one.request.prompt_ids == two.request.prompt_ids
    assert one.request.sampling.seed != two.request.sampling.seed
    assert one.request.request_id != two.request.request_id


def test_without_a_seed_one_is_chosen_and_reported(synthesizer: Synthesizer) -> None:
    free = collect_speech(synthesizer, sampling=SamplingOverrides())
    other = collect_speech(synthesizer, sampling=SamplingOverrides())
    assert free.started.seed != other.started.seed
    again = collect_speech(synthesizer, sampling=SamplingOverrides(seed=free.started.seed))
    assert again.data == free.data


@pytest.mark.parametrize("encoding", supported_encodings())
def test_unary_and_streamed_hold_the_same_samples(
    synthesizer: Synthesizer, encoding: AudioEncoding
) -> None:
    streamed = collect_speech(synthesizer, encoding=encoding, speaking_rate=1.25)
    request = SpeechRequest(TEXT, encoding=encoding, speaking_rate=1.25, sampling=SEEDED)
    whole = run(synthesizer.synthesize(request))
    if encoding.is_raw:
        assert whole.audio == streamed.data
        return
    heard, rate = soundfile.read(BytesIO(whole.audio), dtype="int16")
    assert rate == RATE
    assert len(heard) == streamed.num_samples
    assert [c.sample_count for c in whole.chunks] == [c.sample_count for c in streamed.chunks]
    if encoding in (AudioEncoding.WAV, AudioEncoding.FLAC):
        raw = collect_speech(synthesizer, speaking_rate=1.25).data
        assert heard.tobytes() == raw


def test_concurrent_requests_give_the_audio_of_single_ones(synthesizer: Synthesizer) -> None:
    texts = [f"Sentence number {n}. It has a second part." for n in "abcdefgh"]
    alone = [collect_speech(synthesizer, text).data for text in texts]

    async def together() -> list[bytes]:
        requests = [SpeechRequest(text, sampling=SEEDED) for text in texts]
        done = await asyncio.gather(*map(synthesizer.synthesize, requests))
        return [speech.audio for speech in done]

    assert run(together()) == alone


# --- the way out


def test_gain_and_clipping(client: RampClient, synthesizer: Synthesizer) -> None:
    heard = collect_speech(synthesizer, "Hi.", gain_db=6.0)
    expected = to_s16(ramp_of(client, client.spoken) * np.float32(10 ** (6 / 20)))
    assert heard.data == expected.tobytes()
    assert abs(int(expected.min())) == 32767


@pytest.mark.parametrize(
    ("encoding", "codec_rate", "sent"),
    [(AudioEncoding.OGG_OPUS, 22_050, 24_000), (AudioEncoding.PCM_F32LE, 22_050, 22_050)],
)
def test_rate_zero_is_the_codecs_own_or_the_next_the_encoding_has(
    tiny_checkpoint: Path, encoding: AudioEncoding, codec_rate: int, sent: int
) -> None:
    client = RampClient()
    client.decoder.spec = replace(client.decoder.spec, sample_rate=codec_rate)
    assert collect_speech(
        build(client, tiny_checkpoint), encoding=encoding
    ).started.audio_format == (AudioFormat(encoding, sent))


def test_messages_stay_below_64_kib(client: RampClient, synthesizer: Synthesizer) -> None:
    client.is_endless = True
    heard = collect_speech(
        synthesizer,
        "One long sentence at once, please.",
        encoding=AudioEncoding.PCM_F32LE,
        sample_rate=48_000,
        chunking=ChunkingOverrides(chunk_sizes=(1000,)),
    )
    assert len(heard.chunks) > 5
    assert max(len(chunk.data) for chunk in heard.chunks) <= 48 * 1024
    assert sum(chunk.token_count for chunk in heard.chunks) == len(client.spoken)


# --- carry


def test_every_message_carries_its_last_codes(client: RampClient, synthesizer: Synthesizer) -> None:
    for chunk in collect_speech(synthesizer).chunks:
        spoken = client.spoken[: chunk.token_offset + chunk.token_count]
        assert chunk.carry == tuple(spoken[-3:])


def test_without_a_buffer_there_is_no_carry(client: RampClient, synthesizer: Synthesizer) -> None:
    heard = collect_speech(synthesizer, chunking=ChunkingOverrides(buffer=0))
    assert all(chunk.carry == () for chunk in heard.chunks)
    assert [job.carry for job in client.jobs] == [None, (), (), ()]


@pytest.mark.parametrize("carry", [(), (1, 2, 3, 4)])
def test_a_carry_continues_an_earlier_request(
    client: RampClient, synthesizer: Synthesizer, carry: tuple[int, ...]
) -> None:
    collect_speech(synthesizer, "Continue.", carry=carry)
    assert client.jobs[0].carry == carry


def test_a_carry_outside_the_codebook_is_refused(synthesizer: Synthesizer) -> None:
    with pytest.raises(CodeRangeError, match="carried code 64"):
        collect_speech(synthesizer, "Continue.", carry=(64,))


# --- what is done early


def test_speech_begins_before_its_first_event_is_read(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    """And ends when the events are closed after it, or fails behind it."""

    async def scenario() -> None:
        client.gate.clear()
        events = synthesizer.stream(SpeechRequest(TEXT, sampling=SEEDED))
        assert isinstance(await anext(events), Started)
        assert (len(client.jobs), client.num_open) == (1, 1)
        await events.aclose()
        assert client.num_open == 0
        client.gate.set()
        client.ends_with = FinishReason.ERROR
        failing = synthesizer.stream(SpeechRequest(TEXT, sampling=SEEDED))
        assert isinstance(await anext(failing), Started)
        with pytest.raises(SynthesisError):
            [event async for event in failing]
        assert client.num_open == 0

    run(scenario())


class HeldBack:
    """A slot that a test gives or refuses; the jobs of `engine` are sent before."""

    def __init__(self, engine: EngineClient | None) -> None:
        self._engine = engine
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def speak_behind(self, client: EngineClient) -> Speak | None:
        return client.speak if client is self._engine else None

    async def held(self) -> None:
        await asyncio.shield(self.answer)


@pytest.mark.parametrize("is_near", [False, True])
def test_the_text_is_read_and_nothing_is_heard_before_the_call_is_admitted(
    client: RampClient, synthesizer: Synthesizer, is_near: bool
) -> None:
    """The job is sent at once if the engine itself admits the call, else afterwards."""

    async def scenario() -> None:
        engine = client if is_near else None
        slot = HeldBack(engine)
        request = SpeechRequest(TEXT, sampling=SEEDED)
        waiting = synthesizer.stream(request, slot)
        started = asyncio.create_task(anext(waiting))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert not started.done()
        unreadable = replace(request, pronunciations=(Pronunciation("\x00", "x"),))
        with pytest.raises(InvalidRequestError):  # a text that cannot be read does not wait
            await anext(synthesizer.stream(unreadable, slot))
        assert len(client.jobs) == is_near
        slot.answer.set_result(None)
        assert isinstance(await started, Started)
        assert (len(client.jobs), client.num_open) == (1, 1)
        await waiting.aclose()
        refused = HeldBack(engine)
        refused.answer.set_exception(ServerBusyError("busy", subject="server", retry_after_s=1.0))
        with pytest.raises(ServerBusyError):
            await anext(synthesizer.stream(request, refused))
        assert client.num_open == 0

    run(scenario())
