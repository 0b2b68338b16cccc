"""Words that are missing or doubled in hard texts: our voice and the teacher.

`benchmarks.skipped` in full, and the same texts in the same voices by the teacher. It says the
words as the service reads them, so that both are asked to say the same. What is asked for again in
the same voice, as one-word texts are, it says once: it has no seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache

from benchmarks.report import Report, publish
from benchmarks.skipped import (
    Listener,
    Log,
    Text,
    above_teacher,
    compared,
    figures,
    texts,
    until_stopped,
)
from benchmarks.speech_judges import Recogniser, prepared
from benchmarks.understood import Speaker
from training.evaluate.systems import Teacher
from tts.api.load import load


def hearing(speak: Speaker, recogniser: Listener) -> Callable[[Text], str]:
    """Return a function from a text to what is recognised in the teacher's speech."""

    @cache
    def heard(spoken: str, voice: str) -> str:
        clip = speak(spoken, voice)
        return recogniser.words(prepared(clip.samples, clip.sample_rate))

    return lambda text: heard(text.spoken, text.voice)


def run(args: argparse.Namespace) -> int:
    """Judge both, and print the report; Ctrl-C ends it with the texts so far."""
    recogniser, found = Recogniser(args.moonshine), []
    hear = hearing(Teacher.open(args.teacher, args.package, args.device).speak, recogniser)
    with load(args.model) as voice:
        asked = texts(args.words, args.seed)
        for one in until_stopped(compared(voice, asked, recogniser, Log(args.log), hear)):
            found.append(one)
            if one.unchecked.rate or one.num_retried or one.teacher.rate:
                print(one, file=sys.stderr, flush=True)
    return publish(Report("skipped", (*figures(found), *above_teacher(found))))
