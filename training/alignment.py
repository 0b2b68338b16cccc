"""Which letters of a text make which of its phones: one sound for every letter.

What the rules say is aligned as they say it. All else, from the teacher's lexicon or from its way
with abbreviations and possessives, is aligned by the cheapest path: a sound costs the negative
logarithm of how often the rules give it to the letter (Viterbi; for the idea see Black, Lenzo and
Pagel, "Issues in building general letter to sound rules", 1998).
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

UNSEEN = 9.0  # nats: a sound that the rules never give to the letter
EXTRA = 14.0  # a sound more than the letter's own
GAP = 0.5  # a word that ends between two characters that are no letters
TIE = 1e-6  # of two equal letters the second sounds, as the rules have it
BETWEEN = re.compile(r"[ -]+")  # words, as the teacher takes them


class Alignment:
    """Made from the rules, on all words of the lexicon."""

    def __init__(self, rules: Rules) -> None:
        words = Strings([w.encode() for w in rules.lexicon() if w.isascii() and w.isalpha()])
        letters, sounds = bytes(words.bytes).decode(), rules.sounds(words).bytes - FIRST_BYTE
        seen, total = Counter(zip(letters, sounds.tolist(), strict=True)), Counter(letters)
        self._cost = {pair: -math.log(count / total[pair[0]]) for pair, count in seen.items()}
        self._word = functools.lru_cache(maxsize=100_000)(self._align)

    def text(self, text: str, phones: str) -> bytes:
        """Sounds of a text, as files have them, at least one for every character; `phones` as
        `training.teacher.phone_text` writes them. "" when there are phones that no sound has."""
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
        """The cheapest path."""
        names = phones.split()
        if not text or any((name,) not in NUMBER for name in names):
            return b""
        single = [NUMBER[name,] for name in names]
        pair = [NUMBER[two] if two in PAIRS else None for two in itertools.pairwise(names)]
        best = [0.0, *[math.inf] * len(names)]  # cost of the letters so far with j phones said
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
        """`best` after one more letter; and its sounds, with how many phones were said before."""
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
