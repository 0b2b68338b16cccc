"""Melody of questions and durations of lines, next to the teacher's.

A question rises when its end is a semitone or more above the lowest pitch shortly before; counted
are those that the teacher lets rise. Their pitch is what drives the voices' sources
(`training.evaluate.melody`), and once more what a tracker finds in the sound of both. The teacher's
durations are those of its plan, which needs no sound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Figure, Report, lines_of, publish
from benchmarks.understood import Clip, Speaker
from training.evaluate.melody import PLANNED_HOP_S, DecoderPitch, planned_pitch
from training.evaluate.pitch import HOP_S, pitch_of
from training.evaluate.reading import CodeClient, load_with_codes
from training.evaluate.systems import (
    THEIRS,
    Teacher,
    VoicedLine,
    each,
    held_out,
    in_turn,
    speaker_of,
)
from training.rises import RISES, rise_at_end
from tts.api.voice import LoadedVoice

QUESTIONS = Path(__file__).parents[1] / "questions.txt"
LEAST_RISING = 0.8
SHORTEST, LONGEST = 0.6, 1.6  # share of the teacher's duration
RUNAWAY = 2.5
WORST = 10  # lines that are shown


@dataclass(frozen=True, slots=True)
class Rise:
    """Semitones by which questions rise at their ends; NaN without voice."""

    driven: tuple[float, ...]  # by the pitch that drives the source
    heard: tuple[float, ...]  # by the sound


def ours_of(
    speak: Speaker, codes: CodeClient, read: DecoderPitch, lines: Sequence[VoicedLine]
) -> Rise:
    """Return the rises of our speech, spoken one after the other."""
    driven, heard = [], []
    for line in lines:
        heard.append(rise_of(speak(*line)))
        driven.append(rise_at_end(read.of(codes.take(), codes.prompt), read.hop_s))
    return Rise(tuple(driven), tuple(heard))


def theirs_of(teacher: Teacher, lines: Sequence[VoicedLine]) -> Rise:
    """Return the rises of the teacher's plans and sounds."""
    driven = (rise_at_end(pitch, PLANNED_HOP_S) for pitch in planned_pitch(teacher, lines))
    return Rise(tuple(driven), tuple(rise_of(teacher.speak(*line)) for line in lines))


def rise_of(clip: Clip) -> float:
    """Return how far a clip's pitch rises at its end, in semitones; NaN without voice."""
    return rise_at_end(pitch_of(clip), HOP_S)


def rising(
    ours: Sequence[float], theirs: Sequence[float], how: str = "", bar: float | None = LEAST_RISING
) -> Iterator[Figure]:
    """Iterate over the figures of questions; `how` follows their names."""
    pairs = list(zip(ours, theirs, strict=True))
    both = [(a, b) for a, b in pairs if b >= RISES]
    others = [a for a, b in pairs if b < RISES]
    note = f"{len(both)} of {len(pairs)} rise as the teacher says them"
    share = np.mean([a >= RISES for a, _ in both] or [0.0])
    name = f"questions that rise like the teacher's{how}"
    yield Figure(name, (float(share),), "", bar, True, note)
    share = np.mean([a >= RISES for a in others] or [0.0])
    yield Figure(f"questions that rise unlike the teacher's{how}", (float(share),), "")


def lengths(shares: np.ndarray) -> Iterator[Figure]:
    """Iterate over the figures of durations, as shares of the teacher's [N]."""
    outside = ((shares < SHORTEST) | (shares > LONGEST)).sum()
    yield Figure("durations, of the teacher's", tuple(shares.tolist()), "")
    note = f"of {len(shares)} lines"
    limits = f"durations outside {SHORTEST} to {LONGEST}"
    yield Figure(limits, (float(outside),), "lines", 0.0, note=note)
    yield Figure("without an end", (float((shares > RUNAWAY).sum()),), "lines", 0.0)
    yield Figure("empty", (float((shares == 0).sum()),), "lines", 0.0)


def shares_of(clips: Iterator[Clip], seconds: np.ndarray) -> np.ndarray:
    """Return the clips' durations as shares of `seconds` [N]."""
    own = [len(clip.samples) / clip.sample_rate for clip in clips]
    return np.array(own) / seconds


def extremes(shares: np.ndarray, lines: Sequence[VoicedLine]) -> Iterator[str]:
    """Iterate over the lines whose durations are farthest from the teacher's."""
    order = np.argsort(-np.abs(np.log(np.maximum(shares, 1e-3))))[:WORST]
    for i in order.tolist():
        yield f"{shares[i]:.2f}  {lines[i][1]:8s} {lines[i][0]}"


def compare(
    teacher: Teacher, ours: tuple[LoadedVoice, CodeClient], read: DecoderPitch,
    questions: Sequence[VoicedLine], lines: Sequence[VoicedLine],
) -> Report:  # fmt: skip
    """Compare questions and durations, and print the questions that the teacher lets rise and the
    extremes of the durations."""
    voice, codes = ours
    speak = speaker_of(voice)
    own, other = ours_of(speak, codes, read, questions), theirs_of(teacher, questions)
    for (text, name), mine, its in zip(questions, own.driven, other.driven, strict=True):
        if its >= RISES:
            print(f"{mine:5.1f} ({its:.1f})  {name:8s} {text}", file=sys.stderr)
    shares = shares_of(each(speak, lines), teacher.seconds(lines))
    print("\n".join(extremes(shares, lines)), file=sys.stderr)
    rows = (
        *rising(own.driven, other.driven),
        *rising(own.heard, other.heard, ", by the sound", None),
        *lengths(shares),
    )
    return Report("prosody", rows)


def run(args: argparse.Namespace) -> int:
    """Compare questions and durations, and print the report."""
    teacher, voices = Teacher.open(args.teacher, args.package, args.device), tuple(THEIRS)
    questions = in_turn(lines_of(QUESTIONS), voices, args.questions)
    lines = in_turn(held_out(), voices, args.lines)
    read, ours = DecoderPitch.load(args.model), load_with_codes(args.model)
    with ours[0]:
        return publish(compare(teacher, ours, read, questions, lines))
