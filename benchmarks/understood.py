"""Naturalness of held-out sentences in four built-in voices, and misheard words.

Every sentence is synthesized in every voice by the whole service over loopback gRPC, and judged by
the models of `benchmarks.speech_judges`, whose module says what they need. They also make errors on
natural speech: `python -m training.evaluate natural` judges the teacher in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.report import Figure, Report, arguments, lines_of, publish
from benchmarks.speech_judges import Acoustics, SpeechJudges, prepared
from benchmarks.word_errors import WordErrors, total, word_errors
from tests.speech_server import SpeechClient, serving

VOICES = ("hazel", "owen", "edith", "hugh")
HELD_OUT = Path(__file__).parent / "held_out.txt"
SEED = 1
WORST = 20  # sentences that are shown


@dataclass(frozen=True, slots=True)
class Clip:
    """Mono float32 samples at a rate in Hz."""

    samples: np.ndarray
    sample_rate: int


Speaker = Callable[[str, str], Clip]
"""Function from text and voice to speech."""


class Judges(Protocol):
    """Judges of clips that `prepared` made."""

    def naturalness(self, clip: np.ndarray) -> float: ...

    def words(self, clip: np.ndarray) -> str: ...


@dataclass(frozen=True, slots=True)
class Judged:
    """One sentence in one voice: what a recogniser wrote, and the errors of a reading."""

    voice: str
    text: str
    heard: str
    natural: float
    errors: WordErrors

    def __str__(self) -> str:
        return (f"{self.voice:8s} {self.natural:.2f} {self.errors.wrong}/{self.errors.words}  "
                f"{self.text} | {self.heard}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class JudgedSound(Judged):
    """The same, with errors of the words and measures of the sound."""

    acoustics: Acoustics


def judge(
    speak: Speaker, judges: Judges, voices: Iterable[str], sentences: Sequence[str]
) -> list[JudgedSound]:
    """Synthesize and judge every sentence in every voice."""
    found = []
    for voice in voices:
        for text in sentences:
            said = speak(text, voice)
            clip = prepared(said.samples, said.sample_rate)
            heard = judges.words(clip)
            natural, errors = judges.naturalness(clip), word_errors(text, heard)
            acoustics = Acoustics.of(said.samples, said.sample_rate)
            found.append(JudgedSound(voice, text, heard, natural, errors, acoustics))
    return found


def served(client: SpeechClient) -> Speaker:
    """Return a speaker for the service, with one seed."""

    def speak(text: str, voice: str) -> Clip:
        speech = client.synthesize(text, voice=voice, seed=SEED)
        samples = np.frombuffer(speech.pcm, dtype="<i2").astype(np.float32) / 32768.0
        return Clip(samples, speech.sample_rate)

    return speak


def figures(found: Sequence[JudgedSound], prefix: str = "") -> Iterator[Figure]:
    """Iterate over the figures of each voice, then of all of them; ranges are over sentences."""
    for voice in (*dict.fromkeys(one.voice for one in found), ""):
        own = [one for one in found if voice in {"", one.voice}]
        name, errors = f"{prefix}{voice or 'all'}", total(one.errors for one in own)
        natural = [one.natural for one in own]
        note = f"mean {np.mean(natural):.2f}"
        yield Figure(f"{name}, naturalness", tuple(natural), "MOS", note=note)
        note = f"{errors.words} words"
        yield Figure(f"{name}, misheard words", (errors.rate,), "of words", note=note)
    acoustics = [one.acoustics for one in found]
    rates = [one.errors.words / one.acoustics.seconds for one in found]
    pitch, high = tuple(one.pitch_range for one in acoustics), tuple(one.high for one in acoustics)
    yield Figure(f"{prefix}all, pitch range", pitch, "semitones")
    yield Figure(f"{prefix}all, power above 6 kHz", high, "dB")
    yield Figure(f"{prefix}all, speaking rate", tuple(rates), "words/s")


def worst(found: Sequence[Judged]) -> Iterator[str]:
    """Iterate over the sentences with the most misheard words, the least natural first."""
    for one in sorted(found, key=lambda one: (-one.errors.wrong, one.natural))[:WORST]:
        yield str(one)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Naturalness and misheard words of held-out sentences.", repeat=1)
    options.add_argument("--moonshine", type=Path, required=True, help="the recogniser's folder")
    options.add_argument("--sentences", type=int, help="only the first N")
    args = options.parse_args(argv)
    sentences = lines_of(HELD_OUT, args.sentences)
    with serving(args.model) as server, SpeechClient(server.address) as client:
        found = judge(served(client), SpeechJudges(args.moonshine), VOICES, sentences)
    print("\n".join(worst(found)), file=sys.stderr)
    return publish(Report("understood", tuple(figures(found))))


if __name__ == "__main__":
    sys.exit(main())
