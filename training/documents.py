"""Tokenised speech as training sequences, vectorised: hundreds of thousands of clips a second.

A document is a voice token and one or more turns of that voice, each
`text <|start_of_speech|> codes <|end_of_speech|>`; or a text and its phones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.llama import MAX_TOKENS
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

BUCKETS = (96, 128, 160, 192, 256, 320, 448, MAX_TOKENS)


def flat_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of ranges [start, start + length), one range after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


class Speech:
    """Tokenised clips as one flat array of turns."""

    def __init__(self, path: Path, lines: list[str], held_out: int) -> None:
        with np.load(path) as data:
            codes, clips, phones = data["codes"], data["clips"], data["phones"]
        encoded = [line.encode("ascii", "ignore") for line in lines]
        line_len = np.array([len(line) for line in encoded])
        line_start = np.cumsum(line_len) - line_len
        self.text = np.frombuffer(b"".join(encoded), np.uint8)
        self.text_start, self.text_len = line_start[clips[:, 2]], line_len[clips[:, 2]]
        self.code_len, self.voice = clips[:, 1], clips[:, 3]
        self.turn_len = self.text_len + self.code_len + 2
        self.start = np.cumsum(self.turn_len) - self.turn_len
        self.turns = np.empty(int(self.turn_len.sum()), np.int16)
        spoken = self.start + self.text_len
        self.turns[flat_index(self.start, self.text_len)] = self.text[
            flat_index(self.text_start, self.text_len)
        ]
        self.turns[spoken] = START_OF_SPEECH
        self.turns[flat_index(spoken + 1, self.code_len)] = FIRST_CODE + codes[
            flat_index(clips[:, 0], self.code_len)
        ].astype(np.int16)
        self.turns[spoken + 1 + self.code_len] = END_OF_SPEECH
        self.phones = phones
        breaks = np.flatnonzero(phones == ord("\n"))
        self.phone_start = np.concatenate([[0], breaks + 1])
        self.phone_len = np.concatenate([breaks, [len(phones)]]) - self.phone_start
        order = np.random.default_rng(0).permutation(len(clips))
        self.held_out, self.train = order[:held_out], order[held_out:]


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents as arrays: first token, span [at, at + count) of `clips`, whether the first turn
    goes without its text, and the length in tokens."""

    clips: np.ndarray
    first: np.ndarray
    at: np.ndarray
    count: np.ndarray
    textless: np.ndarray
    length: np.ndarray

    def tokens(self, speech: Speech, i: int) -> np.ndarray:
        """Document i, int16."""
        clips = self.clips[self.at[i] : self.at[i] + self.count[i]]
        first = np.array([self.first[i]], np.int16)
        if self.first[i] == PHONEMES:
            return np.concatenate([first, _phoneme_turn(speech, clips[0])])
        skip = speech.text_len[clips[0]] if self.textless[i] else 0
        starts = speech.start[clips]
        turns = [
            speech.turns[a + (skip if k == 0 else 0) : a + n]
            for k, (a, n) in enumerate(zip(starts, speech.turn_len[clips], strict=True))
        ]
        return np.concatenate([first, *turns])


def _phoneme_turn(speech: Speech, clip: int) -> np.ndarray:
    a, b = speech.text_start[clip], speech.phone_start[clip]
    text = speech.text[a : a + speech.text_len[clip]]
    phones = speech.phones[b : b + speech.phone_len[clip]]
    return np.concatenate([text, [END_OF_TEXT], phones, [END_OF_TEXT]]).astype(np.int16)


def single_turns(speech: Speech, clips: np.ndarray) -> Documents:
    """Every clip as a document of its own."""
    count = np.ones(len(clips), np.int64)
    first, length = FIRST_VOICE + speech.voice[clips], 1 + speech.turn_len[clips]
    return Documents(clips, first, np.arange(len(clips)), count, count < 1, length)


