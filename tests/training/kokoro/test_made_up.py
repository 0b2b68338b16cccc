"""Words that exist in no language, and the lines that have them."""

from __future__ import annotations

import random

import pytest

from training.kokoro.made_up import EDGES, NO_LETTERS, Lines, changed, invented, judging

ROWS = ["ðə kˈæt, ðæt sˈæt.\tThe cat, that sat.", "“jˈɛs,” ʃi sˈɛd.\t“Yes,” she said.",
        "nˈIn ˈʌv ðəm\t9 of them", "wˌʌn hˈʌndɹəd\t100"]  # fmt: skip


@pytest.mark.parametrize("accent", ["a", "b"])
def test_invented_words_end_in_every_vowel_and_have_one_stress(accent: str) -> None:
    rng = random.Random(0)
    words = [invented(rng, accent) for _ in range(3000)]
    assert len(set(words)) > 2800
    assert all(word.count("ˈ") == 1 for word in words)
    assert {word[-1] for word in words} >= set("æɛɪʊʌəAI" + ("ɑiu" if accent == "a" else "ɒː"))


def test_judging_words_are_one_to_three_syllables() -> None:
    words = judging()
    assert words[:20] == judging(20)
    assert len(set(words)) > 450
    assert all(word.count("ˈ") == 1 for word in words)


def test_a_changed_word_has_as_many_phones() -> None:
    rng = random.Random(0)
    found = {changed(rng, "kˈæt") for _ in range(50)}
    assert len(found) > 30
    assert all(len(word) == 4 and word[1] == "ˈ" for word in found)


def test_lines_have_words_without_letters_beside_their_symbols() -> None:
    lines = list(Lines(ROWS, "a", 1).take(300))
    assert lines == list(Lines(ROWS, "a", 1).take(300))
    known = {word.strip(EDGES) for row in ROWS for word in row.split("\t")[0].split(" ")}
    made = alone = 0
    for line in lines:
        said, text = (side.split(" ") for side in line.split("\t"))
        assert len(said) == len(text)
        cores = [word.strip(EDGES) for word in text]
        assert NO_LETTERS in cores
        alone += set(cores) == {NO_LETTERS}
        for sounds, letters in zip(said, text, strict=True):
            word = sounds.strip(EDGES)
            if letters.strip(EDGES) == NO_LETTERS:
                made += 1
                assert word not in known
                assert word not in judging()
                assert sounds.replace(word, NO_LETTERS) == letters
            else:
                assert word in known
    assert made > 300
    assert 40 < alone < 120
    assert "9 _ them" in {line.split("\t")[1] for line in lines}
