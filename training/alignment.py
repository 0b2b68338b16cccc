"""Alignment of a text's letters with its phones: one sound for every letter.

Words that the rules pronounce are aligned by the rules. All others, from the teacher's lexicon or
from its handling of abbreviations and possessives, are aligned by the cheapest path: a sound costs
the negative logarithm of its frequency for the letter under the rules (Viterbi; for the idea see
Black, Lenzo and Pagel, "Issues in building general letter to sound rules", 1998).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence

from training.rules import Rules
from training.sounds import BREAK, FIRST_BYTE, NUMBER, PAIRS, SILENT, WORD_BREAK, sound_bytes
from training.strings import Strings

UNSEEN = 9.0  # nats: a sound that the rules never assign to the letter
EXTRA = 14.0  # cost of an additional sound
GAP = 0.5  # cost of a word end between two characters that are not letters
TIE = 1e-6  # cost that puts the sound of a double letter on the second one, like the rules
BETWEEN = re.compile(r"[ -]+")  # separators of words, as for the teacher


class Alignment:
    """Alignment with costs from the rules, on all words of the lexicon."""

    def __init__(self, rules: Rules) -> None:
        words = Strings([w.encode() for w in rules.lexicon() if w.isascii() and w.isalpha()])
        letters, sounds = bytes(words.bytes).decode(), rules.sounds(words).bytes - FIRST_BYTE
        seen, total = Counter(zip(letters, sounds.tolist(), strict=True)), Counter(letters)
        self._cost = {pair: -math.log(count / total[pair[0]]) for pair, count in seen.items()}
        self._word = functools.lru_cache(maxsize=100_000)(self._align)

    def text(self, text: str, phones: str) -> bytes:
        """Return the sounds of a text in file format, at least one for every character.

        `phones` are in the format of `training.teacher.phone_text`. Returns "" when there are
        phones without a sound.
        """
        words, said = BETWEEN.split(text), phones.split(f" {BREAK} ")
        if len(words) != len(said) or not all(words):
            return self._word(text, phones)
        gaps = (sound_bytes([WORD_BREAK, *[SILENT] * (len(gap) - 1)])
                for gap in BETWEEN.findall(text))  # fmt: skip
        spelled = map(self._word, words, said)
        return b"".join(itertools.chain(*itertools.zip_longest(spelled, gaps, fillvalue=b"")))

    def _price(self, letter: str, sound: int) -> float:
        if letter.isalpha():
            return self._cost.get((letter, sound), UNSEEN)
        return {SILENT: 0.0, WORD_BREAK: GAP}.get(sound, UNSEEN)

    def _align(self, text: str, phones: str) -> bytes:
        """Return the cheapest path."""
        names = phones.split()
        if not text or any((name,) not in NUMBER for name in names):
            return b""
        single = [NUMBER[name,] for name in names]
        pair = [NUMBER[two] if two in PAIRS else None for two in itertools.pairwise(names)]
        best = [0.0, *[math.inf] * len(names)]  # cost of the letters so far with j phones used
        steps = []
        for letter in text.lower():
            best, step = self._next(letter, best, single, pair)
            steps.append(step)
        said, out = len(names), []
        for step in reversed(steps):
            sounds, before = step[said]
            out.append(sound_bytes(sounds))
            said = before
        return b"".join(reversed(out))

    def _next(
        self, letter: str, best: list[float], single: Sequence[int], pair: Sequence[int | None]
    ) -> tuple[list[float], list[tuple[tuple[int, ...], int]]]:
        """Return `best` after one more letter; and its sounds, with the number of phones used
        before.
        """
        now = [cost + self._price(letter, SILENT) for cost in best]
        step: list[tuple[tuple[int, ...], int]] = [((SILENT,), j) for j in range(len(best))]
        for count, sounds in ((1, single), (2, pair)):
            for j, (cost, sound) in enumerate(zip(best, sounds, strict=False)):
                price = math.inf if sound is None else cost + self._price(letter, sound)
                if sound is not None and price < now[j + count] + TIE:
                    now[j + count], step[j + count] = price, ((sound,), j)
        for j, sound in enumerate(single):
            if now[j] + EXTRA < now[j + 1]:
                now[j + 1], step[j + 1] = now[j] + EXTRA, ((*step[j][0], sound), step[j][1])
        return now, step
