"""The aligner: streamed input equals whole input; word times on known paths."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm import CheckpointError
from tts.speech.aligner import (
    LETTERS,
    NUM_LABELS,
    Aligner,
    AlignerConfig,
    LetterStream,
    letter_labels,
)
from tts.speech.word_times import WordTimer
from tts.text.segmenter import SpokenWord, TextOptions, split_text


def random_aligner() -> Aligner:
    """An aligner of several layers with random weights."""
    config = AlignerConfig(codebook_size=50, table_width=8, width=16)
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    weights = {
        "table.weight": weight(config.codebook_size, config.table_width),
        "output.weight": weight(config.frames_per_code * NUM_LABELS, config.width),
        "output.bias": weight(config.frames_per_code * NUM_LABELS),
    }
    for number, (width, following) in enumerate(pairwise(config.widths)):
        weights[f"layers.{number}.weight"] = weight(following, width, config.kernel)
        weights[f"layers.{number}.bias"] = weight(following)
    return Aligner(config, weights)


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 40), max_size=6), length=st.integers(1, 40))
def test_streamed_equals_the_whole(cuts: list[int], length: int) -> None:
    aligner = random_aligner()
    codes = np.random.default_rng(length).integers(0, aligner.config.codebook_size, length)
    stream = LetterStream(aligner)
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    parts = [stream.push(tuple(codes[a:b])) for a, b in pairwise(edges)]
    parts.append(stream.push((), is_last=True))
    whole = LetterStream(aligner).push(tuple(codes), is_last=True)
    assert np.array_equal(np.concatenate(parts), whole)


def spelled() -> Aligner:
    """An aligner that assigns label c to code c with high probability."""
    config = AlignerConfig(codebook_size=NUM_LABELS, frames_per_code=2, table_width=NUM_LABELS,
                           width=NUM_LABELS, layers=1, kernel=1)  # fmt: skip
    identity = np.eye(NUM_LABELS, dtype=np.float32)
    weights = {
        "table.weight": 20 * identity,
        "layers.0.weight": identity[:, :, None],
        "layers.0.bias": np.zeros(NUM_LABELS, np.float32),
        "output.weight": np.concatenate([identity, identity]),
        "output.bias": np.zeros(2 * NUM_LABELS, np.float32),
    }
    return Aligner(config, weights)


def words_of(text: str) -> list[SpokenWord]:
    return [SpokenWord(word, i, i + 1, word) for i, word in enumerate(text.split())]


def codes_of(letters: str) -> tuple[int, ...]:
    return tuple(0 if c == "_" else 1 + LETTERS.index(c) for c in letters)


SAID = "__hheelloo___woorlldd__ttoo__"


@pytest.mark.parametrize("step", [1, 4, 100])
def test_words_are_where_their_letters_are(step: int) -> None:
    timer = WordTimer(spelled(), words_of("hello, world to"), seconds_per_code=0.04)
    codes = codes_of(SAID)
    spans = [s for i in range(0, len(codes), step) for s in timer.push(codes[i : i + step])]
    spans += timer.finish()
    times = [(s.word.text, round(s.start_s / 0.04), round(s.end_s / 0.04)) for s in spans]
    assert times == [("hello,", 2, 10), ("world", 13, 21), ("to", 23, 27)]


def test_words_are_reported_before_the_segment_ends() -> None:
    timer = WordTimer(spelled(), words_of("hello world to"), seconds_per_code=0.04)
    told = timer.push(codes_of(SAID[:21]))
    assert [span.word.text for span in told] == ["hello"]
    assert [span.word.text for span in timer.finish(is_whole=False)] == ["world"]


def test_words_that_do_not_fit_are_omitted() -> None:
    timer = WordTimer(spelled(), words_of("hello world"), seconds_per_code=0.04)
    timer.push(codes_of("hel"))
    assert [span.word.text for span in timer.finish()] == ["hello"]


def test_words_without_letters_and_segments_without_speech() -> None:
    timer = WordTimer(spelled(), words_of("... 7"), seconds_per_code=0.04)
    assert timer.push(codes_of("___")) == []
    assert timer.finish() == []
    assert WordTimer(spelled(), words_of("hello"), seconds_per_code=0.04).finish() == []
    assert letter_labels("Don't 7!") == [4, 15, 14, 27, 20]
    assert letter_labels("Ñandú") == letter_labels("nandu")


def test_words_of_a_segment_and_where_they_are_in_the_input() -> None:
    text = "It cost $5.20 on May 3rd, she said."
    (segment,) = split_text(text, TextOptions())
    assert [(w.text, text[w.start : w.end]) for w in segment.words][:3] == [
        ("It", "It"),
        ("cost", "cost"),
        ("$5.20", "$5.20"),
    ]
    price = segment.words[2].spoken
    assert price.startswith("five dollars")
    spoken = " ".join(word.spoken for word in segment.words)
    assert spoken.replace(",", "") == segment.text.replace(",", "")
    ends = [word.end for word in segment.words]
    assert ends == sorted(ends)
    assert ends[-1] == len(text)


def test_a_damaged_aligner_configuration_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"codebook_size": 0}')
    with pytest.raises(CheckpointError, match="whole numbers"):
        Aligner.load(tmp_path)
