"""Made-up words in the teacher's symbols: those that a voice learns, and those that judge it.

English words do not have every sequence of phones: hardly any ends in a short vowel. A voice that
learned from English words alone says others as the nearest word of those. So some of its lines
have words of other sequences; in their texts `_` stands where such a word is, which has no letters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

NO_LETTERS = "_"  # in a text: a word that has symbols only
SINGLE, ENDS = "pbtdkɡfvθðszʃʧʤmhnlɹwj", "pbtdkɡfvθðszʃʒʧʤmnŋl"
CLUSTERS = (
    "pl", "bl", "kl", "ɡl", "fl", "sl", "pɹ", "bɹ", "tɹ", "dɹ", "kɹ", "ɡɹ", "fɹ", "θɹ", "ʃɹ",
    "st", "sp", "sk", "sm", "sn", "sw", "tw", "dw", "kw", "ɡw", "θw", "stɹ", "spɹ", "skɹ", "spl",
    "skw", "pj", "bj", "fj", "kj", "mj", "hj", "vj",
)  # fmt: skip
CLOSINGS = (
    "st", "sk", "sp", "nd", "nt", "mp", "ŋk", "nʧ", "nʤ", "lt", "ld", "lk", "lf", "lm", "ks", "ps",
    "ts", "dz", "nz", "mz", "ɡz", "ft", "kt", "pt", "θs", "nθ",
)  # fmt: skip
VOWELS = {
    "a": (*"AIOWYiuɑɔæɛɪʊʌ", "ɜɹ", "ɑɹ", "ɔɹ", "ɛɹ", "ɪɹ"),
    "b": (*"AIQWYæɛɪʊʌɒ", "iː", "uː", "ɑː", "ɔː", "ɜː", "ɪə"),
}
WEAK = {"a": (*"əəəɪɪiO", "əɹ"), "b": (*"əəəɪɪiQ",)}
SYLLABLES = (1, 1, 2, 2, 2, 3, 3, 4)
OPEN, CLUSTER, BARE = 0.45, 0.3, 0.08  # shares: syllables without an end, clusters, no onset
INNER_END, SECOND_STRESS = 0.25, 0.25
CHANGED = 0.35  # of words: one of the line's with some phones exchanged
ALONE = 0.25  # of lines: made-up words only
MOST_ALONE, MOST_WORDS = 5, 14  # words of a line
EDGES = '.,!?;:…—“”"()-'
MARKS = "ˈˌː"

# The words that judge, of one to three syllables that English could have.
ONSETS = (
    *"pbtdkɡfvθðszʃʧʤhmnlɹwj", "pl", "bl", "kl", "ɡl", "fl", "sl", "pɹ", "bɹ", "tɹ", "dɹ", "kɹ",
    "ɡɹ", "fɹ", "θɹ", "st", "sp", "sk", "sm", "sn", "sw", "tw", "kw", "stɹ",
)  # fmt: skip
CODAS = (*[""] * 8, *"pbtdkɡfvθszʃʧʤmnŋl", "st", "nd", "nt", "mp", "ŋk", "lt", "ks")
STRESSED = {"a": tuple("AIOWYiuɑɔæɛɪʊʌ"), "b": (*"AIQWYæɛɪʊʌɒ", "iː", "uː", "ɑː", "ɔː", "ɜː")}
"""Vowels of stressed syllables by accent; others have ə or ɪ."""
JUDGES, JUDGES_SEED = 500, 0
JUDGING_ACCENTS = "aabb"  # those of the voices that say them, in turn


def judging(
    count: int = JUDGES, seed: int = JUDGES_SEED, accents: str = JUDGING_ACCENTS
) -> list[str]:
    """Return the words that judge a voice, in `accents` in turn."""
    rng = random.Random(seed)
    return [judging_word(rng, accents[n % len(accents)]) for n in range(count)]


def judging_word(rng: random.Random, accent: str) -> str:
    """Return the teacher's symbols of a word of one to three syllables that English could have."""
    count = rng.choice((1, 2, 2, 3))
    stressed, word = rng.randrange(count), ""
    for number in range(count):
        vowel = f"ˈ{rng.choice(STRESSED[accent])}" if number == stressed else rng.choice("əɪ")
        coda = rng.choice(CODAS) if number == count - 1 else ""
        word += rng.choice(ONSETS) + vowel + coda
    return word


