"""Training sequences in batches of one length, with what is predicted of them.

A document is turns of speech, each `text <|start_of_speech|> codes <|end_of_speech|>`; or a text
and its sounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from training.vocabulary import END_OF_SPEECH, END_OF_TEXT, FIRST_CODE, PAD, PHONEMES


class Sized(Protocol):
    """Documents with known lengths in tokens."""

    @property
    def length(self) -> np.ndarray: ...


def target_mask(tokens: np.ndarray) -> np.ndarray:
    """Return True where a token is predicted: codes and ends, or everything after a phoneme
    text.
    """
    if tokens[0] == PHONEMES:
        return np.arange(len(tokens)) > np.argmax(tokens == END_OF_TEXT)
    return (tokens >= FIRST_CODE) | (tokens == END_OF_SPEECH)


@dataclass(frozen=True, slots=True)
class Batch:
    """Ids [B, T] and targets: flat positions, their tokens and how much each counts."""

    ids: Tensor
    chosen: Tensor
    targets: Tensor
    weights: Tensor  # float32

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which the device copies asynchronously."""
        parts = self.ids, self.chosen, self.targets, self.weights
        return Batch(*(part.pin_memory() for part in parts))


def assemble(rows: Sequence[tuple[np.ndarray, np.ndarray]], length: int, size: int) -> Batch:
    """Pad documents to one length; missing rows are padding. A row's second part says how much each
    of its tokens counts as a target; 0: it is not predicted."""
    ids = np.full((size, length + 1), PAD, np.int64)
    counts = np.zeros((size, length + 1), np.float32)
    for row, (tokens, weights) in enumerate(rows):
        ids[row, : len(tokens)] = tokens[: length + 1]
        counts[row, : len(tokens)] = weights[: length + 1]
    weights = counts[:, 1:].reshape(-1)
    chosen = np.flatnonzero(weights)
    targets = ids[:, 1:].reshape(-1)[chosen]
    inputs = np.ascontiguousarray(ids[:, :-1])
    return Batch(*map(torch.from_numpy, (inputs, chosen, targets, weights[chosen])))


Plan = tuple[int, list[tuple[int, int]]]  # bucket length, (part, document) of each row


def bucketed(
    parts: Sequence[Sized], tokens: int, rng: np.random.Generator, buckets: Sequence[int]
) -> list[Plan]:
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
