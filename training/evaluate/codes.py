"""Codes of a language model, without decoder and service: many lines at once, on any device.

Phones of made-up words in IPA (as `phonemes` asks for them) and the pitch at the end of questions
(as `prosody` does) are read from the codes by what read them in training. The teacher's own codes
are read next to them: the model cannot have learned what is missed there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from benchmarks.report import Figure, Report, lines_of, publish
from training.evaluate.melody import PLANNED_HOP_S, planned_pitch
from training.evaluate.phonemes import (
    BETWEEN,
    SENTENCE,
    WORST,
    Asked,
    asked_of_teacher,
    judging_words,
    of_words,
)
from training.evaluate.prosody import QUESTIONS, lengths, rising
from training.evaluate.reading import POINT_S, PhoneReader
from training.evaluate.systems import THEIRS, Teacher, VoicedLine, in_turn
from training.kokoro.packages import symbols
from training.rises import RISES, rise_at_end, steady
from training.speech_codec.coder import Coder, load_coder
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_lm.vocabulary import Symbols
from training.speech_lm.writer import Writer, prompt_of, tokens_of, tokens_of_phonemes

AT_ONCE = 250  # lines
CODES_PER_S = 25

Write = Callable[[Sequence[list[int]], int], list[list[int]]]
"""Function from prompts and a seed to codes."""


def asked_of_model(
    write: Write, voices: dict[str, list[int]], known: Symbols, reader: PhoneReader,
    words: Sequence[tuple[str, str]], seed: int,
) -> list[Asked]:  # fmt: skip
    """Return made-up words, each with a voice, that the model says in a sentence."""
    before, after = SENTENCE.split(BETWEEN)
    prompts = [
        prompt_of(
            voices[THEIRS[name]],
            [*tokens_of(f"{before} "), *tokens_of_phonemes(word, known), *tokens_of(after)],
        )
        for word, name in words
    ]
    said = write(prompts, seed)
    return [
        Asked(word, name, reader.phones(codes))
        for (word, name), codes in zip(words, said, strict=True)
    ]


def rise_of(reader: PhoneReader, codes: Sequence[int]) -> float:
    """Return how far the pitch rises at the end of codes, in semitones; NaN without voice."""
    return rise_at_end(steady(reader.pitch(codes), POINT_S), POINT_S)


def of_questions(
    teacher: Teacher, coder: Coder, reader: PhoneReader, lines: Sequence[VoicedLine],
    said: Sequence[Sequence[list[int]]],
) -> Iterator[Figure]:  # fmt: skip
    """Iterate over the figures of questions that were said several times."""
    planned = [rise_at_end(pitch, PLANNED_HOP_S) for pitch in planned_pitch(teacher, lines)]
    spelled = [(teacher.phonemes(*line), line[1]) for line in lines]
    theirs = [rise_of(reader, codes) for codes in teacher.codes_of_lines(coder, spelled)]
    ours = [[rise_of(reader, codes) for codes in draw] for draw in said]
    for n, (text, name) in enumerate(lines):
        if planned[n] >= RISES:
            found = " ".join(f"{draw[n]:5.1f}" for draw in ours)
            print(f"{found} ({planned[n]:.1f}, {theirs[n]:.1f})  {name:8s} {text}", file=sys.stderr)
    yield from rising([rise for draw in ours for rise in draw], planned * len(ours))
    yield from rising(theirs, planned, ", the teacher's codes", None)
    seconds = teacher.seconds(lines)
    shares = [[len(codes) / CODES_PER_S for codes in draw] / seconds for draw in said]
    yield from lengths(np.concatenate(shares))


def run(args: argparse.Namespace) -> int:
    """Judge words and questions, and print the report and what is wrong."""
    device, sizes = torch.device(args.device), coder_sizes(DESIGNS["source_free"])
    teacher = Teacher.open(args.teacher, args.package, args.device, args.spelled)
    known, coder = symbols(args.package), load_coder(args.coder, sizes)
    reader, writer = PhoneReader.load(args.reader, sizes, known), Writer(args.weights, device)

    def write(prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
        parts = (prompts[n : n + AT_ONCE] for n in range(0, len(prompts), AT_ONCE))
        return [codes for p in parts for codes in writer.codes(p, seed, args.temperature)]

    words = judging_words(args.words, args.seed)
    questions = in_turn(lines_of(QUESTIONS), tuple(THEIRS), args.questions)
    asked = [prompt_of(writer.voices[THEIRS[name]], tokens_of(text)) for text, name in questions]
    spoken = [
        one
        for seed in range(args.draws)
        for one in asked_of_model(write, writer.voices, Symbols(known), reader, words, seed)
    ]
    for one in sorted(spoken, key=lambda one: -one.errors.rate)[:WORST]:
        print(f"{one.voice:8s} {one.word}  {one.heard}", file=sys.stderr)
    theirs = list(asked_of_teacher(teacher, coder, reader, words))
    said = [write(asked, seed) for seed in range(args.draws)]
    return publish(
        Report("codes", (
            *of_words(spoken, "", barred=True),
            *of_words(theirs, "teacher, ", barred=False),
            *of_questions(teacher, coder, reader, questions, said),
        ))
    )  # fmt: skip
