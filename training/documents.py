"""Tokenised speech as training sequences, vectorised: hundreds of thousands of clips a second.

A document is a voice token and one or more turns of that voice, each `text <|start_of_speech|>
codes <|end_of_speech|>`; or a text and its sounds. A voice without a name has no token: its
documents begin with `<|voice_any|>` and have several turns. The first of them corresponds to a clip
of a request, so that it sometimes has two lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from training.llama import MAX_TOKENS
from training.pronunciations import PhonemeTask, Pronunciations
from training.strings import Strings, flat_index
from training.vocabulary import (
    ANY_VOICE,
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    FIRST_VOICE,
    PAD,
    PHONEMES,
    START_OF_SPEECH,
)
from training.voices import NAMED

NUM_NAMED = len(NAMED)
NAMED_TURNS, UNNAMED_TURNS = (0.62, 0.2, 0.1, 0.08), (0.0, 0.4, 0.4, 0.2)  # shares of 1 … 4 lines
# share of a named voice's documents of several turns that also begin with the token of any voice
FOLLOW_SHARE = 0.05
# A larger share makes the model imitate named voices for every clip.
TEXTLESS_SHARE = 0.15  # share of such documents whose first turn has no text
JOINED_SHARE = 0.5  # share of documents with three lines and more whose first turn has two
HELD_OUT_LINE, MAX_HELD_OUT = 797, 512  # one line in so many is held out
BUCKETS = (32, 64, 96, 128, 160, 192, 256, 320, 448, MAX_TOKENS)


class Speech:
    """Tokenised clips as one flat array of turns."""

    def __init__(self, paths: Sequence[Path], lines: list[str]) -> None:
        parts = [np.load(path) for path in paths]
        codes = np.concatenate([part["codes"] for part in parts])
        sizes = np.cumsum([0, *(len(part["codes"]) for part in parts)])
        clips = np.concatenate(
            [part["clips"] + [at, 0, 0, 0] for part, at in zip(parts, sizes[:-1], strict=True)]
        )
        self.line = clips[:, 2]
        self.text = Strings([line.encode("ascii", "ignore") for line in lines])
        self.text_start, self.text_len = self.text.start[self.line], self.text.length[self.line]
        self.code_len, self.voice = clips[:, 1], clips[:, 3]
        self.turn_len = self.text_len + self.code_len + 2
        self.start = np.cumsum(self.turn_len) - self.turn_len
        self.turns = np.empty(int(self.turn_len.sum()), np.int16)
        spoken = self.start + self.text_len
        self.turns[flat_index(self.start, self.text_len)] = self.text.bytes[
            flat_index(self.text_start, self.text_len)
        ]
        self.turns[spoken] = START_OF_SPEECH
        self.turns[flat_index(spoken + 1, self.code_len)] = FIRST_CODE + codes[
            flat_index(clips[:, 0], self.code_len)
        ].astype(np.int16)
        self.turns[spoken + 1 + self.code_len] = END_OF_SPEECH
        sounds = b"\n".join(part["sounds"].tobytes() for part in parts if len(part["clips"]))
        self.sounds = Strings(sounds.split(b"\n"))
        is_held_out = self.line % HELD_OUT_LINE == 0
        self.train = np.flatnonzero(~is_held_out)
        self.held_out = np.flatnonzero(is_held_out & (self.voice < NUM_NAMED))[:MAX_HELD_OUT]

    def turn(self, clip: int) -> np.ndarray:
        """Return text, start, codes and end, int16."""
        return self.turns[self.start[clip] : self.start[clip] + self.turn_len[clip]]

    def halves(self, clip: int) -> tuple[bytes, np.ndarray]:
        """Return a clip's text and its codes' tokens."""
        return self.text[self.line[clip]].tobytes(), self.turn(clip)[self.text_len[clip] + 1 : -1]

    def first_token(self, clips: np.ndarray) -> np.ndarray:
        """Return the voice's token, or that of any voice."""
        voice = self.voice[clips]
        return np.where(voice < NUM_NAMED, FIRST_VOICE + voice, ANY_VOICE)


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents as arrays: first token, span [at, at + count) of `clips`, whether the first turn
    has two of them (`joined`) and no text (`textless`), and the length in tokens.
    """

    clips: np.ndarray
    first: np.ndarray
    at: np.ndarray
    count: np.ndarray
    joined: np.ndarray
    textless: np.ndarray
    length: np.ndarray

    def tokens(self, speech: Speech, i: int) -> np.ndarray:
        """Return document i, int16."""
        clips = self.clips[self.at[i] : self.at[i] + self.count[i]]
        first = np.array([self.first[i]], np.int16)
        opening = 2 if self.joined[i] else 1
        turn = first_turn(speech, clips[:opening], textless=bool(self.textless[i]))
        return np.concatenate([first, turn, *(speech.turn(clip) for clip in clips[opening:])])


def first_turn(speech: Speech, clips: np.ndarray, *, textless: bool) -> np.ndarray:
    """Return one turn of one or two clips: their texts, joined with a space, and their codes,
    int16.
    """
    texts, codes = zip(*map(speech.halves, clips), strict=True)
    said = [texts[0], *(piece for text in texts[1:] for piece in (b" ", text))]
    text = np.frombuffer(b"" if textless else b"".join(said), np.uint8)
    return np.concatenate(([*text, START_OF_SPEECH], *codes, [END_OF_SPEECH])).astype(np.int16)


def single_turns(speech: Speech, clips: np.ndarray) -> Documents:
    """Return every clip as a document."""
    count = np.ones(len(clips), np.int64)
    length = 1 + speech.turn_len[clips]
    at = np.arange(len(clips))
    no = np.zeros(len(clips), bool)
    return Documents(clips, speech.first_token(clips), at, count, no, no, length)


def multi_turns(speech: Speech, clips: np.ndarray, rng: np.random.Generator) -> Documents:
    """Return clips of one voice as documents of one to four turns; long ones lose their last
    turns.
    """
    is_named = bool(speech.voice[clips[0]] < NUM_NAMED)
    shares = NAMED_TURNS if is_named else UNNAMED_TURNS
    count = rng.choice((1, 2, 3, 4), size=len(clips), p=shares)
    at = np.cumsum(count) - count
    count, at = count[at + count <= len(clips)], at[at + count <= len(clips)]
    total = np.concatenate([[0], np.cumsum(speech.turn_len[clips])])
    for _ in range(3):
        count = count - ((total[at + count] - total[at] >= BUCKETS[-1]) & (count > 1))
    chances = rng.random((3, len(count)))
    follow = (count > 1) & (chances[0] < (FOLLOW_SHARE if is_named else 1))
    textless = follow & (chances[1] < TEXTLESS_SHARE)
    joined = follow & (count > 2) & (chances[2] < JOINED_SHARE)
    first = np.where(follow, ANY_VOICE, speech.first_token(clips[at]))
    second_text = np.where(joined, 1 + speech.text_len[clips[at + joined]], 0)
    left_out = joined + textless * (speech.text_len[clips[at]] + second_text)
    length = 1 + total[at + count] - total[at] - left_out
    return Documents(clips, first, at, count, joined, textless, length)


Part = Documents | Pronunciations


class Sized(Protocol):
    """Documents with known lengths in tokens."""

    @property
    def length(self) -> np.ndarray: ...


def compose(
    speech: Speech, rng: np.random.Generator, phonemes: PhonemeTask | None = None,
    fullness: float = 1.0,
) -> list[Part]:  # fmt: skip
    """Return one pass over the training clips, with the phoneme task's share of tokens.

    `fullness` 1: the share is complete, as that of speech is.
    """
    parts: list[Part] = []
    for voice in np.unique(speech.voice):
        mine = speech.train[speech.voice[speech.train] == voice]
        if len(mine):
            parts.append(multi_turns(speech, rng.permutation(mine), rng))
    if phonemes is not None:
        tokens = sum(int(part.length.sum()) for part in parts)
        parts += phonemes.compose(speech.sounds, speech.line, speech.train, tokens, rng, fullness)
    return parts


def target_mask(tokens: np.ndarray) -> np.ndarray:
    """Return True where a token is predicted: codes and ends, or everything after a phoneme
    text.
    """
    if tokens[0] == PHONEMES:
        return np.arange(len(tokens)) > np.argmax(tokens == END_OF_TEXT)
    return (tokens >= FIRST_CODE) | (tokens == END_OF_SPEECH)


@dataclass(frozen=True, slots=True)
class Batch:
    """Ids [B, T] and targets: flat positions and their tokens."""

    ids: Tensor
    chosen: Tensor
    targets: Tensor

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which the device copies asynchronously."""
        return Batch(*(t.pin_memory() for t in (self.ids, self.chosen, self.targets)))


