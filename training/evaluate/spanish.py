"""Spanish sentences in the voices that speak Spanish, next to the teacher.

No package has a recogniser of Spanish with its weights. So phones are read from the codes, which
judges the language model, and an English recogniser writes down what it hears: it writes Spanish
speech almost as Spanish is spelled, and the teacher's in the same run says how much it errs. The
judge of naturalness knows no language: it alone would pass what cannot be understood.
"""

from __future__ import annotations

import argparse
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.report import Figure, Report, lines_of, publish
from benchmarks.speech_judges import SpeechJudges, prepared
from benchmarks.understood import SEED, Clip, Judged, Judges
from benchmarks.word_errors import WordErrors, edit_distance, total
from training.evaluate.reading import PhoneReader, load_with_codes, phones_of
from training.evaluate.systems import SPANISH_VOICES, Teacher
from training.kokoro.packages import symbols
from training.kokoro.spanish import HELD_OUT
from training.speech_codec.coder import Coder, load_coder
from training.speech_codec.config import DESIGNS, coder_sizes

LEAST_NATURAL, LEAST_RIGHT = 3.8, 0.97
WORST = 10  # sentences that are shown

Said = Callable[[str, str], tuple[Clip, Sequence[int]]]
"""Function from text and voice to speech and its codes."""


@dataclass(frozen=True, slots=True)
class JudgedCodes(Judged):
    """The same, with errors of the phones that the codes hold, and of the recogniser's letters."""

    letters: WordErrors


def letters_of(text: str) -> str:
    """Return a text's letters without accents."""
    return re.sub(r"[^a-z]", "", unicodedata.normalize("NFD", text.lower()))


def wrong(wanted: str, found: str) -> WordErrors:
    """Return how many signs of a text are not as they should be."""
    return WordErrors(edit_distance(wanted, found), len(wanted))


def judge(
    say: Said, judges: Judges, reader: PhoneReader, teacher: Teacher, sentences: Sequence[str]
) -> Iterator[JudgedCodes]:
    """Iterate over every sentence in every voice."""
    for voice in SPANISH_VOICES:
        for text in sentences:
            clip, codes = say(text, voice)
            sound = prepared(clip.samples, clip.sample_rate)
            heard, meant = judges.words(sound), phones_of(teacher.phonemes(text, voice))
            letters = wrong(letters_of(text), letters_of(heard))
            phones = wrong(meant, reader.phones(codes))
            yield JudgedCodes(voice, text, heard, judges.naturalness(sound), phones, letters)


def of_teacher(teacher: Teacher, coder: Coder) -> Said:
    """Return the teacher's speech, and the codes of its plans."""

    def say(text: str, voice: str) -> tuple[Clip, Sequence[int]]:
        return teacher.speak(text, voice), teacher.codes(
            coder, teacher.phonemes(text, voice), voice
        )

    return say


def kept(say: Said, folder: Path) -> Said:
    """Return the same, which also writes each clip below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}

    def also_write(text: str, voice: str) -> tuple[Clip, Sequence[int]]:
        clip, codes = say(text, voice)
        number = counts[voice] = counts.get(voice, -1) + 1
        soundfile.write(folder / f"{voice}_{number:02d}.wav", clip.samples, clip.sample_rate)
        return clip, codes

    return also_write


def figures(found: Sequence[JudgedCodes], prefix: str, *, barred: bool) -> Iterator[Figure]:
    """Iterate over the figures of each voice and of all."""
    for voice in (*SPANISH_VOICES, ""):
        own = [one for one in found if voice in {"", one.voice}]
        name, natural = f"{prefix}{voice or 'all'}", [one.natural for one in own]
        bar, note = LEAST_NATURAL if barred else None, f"mean {np.mean(natural):.2f}"
        yield Figure(f"{name}, naturalness", tuple(natural), "MOS", bar, True, note)
        phones, letters = (
            total(getattr(one, part) for one in own) for part in ("errors", "letters")
        )
        bar, note = LEAST_RIGHT if barred else None, f"{phones.words} phones"
        yield Figure(f"{name}, phones right", (1 - phones.rate,), "", bar, True, note)
        note = f"{letters.words} letters, by a recogniser of English"
        yield Figure(f"{name}, letters written otherwise", (letters.rate,), "", note=note)


def run(args: argparse.Namespace) -> int:
    """Judge both, and print the report and the sentences whose phones are wrong most often."""
    sentences = lines_of(HELD_OUT, args.sentences)
    known, sizes = symbols(args.package), coder_sizes(DESIGNS["source_ahead"])
    reader = PhoneReader.load(args.reader, sizes, known)
    teacher = Teacher.open(args.teacher, args.package, args.device, args.spelled)
    judges: Judges = SpeechJudges(args.moonshine)
    ours, codes = load_with_codes(args.model)

    def of_ours(text: str, voice: str) -> tuple[Clip, Sequence[int]]:
        speech = ours.say(text, voice=voice, seed=SEED)
        return Clip(speech.samples, speech.sample_rate), codes.take()

    rows: list[Figure] = []
    with ours:
        speakers = {"": of_ours, "teacher, ": of_teacher(teacher, load_coder(args.coder, sizes))}
        for prefix, speaker in speakers.items():
            say = kept(speaker, args.out / (prefix[:-2] or "ours")) if args.out else speaker
            found = list(judge(say, judges, reader, teacher, sentences))
            rows += figures(found, prefix, barred=not prefix)
            for one in sorted(found, key=lambda one: -one.errors.rate)[:WORST]:
                print(f"{prefix}{one}", file=sys.stderr)
    return publish(Report("spanish", tuple(rows)))
