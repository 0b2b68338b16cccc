"""Word times: of the teacher's own codes by our aligner, and of our speech by the sound.

Codes of the teacher's plans are aligned with their words, whose times its durations say exactly.
For our own speech the teacher says the same line, too, and dynamic time warping of both sounds
finds the places of its borders of words in ours. How exact that is shows where another voice of the
teacher, whose durations are known as well, takes the place of ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import tts
from benchmarks.report import Figure, Report, publish
from benchmarks.understood import SEED, Clip
from training.evaluate.systems import THEIRS, Teacher, VoicedLine, held_out, in_turn
from training.evaluate.warping import Warping, features
from training.labels import TimedWord, word_times
from training.speech_codec.coder import CODER_FILE, Coder, load_coder
from training.speech_codec.config import BASE, coder_sizes
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import Symbols
from training.timings import Line, evaluate
from tts.api.voice import LoadedVoice
from tts.config.defaults import embedded_folder
from tts.speech.aligner import FOLDER, Aligner

MOST_MS, MOST_MS_OF_90 = 20.0, 60.0
CODES_PER_S = BASE.sample_rate / BASE.hop
WORST = 10  # words that are shown
Error = tuple[float, str]
"""Milliseconds, and the border of a word that is so far off."""


def words_of(
    teacher: Teacher, text: str, phonemes: str, durations: np.ndarray
) -> tuple[TimedWord, ...]:
    """Return the words of what the teacher says, by its durations; none where text and phonemes
    have other numbers of words."""
    texts = Texts([[f"{phonemes}\t{text}"], []], Symbols(teacher.known))
    return word_times(texts, 0, durations)


def errors_ms(words: Sequence[TimedWord], mapped: Sequence[TimedWord]) -> list[Error]:
    """Return how far starts and ends of the same words are apart, in ms, each with its word."""
    found = []
    for one, other in zip(words, mapped, strict=True):
        found.append((1000 * abs(one.start_s - other.start_s), f"start of {one.text}"))
        found.append((1000 * abs(one.end_s - other.end_s), f"end of {one.text}"))
    return found


def moved(words: Sequence[TimedWord], warping: Warping) -> list[TimedWord]:
    """Return words at the places of the other sound."""
    return [TimedWord(name, warping(start), warping(end)) for name, start, end in words]


def spoken(voice: LoadedVoice, text: str, name: str) -> tuple[Clip, list[TimedWord]]:
    """Return our speech and its words."""
    speech = voice.say(text, voice=name, seed=SEED, timestamps="word")
    words = [TimedWord(word.word, word.start_s, word.end_s) for word in speech.words]
    return Clip(speech.samples, speech.sample_rate), words


def neighbour(voice: str, voices: Sequence[str]) -> str:
    """Return the next voice of the same accent and sex."""
    same = [name for name in voices if THEIRS[name][:2] == THEIRS[voice][:2]]
    return same[(same.index(voice) + 1) % len(same)]


def coded(teacher: Teacher, coder: Coder, lines: Sequence[VoicedLine]) -> Iterator[Line]:
    """Iterate over the codes of the teacher's plans, with their words."""
    for text, name in lines:
        phonemes = teacher.phonemes(text, name)
        durations = teacher.plan([(phonemes, name)])["durations"]
        words = words_of(teacher, text, phonemes, durations)
        if words:
            yield Line(teacher.codes(coder, phonemes, name), words)


def of_codes(aligner: Aligner, lines: Iterator[Line]) -> Iterator[Figure]:
    """Iterate over the figures of the teacher's codes."""
    report = evaluate(aligner, lines, CODES_PER_S)
    for figure, bar in zip(report.figures[:3], (MOST_MS, MOST_MS_OF_90, None), strict=True):
        yield replace(figure, name=f"teacher's codes, {figure.name}", bar=bar)


def compared(
    teacher: Teacher, voice: LoadedVoice, lines: Sequence[VoicedLine]
) -> Iterator[tuple[list[Error], list[Error]]]:
    """Iterate over the errors of every line's words: ours, and those of the warping."""
    for text, name in lines:
        phonemes = teacher.phonemes(text, name)
        take = teacher.take(phonemes, name)
        other = teacher.take(phonemes, neighbour(name, tuple(THEIRS)))
        words, others = (words_of(teacher, text, phonemes, one.durations) for one in (take, other))
        clip, ours = spoken(voice, text, name)
        if not words or len(words) != len(ours):
            continue
        heard = features(take.clip)
        yield (
            errors_ms(ours, moved(words, Warping(heard, features(clip)))),
            errors_ms(others, moved(words, Warping(heard, features(other.clip)))),
        )


def of_sound(ours: Sequence[float], warped: Sequence[float]) -> Iterator[Figure]:
    """Iterate over the figures of both kinds of errors in ms."""
    note = f"{len(ours) // 2} words"
    yield Figure("start and end of a word", tuple(ours), "ms", MOST_MS, note=note)
    yield Figure("90 % within", (float(np.percentile(ours, 90)),), "ms", MOST_MS_OF_90)
    yield Figure("warping, start and end of a word", tuple(warped), "ms")
    yield Figure("warping, 90 % within", (float(np.percentile(warped, 90)),), "ms")


def run(args: argparse.Namespace) -> int:
    """Compare word times, and print the report and the worst words."""
    torch.manual_seed(args.seed)
    teacher = Teacher.open(args.teacher, args.package, args.device)
    lines = in_turn(held_out(), tuple(THEIRS), args.lines)
    coder = load_coder(CODER_FILE, coder_sizes(BASE))
    folder = Path(args.model) if args.model else embedded_folder()
    rows = list(of_codes(Aligner.load(folder / FOLDER), coded(teacher, coder, lines)))
    ours: list[Error] = []
    warped: list[Error] = []
    with tts.load(args.model) as voice:
        for own, other in compared(teacher, voice, lines):
            ours += own
            warped += other
    for error, word in sorted(ours, reverse=True)[:WORST]:
        print(f"{error:5.0f} ms  {word}", file=sys.stderr)
    values = ([error for error, _ in side] for side in (ours, warped))
    return publish(Report("timings", (*rows, *of_sound(*values))))
