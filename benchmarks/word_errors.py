"""Word error rate of a recogniser's output, and the words that are missing or too many in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from num2words import num2words


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Wrong words (substituted, deleted, inserted) and the number of reference words."""

    wrong: int = 0
    words: int = 0

    @property
    def rate(self) -> float:
        return self.wrong / self.words if self.words else 0.0

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(self.wrong + other.wrong, self.words + other.words)


def words_of(text: str) -> list[str]:
    """Return lower-case words, figures as words: a recogniser may write 6 where "six" was meant.

    Apostrophes belong to words, all other signs separate them.
    """
    whole = re.sub(r"(?<=\d),(?=\d)", "", text)
    spelled = re.sub(r"\d+", lambda found: f" {num2words(int(found[0]))} ", whole)
    return re.findall(r"[a-z']+", spelled.lower())


def edit_distance(meant: Sequence[str], heard: Sequence[str]) -> int:
    """Return the fewest insertions, deletions and substitutions that turn one into the other.

    Wagner and Fischer 1974, one column of the table at a time.
    """
    column = list(range(len(meant) + 1))
    for inserted, word in enumerate(heard, start=1):
        following = [inserted]
        for other, (diagonal, left) in zip(meant, pairwise(column), strict=True):
            replaced = diagonal + (word != other)
            following.append(min(replaced, left + 1, following[-1] + 1))
        column = following
    return column[-1]


def word_errors(meant: str, heard: str) -> WordErrors:
    """Compare a text with the recognised words."""
    reference = words_of(meant)
    return WordErrors(edit_distance(reference, words_of(heard)), len(reference))


def total(errors: Iterable[WordErrors]) -> WordErrors:
    """Return the sum, every word with the same weight."""
    return sum(errors, WordErrors())


@dataclass(frozen=True, slots=True)
class Slips:
    """Words that are missing or too many in speech, and the number of reference words."""

    missing: int = 0
    extra: int = 0
    words: int = 0

    @property
    def rate(self) -> float:
        return (self.missing + self.extra) / self.words if self.words else 0.0

    def __add__(self, other: Slips) -> Slips:
        missing, extra = self.missing + other.missing, self.extra + other.extra
        return Slips(missing, extra, self.words + other.words)


def slips(meant: str, heard: str) -> Slips:
    """Compare a text with the recognised words; misheard words are neither missing nor too many.

    Words next to each other that sound alike as a whole are misheard, whatever their number:
    "overload" and "over load", "Agnes Henderson" and "Agnesson".
    """
    reference = words_of(meant)
    found = closest_words(reference, heard)
    missing = extra = 0
    matcher = SequenceMatcher(None, reference, found, autojunk=False)
    for _, start, end, found_start, found_end in matcher.get_opcodes():
        one, other = reference[start:end], found[found_start:found_end]
        if not _are_alike("".join(one), "".join(other)):
            missing += max(0, len(one) - len(other))
            extra += max(0, len(other) - len(one))
    return Slips(missing, extra, len(reference))


def _are_alike(one: str, other: str) -> bool:
    return edit_distance(one, other) <= max(len(one), len(other)) / 2


def closest_words(reference: Sequence[str], heard: str) -> list[str]:
    """Return the recognised words, every figure in the reading that is closest to the reference."""
    parts = re.split(r"(\d+)", re.sub(r"(?<=\d),(?=\d{3})", "", heard))
    for place in range(1, len(parts), 2):
        before, after = "".join(parts[:place]), "".join(parts[place + 1 :])
        read = [f" {reading} " for reading in _readings(parts[place])]
        whole = [words_of(f"{before}{reading}{after}") for reading in read]
        distances = [edit_distance(reference, words) for words in whole]
        parts[place] = read[distances.index(min(distances))]
    return words_of("".join(parts))


def _readings(digits: str) -> list[str]:
    """Return a number, its digits one by one, and a number of hundreds and the rest, as words."""
    single = " ".join(num2words(int(digit)) for digit in digits)
    found = [num2words(int(digits)), single]
    if len(digits) in (3, 4):
        rest = num2words(int(digits[-2:])) if int(digits[-2:]) else "hundred"
        is_oh = digits[-2] == "0" and digits[-1] != "0"  # 1903 is "nineteen oh three"
        found.append(f"{num2words(int(digits[:-2]))} {'oh ' if is_oh else ''}{rest}")
    return found
