"""The second task: its words, their frequency, and their spelling."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.training.speechlike import has_teacher
from training.lexicon import (
    HELD_OUT_SHARE,
    MAX_LETTERS,
    MIN_LETTERS,
    Pronouncer,
    is_held_out,
    known_words,
    listed_words,
    words_of,
)
from training.made_words import CHUNK, SIMILAR, SIZES, Maker, Pieces, SimilarWords, made_words
from training.pronunciations import (
    RUNS,
    Pairs,
    PhonemeTask,
    alone,
    pure_lines,
    read_pairs,
    word_runs,
)
from training.sounds import NUMBER, sound_bytes, sound_numbers, spelled
from training.strings import Strings, flat_index
from training.vocabulary import END_OF_TEXT, FIRST_SOUND, PHONEMES

WORDS = {"alpha": "ae1 l f . ax0", "beta": "b ey1 t ax0", "don't": "d ow1 n . t", "x": "eh1 k s"}
LINES = ["Alpha and beta.", "Beta.", "The cat sat there."]
SPOKEN = ["ae1 l / ae1 n d / b", "b ey1", "dh ax0 / k-s ae1 t", "b iy1"]
NONE = Pairs(Strings([]), Strings([]))
LINE_OF = np.array([0, 1, 2, 1])


@pytest.fixture
def pairs(tmp_path: Path) -> Pairs:
    (tmp_path / "words.tsv").write_text(
        "".join(f"{w}\t{written(s).decode()}\n" for w, s in WORDS.items())
    )
    return read_pairs(tmp_path / "words.tsv")


def written(sounds: str) -> bytes:
    """Return sounds in file format; a point is silence, a hyphen joins two phones."""
    return sound_bytes([NUMBER[() if s == "." else tuple(s.split("-"))] for s in sounds.split()])


def phones_of(sounds: bytes) -> str:
    numbers = sound_numbers(np.frombuffer(sounds, np.uint8))
    return "".join(map(spelled, numbers)).rstrip()


def read(tokens: np.ndarray) -> tuple[str, str]:
    """Return text and phones of a document, with points for silent letters."""
    (middle,) = np.flatnonzero(tokens[:-1] == END_OF_TEXT)
    assert (tokens[0], tokens[-1]) == (PHONEMES, END_OF_TEXT)
    text, sounds = tokens[1:middle], tokens[middle + 1 : -1] - FIRST_SOUND
    said = (spelled(sound).strip().replace(" ", "-") or "." for sound in sounds)
    return bytes(text.astype(np.uint8)).decode(), " ".join(said)


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
    task = PhonemeTask(0.25, (0.2, 0.8), [pairs], LINES, NONE)
    clips = np.tile(np.arange(4), 500)
    found = task.compose(
        Strings([*map(written, SPOKEN)] * 500), LINE_OF, clips % 4, 90_000, np.random.default_rng(1)
    )
    tokens = [int(part.length.sum()) for part in found]
    assert tokens == pytest.approx([24_000, 6000], rel=0.1)


def test_sentences_are_as_they_were_spoken(pairs: Pairs) -> None:
    task = PhonemeTask(0.5, (1, 1), [pairs], LINES, NONE)
    *_, sentences = task.compose(
        Strings([*map(written, SPOKEN)]),
        LINE_OF,
        np.array([0, 2, 3]),
        1000,
        np.random.default_rng(1),
    )
    found = {read(sentences.tokens(None, i)) for i in range(len(sentences.first))}
    assert found == {
        (LINES[0], SPOKEN[0]), (LINES[2], SPOKEN[2]), (LINES[1], "b iy1")
    }  # fmt: skip


# --- held-out words, and synthetic words


def test_a_held_out_word_is_held_out_in_every_writing() -> None:
    words = [f"word{chr(97 + a)}{chr(97 + b)}" for a in range(26) for b in range(26)]
    held_out = [word for word in words if is_held_out(word)]
    assert 0 < len(held_out) < 4 * len(words) / HELD_OUT_SHARE
    assert all(is_held_out(f"'{word}'") for word in held_out)
    assert not is_held_out("the")


def test_no_sentence_with_a_held_out_word_teaches_phonemes() -> None:
    lines = ["The cat.", "They WORDY, he said.", "wordy", "'Wordy' words"]
    assert pure_lines(lines, {"wordy"}).tolist() == [True, False, False, False]


def test_held_out_words_are_asked_for_alone(pairs: Pairs) -> None:
    task = PhonemeTask(0.5, (1, 1), [pairs], ["A beta.", "Gamma."], pairs)
    assert task.pure.tolist() == [False, True]
    found = [read(task.held_out.tokens(None, i)) for i in range(len(pairs))]
    assert found == [*WORDS.items()]
    assert len(alone(NONE).first) == 0


def test_the_words_of_dictionaries_are_read_from_their_indices(tmp_path: Path) -> None:
    dictd, wordnet = tmp_path / "gcide.index", tmp_path / "index.noun"
    dictd.write_text("a la carte\tBn\tG\nsnow\tB8\tIa\n")
    wordnet.write_text("  1 This software is free\nsnow_goose n 1 3 @ #m #p 1 0 01855 \n")
    assert listed_words([str(dictd), str(wordnet)]) == ["a la carte", "snow", "snow goose"]
    assert known_words(listed_words([str(wordnet)])) == ["goose", "snow"]


def test_words_are_lower_case_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("Anna\nAnna's\ncafé\nsnow\n")
    assert listed_words([str(tmp_path / "list")]) == ["Anna", "snow"]
    assert words_of("Don't stop, 'Anna'!") == ["don't", "stop", "'anna'"]
    assert known_words(["B a", "'Anna's' " + "x" * 30]) == ["a", "anna's", "b"]


KNOWN = words_of(
    "nation station stationed ration rational national sensation sensational relation relational "
    "rationed passion passionate compassion compassionate dispassionate"
)


@pytest.mark.parametrize("size", [2, 3])
def test_drawn_words_are_of_known_pieces(size: int) -> None:
    pieces = Pieces(KNOWN, size)
    drawn = pieces.draw(400, np.random.default_rng(1))
    assert drawn == sorted(set(pieces.draw(400, np.random.default_rng(1))))
    border, width = " " * size, size + 1
    known = {w[i : i + width] for k in KNOWN for w in [f"{border}{k} "] for i in range(len(k) + 1)}
    assert len(drawn) > 10
    for word in (letters.decode() for letters in drawn):
        assert MIN_LETTERS <= len(word) <= MAX_LETTERS
        padded = f"{border}{word} "
        assert all(padded[i : i + width] in known for i in range(len(word) + 1))


def common(a: str, b: str) -> int:
    """Return the number of letters that both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(a, b, strict=False)))


