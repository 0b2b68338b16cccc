"""How well a clip of a voice that was never heard is followed: in pitch, and in timbre.

A trial: one of `UNSEEN` says two held-out sentences, which are the clip, and the model says two
others in that voice. It has followed the timbre when the mean envelope of what it said is nearer to
the clip's than to that of any named voice, each said by the teacher. Two sentences say much the
same sounds as two others, one does not: what is said weighs in an envelope as much as who says it.
The teacher itself says the two others, too, as it is and through the codec: what could be reached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Figure, Report
from training.measures import Timbre, envelope_distance
from training.studio import CodecAlone, Studio, Take, in_groups, teach
from training.teacher import Teacher, Utterance
from training.voices import NAMED, TEACHERS, UNSEEN, Voice

BAR = 0.8
MOST_PITCH_ERROR = 0.15


@dataclass(frozen=True, slots=True)
class Trial:
    """Who is followed, what the clip says, and what is to be said."""

    number: int
    voice: Voice
    said: str
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one trial: how far the pitch is off, as a share, and distances of mean envelopes: to the
    clip, and to the nearest named voice."""

    pitch_error: float
    to_clip: float
    to_named: float
    named: str

    @property
    def has_pitch(self) -> bool:
        return self.pitch_error <= MOST_PITCH_ERROR

    @property
    def has_timbre(self) -> bool:
        return self.to_clip < self.to_named

    def __str__(self) -> str:
        verdict = ("neither", "timbre", "pitch", "both")[2 * self.has_pitch + self.has_timbre]
        return (
            f"pitch off {self.pitch_error:.3f}, clip {self.to_clip:.2f}, "
            f"{self.named} {self.to_named:.2f}: {verdict}"
        )


def trials(sentences: Sequence[str], count: int) -> list[Trial]:
    """Clips go through the sentences from the first, texts from the middle."""
    middle = len(sentences) // 2

    def pair(first: int) -> str:
        return " ".join(sentences[(first + k) % len(sentences)] for k in (0, 1))

    return [
        Trial(n, UNSEEN[n % len(UNSEEN)], pair(2 * n), pair(2 * n + middle)) for n in range(count)
    ]


class Listener:
    """Knows a trial's clip and the named voices, who say the same; compares takes with them."""

    def __init__(self, teacher: Teacher, trial: Trial, clip: Utterance) -> None:
        self.wanted = Timbre(clip.samples / np.float32(32768))
        self.others = {
            voice.name: Timbre(teach(teacher, trial.said, voice).samples) for voice in NAMED
        }

    def compare(self, take: Take) -> Outcome:
        got = Timbre(take.samples)
        distances = {name: envelope_distance(got, other) for name, other in self.others.items()}
        nearest = min(distances, key=distances.__getitem__)
        return Outcome(
            abs(got.pitch_hz / self.wanted.pitch_hz - 1),
            envelope_distance(got, self.wanted),
            distances[nearest],
            nearest,
        )


def followed(
    model: str, codec: CodecAlone, sentences: Sequence[str], count: int
) -> Iterator[tuple[Trial, dict[str, Outcome]]]:
    """Every trial, with the outcome of the teacher, of the codec and of the model."""
    studio, teacher = Studio(model), Teacher()
    for group in in_groups(trials(sentences, count)):
        clips = [teacher.speak(trial.said, trial.voice) for trial in group]
        takes = studio.speak_each([
            (trial.text, studio.following(clip, trial.said), trial.number + 1)
            for trial, clip in zip(group, clips, strict=True)
            if clip is not None
        ])  # fmt: skip
        for trial, clip, take in zip(group, clips, takes, strict=True):
            assert clip is not None
            listener = Listener(teacher, trial, clip)
            own = teach(teacher, trial.text, trial.voice)
            spoken = {"teacher": own, "codec": codec.render(own), "voice": take}
            yield trial, {name: listener.compare(each) for name, each in spoken.items()}
    studio.close()


def _share(outcomes: Sequence[Outcome], holds: Callable[[Outcome], bool]) -> tuple[float, ...]:
    return (float(np.mean([holds(outcome) for outcome in outcomes])),)


def evaluate(model: str, codec: CodecAlone, sentences: Sequence[str], count: int) -> Report:
    """The report; every trial is told on standard error."""
    found: list[dict[str, Outcome]] = []
    for trial, outcomes in followed(model, codec, sentences, count):
        found.append(outcomes)
        print(f"{trial.number} {TEACHERS[trial.voice.teacher]} {trial.voice.pitch_hz:.0f} Hz, "
              f"formants {float(trial.voice.formants):.3f}:",
              "; ".join(f"{name} {outcome}" for name, outcome in outcomes.items()),
              file=sys.stderr, flush=True)  # fmt: skip
    teacher, coded, voice = ([f[who] for f in found] for who in ("teacher", "codec", "voice"))
    return Report("following", (
        Figure("trials", (float(count),), ""),
        Figure("teacher nearer to the clip", _share(teacher, lambda o: o.has_timbre), "share"),
        Figure("teacher's pitch within 15 %", _share(teacher, lambda o: o.has_pitch), "share"),
        Figure("codec nearer to the clip", _share(coded, lambda o: o.has_timbre), "share"),
        Figure("pitch off by", tuple(o.pitch_error for o in voice), "share"),
        Figure("pitch within 15 %", _share(voice, lambda o: o.has_pitch), "share", BAR, True),
        Figure("nearer to the clip", _share(voice, lambda o: o.has_timbre), "share", BAR, True),
        Figure("both", _share(voice, lambda o: o.has_pitch and o.has_timbre), "share", BAR, True),
    ))  # fmt: skip
