"""Voices: rows of style vectors by length of the text, and mixtures of them.

The first half of a style vector is timbre, the second prosody. A weighted mean of voices is a voice
again, and the two halves may come from different mixtures. Voices are named by a letter for the
language (a and b: American and British English), one for the sex, and a name.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LENGTHS = "lengths"  # with the voices' rows: the numbers of ids that they are for
HALF = 128
NAMED_SHARE = 0.35  # of sessions that one of the teacher's own voices speaks
SAME_HALVES = 0.6  # of mixtures whose timbre is that of the voices that lend the prosody
MIXED = (2, 3)  # voices in a mixture

Weights = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Voice:
    """Shares of named voices in a voice's timbre and in its prosody; each sums to 1."""

    timbre: Weights
    prosody: Weights

    @property
    def accent(self) -> str:
        """'a' or 'b': that of the largest share of the prosody."""
        return max(self.prosody, key=lambda part: part[1])[0][0]

    @property
    def sex(self) -> str:
        """'f' or 'm': that of the largest share of the prosody."""
        return max(self.prosody, key=lambda part: part[1])[0][1]

    @classmethod
    def named(cls, name: str) -> Voice:
        """One of the teacher's own."""
        return cls(((name, 1.0),), ((name, 1.0),))


class StyleBook:
    """The style rows of all named voices."""

    def __init__(self, rows: Mapping[str, np.ndarray], device: torch.device) -> None:
        held = dict(rows)
        first = next(iter(held.values()))
        lengths = held.pop(LENGTHS, np.arange(len(first)))
        self._lengths = np.asarray(lengths, np.float64)
        self._rows = {
            name: torch.from_numpy(value.astype(np.float32)).to(device)
            for name, value in held.items()
        }
        self.english = tuple(sorted(name for name in held if name[0] in "ab"))
        self.all = tuple(sorted(held))

    @classmethod
    def load(cls, path: Path, device: torch.device) -> StyleBook:
        """Read the file that `training.kokoro.convert` writes."""
        with np.load(path) as stored:
            return cls({name: stored[name] for name in stored.files}, device)

    def style(self, voice: Voice, length: int) -> Tensor:
        """float32 [256] for a text of `length` ids; rows between those that are held are means."""
        at = float(np.interp(length, self._lengths, np.arange(len(self._lengths))))
        timbre = sum(share * self._row(name, at)[:HALF] for name, share in voice.timbre)
        prosody = sum(share * self._row(name, at)[HALF:] for name, share in voice.prosody)
        return torch.cat((torch.as_tensor(timbre), torch.as_tensor(prosody)))

    def number(self, voice: Voice) -> int:
        """Place of a named voice among the English ones; -1 of a mixture."""
        (name, _), *others = voice.timbre
        if others or voice.timbre != voice.prosody:
            return -1
        return self.english.index(name)

    def _row(self, name: str, at: float) -> Tensor:
        rows, low = self._rows[name], int(at)
        high = min(low + 1, len(rows) - 1)
        return rows[low].lerp(rows[high], at - low)

    def draw(self, rng: random.Random, named: float = NAMED_SHARE) -> Voice:
        """A named English voice, in this share of draws, or a mixture of voices of one sex."""
        if rng.random() < named:
            return Voice.named(rng.choice(self.english))
        return self.mixture(rng)

    def mixture(self, rng: random.Random) -> Voice:
        """Prosody of two or three English voices of one sex; timbre of the same ones, or of any of
        that sex, whatever their language."""
        sex = rng.choice("fm")
        prosody = _mix([name for name in self.english if name[1] == sex], rng)
        if rng.random() < SAME_HALVES:
            return Voice(prosody, prosody)
        return Voice(_mix([name for name in self.all if name[1] == sex], rng), prosody)


def _mix(names: list[str], rng: random.Random) -> Weights:
    chosen = rng.sample(names, rng.choice(MIXED))
    sizes = [rng.expovariate(1.0) + 0.05 for _ in chosen]
    return tuple((name, size / sum(sizes)) for name, size in zip(chosen, sizes, strict=True))


def thin(rows: Mapping[str, np.ndarray], step: int, last: int) -> dict[str, np.ndarray]:
    """Every `step`-th row up to `last` ids: the rows change so slowly that means of neighbours
    replace the others."""
    lengths = np.arange(0, last + 1, step)
    return {LENGTHS: lengths} | {name: value[lengths] for name, value in rows.items()}