def test_similar_words_differ_in_a_piece() -> None:
    similar = SimilarWords(KNOWN)
    drawn = similar.draw(2000, np.random.default_rng(1))
    assert drawn == sorted(set(similar.draw(2000, np.random.default_rng(1))))
    assert len(drawn) > 500
    for word in (letters.decode() for letters in drawn):
        assert MIN_LETTERS <= len(word) <= MAX_LETTERS
        shared = max(
            common(*pair)
            for known in KNOWN
            for pair in ((word, known), (word[::-1], known[::-1]))
        )  # fmt: skip
        assert shared >= (len(word) - 4) / 2


# --- against the teacher

teacher_only = pytest.mark.skipif(not has_teacher(), reason="needs libflite1")


@pytest.fixture(scope="module")
def pronouncer() -> Pronouncer:
    return Pronouncer()


@teacher_only
def test_the_lexicon_is_what_the_teacher_looks_up(pronouncer: Pronouncer) -> None:
    words, teacher = pronouncer.rules.lexicon(), pronouncer.teacher
    assert len(words) > 30_000
    assert all(teacher.is_exception(word) for word in words)
    assert pronouncer.is_exception(f"{words[100]}'s")
    others = Pieces(words[::7], 3).draw(500, np.random.default_rng(2))
    found = [teacher.is_exception(word.decode()) for word in others]
    assert found == [word.decode() in pronouncer.lexicon for word in others]


