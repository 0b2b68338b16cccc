"""The check of segments: letters that are written here, and real codes of the built-in voice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tts.speech.aligner import NUM_LABELS, Aligner, letter_labels
from tts.speech.check import SOUND, CheckResult, Verdict, check_segment
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    ChunkingOverrides,
    Done,
    SamplingOverrides,
    SpeechRequest,
)
from tts.speech.word_times import WordTimer
from tts.text.segmenter import SegmentStream, TextNormalization, TextOptions, TextSegment

PLAIN = TextOptions(max_characters=200)
FRAMES_PER_LETTER = 5
SURE = -8.0  # log-probability of every other letter
CODES_PER_S = 25.0

# --- letters that are written here


def segment_of(text: str, options: TextOptions = PLAIN) -> TextSegment:
    (segment,) = SegmentStream(options).split(text)
    return segment


def frames(*words: str) -> np.ndarray:
    """Letters of words that are clearly spoken, with silence between them."""
    labels = [0] * 10
    for word in words:
        labels += [label for label in letter_labels(word) for _ in range(FRAMES_PER_LETTER)]
        labels += [0] * 4
    found = np.full((len(labels), NUM_LABELS), SURE, np.float32)
    found[np.arange(len(labels)), labels] = 0.0
    return found


def verdict(text: str, spoken: str) -> Verdict:
    seconds = 0.1 * len(text)
    return check_segment(segment_of(text), seconds, letters=frames(*spoken.split()))


@pytest.mark.parametrize(
    ("spoken", "result", "num_words"),
    [
        ("it is very very cold today", CheckResult.SOUND, 0),
        ("it is very cold today", CheckResult.SKIPPED, 1),
        ("it is very very cold", CheckResult.SKIPPED, 1),
        ("very very cold today", CheckResult.SKIPPED, 2),
        ("it is today", CheckResult.SKIPPED, 3),
        ("it is very very very cold today", CheckResult.REPEATED, 1),
        ("it is very very cold cold today", CheckResult.REPEATED, 1),
        ("it is very very cold today very very cold today", CheckResult.REPEATED, 4),
    ],
)
def test_words_that_are_missing_or_too_many(
    spoken: str, result: CheckResult, num_words: int
) -> None:
    assert verdict("It is very, very cold today.", spoken) == Verdict(result, num_words)


@pytest.mark.parametrize("spoken", ["it is is cold", "it cold"])
def test_words_are_counted_where_the_letters_are_unsure(spoken: str) -> None:
    """A short word twice makes the speech 18 nats less likely, without the word 3.6 nats."""
    text, unsure = "It is cold.", 1.8 / -SURE
    found = check_segment(segment_of(text), 1.0, letters=unsure * frames(*spoken.split()))
    assert found.num_words == 1
    sound = check_segment(segment_of(text), 1.0, letters=unsure * frames("it", "is", "cold"))
    assert sound == SOUND


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_words_side_by_side_are_counted(count: int) -> None:
    """The frames of one word can be shared out to two: two of them could be either letter."""
    text = f"{'no, ' * count}the hammers."
    said = frames(*["no"] * (count - 1), "the", "hammers")
    first = 10 + FRAMES_PER_LETTER - 1  # the last frame of "n", and the first of "o"
    said[first : first + 2, letter_labels("no")] = np.log(0.5)
    found = check_segment(segment_of(text), 0.1 * len(text), letters=said)
    assert found == Verdict(CheckResult.SKIPPED, 1)
    whole = frames(*["no"] * count, "the", "hammers")
    whole[first : first + 2, letter_labels("no")] = np.log(0.5)
    assert check_segment(segment_of(text), 0.1 * len(text), letters=whole) == SOUND


@pytest.mark.parametrize(
    "spoken", ["room forty one", "room one", "room forty", "room forty one one"]
)
def test_each_word_of_a_number_is_counted(spoken: str) -> None:
    found = check_segment(segment_of("Room 41."), 1.5, letters=frames(*spoken.split()))
    assert (found == SOUND) == (spoken == "room forty one")
    assert found.num_words <= 1


def test_words_in_another_order() -> None:
    found = verdict("Bring the ladder and the lantern.", "bring the lantern and the ladder")
    assert found.result is not CheckResult.SOUND


@pytest.mark.parametrize(
    ("seconds", "result"),
    [
        (0.5, CheckResult.TOO_FAST),
        (1.5, CheckResult.SOUND),
        (4.0, CheckResult.SOUND),
        (6.0, CheckResult.TOO_SLOW),
    ],
)
def test_the_length_is_compared_with_the_texts(seconds: float, result: CheckResult) -> None:
    assert check_segment(segment_of("The ferry leaves at noon."), seconds).result is result


def test_speech_without_an_end_is_cut() -> None:
    segment = segment_of("The ferry leaves.")
    assert check_segment(segment, 2.0, is_cut=True) == Verdict(CheckResult.CUT, 3)


@pytest.mark.parametrize("text", ["Room 5 is 123456789.", "Olá, você está aí?", "今日は。"])
def test_texts_with_other_signs_than_letters_are_only_checked_for_an_end(text: str) -> None:
    segment = segment_of(
        text, replace(PLAIN, normalization=TextNormalization.OFF, ascii_only=False)
    )
    assert check_segment(segment, 0.01, letters=frames("no")).result is CheckResult.SOUND
    assert check_segment(segment, 0.01, is_cut=True).result is CheckResult.CUT


# --- the built-in voice

SENTENCES = (
    "The library closes early on Fridays during the winter.",
    "Her sister teaches music at a small school near the river.",
    "We walked along the harbor until the lamps were lit.",
    "A careful gardener waters the roses before sunrise.",
    "They painted the kitchen yellow and the hallway green.",
    "People expected the orchestra to play another waltz.",
)
TEXT = "Put it away. We leave at noon."
SHORT = "We leave."  # for what does not depend on the words
WHOLE = ChunkingOverrides(chunk_sizes=(500,), buffer=500)  # one block, which carries all codes


@dataclass(frozen=True, slots=True)
class Spoken:
    """Sentence and its codes; `words`: codes [start, end) of words of four letters or more."""

    segment: TextSegment
    codes: tuple[int, ...]
    words: tuple[tuple[int, int], ...]


@pytest.fixture(scope="module")
def aligner(built_in: Synthesizer) -> Aligner:
    assert built_in.settings.aligner is not None
    return Aligner.load(built_in.settings.aligner)


@pytest.fixture(scope="module")
def spoken(runner: asyncio.Runner, built_in: Synthesizer, aligner: Aligner) -> tuple[Spoken, ...]:
    async def speak(text: str) -> Spoken:
        request = SpeechRequest(text, sampling=SamplingOverrides(seed=3), chunking=WHOLE)
        done = await built_in.synthesize(request)
        codes = done.chunks[-1].carry
        segment = segment_of(text)
        timer = WordTimer(aligner, segment.words, 1 / CODES_PER_S)
        spans = [span for span in [*timer.push(codes), *timer.finish()] if is_long(span.word.text)]
        places = [(round(s.start_s * CODES_PER_S), round(s.end_s * CODES_PER_S)) for s in spans]
        return Spoken(segment, codes, tuple(places))

    async def speak_all() -> list[Spoken]:
        return await asyncio.gather(*map(speak, SENTENCES))

    return tuple(runner.run(speak_all()))


EAGER_TEXT = "After a long week of meetings, everyone went home by train."


@pytest.mark.parametrize("eager", [1, 2])
def test_an_eager_sentence_is_sound_as_a_whole(
    runner: asyncio.Runner, built_in: Synthesizer, aligner: Aligner, eager: int
) -> None:
    """It begins while its second half has not come, and has each of its words once."""

    async def speak() -> tuple[int, ...]:
        chunking = ChunkingOverrides(buffer=500)  # the last carry has all codes
        request = SpeechRequest(sampling=SamplingOverrides(seed=3), chunking=chunking, eager=eager)
        session, carry, is_whole = built_in.open_session(request), (), False
        session.feed(EAGER_TEXT[: EAGER_TEXT.index("went")])
        async for event in session.events():
            if isinstance(event, AudioChunk):
                carry = event.carry
                if not is_whole:
                    is_whole = True
                    session.feed(EAGER_TEXT[EAGER_TEXT.index("went") :])
                    session.close()
        return carry

    segment = segment_of(EAGER_TEXT)
    codes = runner.run(asyncio.wait_for(speak(), 60))
    assert results([(segment, codes)], aligner) == ["sound"]


def is_long(word: str) -> bool:
    return len(letter_labels(word)) >= 4


def results(items: Sequence[tuple[TextSegment, tuple[int, ...]]], aligner: Aligner) -> list[str]:
    found = [
        check_segment(segment, len(codes) / CODES_PER_S, letters=aligner.letters(codes))
        for segment, codes in items
    ]
    return [verdict.result.value for verdict in found]


def test_almost_all_sound_speech_passes(spoken: tuple[Spoken, ...], aligner: Aligner) -> None:
    found = results([(one.segment, one.codes) for one in spoken], aligner)
    assert found.count("sound") >= len(spoken) - 1


def test_most_words_that_are_cut_out_or_doubled_are_found(
    spoken: tuple[Spoken, ...], aligner: Aligner
) -> None:
    cut, doubled = [], []
    for one in spoken:
        for start, end in one.words:
            cut.append((one.segment, one.codes[:start] + one.codes[end:]))
            doubled.append((one.segment, one.codes[:end] + one.codes[start:]))
    assert len(cut) > 30
    assert results(cut, aligner).count("skipped") >= 0.8 * len(cut)
    assert results(doubled, aligner).count("repeated") >= 0.6 * len(doubled)


def test_an_early_end_is_found(spoken: tuple[Spoken, ...], aligner: Aligner) -> None:
    early = [(one.segment, one.codes[: one.words[-1][0]]) for one in spoken]
    assert set(results(early, aligner)) == {"skipped"}


def test_checked_speech_is_the_same_where_it_is_sound(
    runner: asyncio.Runner, built_in: Synthesizer
) -> None:
    request = SpeechRequest(TEXT, sampling=SamplingOverrides(seed=3))

    async def listen(request: SpeechRequest) -> tuple[list[AudioChunk], tuple[object, ...]]:
        events = [event async for event in built_in.stream(request)]
        (checks,) = (event.result.checks for event in events if isinstance(event, Done))
        return [event for event in events if isinstance(event, AudioChunk)], checks

    async def both() -> None:
        chunks, no_checks = await listen(request)
        checked, checks = await listen(replace(request, check=True))
        assert (checks, no_checks) == (((CheckResult.SOUND,),) * 2, ())
        assert chunks == checked
        whole = await built_in.synthesize(replace(request, check=True))
        assert whole.audio == b"".join(chunk.data for chunk in chunks)
        assert whole.result.checks == checks

    runner.run(both())


@pytest.mark.parametrize("check", [None, False, True])
def test_whole_speech_is_checked_by_default_and_a_stream_is_not(
    runner: asyncio.Runner, built_in: Synthesizer, check: bool | None
) -> None:
    request = SpeechRequest(SHORT, sampling=SamplingOverrides(seed=3), check=check)

    async def checks() -> tuple[int, int]:
        whole = await built_in.synthesize(request)
        *_, done = [event async for event in built_in.stream(request)]
        assert isinstance(done, Done)
        return len(whole.result.checks), len(done.result.checks)

    expected = {None: (1, 0), False: (0, 0), True: (1, 1)}
    assert runner.run(checks()) == expected[check]


def test_a_sessions_segments_are_checked_on_request_only(
    runner: asyncio.Runner, built_in: Synthesizer
) -> None:
    async def converse(*, check: bool) -> int:
        session = built_in.open_session(SpeechRequest(check=check))
        session.feed(SHORT)
        session.close()
        *_, done = [event async for event in session.events()]
        assert isinstance(done, Done)
        return len(done.result.checks)

    assert runner.run(converse(check=False)) == 0
    assert runner.run(converse(check=True)) == 1
