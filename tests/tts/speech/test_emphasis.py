"""Emphasis of words: times and samples around the stretched parts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import stretch_part
from tts.speech.emphasis import STRESSES, EmphasisedWords
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import AudioChunk, SamplingOverrides, SpeechRequest
from tts.speech.word_times import WordSpan
from tts.text.markup.ssml import read_ssml
from tts.text.segmenter import SpokenWord, TextSegment

RATE = 24_000


def word(text: str, start: int) -> SpokenWord:
    return SpokenWord(text, start, start + len(text), text)


def hum(seconds: float) -> np.ndarray:
    """Return a voice-like tone of 110 Hz, float32."""
    times_s = np.arange(round(seconds * RATE)) / RATE
    tone = sum(np.sin(2 * np.pi * 110 * k * times_s) / k for k in range(1, 12))
    return (0.1 * tone).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.05, 0.6), st.floats(0.5, 2.0))
def test_a_part_is_stretched_without_a_seam(start_s: float, length_s: float, rate: float) -> None:
    samples = hum(2.0)
    start, end = round(start_s * RATE), round((start_s + length_s) * RATE)
    part, following = stretch_part(samples, (start, end), rate, RATE)
    assert len(part) == pytest.approx(length_s * RATE / rate, abs=0.0125 * RATE)
    assert following == pytest.approx(end, abs=0.025 * RATE * max(1.0, rate))
    joined = np.concatenate([samples[:start], part, samples[following:]])
    assert np.abs(np.diff(joined)).max() < 1.5 * np.abs(np.diff(samples)).max()


def test_levels_are_those_of_the_words_in_an_element() -> None:
    source = "<speak>a <emphasis level='strong'>b c</emphasis> d<emphasis>e</emphasis></speak>"
    places = [source.index(f"{letter} ") for letter in "ab"]
    places += [source.index("c<"), source.index("d<")]
    words = tuple(word(text, place) for text, place in zip("abcd", places, strict=True))
    segment = TextSegment(0, "a b c de", 0, len(source), words=words)
    found = EmphasisedWords.of(segment, read_ssml(source))
    assert {word.text: level for word, level in found.levels.items()} == {
        "b": "strong",
        "c": "strong",
    }


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["", *STRESSES]), min_size=1, max_size=8), st.booleans())
def test_the_samples_between_emphasised_words_are_kept(levels: list[str], ends: bool) -> None:
    words = [word("x", 2 * index) for index in range(len(levels))]
    given_levels = {w: level for w, level in zip(words, levels, strict=True) if level}
    spans = [WordSpan(w, 0.3 * n + 0.05, 0.3 * n + 0.25) for n, w in enumerate(words)]
    samples = hum(0.3 * len(words) + (0.0 if ends else 0.1))
    found, timeline = EmphasisedWords(given_levels).applied(samples, spans, RATE)
    assert len(found) == pytest.approx(len(samples) + timeline.added_s * RATE, abs=1e-3)
    for span, level in zip(spans, levels, strict=True):
        start, end = (round(timeline(time_s) * RATE) for time_s in (span.start_s, span.end_s))
        if level and not ends:
            length = (end - start) / RATE / 0.2
            assert length == pytest.approx(1 / STRESSES[level].rate, abs=0.2)
        elif not level:
            before = samples[
                round((span.start_s + 0.05) * RATE) : round((span.end_s - 0.02) * RATE)
            ]
            first = round(timeline(span.start_s + 0.05) * RATE)
            assert np.array_equal(found[first : first + len(before)], before)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.3, 0.7), st.sampled_from([("strong", "reduced"), ("reduced", "strong")]))
def test_neighbours_of_two_levels_join_without_a_step(
    middle_s: float, levels: tuple[str, str]
) -> None:
    words = word("a", 0), word("b", 2)
    spans = [WordSpan(words[0], 0.1, middle_s), WordSpan(words[1], middle_s, 1.0)]
    tone = 0.1 * np.sin(2 * np.pi * 110 * np.arange(RATE * 2) / RATE).astype(np.float32)
    emphasised = EmphasisedWords(dict(zip(words, levels, strict=True)))
    found, _ = emphasised.applied(tone, spans, RATE)
    loudest = 10 ** (STRESSES["strong"].gain_db / 20)
    assert np.abs(np.diff(found)).max() < 2 * loudest * np.abs(np.diff(tone)).max()


def test_chunks_of_an_emphasised_sentence_have_the_codes_of_their_blocks(
    runner: asyncio.Runner, built_in: Synthesizer
) -> None:
    """A request can continue from any of them, as without emphasis."""

    async def codes(level: str) -> list[tuple[int, int, int, tuple[int, ...]]]:
        source = f"<speak>You must <emphasis level='{level}'>never</emphasis> open it.</speak>"
        request = SpeechRequest(
            source, markup=read_ssml(source), sampling=SamplingOverrides(seed=7)
        )
        events = [event async for event in built_in.stream(request)]
        return [
            (event.token_offset, event.token_count, event.next_token_offset, event.carry)
            for event in events
            if isinstance(event, AudioChunk)
        ]

    plain, emphasised = (runner.run(codes(level)) for level in ("none", "strong"))
    assert len(plain) > 2
    assert emphasised == plain
