"""Whose voice is heard: every named voice against all others, and against its teacher.

Every voice of the teacher says some lines as a reference. Then both systems say other lines; a
line's speaker is the reference of the nearest speaker vector.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import tts
from benchmarks.report import Figure, Report, publish
from benchmarks.speech_judges import SpeakerVector, load_speaker, prepared
from benchmarks.understood import Clip, Speaker
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

LEAST_COSINE = 0.85  # of a named voice to its teacher
MOST_LOST = 0.05  # of the lines whose speaker the teacher's own speech shows
WORST = 8  # voices that are shown


@dataclass(frozen=True, slots=True)
class Told:
    """The voice that is heard in a line of `voice`, and the cosine to the reference of that."""

    voice: str
    nearest: str
    cosine: float

    @property
    def right(self) -> bool:
        return self.voice == self.nearest


class References:
    """Speaker vectors of voices, each the mean of some lines."""

    def __init__(self, vector: SpeakerVector, clips: Mapping[str, Iterable[Clip]]) -> None:
        self._vector = vector
        self.names = tuple(clips)
        means = [np.mean([self.vector(clip) for clip in own], 0) for own in clips.values()]
        self._rows = np.stack([mean / np.linalg.norm(mean) for mean in means])

    def vector(self, clip: Clip) -> np.ndarray:
        """Return the unit vector of a clip's speaker."""
        found = self._vector(prepared(clip.samples, clip.sample_rate))
        return found / np.linalg.norm(found)

    def tell(self, clip: Clip, voice: str) -> Told:
        """Return who is heard in a clip of `voice`."""
        cosines = self._rows @ self.vector(clip)
        nearest = self.names[int(cosines.argmax())]
        return Told(voice, nearest, float(cosines[self.names.index(voice)]))

    def others(self) -> np.ndarray:
        """Return the cosines of all pairs of voices."""
        return (self._rows @ self._rows.T)[np.triu_indices(len(self._rows), 1)]


def said_by(speak: Speaker, texts: Sequence[str], voices: Iterable[str]) -> dict[str, list[Clip]]:
    """Return every voice's clips of the same texts."""
    return {voice: [speak(text, voice) for text in texts] for voice in voices}


def tell(references: References, speak: Speaker, lines: Sequence[VoicedLine]) -> list[Told]:
    """Return who is heard in lines that a system speaks, several at once."""
    clips = zip(each(speak, lines), lines, strict=True)
    return [references.tell(clip, voice) for clip, (_, voice) in clips]


def tell_in_turn(references: References, speak: Speaker, lines: Sequence[VoicedLine]) -> list[Told]:
    """Return who is heard in lines that a system speaks one after the other."""
    return [references.tell(speak(text, voice), voice) for text, voice in lines]


def right(found: Sequence[Told]) -> float:
    """Return the share of lines whose speaker is heard."""
    return sum(one.right for one in found) / len(found)


def figures(ours: Sequence[Told], theirs: Sequence[Told]) -> Iterator[Figure]:
    """Iterate over our figures and the teacher's."""
    share, note = right(theirs), f"{len(ours)} lines"
    yield Figure("own voice is nearest", (right(ours),), "of lines", share - MOST_LOST, True, note)
    cosines = tuple(one.cosine for one in ours)
    yield Figure("cosine to the teacher's voice", cosines, "", LEAST_COSINE, True)
    yield Figure("teacher, own voice is nearest", (share,), "of lines")
    yield Figure("teacher, cosine to its other lines", tuple(one.cosine for one in theirs), "")


def worst(ours: Sequence[Told], theirs: Sequence[Told]) -> Iterator[str]:
    """Iterate over the voices that are heard least often, with the teacher's figures."""
    rows = []
    for voice in dict.fromkeys(one.voice for one in ours):
        own, other = ([one for one in side if one.voice == voice] for side in (ours, theirs))
        cosine, wrong = (
            np.mean([one.cosine for one in own]),
            [o.nearest for o in own if not o.right],
        )
        rows.append((right(own), cosine, f"{voice:8s} {right(own):.2f} (teacher {right(other):.2f})"
                     f" cosine {cosine:.3f}  {' '.join(wrong)}"))  # fmt: skip
    for *_, line in sorted(rows)[:WORST]:
        yield line


def compare(
    teacher: Teacher, voice: LoadedVoice, vector: SpeakerVector, lines: Sequence[VoicedLine],
    reference_texts: Sequence[str],
) -> Report:  # fmt: skip
    """Judge lines by both systems, and print the worst voices."""
    names = dict.fromkeys(name for _, name in lines)
    references = References(vector, said_by(teacher.speak, reference_texts, names))
    ours = tell(references, speaker_of(voice), lines)
    theirs = tell_in_turn(references, teacher.speak, lines)
    print("\n".join(worst(ours, theirs)), file=sys.stderr)
    return Report("voices", tuple(figures(ours, theirs)))


def run(args: argparse.Namespace) -> int:
    """Judge all named voices, and print the report."""
    teacher, texts, count = (
        Teacher.open(args.teacher, args.package, args.device),
        held_out(),
        args.references,
    )
    lines = in_turn(texts[count:], tuple(THEIRS), args.lines)
    with tts.load(args.model) as voice:
        return publish(compare(teacher, voice, load_speaker(), lines, texts[:count]))
