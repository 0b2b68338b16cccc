"""Word times of the shipped voice, for clients."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from tts.server.wire.speech import to_fields
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    SamplingOverrides,
    SpeechRequest,
    TimestampGranularity,
    WordTime,
    WordTimes,
)

TEXT = "The ferry leaves at noon on 5 May. Bring a coat."
WORDS = [
    "The",
    "ferry",
    "leaves",
    "at",
    "noon",
    "on",
    "5",
    "May.",
    "Bring",
    "a",
    "coat.",
]


def request(**values: object) -> SpeechRequest:
    return SpeechRequest(
        TEXT,
        sampling=SamplingOverrides(seed=3),
        timestamps=TimestampGranularity.WORD,
        **values,  # type: ignore[arg-type]
    )


def spoken(runner: asyncio.Runner, built_in: Synthesizer, speech: SpeechRequest) -> list:
    async def collect() -> list:
        return [event async for event in built_in.stream(speech)]

    return runner.run(collect())


def words_in(events: list) -> list[WordTime]:
    return [word for event in events if isinstance(event, WordTimes) for word in event.words]


@pytest.fixture(scope="module")
def events(runner: asyncio.Runner, built_in: Synthesizer) -> list:
    """The events of a stream."""
    return spoken(runner, built_in, request())


def test_every_word_in_order_within_the_audio(events: list) -> None:
    words = words_in(events)
    # A phrase that is read as one ("on 5 May": "on the fifth of May") is one word.
    assert words[0].word == "The"
    assert " ".join(TEXT[w.text_start : w.text_end] for w in words) == " ".join(WORDS)
    starts = [word.start_s for word in words]
    assert starts == sorted(starts)
    assert all(word.start_s < word.end_s for word in words)
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(words))
    end_s = sum(e.sample_count for e in events if isinstance(e, AudioChunk)) / 24_000
    assert words[-1].end_s <= end_s
    assert words[-1].end_s > end_s - 1.0


def test_words_are_reported_while_audio_is_generated(events: list) -> None:
    first = next(i for i, event in enumerate(events) if isinstance(event, WordTimes))
    assert sum(isinstance(event, AudioChunk) for event in events[first:]) >= 2
    sent = [to_fields(event).get("words") for event in events]
    assert next(w.word for words in sent if words for w in words.words) == "The"


def test_unary_and_streamed_times_are_equal_and_scale_with_the_rate(
    runner: asyncio.Runner, built_in: Synthesizer, events: list
) -> None:
    streamed = words_in(events)
    whole = runner.run(built_in.synthesize(request(check=False)))
    assert list(whole.words) == streamed
    faster = words_in(spoken(runner, built_in, request(speaking_rate=2.0)))
    assert [w.start_s for w in faster] == pytest.approx([w.start_s / 2 for w in streamed])


def test_trimmed_silence_moves_the_times(
    runner: asyncio.Runner, built_in: Synthesizer, events: list
) -> None:
    words = words_in(events)
    trimmed = words_in(spoken(runner, built_in, request(trim_silence=True)))
    assert [w.word for w in trimmed] == [w.word for w in words]
    shift = words[-1].start_s - trimmed[-1].start_s
    assert 0 <= shift < 0.3


def test_word_times_are_sent_on_request_only(runner: asyncio.Runner, built_in: Synthesizer) -> None:
    plain = SpeechRequest("Good morning.", sampling=SamplingOverrides(seed=3))
    assert not words_in(spoken(runner, built_in, plain))
