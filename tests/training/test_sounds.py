"""The second task's alphabet: its tokens, and the sounds of letters."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.speechlike import has_teacher
from training.alignment import Alignment
from training.rules import Rules
from training.sounds import (
    MAX_SOUNDS,
    PAIRS,
    PHONES,
    SILENT,
    SOUNDS,
    WORD_BREAK,
    sound_bytes,
    sound_numbers,
    spelled,
)
from training.strings import Strings
from training.vocabulary import FIRST_CODE, FIRST_SOUND, build_tokenizer


def test_a_file_has_a_printable_byte_for_each_sound() -> None:
    numbers = range(len(SOUNDS))
    written = sound_bytes(numbers)
    assert written.decode("ascii").isprintable()
    assert b" " not in written
    assert sound_numbers(np.frombuffer(written, np.uint8)).tolist() == [*numbers]


def test_an_answer_reads_as_phones() -> None:
    tokenizer = build_tokenizer(8)
    sounds = [("hh",), ("ax0",), (), ("l",), ("ow1",), ("/",), ("k", "s")]
    ids = [FIRST_SOUND + SOUNDS.index(sound) for sound in sounds]
    assert tokenizer.decode(ids) == "hh ax0 l ow1 / k s "
    everything = [FIRST_SOUND + i for i in range(MAX_SOUNDS)]
    assert tokenizer.decode(everything) == "".join(map(spelled, range(len(SOUNDS))))


def test_no_text_is_written_in_sounds() -> None:
    tokenizer = build_tokenizer(8)
    text = " ".join(" ".join(pair) for pair in ((*PHONES,), *PAIRS)) + " / "
    assert tokenizer.encode(text).ids == [*text.encode()]
    assert tokenizer.encode("<|s_0|><|s_7|>").ids == [FIRST_CODE, FIRST_CODE + 7]
    assert tokenizer.get_vocab_size() == FIRST_CODE + 8


# --- with the teacher's rules


@pytest.fixture(scope="module")
def alignment() -> Alignment:
    if not has_teacher():
        pytest.skip("needs libflite1")
    return Alignment(Rules())


def shown(sounds: bytes) -> str:
    numbers = sound_numbers(np.frombuffer(sounds, np.uint8))
    return " ".join("-".join(SOUNDS[number]) or "." for number in numbers)


@pytest.mark.parametrize(
    ("text", "phones", "sounds"),
    [
        ("show", "sh ow1", "sh . ow1 ."),
        ("Knight", "n ay1 t", ". n ay1 . . t"),
        ("phoenix", "f iy1 n ih0 k s", "f . . iy1 n ih0 k-s"),
        ("don't", "d ow1 n t", "d ow1 n . t"),
        ("dog's", "d ao1 g / z", "d ao1 g / z"),
        ("Mr.", "m ih1 s t er0", "m ih1 s t er0 ."),
        ("x", "eh1 k s", "eh1 k s"),
        ("Yes - no.", "y eh1 s / n ow1", "y eh1 s / . . n ow1 ."),
        ("well-known", "w eh1 l / n ow1 n", "w eh1 . l / . n ow1 . n"),
        ("a cf. b", "ax0 / s iy1 / eh1 f / b iy1", "ax0 / s iy1 / eh1 f / b iy1"),
    ],
)
def test_each_letter_has_its_sound(
    alignment: Alignment, text: str, phones: str, sounds: str
) -> None:
    found = alignment.text(text, phones)
    assert "".join(map(spelled, sound_numbers(np.frombuffer(found, np.uint8)))).strip() == phones
    assert shown(found) == sounds


def test_what_the_rules_say_is_aligned_as_they_say_it(alignment: Alignment) -> None:
    rules = Rules()
    words = [b"straightened", b"thoroughbred", b"phonograph", b"quixotical", b"zanthoxylum"]
    said = rules.sounds(Strings(words))
    for i, word in enumerate(words):
        numbers = sound_numbers(said[i])
        phones = "".join(map(spelled, numbers)).strip()
        aligned = alignment.text(word.decode(), phones)
        assert len(aligned) == len(said[i]) == len(word)


def test_unknown_phones_are_not_aligned(alignment: Alignment) -> None:
    assert alignment.text("a", "qq1") == b""
    assert shown(alignment.text("'", "")) == "."
    assert shown(sound_bytes([SILENT, WORD_BREAK])) == ". /"
