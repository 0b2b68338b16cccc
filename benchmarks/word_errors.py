"""Word error rate of a recogniser's output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    """Return the fewest insertions, deletions and substitutions that turn one list into the other.

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
