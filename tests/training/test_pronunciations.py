"""The second task: which words it sees, how often, and how they are written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from training.lexicon import HELD_OUT_SHARE, is_held_out, known_words, made_words, words_of
from training.pronunciations import (
    RUNS,
    Pairs,
    PhonemeTask,
    pure_lines,
    read_pairs,
    word_runs,
)
from training.strings import Strings, flat_index
from training.vocabulary import END_OF_TEXT, PHONEMES

WORDS = {"alpha": "ae1 l f ax0", "beta": "b ey1 t ax0", "don't": "d ow1 n t", "x": "eh1 k s"}
LINES = ["Alpha and beta.", "Beta.", "The cat sat there."]
SPOKEN = [b"ae1 l / ae1 n d / b", b"b ey1", b"dh ax0 / k ae1 t", b"b iy1"]
LINE_OF = np.array([0, 1, 2, 1])


@pytest.fixture
def pairs(tmp_path: Path) -> Pairs:
    (tmp_path / "words.tsv").write_text("".join(f"{w}\t{p}\n" for w, p in WORDS.items()))
    return read_pairs(tmp_path / "words.tsv")


def read(tokens: np.ndarray) -> tuple[str, str]:
    """Text and phones of a document."""
    (middle,) = np.flatnonzero(tokens[:-1] == END_OF_TEXT)
    assert (tokens[0], tokens[-1]) == (PHONEMES, END_OF_TEXT)
    text, phones = tokens[1:middle], tokens[middle + 1 : -1]
    return bytes(text.astype(np.uint8)).decode(), bytes(phones.astype(np.uint8)).decode()


def test_ranges_become_indices() -> None:
    found = flat_index(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert found.tolist() == [5, 6, 9, 10, 11]


def test_joined_strings_have_the_joint_after_each() -> None:
    flat, bounds = Strings([b"one", b"", b"three"]).joined(np.array([2, 1, 0]), b" / ")
    assert flat.tobytes() == b"three /  / one / "
    assert bounds.tolist() == [0, 8, 11, 17]


def test_runs_of_words_are_read_word_by_word(pairs: Pairs) -> None:
    runs = word_runs(pairs, 30_000, np.random.default_rng(3))
    count, capitals = np.zeros(len(RUNS) + 1, int), 0
    for i in range(len(runs.first)):
        tokens = runs.tokens(None, i)
        text, phones = read(tokens)
        assert len(tokens) == runs.length[i]
        words = text.split(" ")
        assert phones == " / ".join(WORDS[word.lower()] for word in words)
        assert all(word in (word.lower(), word.upper(), word.capitalize()) for word in words)
        capitals += sum(word != word.lower() for word in words)
        count[len(words)] += 1
    assert count[1:] / count.sum() == pytest.approx(RUNS, abs=0.05)
    total = int((count * np.arange(len(count))).sum())
    assert 0.2 < capitals / total < 0.36
    assert 27_000 < runs.length.sum() < 33_000


def test_every_word_comes_equally_often(pairs: Pairs) -> None:
    runs = word_runs(pairs, 6000, np.random.default_rng(5))
    words = [w for i in range(len(runs.first)) for w in read(runs.tokens(None, i))[0].split(" ")]
    counts = [sum(word.lower() == known for word in words) for known in WORDS]
    assert max(counts) - min(counts) <= 8


def test_a_pass_takes_its_share_of_tokens(pairs: Pairs) -> None:
    task = PhonemeTask(0.25, (0.2, 0.8), [pairs], LINES)
    clips = np.tile(np.arange(4), 500)
    found = task.compose(
        Strings(SPOKEN * 500), LINE_OF, clips % 4, 90_000, np.random.default_rng(1)
    )
    tokens = [int(part.length.sum()) for part in found]
    assert tokens == pytest.approx([24_000, 6000], rel=0.1)


def test_sentences_are_as_they_were_spoken(pairs: Pairs) -> None:
    task = PhonemeTask(0.5, (1, 1), [pairs], LINES)
    *_, sentences = task.compose(
        Strings(SPOKEN), LINE_OF, np.array([0, 2, 3]), 1000, np.random.default_rng(1)
    )
    found = {read(sentences.tokens(None, i)) for i in range(len(sentences.first))}
    assert found == {
        (LINES[0], SPOKEN[0].decode()), (LINES[2], SPOKEN[2].decode()), (LINES[1], "b iy1")
    }  # fmt: skip


# --- words that are held out, and words that are made up


def test_a_held_out_word_is_held_out_in_every_writing() -> None:
    words = [f"word{chr(97 + a)}{chr(97 + b)}" for a in range(26) for b in range(26)]
    held_out = [word for word in words if is_held_out(word)]
    assert 0 < len(held_out) < 4 * len(words) / HELD_OUT_SHARE
    assert all(is_held_out(f"'{word}'") for word in held_out)
    assert not is_held_out("the")


def test_no_sentence_with_a_held_out_word_teaches_phonemes() -> None:
    endings = (chr(97 + n // 26) + chr(97 + n % 26) for n in range(26 * 26))
    word = next(f"word{ending}" for ending in endings if is_held_out(f"word{ending}"))
    lines = ["The cat.", f"They {word.upper()}, he said.", f"{word}"]
    allowed = [True, False, False]
    assert pure_lines(lines).tolist() == allowed


def test_words_are_lower_case_and_sorted() -> None:
    assert words_of("Don't stop, 'Anna'!") == ["don't", "stop", "'anna'"]
    assert known_words(["B a", "'Anna's' " + "x" * 30]) == ["a", "anna's", "b"]


def test_made_words_are_new_and_of_known_pieces() -> None:
    known = known_words(
        ["nation station stationed ration rational national sensation sensational relation",
         "relational rationed passion passionate compassion compassionate dispassionate"]
    )  # fmt: skip
    made = made_words(known, 12, seed=1)
    assert made == made_words(known, 12, seed=1)
    assert len(made) == len(set(made)) > 5
    assert not set(made) & set(known)
    pieces = {w[i : i + 4] for word in known for w in [f"   {word} "] for i in range(len(w) - 3)}
    for word in made:
        assert re.fullmatch("[a-z]{4,20}", word)
        assert not is_held_out(word)
        assert all(f"   {word} "[i : i + 4] in pieces for i in range(len(word) + 1))
