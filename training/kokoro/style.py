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
        """'a', 'b' or 'e': that of the largest share of the prosody."""
        return max(self.prosody, key=lambda part: part[1])[0][0]

    @property
    def sex(self) -> str:
        """'f' or 'm': that of the largest share of the prosody."""
        return max(self.prosody, key=lambda part: part[1])[0][1]

    @classmethod
    def named(cls, name: str) -> Voice:
        """One of the teacher's own."""
        return cls(((name, 1.0),), ((name, 1.0),))


SPANISH = {
    "ef_lucia": Voice((("ef_dora", 0.6), ("ff_siwis", 0.4)), (("ef_dora", 1.0),)),
    "em_diego": Voice((("em_alex", 0.6), ("im_nicola", 0.4)), (("em_alex", 1.0),)),
}
"""The voices of our own that speak Spanish: the prosody of a Spanish voice of the teacher's, and a
timbre that is clearer than its own."""
ROMANCE = "efip"  # languages of voices that may lend a mixture prosody for Spanish
LEAST_OWN = 0.6  # share of a Spanish voice in that


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
        english = {name: Voice.named(name) for name in self.english}
        self.spanish = tuple(
            name
            for name, voice in SPANISH.items()
            if all(part in held for part, _ in (*voice.timbre, *voice.prosody))
        )
        self._voices = english | {name: SPANISH[name] for name in self.spanish}
        self.named = tuple(self._voices)
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
        """Place of a voice among the named ones; -1 of a mixture."""
        voices = list(self._voices.values())
        return voices.index(voice) if voice in voices else -1

    def _row(self, name: str, at: float) -> Tensor:
        rows, low = self._rows[name], int(at)
        high = min(low + 1, len(rows) - 1)
        return rows[low].lerp(rows[high], at - low)

    def draw(self, rng: random.Random, named: float = NAMED_SHARE, spanish: float = 0.0) -> Voice:
        """A named voice, in this share of draws, or a mixture of voices of one sex; `spanish`:
        share of draws that speak Spanish, the others speak English."""
        is_spanish = spanish > 0 and rng.random() < spanish
        if rng.random() < named:
            return self._voices[rng.choice(self.spanish if is_spanish else self.english)]
        return self.spanish_mixture(rng) if is_spanish else self.mixture(rng)

    def mixture(self, rng: random.Random) -> Voice:
        """Prosody of two or three English voices of one sex; timbre of the same ones, or of any of
        that sex, whatever their language."""
        sex = rng.choice("fm")
        prosody = _mix([name for name in self.english if name[1] == sex], rng)
        if rng.random() < SAME_HALVES:
            return Voice(prosody, prosody)
        return Voice(_mix([name for name in self.all if name[1] == sex], rng), prosody)

    def spanish_mixture(self, rng: random.Random) -> Voice:
        """Prosody of a Spanish voice, most of it at least; timbre of any voices of its sex."""
        (name, _), *_ = SPANISH[rng.choice(self.spanish)].prosody
        near = [other for other in self.all if other[1] == name[1] and other != name]
        share = rng.uniform(LEAST_OWN, 1.0)
        lent = rng.choice([other for other in near if other[0] in ROMANCE])
        return Voice(_mix([name, *near], rng), ((name, share), (lent, 1 - share)))


def _mix(names: list[str], rng: random.Random) -> Weights:
    chosen = rng.sample(names, rng.choice(MIXED))
    sizes = [rng.expovariate(1.0) + 0.05 for _ in chosen]
    return tuple((name, size / sum(sizes)) for name, size in zip(chosen, sizes, strict=True))


def thin(rows: Mapping[str, np.ndarray], step: int, last: int) -> dict[str, np.ndarray]:
    """Every `step`-th row up to `last` ids: the rows change so slowly that means of neighbours
    replace the others."""
    lengths = np.arange(0, last + 1, step)
    return {LENGTHS: lengths} | {name: value[lengths] for name, value in rows.items()}
