"""Documents of the second task: a text, and its sounds as pronounced by the teacher.

Words alone and in runs of a few, and sentences as spoken. The words are those of
`training.lexicon`: the teacher's lexicon, other words, each as often as any other of its kind, and
synthetic ones, of which there are so many that only rules can be learned from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.lexicon import words_of
from training.sounds import WORD_BREAK, sound_bytes, sound_numbers
from training.strings import Strings
from training.vocabulary import END_OF_TEXT, FIRST_SOUND, PHONEMES

RUNS = np.array([0.3, *[0.7 / 11] * 11])  # shares of documents of 1 … 12 words
CAPITALISED, UPPER = 0.25, 0.03  # shares of words
SPACE, BREAK = b" ", sound_bytes([WORD_BREAK])


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts and their sounds in file format."""

    texts: Strings
    sounds: Strings

    def __len__(self) -> int:
        return len(self.texts.length)


class Pronunciations:
    """Documents of one or more pairs: texts joined with spaces, sounds joined with breaks."""

    def __init__(
        self, texts: tuple[np.ndarray, np.ndarray], sounds: tuple[np.ndarray, np.ndarray],
        runs: np.ndarray,
    ):  # fmt: skip
        """`texts`, `sounds`: results of `Strings.joined`; `runs`: pairs in each document."""
        ends = np.cumsum(runs)
        (self._text, text_at), (self._sound, sound_at) = texts, sounds
        self._text_from, self._text_to = text_at[ends - runs], text_at[ends] - len(SPACE)
        self._sound_from, self._sound_to = sound_at[ends - runs], sound_at[ends] - len(BREAK)
        self.length = self._text_to - self._text_from + self._sound_to - self._sound_from + 3
        self.first = np.full(len(runs), PHONEMES)

    def tokens(self, speech: object, i: int) -> np.ndarray:
        """Return document i, int16; the speech is not used."""
        text = self._text[self._text_from[i] : self._text_to[i]]
        sounds = self._sound[self._sound_from[i] : self._sound_to[i]]
        out = np.empty(len(text) + len(sounds) + 3, np.int16)
        out[0], out[-1] = PHONEMES, END_OF_TEXT
        out[1 : len(text) + 1], out[len(text) + 1] = text, END_OF_TEXT
        out[len(text) + 2 : -1] = FIRST_SOUND + sound_numbers(sounds)
        return out


def read_pairs(path: Path) -> Pairs:
    """Read a file of `training.lexicon`."""
    data = np.fromfile(path, np.uint8)
    tabs, ends = np.flatnonzero(data == ord("\t")), np.flatnonzero(data == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    texts = Strings.of(data, starts, tabs - starts)
    return Pairs(texts, Strings.of(data, tabs + 1, ends - tabs - 1))


def capitalise(text: np.ndarray, bounds: np.ndarray, rng: np.random.Generator) -> None:
    """Capitalise some words, and convert a few to upper case, in place."""
    chance = rng.random(len(bounds) - 1)
    chosen = np.repeat(chance < UPPER, np.diff(bounds))
    chosen[bounds[:-1]] |= chance < UPPER + CAPITALISED
    text[chosen & (text >= ord("a")) & (text <= ord("z"))] -= ord("a") - ord("A")


def word_runs(pairs: Pairs, tokens: float, rng: np.random.Generator) -> Pronunciations:
    """Return about so many tokens of words, without repetition before all are used."""
    each = pairs.texts.length.mean() + pairs.sounds.length.mean() + len(SPACE + BREAK)
    wanted = max(1, round(tokens / each))
    passes = -(-wanted // len(pairs))
    order = np.concatenate([rng.permutation(len(pairs)) for _ in range(passes)])[:wanted]
    runs = rng.choice(len(RUNS), wanted, p=RUNS) + 1
    runs = runs[np.cumsum(runs) <= wanted]
    text, bounds = pairs.texts.joined(order, SPACE)
    capitalise(text, bounds, rng)
    return Pronunciations((text, bounds), pairs.sounds.joined(order, BREAK), runs)


def alone(pairs: Pairs) -> Pronunciations:
    """Return every word as a document, as in an evaluation."""
    order = np.arange(len(pairs))
    texts, sounds = pairs.texts.joined(order, SPACE), pairs.sounds.joined(order, BREAK)
    return Pronunciations(texts, sounds, np.ones_like(order))


def pure_lines(lines: Iterable[str], held_out: AbstractSet[str]) -> np.ndarray:
    """Return bool: lines without held-out words of the phoneme task."""
    pure = [held_out.isdisjoint(word.strip("'") for word in words_of(line)) for line in lines]
    return np.array(pure)


class PhonemeTask:
    """The phoneme task's part of a pass over the speech."""

    def __init__(
        self, share: float, parts: Sequence[float], pairs: Sequence[Pairs], lines: Sequence[str],
        held_out: Pairs,
    ) -> None:  # fmt: skip
        """`share` of all tokens; of these, `parts`: sentences, then one for each of `pairs`."""
        self.share, self.pairs = share, pairs
        self.parts = np.array(parts) / sum(parts)
        self.texts = Strings([line.encode("ascii", "ignore") for line in lines])
        texts = (held_out.texts[i].tobytes().decode() for i in range(len(held_out)))
        self.pure, self.held_out = pure_lines(lines, frozenset(texts)), alone(held_out)

    def compose(
        self, spoken: Strings, line: np.ndarray, clips: np.ndarray, tokens: int,
        rng: np.random.Generator, fullness: float = 1.0,
    ) -> list[Pronunciations]:  # fmt: skip
        """Return documents for `tokens` tokens of speech, which have `fullness` of their share.

        `spoken` and `line` are the sounds and the line of every clip; `clips` are the candidates.
        Clips without sounds are not used.
        """
        share = 1 - fullness * (1 - self.share)
        wanted = tokens * share / (1 - share) * self.parts
        runs = [word_runs(p, n, rng) for p, n in zip(self.pairs, wanted[1:], strict=True) if n]
        allowed = rng.permutation(clips[self.pure[line[clips]] & (spoken.length[clips] > 0)])
        length = self.texts.length[line[allowed]] + spoken.length[allowed] + 3
        chosen = allowed[np.cumsum(length) <= wanted[0]]
        texts = self.texts.joined(line[chosen], SPACE)
        sounds = spoken.joined(chosen, BREAK)
        return [*runs, Pronunciations(texts, sounds, np.ones_like(chosen))]