def phoneme_documents(speech: Speech, clips: np.ndarray) -> Documents:
    count = np.ones(len(clips), np.int64)
    length = speech.text_len[clips] + speech.phone_len[clips] + 3
    first = np.full(len(clips), PHONEMES)
    return Documents(clips, first, np.arange(len(clips)), count, count < 1, length)


def multi_turns(speech: Speech, clips: np.ndarray, rng: np.random.Generator) -> Documents:
    """Clips of one voice as documents of one to four turns; too long ones lose their last turns."""
    count = rng.choice((1, 2, 3, 4), size=len(clips), p=(0.62, 0.2, 0.1, 0.08))
    at = np.cumsum(count) - count
    count, at = count[at + count <= len(clips)], at[at + count <= len(clips)]
    total = np.concatenate([[0], np.cumsum(speech.turn_len[clips])])
    for _ in range(3):
        count = count - ((total[at + count] - total[at] >= BUCKETS[-1]) & (count > 1))
    chances = rng.random((2, len(count)))
    follow = (count > 1) & (chances[0] < 0.4)
    textless = follow & (chances[1] < 0.15)
    first = np.where(follow, ANY_VOICE, FIRST_VOICE + speech.voice[clips[0]])
    length = 1 + total[at + count] - total[at] - textless * speech.text_len[clips[at]]
    return Documents(clips, first, at, count, textless, length)


def compose(speech: Speech, rng: np.random.Generator, phoneme_share: float) -> list[Documents]:
    """One pass over the training clips."""
    parts = []
    for voice in np.unique(speech.voice):
        mine = speech.train[speech.voice[speech.train] == voice]
        parts.append(multi_turns(speech, rng.permutation(mine), rng))
    some = int(sum(len(p.first) for p in parts) * phoneme_share)
    parts.append(phoneme_documents(speech, rng.permutation(speech.train)[:some]))
    return parts


def target_mask(tokens: np.ndarray) -> np.ndarray:
    """True where a token is to be predicted: codes and ends, or everything after a phoneme text."""
    if tokens[0] == PHONEMES:
        return np.arange(len(tokens)) > np.argmax(tokens == END_OF_TEXT)
    return (tokens >= FIRST_CODE) | (tokens == END_OF_SPEECH)


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [B, T] and what to predict: flat positions and their targets."""

    ids: Tensor
    chosen: Tensor
    targets: Tensor


def assemble(rows: list[np.ndarray], length: int, size: int) -> Batch:
    """Pad documents to one length; missing rows stay padding."""
    ids = np.full((size, length + 1), PAD, np.int64)
    mask = np.zeros((size, length + 1), bool)
    for row, document in enumerate(rows):
        tokens = document[: length + 1]
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = target_mask(tokens)
    chosen = np.flatnonzero(mask[:, 1:])
    targets = ids[:, 1:].reshape(-1)[chosen]
    inputs = np.ascontiguousarray(ids[:, :-1])
    return Batch(torch.from_numpy(inputs), torch.from_numpy(chosen), torch.from_numpy(targets))


Plan = tuple[int, list[tuple[int, int]]]  # bucket length, (part, document) of each row


def bucketed(parts: list[Documents], tokens: int, rng: np.random.Generator) -> list[Plan]:
    """Full batches of `tokens` tokens, each of one bucket's length, in random order."""
    part = np.concatenate([np.full(len(p.first), i) for i, p in enumerate(parts)])
    index = np.concatenate([np.arange(len(p.first)) for p in parts])
    bucket = np.searchsorted(BUCKETS, np.concatenate([p.length for p in parts]) - 1)
    plans: list[Plan] = []
    for number, length in enumerate(BUCKETS):
        members = rng.permutation(np.flatnonzero(bucket == number))
        rows = max(1, tokens // length)
        if 0 < len(members) < rows:
            members = rng.choice(members, rows)
        for i in range(0, len(members) - rows + 1, rows):
            chosen = members[i : i + rows]
            plans.append((length, list(zip(part[chosen], index[chosen], strict=True))))
    return [plans[i] for i in rng.permutation(len(plans))]
