"""Words that are missing or doubled in hard texts: our voice and the teacher.

`benchmarks.skipped` in full, and the same texts in the same voices by the teacher. It says the
words as the service reads them, so that both are asked to say the same.
"""

from __future__ import annotations

import argparse

from benchmarks.report import Report, publish
from benchmarks.skipped import above_teacher, compare, figures, spoken_in_turn, texts, total
from benchmarks.speech_judges import Recogniser, prepared
from benchmarks.word_errors import slips
from training.evaluate.systems import Teacher
from tts.api.load import load


def run(args: argparse.Namespace) -> int:
    """Judge both, and print the report."""
    recogniser, asked = Recogniser(args.moonshine), texts(args.words, args.seed)
    teacher = Teacher.open(args.teacher, args.package)
    theirs = []
    for text in asked:
        clip = teacher.speak(text.spoken, text.voice)
        words = recogniser.words(prepared(clip.samples, clip.sample_rate))
        theirs.append(slips(text.spoken, words))
    with load(args.model) as voice:
        found = [compare(spoken, recogniser) for spoken in spoken_in_turn(voice, asked)]
    rows = *figures(found), *above_teacher(found, total(theirs))
    return publish(Report("skipped", tuple(rows)))
