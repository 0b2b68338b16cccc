"""Synthetic words, composed from pieces of known words, so many that only rules can be learned.

Every few letters of a synthetic word also follow each other in a known one: two, three or four
letters determine the distribution of the next one. Fewer letters give less usual words and rarer
contexts. Most of the rules apply to few words: of the drawn words, those with the rarest rules are
kept.

Other words are a word of the lexicon with a piece changed. They follow the rules, unlike the
original word, which is an exception: memorised pronunciations must not spread to similar words.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from training.lexicon import (
    MADE,
    MADE_HELD_OUT,
    MAX_LETTERS,
    MIN_LETTERS,
    Pronouncer,
    is_held_out,
    write,
)
from training.strings import Strings, flat_index

SIMILAR = 0
# number of letters that determine the next one; in turn, chunk by chunk
SIZES = (3, 4, SIMILAR, 3, 4, 2)
CHUNK = 200_000  # words drawn by one process at once
KEPT = 1 / 3  # share that is kept, with the rarest paths through the rules
COMMON = 10  # known words: a path with so many more has half the weight
MAX_HELD_OUT = 4000
NUM_LETTERS = 27  # and the border of a word


class Pieces:
    """Distribution of letters that follow letters in known words."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        border = b" " * size
        text = Strings([border + w.encode() + b" " for w in words if w.isascii() and w.isalpha()])
        letters = np.where(text.bytes == ord(" "), 0, text.bytes - ord("a") + 1).astype(np.int64)
        places = flat_index(text.start + size, text.length - size)
        before = np.zeros(len(places), np.int64)
        for back in range(size, 0, -1):
            before = before * NUM_LETTERS + letters[places - back]
        self.size = size
        self._count = np.bincount(before, minlength=NUM_LETTERS**size)
        self._first = np.cumsum(self._count) - self._count
        self._next = letters[places][np.argsort(before, kind="stable")]

    def draw(self, count: int, rng: np.random.Generator) -> list[bytes]:
        """Return new words, sorted, without duplicates; fewer than `count`, because long ones are
        dropped.
        """
        rows = np.zeros((count, MAX_LETTERS + 1), np.uint8)
        before, active = np.zeros(count, np.int64), np.arange(count)
        for place in range(MAX_LETTERS + 1):
            chance = rng.random(len(active))
            at = self._first[before] + (chance * self._count[before]).astype(np.int64)
            letter = self._next[at]
            rows[active, place] = np.where(letter == 0, 0, letter + ord("a") - 1)
            goes_on = letter > 0
            before = (before * NUM_LETTERS + letter)[goes_on] % NUM_LETTERS**self.size
            active = active[goes_on]
        rows[active] = 0
        words = np.unique(rows.reshape(-1).view(f"S{MAX_LETTERS + 1}"))
        return [word for word in words.tolist() if len(word) >= MIN_LETTERS]


