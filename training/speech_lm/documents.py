"""Tokenised speech as training sequences.

    voice tokens, then turns: [<spanish>] text <start> codes <end>
    <phonemes> [<british> | <spanish>] text <end of text> symbols <end of text>

A document's turns are lines of one track in any order; the first turn may hold two or three of
them. Voice tokens are one of the track's rows, or a named voice's fixed one. A text is bytes, or
symbols after a marker, or bytes with some words as symbols, whose punctuation stays bytes. Words
without letters are symbols in all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.documents import target_mask
from training.kokoro.made_up import NO_LETTERS
from training.speech_lm.speech import Speech
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import BRITISH, FIRST_SYMBOL, SPANISH, SPELLED
from training.vocabulary import (
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    PHONEMES,
    START_OF_SPEECH,
)

BUCKETS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
BREAK = 0.5  # chance that the next line of a track begins another document
JOINED = 0.2  # of documents of several lines: one in ten of all
MOST_JOINED = 3
SPELLED_SHARE, WORDS_SHARE = 0.15, 0.1  # of documents: all of the text in symbols, some words
WORD_CHANCE = 0.3  # of a word in those
FIXED_SHARE = 0.5  # of a named voice's documents
PRONOUNCED = 0.1  # as many documents of letters to sounds, to one of speech
SENTENCES, MOST_WORDS = 0.4, 4  # of those; the others are runs of words
TEXT, SYMBOLS, WORDS = range(3)
ACCENT_MARKS = ((), (BRITISH,), (SPANISH,))  # of a pronounced text, by accent


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents of utterances `order[at : at + count]`, of which the first turn holds `joined`.

    `way`: TEXT, SYMBOLS or WORDS. `row`: number of the track's row, or -1: its voice's fixed one.
    """

    speech: Speech
    texts: Texts
    order: np.ndarray
    at: np.ndarray
    count: np.ndarray
    joined: np.ndarray
    way: np.ndarray
    row: np.ndarray
    length: np.ndarray  # in tokens, at most
    only_ends: bool = False  # of the targets those that say how a question's pitch ends

    def weighted(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Document i, and how much each of its tokens counts as a target, float32."""
        tokens, speech = self.tokens(i), self.speech
        weights = wanted(tokens, speech.voice_tokens).astype(np.float32)
        codes = np.flatnonzero(tokens >= FIRST_CODE)[speech.voice_tokens :]
        places = speech.places(self.order[self.at[i] : self.at[i] + self.count[i]])
        if self.only_ends:
            weights[:] = 0
            weights[codes] = speech.ending[places]
        else:
            weights[codes] = speech.weight[places]
        return tokens, weights

    def tokens(self, i: int) -> np.ndarray:
        """Document i, int16."""
        lines = self.order[self.at[i] : self.at[i] + self.count[i]]
        joined = self.joined[i]
        turns = [lines[:joined], *(lines[n : n + 1] for n in range(joined, len(lines)))]
        pieces = [self._voice(i, int(self.speech.track[lines[0]]))]
        for turn in turns:
            rows = self.speech.text[turn].tolist()
            mark = _one(SPANISH)[: int(self.texts.spanish[rows[0]])]
            pieces += [mark, self._text(rows, int(self.way[i]))]
            pieces += [_one(START_OF_SPEECH), self.speech.said(turn), _one(END_OF_SPEECH)]
        return np.concatenate(pieces)

    def _voice(self, i: int, track: int) -> np.ndarray:
        if self.row[i] < 0:
            return self.speech.fixed[int(self.speech.voice[track])]
        return self.speech.rows[track, self.row[i]]

    def _text(self, rows: Sequence[int], way: int) -> np.ndarray:
        """One text of some rows, int16."""
        texts = self.texts
        if way == SYMBOLS:
            space = bytes((texts.symbols.space,))
            return spelled(space.join(texts.spelled[row].tobytes() for row in rows))
        chance = WORD_CHANCE if way == WORDS else 0.0
        words = [word for row in rows for word in some_words(texts, row, self.order[0], chance)]
        return np.concatenate([part for word in words for part in (word, _bytes(b" "))][:-1])


def some_words(texts: Texts, row: int, seed: int, chance: float) -> list[np.ndarray]:
    """A row's words, some of them and those without letters as symbols; of one that is not aligned
    the text."""
    if not texts.aligned[row] or not (chance or texts.unwritten[row]):
        return [_bytes(texts.text[row].tobytes())]
    rng, words = random.Random(row * 1_000_003 + int(seed)), []
    for pair in texts.words(row):
        letters, symbols = texts.bare(pair)
        if letters and symbols and (letters == NO_LETTERS.encode() or rng.random() < chance):
            before, after = map(_bytes, texts.around(pair[0]))
            words.append(np.concatenate((before, spelled(symbols), after)))
        else:
            words.append(_bytes(pair[0]))
    return words


def _one(token: int) -> np.ndarray:
    return np.array((token,), np.int16)


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.int16)


def spelled(places: bytes) -> np.ndarray:
    """The marker and symbols, int16."""
    return np.concatenate((_one(SPELLED), FIRST_SYMBOL + _bytes(places)))


def spoken(speech: Speech, texts: Texts, rng: np.random.Generator) -> Documents:
    """One pass over all utterances that are trained on."""
    track = speech.track[speech.train]
    order = speech.train[np.lexsort((rng.random(len(track)), track))]
    text, sound = texts.text.length, texts.spelled.length
    most = (text + sound)[speech.text[order]] + speech.code_len[order] + 4
    begins = _begins(speech.track[order], most, BUCKETS[-1] - speech.voice_tokens - 2, rng)
    at = np.flatnonzero(begins)
    count = np.diff(np.append(at, len(order)))
    joins = (count > 1) & (rng.random(len(at)) < JOINED)
    joined = np.where(joins, np.minimum(count, MOST_JOINED), 1)
    shares = (1 - SPELLED_SHARE - WORDS_SHARE, SPELLED_SHARE, WORDS_SHARE)
    way = rng.choice(3, len(at), p=shares)
    return Documents(
        speech, texts, order, at, count, joined, way, choose_rows(speech, order, at, rng),
        lengths(speech, texts, order, at, joined, way),
    )  # fmt: skip


def _begins(
    track: np.ndarray, most: np.ndarray, limit: int, rng: np.random.Generator
) -> np.ndarray:
    """bool: utterances that begin a document; the others continue the one before."""
    begins = rng.random(len(track)) < BREAK
    begins[0] = True
    begins[1:] |= track[1:] != track[:-1]
    ends = np.cumsum(most)
    before = (ends - most)[begins][np.cumsum(begins) - 1]
    return begins | (ends - before > limit)


def lengths(
    speech: Speech, texts: Texts, order: np.ndarray, at: np.ndarray, joined: np.ndarray,
    way: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Tokens of documents; of those with some words as symbols at most as many."""
    row = speech.text[order]
    count = np.diff(np.append(at, len(order)))
    mixed = np.logical_or.reduceat(texts.unwritten[row], at)
    way = np.where((way == TEXT) & mixed, WORDS, way)
    text, sound = (np.add.reduceat(s.length[row], at) for s in (texts.text, texts.spelled))
    codes = np.add.reduceat(speech.code_len[order], at)
    turns = count - joined + 1
    written = np.choose(way, (text, sound + turns, text + sound + count))
    marks = np.where(texts.spanish[row[at]], turns, 0)  # a track has one language
    return speech.voice_tokens + codes + written + marks + 2 * turns + joined - 1


def choose_rows(
    speech: Speech, order: np.ndarray, at: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """For each document one of its track's rows; -1 for a named voice's fixed row."""
    track = speech.track[order[at]]
    row = rng.integers(speech.rows.shape[1], size=len(at))
    fixed = (speech.voice[track] >= 0) & (rng.random(len(at)) < FIXED_SHARE)
    return np.where(fixed, -1, row)


def held_out(
    speech: Speech, texts: Texts, way: int, chosen: np.ndarray | None = None,
    *, only_ends: bool = False,
) -> Documents:  # fmt: skip
    """Lines that are not trained on, each as a document, always with the same rows. `chosen`: bool
    for each text, whether its lines are among them."""
    order = speech.held_out
    if chosen is not None:
        order = order[chosen[speech.text[order]]]
    at = np.arange(len(order))
    ways, ones = np.full(len(order), way), np.ones(len(order), np.int64)
    row = choose_rows(speech, order, at, np.random.default_rng(0))
    length = lengths(speech, texts, order, at, ones, ways)
    return Documents(speech, texts, order, at, ones, ones, ways, row, length, only_ends)


class Pronounced:
    """Letters to sounds: documents of texts and their symbols."""

    def __init__(self, pairs: Sequence[tuple[int, bytes, bytes]]) -> None:
        """`pairs`: accent, text, symbols' places."""
        self._all = [_pronounced(*pair) for pair in pairs]
        self.length = np.array([len(tokens) for tokens in self._all], np.int64)

    def tokens(self, i: int) -> np.ndarray:
        """Document i, int16."""
        return self._all[i]

    def weighted(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Document i, and 1 for each of its tokens that is predicted, float32."""
        return self._all[i], target_mask(self._all[i]).astype(np.float32)


def _pronounced(accent: int, text: bytes, symbols: bytes) -> np.ndarray:
    return np.concatenate((
        np.array((PHONEMES, *ACCENT_MARKS[accent]), np.int16), _bytes(text), _one(END_OF_TEXT),
        FIRST_SYMBOL + _bytes(symbols), _one(END_OF_TEXT),
    ))  # fmt: skip


def pronounced(texts: Texts, count: int, rng: random.Random) -> Pronounced:
    """`count` sentences and runs of words of lines that are trained on."""
    rows = np.flatnonzero(~texts.held_out & ~texts.unwritten).tolist()
    pairs = []
    for row in rng.choices(rows, k=count):
        words = texts.words(row)
        if rng.random() >= SENTENCES and texts.aligned[row]:
            first = rng.randrange(len(words))
            run = [texts.bare(pair) for pair in words[first : first + rng.randint(1, MOST_WORDS)]]
            words = [pair for pair in run if pair[0] and pair[1]] or words
        pairs.append(_joined(texts, row, words))
    return Pronounced(pairs)


def pronounced_held_out(texts: Texts) -> Pronounced:
    """All sentences that are not trained on."""
    rows = np.flatnonzero(texts.held_out & ~texts.unwritten).tolist()
    return Pronounced([_joined(texts, row, texts.words(row)) for row in rows])


def _joined(
    texts: Texts, row: int, words: Sequence[tuple[bytes, bytes]]
) -> tuple[int, bytes, bytes]:
    """Accent, text and symbols."""
    space = bytes((texts.symbols.space,))
    said = space.join(symbols for _, symbols in words)
    return int(texts.accent[row]), b" ".join(word for word, _ in words), said


Part = Documents | Pronounced


def compose(speech: Speech, texts: Texts, seed: Sequence[int]) -> list[Part]:
    """One pass: all speech, and letters to sounds."""
    documents = spoken(speech, texts, np.random.default_rng(seed))
    count = round(PRONOUNCED * len(documents.at))
    return [documents, pronounced(texts, count, random.Random(str(seed)))]


def wanted(tokens: np.ndarray, voice_tokens: int) -> np.ndarray:
    """True where a token is to be predicted: codes and ends, or symbols after a text."""
    mask = target_mask(tokens)
    if tokens[0] != PHONEMES:
        mask[:voice_tokens] = False
    return mask