@teacher_only
def test_rules_say_what_the_teacher_says(pronouncer: Pronouncer) -> None:
    words = sorted(pronouncer.lexicon)
    made = [w.decode() for size in (1, 2, 4) for w in Pieces(words, size).draw(
        400, np.random.default_rng(size))]  # fmt: skip
    made += ["don't", "ctenoid", "kvetches", "mr", "x", *words[::999]]
    for word, line in zip(made, pronouncer.say(made), strict=True):
        written_word, sounds = line.decode().rstrip("\n").split("\t")
        assert written_word == word
        assert phones_of(sounds.encode()) == pronouncer.teacher.pronounce(word)
    short = [pronouncer.rules.apply(w.encode()) and w not in pronouncer.lexicon for w in made]
    assert 0.5 < np.mean(short) < 1


@teacher_only
def test_made_words_are_new_and_some_are_held_out(pronouncer: Pronouncer) -> None:
    maker = Maker([*KNOWN, *sorted(pronouncer.lexicon)[::9]], pronouncer, seed=1)
    chunks = list(made_words(maker, 4000))
    assert chunks == list(made_words(maker, 4000))
    ((kept, held_out),) = chunks
    words, never = ([x.decode().split("\t")[0] for x in lines] for lines in (kept, held_out))
    assert len(words) > 500 > len(never) > 0
    assert not {*words, *never} & {*KNOWN, *pronouncer.lexicon}
    assert not any(map(is_held_out, words))
    assert all(map(is_held_out, never))


@teacher_only
def test_chunks_that_are_drawn_at_once_are_those_of_one_process(pronouncer: Pronouncer) -> None:
    maker = Maker(KNOWN, pronouncer, seed=1)
    assert list(made_words(maker, CHUNK + 50)) == [maker.chunk(0, CHUNK), maker.chunk(1, 50)]


@teacher_only
def test_words_are_kept_for_the_rules_that_few_words_need(pronouncer: Pronouncer) -> None:
    known = [word for word in sorted(pronouncer.lexicon)[::3] if word.isalpha()]
    spelled = Strings([word.encode() for word in known])
    paths = pronouncer.rules.paths(spelled)
    assert len(paths) == spelled.length.sum()
    assert 5000 < len(np.unique(paths)) < 25_509 * 2
    said: dict[int, int] = {}  # a path through the trees ends in one sound
    for path, sound in zip(paths.tolist(), pronouncer.rules.sounds(spelled).bytes, strict=True):
        assert said.setdefault(path, int(sound)) == sound
    maker = Maker(known, pronouncer, seed=3)
    drawn = maker._sources[3].draw(3000, np.random.default_rng((3, 0)))
    kept, _ = maker.chunk(0, 3000)
    need = maker._need([line.split(b"\t")[0] for line in kept])
    assert len(need) < len(drawn) / 2
    assert np.median(need) > 1.5 * np.median(maker._need(drawn))


@teacher_only
def test_words_similar_to_the_lexicon_follow_the_rules(pronouncer: Pronouncer) -> None:
    maker, number = Maker(KNOWN, pronouncer, seed=1), SIZES.index(SIMILAR)
    kept, held_out = maker.chunk(number, 2000)
    assert len(kept) > 1000 > len(held_out) > 0
    for line in kept[::50]:
        word, sounds = line.rstrip(b"\n").split(b"\t")
        assert word.decode() not in pronouncer.lexicon
        assert phones_of(sounds) == pronouncer.teacher.pronounce(word.decode())