def invented(rng: random.Random, accent: str) -> str:
    """Return a word of one to four syllables, with any vowel at its end."""
    count = rng.choice(SYLLABLES)
    stressed = rng.randrange(count)
    return "".join(
        _onset(rng) + _vowel(rng, accent, number - stressed) + _end(rng, last=number == count - 1)
        for number in range(count)
    )


def _onset(rng: random.Random) -> str:
    roll = rng.random()
    if roll < BARE:
        return ""
    return rng.choice(CLUSTERS if roll < BARE + CLUSTER else SINGLE)


def _vowel(rng: random.Random, accent: str, after: int) -> str:
    """Return the vowel of a syllable so many after the stressed one."""
    if after == 0:
        return f"ˈ{rng.choice(VOWELS[accent])}"
    if abs(after) > 1 and rng.random() < SECOND_STRESS:
        return f"ˌ{rng.choice(VOWELS[accent])}"
    return rng.choice(WEAK[accent])


def _end(rng: random.Random, *, last: bool) -> str:
    if not last:
        return rng.choice(ENDS) if rng.random() < INNER_END else ""
    if rng.random() < OPEN:
        return ""
    return rng.choice(CLOSINGS if rng.random() < CLUSTER else ENDS)


def changed(rng: random.Random, word: str) -> str:
    """Return a word with one or two of its phones exchanged: vowels by vowels, others by others."""
    vowels = "AIOQWYiuɑɔæɛɪʊʌəɒ"
    phones = list(word)
    places = [n for n, phone in enumerate(phones) if phone not in MARKS]
    for place in rng.sample(places, min(len(places), rng.choice((1, 1, 2)))):
        if phones[place] in vowels:
            phones[place] = rng.choice(vowels)
        elif phones[place] in SINGLE:
            phones[place] = rng.choice(SINGLE)
    return "".join(phones)


class Lines:
    """Lines with made-up words of one accent, out of lines of its table."""

    def __init__(self, rows: Sequence[str], accent: str, seed: int) -> None:
        """`rows`: phonemes, a tab and the text."""
        pairs = [tuple(side.split(" ") for side in row.split("\t")) for row in rows]
        self._pairs = [(said, text) for said, text in pairs if len(said) == len(text) <= MOST_WORDS]
        self._rng, self._accent = random.Random(f"{accent}{seed}"), accent
        self._known = {word.strip(EDGES) for said, _ in pairs for word in said}
        self._known |= set(judging())

    def take(self, count: int) -> Iterator[str]:
        """Iterate over rows of a table."""
        for _ in range(count):
            alone = self._rng.random() < ALONE or not self._pairs
            yield "\t".join(self._alone() if alone else self._carried())

    def _word(self, like: str = "") -> str:
        """Return a word that is neither in the table nor among those that judge."""
        while True:
            word = changed(self._rng, like) if like else invented(self._rng, self._accent)
            if word not in self._known:
                return word
            like = ""

    def _alone(self) -> tuple[str, str]:
        count = self._rng.randint(1, MOST_ALONE)
        joints = [self._rng.choice((" ", ", ")) for _ in range(count - 1)]
        joints.append(self._rng.choice(".....?!,"))
        said = "".join(f"{self._word()}{joint}" for joint in joints)
        return said, "".join(f"{NO_LETTERS}{joint}" for joint in joints)

    def _carried(self) -> tuple[str, str]:
        """Phonemes and text of a line, in which one or two words are exchanged."""
        said, text = map(list, self._rng.choice(self._pairs))
        places = [n for n, word in enumerate(text) if word.strip(EDGES) and said[n].strip(EDGES)]
        for place in self._rng.sample(places, min(len(places), self._rng.choice((1, 1, 2)))):
            core = said[place].strip(EDGES)
            word = self._word(core if self._rng.random() < CHANGED else "")
            said[place] = said[place].replace(core, word, 1)
            text[place] = text[place].replace(text[place].strip(EDGES), NO_LETTERS, 1)
        return " ".join(said), " ".join(text)
