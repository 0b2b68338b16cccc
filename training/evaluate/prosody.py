"""Melody of questions and durations of lines, next to the teacher's.

A question rises when the pitch of its last voiced part does; counted are those that the teacher
lets rise. The teacher's durations are those of its plan, which needs no sound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import tts
from benchmarks.report import Figure, Report, lines_of, publish
from benchmarks.understood import Clip
from training.evaluate.pitch import pitch_of
from training.evaluate.systems import (
    THEIRS,
    Teacher,
    VoicedLine,
    each,
    held_out,
    in_turn,
    speaker_of,
)
from tts.api.voice import LoadedVoice

QUESTIONS = Path(__file__).parents[1] / "questions.txt"
END_FRAMES = 30  # of 10 ms: the last voiced part of a sentence
FEWEST = 8  # of those with voice, otherwise there is no slope
RISES = 1.0  # semitones over the last part
LEAST_RISING = 0.8
SHORTEST, LONGEST = 0.6, 1.6  # share of the teacher's duration
RUNAWAY = 2.5
WORST = 10  # lines that are shown


def rise_of(clip: Clip) -> float:
    """Return how far the pitch rises over the last voiced part, in semitones; NaN without one."""
    pitch = pitch_of(clip)
    voiced = np.flatnonzero(pitch > 0)
    at = voiced[voiced > voiced[-1] - END_FRAMES] if len(voiced) else voiced
    if len(at) < FEWEST:
        return float("nan")
    return END_FRAMES * float(np.polyfit(at, 12 * np.log2(pitch[at]), 1)[0])


def rising(ours: Sequence[float], theirs: Sequence[float]) -> Iterator[Figure]:
    """Iterate over the figures of questions."""
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if b >= RISES]
    share = sum(a >= RISES for a, _ in both) / max(1, len(both))
    note = f"{len(both)} of {len(theirs)} rise as the teacher says them"
    yield Figure("questions that rise like the teacher's", (share,), "", LEAST_RISING, True, note)
    yield Figure("rise of those", tuple(a for a, _ in both), "semitones")
    yield Figure("teacher, rise of those", tuple(b for _, b in both), "semitones")


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
    teacher: Teacher, voice: LoadedVoice, questions: Sequence[VoicedLine],
    lines: Sequence[VoicedLine],
) -> Report:  # fmt: skip
    """Compare questions and durations, and print the questions that do not rise and the extremes
    of the durations."""
    speak = speaker_of(voice)
    ours = [rise_of(clip) for clip in each(speak, questions)]
    theirs = [rise_of(teacher.speak(*line)) for line in questions]
    shares = shares_of(each(speak, lines), teacher.seconds(lines))
    for (text, name), own, other in zip(questions, ours, theirs, strict=True):
        if other >= RISES > own:
            print(f"{own:5.1f} ({other:.1f})  {name:8s} {text}", file=sys.stderr)
    print("\n".join(extremes(shares, lines)), file=sys.stderr)
    return Report("prosody", (*rising(ours, theirs), *lengths(shares)))


def run(args: argparse.Namespace) -> int:
    """Compare questions and durations, and print the report."""
    teacher, voices = Teacher.open(args.teacher, args.package), tuple(THEIRS)
    questions = in_turn(lines_of(QUESTIONS), voices, args.questions)
    lines = in_turn(held_out(), voices, args.lines)
    with tts.load(args.model) as voice:
        return publish(compare(teacher, voice, questions, lines))