class SimilarWords:
    """Words that differ slightly from known ones."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word.isalpha() and len(word) >= MIN_LETTERS]
        self._letters = "".join(self._words)

    def draw(self, count: int, rng: np.random.Generator) -> list[bytes]:
        """Return new words, sorted, without duplicates: known ones with a changed beginning, end or
        letter; fewer than `count`.
        """
        pairs = rng.integers(len(self._words), size=(count, 2)).tolist()
        letters = rng.integers(len(self._letters), size=count).tolist()
        shares, ways = rng.random((count, 2)).tolist(), rng.integers(5, size=count).tolist()
        found = set()
        for (first, second), letter, share, way in zip(pairs, letters, shares, ways, strict=True):
            word, other = self._words[first], self._words[second]
            new = self._letters[letter]
            found.add(_changed(word, other, new, share, way))
        return sorted(word.encode() for word in found if MIN_LETTERS <= len(word) <= MAX_LETTERS)


def _changed(word: str, other: str, letter: str, share: Sequence[float], way: int) -> str:
    """Add one to four letters of another word at the end (0, 1) or the beginning (2), dropping up
    to three letters; or replace (3) or insert (4) a letter.
    """
    lost, taken = int(4 * share[0]), 1 + int(4 * share[1])
    if way < 2:
        return word[: len(word) - lost] + other[-taken:]
    if way == 2:
        return other[:taken] + word[lost:]
    at = int(share[0] * len(word))
    return word[:at] + letter + word[at + (way == 3) :]


class Maker:
    """Draws chunks of synthetic words with their sounds."""

    def __init__(self, words: Sequence[str], pronouncer: Pronouncer, seed: int) -> None:
        self._known, self._pronouncer, self._seed = frozenset(words), pronouncer, seed
        self._sources: dict[int, Pieces | SimilarWords] = {
            size: Pieces(words, size) for size in set(SIZES) - {SIMILAR}
        }
        self._sources[SIMILAR] = SimilarWords(sorted(pronouncer.lexicon))
        said = Strings([word.encode() for word in words if word.isascii() and word.isalpha()])
        self._paths, self._count = np.unique(pronouncer.rules.paths(said), return_counts=True)

    def _need(self, words: Sequence[bytes]) -> np.ndarray:
        """Return float64 per word: the weight of its letters' paths."""
        strings = Strings(words)
        paths = self._pronouncer.rules.paths(strings)
        at = np.minimum(np.searchsorted(self._paths, paths), len(self._paths) - 1)
        known = np.where(self._paths[at] == paths, self._count[at], 0)
        return np.add.reduceat(1 / (known + COMMON), np.cumsum(strings.length) - strings.length)

    def chunk(self, number: int, count: int) -> tuple[list[bytes], list[bytes]]:
        """Return training lines and held-out lines of the drawn words."""
        rng = np.random.default_rng((self._seed, number))
        size = SIZES[number % len(SIZES)]
        drawn = self._sources[size].draw(count, rng)
        rules, lexicon = self._pronouncer.rules, self._pronouncer.lexicon
        said = [letters for letters in drawn if rules.apply(letters)]
        need = self._need(said) if said else np.empty(0)
        words = [letters.decode() for letters in said]
        share = 1 if size == SIMILAR else KEPT
        rare = {words[i] for i in np.argsort(-need)[: round(share * len(said))]}
        new = [word for word in words if word not in self._known and word not in lexicon]
        held_out = [word for word in new if is_held_out(word)]
        kept = rare.intersection(new).difference(held_out)
        say = self._pronouncer.say
        return say(sorted(kept)), say(held_out)


def made_words(maker: Maker, count: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Iterate over all chunks, in order, using all cores; `count` words are drawn."""
    sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
    if len(sizes) < 2:
        yield from itertools.starmap(maker.chunk, enumerate(sizes))
        return
    context = multiprocessing.get_context("fork")  # so that the tables are not copied
    with context.Pool(min(len(sizes), os.cpu_count() or 1), _adopted.append, (maker,)) as pool:
        yield from pool.imap(_chunk, enumerate(sizes))


_adopted: list[Maker] = []  # of this process


def _chunk(task: tuple[int, int]) -> tuple[list[bytes], list[bytes]]:
    return _adopted[0].chunk(*task)


def write_made_words(
    folder: Path, words: Sequence[str], pronouncer: Pronouncer, count: int, seed: int
) -> None:
    """Write both files. Chunks are drawn independently: a word may occur in several."""
    held_out: list[bytes] = []
    total = 0
    with (folder / MADE).open("wb") as file:
        for kept, never in made_words(Maker(words, pronouncer, seed), count):
            file.write(b"".join(kept))
            total += len(kept)
            held_out += never
    print(f"{MADE}: {total} words", flush=True)
    distinct = sorted(set(held_out))
    write(folder / MADE_HELD_OUT, distinct[:: max(1, len(distinct) // MAX_HELD_OUT)])