def assemble(
    rows: list[np.ndarray], length: int, size: int,
    wanted: Callable[[np.ndarray], np.ndarray] = target_mask,
) -> Batch:  # fmt: skip
    """Pad documents to one length; missing rows are padding. `wanted`: what is to be predicted."""
    ids = np.full((size, length + 1), PAD, np.int64)
    mask = np.zeros((size, length + 1), bool)
    for row, document in enumerate(rows):
        tokens = document[: length + 1]
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = wanted(tokens)
    chosen = np.flatnonzero(mask[:, 1:])
    targets = ids[:, 1:].reshape(-1)[chosen]
    inputs = np.ascontiguousarray(ids[:, :-1])
    return Batch(torch.from_numpy(inputs), torch.from_numpy(chosen), torch.from_numpy(targets))


Plan = tuple[int, list[tuple[int, int]]]  # bucket length, (part, document) of each row


def bucketed(
    parts: Sequence[Sized], tokens: int, rng: np.random.Generator,
    buckets: Sequence[int] = BUCKETS,
) -> list[Plan]:  # fmt: skip
    """Return full batches of `tokens` tokens, each of one bucket's length, in random order."""
    part = np.concatenate([np.full(len(p.length), i) for i, p in enumerate(parts)])
    index = np.concatenate([np.arange(len(p.length)) for p in parts])
    bucket = np.searchsorted(buckets, np.concatenate([p.length for p in parts]) - 1)
    plans: list[Plan] = []
    for number, length in enumerate(buckets):
        members = rng.permutation(np.flatnonzero(bucket == number))
        rows = max(1, tokens // length)
        if 0 < len(members) < rows:
            members = rng.choice(members, rows)
        for i in range(0, len(members) - rows + 1, rows):
            chosen = members[i : i + rows]
            plans.append((length, list(zip(part[chosen], index[chosen], strict=True))))
    return [plans[i] for i in rng.permutation(len(plans))]
