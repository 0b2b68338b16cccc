"""Audibility of segment borders: level and timbre across the joins of segments.

A jump is the difference between the last half second of voiced frames before a place and the first
after it: of the level, and of the mean mel-cepstrum. Jumps at joins are compared with those in the
middle of sentences, and with those of the teacher with the same sentences one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from benchmarks.report import Figure, Report
from training.measures import CEPSTRA_TO_DB, FRAME_MS, Timbre
from training.studio import Studio, Take, teach
from training.teacher import SAMPLE_RATE, Teacher
from training.voices import NAMED, TEACHERS

SIDE = 50  # voiced frames
FRAME = round(SAMPLE_RATE * FRAME_MS / 1000)
SENTENCES = 4  # of one text
MARGIN_DB = 1.0  # above the teacher's jumps: below the audible difference between two sentences


@dataclass(slots=True)
class Jumps:
    """Jumps of level and timbre, both in dB, at places of one kind."""

    level: list[float] = field(default_factory=list)
    timbre: list[float] = field(default_factory=list)

    def add(self, jump: tuple[float, float] | None) -> None:
        """Add a jump, unless there is too little speech on one side."""
        if jump is not None:
            self.level.append(jump[0])
            self.timbre.append(jump[1])


class Track:
    """The voiced frames of one recording: positions, level in dB, mel-cepstrum."""

    def __init__(self, samples: np.ndarray) -> None:
        timbre = Timbre(samples)
        frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
        power = np.square(frames, dtype=np.float64).mean(1)
        self.places = np.flatnonzero(timbre.voiced[: len(power)])
        self.level = 10 * np.log10(power[self.places] + 1e-9)
        self.cepstra = timbre.cepstra[self.places, 1:]

    def jump(self, start: int, at: int, end: int) -> tuple[float, float] | None:
        """Return the jump at a frame, using only frames in `start` … `end`."""
        first, middle, last = np.searchsorted(self.places, (start, at, end))
        before = slice(max(first, middle - SIDE), middle)
        after = slice(middle, min(last, middle + SIDE))
        if min(before.stop - before.start, after.stop - after.start) < SIDE:
            return None
        level = self.level[after].mean() - self.level[before].mean()
        cepstra = self.cepstra[after].mean(0) - self.cepstra[before].mean(0)
        return abs(float(level)), CEPSTRA_TO_DB * float(np.linalg.norm(cepstra))

    def middle(self, start: int, end: int) -> int:
        """Return the frame with as many voiced ones before as after it."""
        inside = self.places[(self.places >= start) & (self.places < end)]
        return int(inside[len(inside) // 2]) if len(inside) else start


def measure(take: Take, joins: Jumps, inside: Jumps) -> None:
    """Add the jumps of a take."""
    track = Track(take.samples)
    bounds = [0, *(join // FRAME for join in take.joins), len(take.samples) // FRAME]
    for start, at, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
        joins.add(track.jump(start, at, end))
    for start, end in pairwise(bounds):
        inside.add(track.jump(start, track.middle(start, end), end))


def one_by_one(takes: Sequence[Take]) -> Take:
    """Join takes like the segments of a text."""
    ends = np.cumsum([len(take.samples) for take in takes])
    return Take(np.concatenate([take.samples for take in takes]), joins=tuple(ends[:-1].tolist()))


def evaluate(model: str, sentences: Sequence[str], count: int) -> Report:
    """Evaluate `count` texts of some sentences, said by each of the teacher's voices."""
    studio, teacher = Studio(model), Teacher()
    parts = [[sentences[(SENTENCES * n + k) % len(sentences)] for k in range(SENTENCES)]
             for n in range(count)]  # fmt: skip
    found = {(who, where): Jumps() for who in ("voice", "teacher") for where in ("joins", "inside")}
    for voice in NAMED[: len(TEACHERS)]:
        takes = studio.speak([" ".join(part) for part in parts], studio.named(voice.name), seed=1)
        taught = (one_by_one([teach(teacher, text, voice) for text in part]) for part in parts)
        for take, reference in zip(takes, taught, strict=True):
            measure(take, found["voice", "joins"], found["voice", "inside"])
            measure(reference, found["teacher", "joins"], found["teacher", "inside"])
    studio.close()
    return Report("joins", tuple(figures(found)))


def figures(found: Mapping[tuple[str, str], Jumps]) -> Iterator[Figure]:
    """Return jumps of voice and teacher, at joins and inside; at joins the teacher's set the
    bar.
    """
    yield Figure("joins", (float(len(found["voice", "joins"].level)),), "")
    for what in ("level", "timbre"):
        taught = getattr(found["teacher", "joins"], what) or [0.0]
        bars = {("voice", "joins"): float(np.median(taught)) + MARGIN_DB}
        for (who, where), jumps in found.items():
            name = f"{who}, {what} {'at joins' if where == 'joins' else 'within sentences'}"
            values = tuple(getattr(jumps, what)) or (0.0,)
            yield Figure(name, values, "dB", bars.get((who, where)))
