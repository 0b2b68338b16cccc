"""Voices: the teacher's three, five derived from them, and many unnamed ones.

A voice is derived by moving the teacher's pitch and formants: flite speaks `formants` times as
slowly at `pitch / formants` times its own pitch, and the samples are then played `formants` times
as fast (resampled). Formants change by `formants`, pitch by `pitch`, and the duration stays. There
is no analysis and resynthesis, so that a derived voice is as clear as its teacher. One of the
teacher's voices, rms, has a fixed pitch: there the two change together.

The unnamed voices train voice cloning. They are on a plane of pitch and formants, without the
surroundings of `UNSEEN`; those are used to evaluate cloning of unseen voices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

TEACHERS = ("slt", "rms", "awb")
PITCH_HZ = (170.0, 99.0, 134.5)  # medians of the teachers
FIXED_PITCH = (1,)
FORMANT_STEP = 40  # formant ratios are multiples of its inverse, so that resampling is rational

NUM_UNNAMED = 1200
PITCH_RANGE_HZ = (82.0, 255.0)
FORMANT_RANGE = (0.86, 1.16)
UNNAMED_TEACHERS = (0, 2, 0, 2, 0, 2, 1)  # in turn; a fixed pitch has less variation
UNSEEN_DISTANCE = 0.03  # in ln pitch / 3 and ln formants: minimum distance from every unseen voice


@dataclass(frozen=True, slots=True)
class Voice:
    """One speaker. `pitch` and `formants` are ratios to the teacher's."""

    teacher: int
    pitch: float = 1.0
    formants: Fraction = Fraction(1)
    name: str = ""
    description: str = ""

    @property
    def pitch_hz(self) -> float:
        """Return the expected median."""
        return PITCH_HZ[self.teacher] * self.pitch


def _made(name: str, description: str, teacher: int, pitch: float, formants: int) -> Voice:
    return Voice(teacher, pitch, Fraction(formants, FORMANT_STEP), name, description)


NAMED = (
    Voice(0, name="slt", description="US English, female"),
    Voice(1, name="rms", description="US English, male"),
    Voice(2, name="awb", description="Scottish English, male"),
    _made("iris", "US English, higher and lighter than slt", 0, 1.24, 44),
    _made("june", "US English, lower and darker than slt", 0, 0.82, 37),
    _made("karl", "US English, lower than rms", 1, 0.925, 37),
    _made("otto", "Scottish English, lower than awb", 2, 0.74, 36),
    _made("wren", "Scottish English, higher than awb", 2, 1.42, 45),
)


def _fixed(teacher: int, pitch_hz: float, formants: float) -> Voice:
    ratio = Fraction(round(formants * FORMANT_STEP), FORMANT_STEP)
    return Voice(teacher, pitch_hz / PITCH_HZ[teacher], ratio)


# Between and beyond the others: teacher, median pitch in Hz, formant ratio.
UNSEEN = tuple(
    _fixed(teacher, pitch_hz, formants)
    for teacher, pitch_hz, formants in (
        (0, 150.0, 1.10), (0, 190.0, 0.90), (0, 230.0, 1.00), (0, 120.0, 0.95), (0, 205.0, 1.15),
        (0, 110.0, 0.875), (0, 262.0, 1.175), (0, 175.0, 1.05), (0, 140.0, 0.85), (0, 240.0, 0.925),
        (2, 100.0, 1.05), (2, 165.0, 0.95), (2, 120.0, 0.875), (2, 220.0, 1.15), (2, 90.0, 0.95),
        (2, 185.0, 1.05), (2, 150.0, 1.15), (2, 80.0, 0.85), (2, 205.0, 1.00), (2, 130.0, 1.10),
    )
)  # fmt: skip


def _place(voice: Voice) -> tuple[float, float]:
    return math.log(voice.pitch_hz) / 3, math.log(voice.formants)


def _is_seen(voice: Voice) -> bool:
    x, y = _place(voice)
    return all(
        other.teacher != voice.teacher or math.hypot(x - a, y - b) >= UNSEEN_DISTANCE
        for other in UNSEEN
        for a, b in (_place(other),)
    )


def _halton(index: int, base: int) -> float:
    value, share = 0.0, 1.0
    while index:
        share /= base
        value += share * (index % base)
        index //= base
    return value


def unnamed() -> tuple[Voice, ...]:
    """Return `NUM_UNNAMED` voices, evenly spread, away from `UNSEEN`."""
    low, high = PITCH_RANGE_HZ
    voices: list[Voice] = []
    index = 0
    while len(voices) < NUM_UNNAMED:
        index += 1
        pitch_hz = low * (high / low) ** _halton(index, 2)
        formants = FORMANT_RANGE[0] + (FORMANT_RANGE[1] - FORMANT_RANGE[0]) * _halton(index, 3)
        teacher = UNNAMED_TEACHERS[index % len(UNNAMED_TEACHERS)]
        if teacher in FIXED_PITCH:
            pitch_hz = PITCH_HZ[teacher] * round(formants * FORMANT_STEP) / FORMANT_STEP
        voice = _fixed(teacher, pitch_hz, formants)
        if _is_seen(voice):
            voices.append(voice)
    return tuple(voices)


VOICES = (*NAMED, *unnamed())
"""Indexed by the number that is stored with every clip; the first `len(NAMED)` have names."""

# Frequency of each, out of `len(TURNS)`: three teachers twice, five derived voices, any unnamed.
UNNAMED_TURN = -1
TURNS = (*range(len(NAMED)), *range(len(TEACHERS)), *(12 * (UNNAMED_TURN,)))


def voice_of(line: int, worker_line: int, first_turn: int) -> int:
    """Return the voice of a line: every voice gets all kinds of text; deterministic."""
    turn = TURNS[(line + worker_line + first_turn) % len(TURNS)]
    if turn != UNNAMED_TURN:
        return turn
    mixed = (line * 2654435761 + first_turn * 40503) % 2**32
    return len(NAMED) + mixed * NUM_UNNAMED // 2**32
