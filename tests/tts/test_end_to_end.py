"""End-to-end tests with tiny weights: text in, audio out, no component replaced."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soundfile

from decoder import AudioEncoding, sample_index
from llm import FinishReason, Request, SamplingParams
from tests.deadlines import HANG_S
from tests.fakes import wait_until_idle
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.checkpoint.tokenizer import IncrementalDetokenizer
from tts.factory import Service
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    ChunkingOverrides,
    Done,
    FlushDone,
    SamplingOverrides,
    SpeechRequest,
    Started,
)
from tts.voices.types import Voice

TEXT = "Dr. Smith paid $5.20 on 3 May. Did he? Yes, and then he went home by the river."


def request(text: str = TEXT, seed: int = 11, **values: Any) -> SpeechRequest:
    values = {"max_audio_s": 4.0} | values
    return SpeechRequest(text, sampling=SamplingOverrides(seed=seed), **values)


def run(scenario: Callable[[], Awaitable[None]], timeout_s: float = HANG_S) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), timeout_s)

    asyncio.run(bounded())


@pytest.fixture
def synthesizer(service: Service) -> Synthesizer:
    assert service.synthesizer is not None
    return service.synthesizer


async def streamed(synthesizer: Synthesizer, speech: SpeechRequest) -> bytes:
    events = [event async for event in synthesizer.stream(speech)]
    return b"".join(event.data for event in events if isinstance(event, AudioChunk))


def test_streamed_and_unary_are_the_same_samples(synthesizer: Synthesizer) -> None:
    async def scenario() -> None:
        whole = await synthesizer.synthesize(request())
        assert await streamed(synthesizer, request()) == whole.audio
        samples = np.frombuffer(whole.audio, "<i2")
        codes = whole.result.usage.output_tokens
        assert len(samples) >= sample_index(1, synthesizer.codec.samples_per_code)
        assert whole.result.usage.audio_s == len(samples) / synthesizer.codec.sample_rate
        assert codes * synthesizer.codec.samples_per_code == len(samples)

    run(scenario)


def test_events_count_every_sample_and_code_once(synthesizer: Synthesizer) -> None:
    async def scenario() -> None:
        speech = request("One. Two. Three.", max_audio_s=60)
        events = [event async for event in synthesizer.stream(speech)]
        started, *chunks, done = events
        assert isinstance(started, Started)
        assert isinstance(done, Done)
        assert started.seed == 11
        sample = code = 0
        for chunk in chunks:
            assert isinstance(chunk, AudioChunk)
            assert (chunk.sample_offset, chunk.token_offset) == (sample, code)
            assert len(chunk.data) == 2 * chunk.sample_count
            sample += chunk.sample_count
            code += chunk.token_count
        assert {chunk.segment_index for chunk in chunks} == {0, 1, 2}

    run(scenario)


def test_same_seed_alone_and_among_eight_is_the_same_bytes(
    service: Service, synthesizer: Synthesizer
) -> None:
    voices = synthesizer.voices.voices()
    requests = [
        request(f"{TEXT} Number {n}.", seed=n, voice=voices[n % len(voices)]) for n in range(8)
    ]

    async def text(number: int) -> None:
        prompt = service.prompts.text_prompt("and now for something else")
        sampling = SamplingParams(seed=number, max_tokens=60)
        async for _ in service.client.generate(Request(f"text-{number}", prompt, sampling)):
            pass

    async def scenario() -> None:
        alone = [await streamed(synthesizer, one) for one in requests]
        together = await asyncio.gather(
            *(streamed(synthesizer, one) for one in requests), *(text(n) for n in range(3))
        )
        assert together[:8] == alone

    run(scenario)


def test_a_container_has_all_samples(synthesizer: Synthesizer) -> None:
    async def scenario() -> None:
        plain = await synthesizer.synthesize(request())
        flac = await synthesizer.synthesize(request(encoding=AudioEncoding.FLAC))
        samples, rate = soundfile.read(io.BytesIO(flac.audio), dtype="int16")
        assert rate == synthesizer.codec.sample_rate
        np.testing.assert_array_equal(samples, np.frombuffer(plain.audio, "<i2"))

    run(scenario)


def test_a_session_synthesizes_text_as_it_arrives(synthesizer: Synthesizer) -> None:
    async def scenario() -> None:
        session = synthesizer.open_session(request("", max_audio_s=60))
        for fragment in ("He", "llo there. ", "How are", " you?"):
            session.feed(fragment)
        session.flush("f1")
        session.feed("Bye.")
        session.close()
        events = [event async for event in session.events()]
        kinds = [type(event) for event in events]
        assert kinds[0] is Started
        assert kinds[-1] is Done
        flush = kinds.index(FlushDone)
        assert {AudioChunk} == set(kinds[1:flush]) == set(kinds[flush + 1 : -1])

    run(scenario)


def test_a_clip_becomes_a_voice_that_speaks(synthesizer: Synthesizer) -> None:
    async def scenario() -> None:
        rate = synthesizer.codec.sample_rate
        clip = io.BytesIO()
        tone = 0.3 * np.sin(np.arange(2 * rate) / 15)
        soundfile.write(clip, tone, rate, format="WAV")
        prompt = await synthesizer.cloner.from_clip(clip.getvalue(), None, "A steady tone.")
        assert len(prompt.codes) == 50
        voice = Voice("tone", prompt=prompt)
        cloned = await synthesizer.synthesize(request("Hello.", voice=voice))
        usual = await synthesizer.synthesize(request("Hello."))
        assert cloned.audio
        assert cloned.audio != usual.audio
        assert cloned.result.usage.prompt_tokens > usual.result.usage.prompt_tokens + 50
        again = await synthesizer.synthesize(request("Hello.", voice=voice))
        assert again.audio == cloned.audio
        assert again.result.usage.cached_prompt_tokens >= 48  # the voice is not computed again

    run(scenario)


def test_a_follow_up_request_continues_the_first(synthesizer: Synthesizer) -> None:
    async def scenario() -> None:
        first = await synthesizer.synthesize(request("One."))
        carry = first.chunks[-1].carry
        assert len(carry) == min(8, first.result.usage.output_tokens)
        continued = await synthesizer.synthesize(request("Two.", carry=carry))
        fresh = await synthesizer.synthesize(request("Two."))
        assert len(continued.audio) == len(fresh.audio)
        assert continued.audio != fresh.audio  # another left context, the same codes

    run(scenario)


def test_chunking_of_a_request_does_not_change_the_length(synthesizer: Synthesizer) -> None:
    async def scenario() -> None:
        usual = await synthesizer.synthesize(request())
        for sizes in ((1,), (3, 7), (500,)):
            chunking = ChunkingOverrides(chunk_sizes=sizes, buffer=4)
            other = await synthesizer.synthesize(request(chunking=chunking))
            assert len(other.audio) == len(usual.audio)

    run(scenario)


def test_closing_a_stream_early_frees_all_resources(
    service: Service, synthesizer: Synthesizer
) -> None:
    async def scenario() -> None:
        stream = synthesizer.stream(request(TEXT * 20))
        async for event in stream:
            if isinstance(event, AudioChunk):
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await wait_until_idle(service.client)

    run(scenario)


def test_control_tokens_in_the_text_are_synthesized_as_text(
    service: Service, synthesizer: Synthesizer
) -> None:
    voice = synthesizer.voices.default
    ids = service.prompts.speech_prompt("<|s_12|><|end_of_speech|>", voice)
    assert all(token_id < 256 for token_id in ids[1:-1])

    async def scenario() -> None:
        speech = await synthesizer.synthesize(request("Say <|s_12|> now."))
        assert speech.result.usage.output_tokens > 0

    run(scenario)


def test_the_same_engine_generates_text(service: Service) -> None:
    async def scenario() -> None:
        messages = [ChatMessage(ChatRole.USER, "Hello?")]
        prompt = service.prompts.chat_prompt(messages)
        assert bytes(prompt).decode() == "user: Hello?\nassistant: "
        sampling = replace(
            service.text.sampling,
            seed=5,
            max_tokens=30,
            stop_token_ids=service.text.stop_token_ids,
            allowed_ranges=((32, 127),),
        )
        chunks = [c async for c in service.client.generate(Request("chat", prompt, sampling))]
        detokenizer = IncrementalDetokenizer(service.prompts.tokenizer)
        text = "".join(detokenizer.push(chunk.token_ids) for chunk in chunks)
        assert chunks[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert len(text + detokenizer.finish()) == sum(len(c.token_ids) for c in chunks)

    run(scenario)
