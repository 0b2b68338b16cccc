"""The synthesizer on the real engine with random weights: all calls give the same audio."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.tts.ramp import TEXT, run
from tts.engine.local_client import LocalEngineClient
from tts.factory import Service
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import AudioChunk, SamplingOverrides, SpeechRequest, UtteranceCancelled

REQUEST = SpeechRequest(TEXT, sampling=SamplingOverrides(seed=11, max_tokens=120))


@pytest.fixture
def speaker(tiny_service: Service, engine_client: LocalEngineClient) -> Synthesizer:
    """A synthesizer; `engine_client` fails the test if a resource stays in use."""
    assert tiny_service.synthesizer is not None
    return tiny_service.synthesizer


NUM_REPEATS = 20


async def audio_of(events: AsyncIterator[object]) -> bytes:
    return b"".join([event.data async for event in events if isinstance(event, AudioChunk)])


def test_streamed_unary_and_session_audio_are_equal(speaker: Synthesizer) -> None:
    async def all_ways() -> list[bytes]:
        session = speaker.open_session(SpeechRequest(sampling=REQUEST.sampling))
        for word in TEXT.split(" "):
            session.feed(word + " ")
        session.close()
        whole = await speaker.synthesize(REQUEST)
        return [
            whole.audio,
            await audio_of(speaker.stream(REQUEST)),
            await audio_of(session.events()),
        ]

    unary, streamed, fed = run(all_ways())
    assert len(unary) > 16_000
    assert unary == streamed == fed


def test_a_barge_in_frees_the_running_utterance(speaker: Synthesizer) -> None:
    """The text is long; audio generated before the barge-in may still arrive."""

    async def interrupt() -> list[object]:
        session = speaker.open_session(SpeechRequest(sampling=REQUEST.sampling))
        session.feed(" ".join([TEXT] * NUM_REPEATS))
        events: list[object] = []
        async for event in session.events():
            events.append(event)
            if isinstance(event, AudioChunk) and event.sequence == 0:
                session.cancel()
                session.close()
        return events

    async def chunks_of_one() -> int:
        return sum([isinstance(event, AudioChunk) async for event in speaker.stream(REQUEST)])

    events = run(interrupt())
    assert isinstance(events[-2], UtteranceCancelled)
    heard = sum(isinstance(event, AudioChunk) for event in events)
    assert 1 <= heard < NUM_REPEATS * run(chunks_of_one()) / 2
