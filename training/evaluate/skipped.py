"""Words that are missing or doubled in hard texts: our voice and the teacher.

`benchmarks.skipped` in full, and the same texts in the same voices by the teacher. It says the
words as the service reads them, so that both are asked to say the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from benchmarks.report import Report, publish
from benchmarks.skipped import (
    Compared,
    Listener,
    Spoken,
    above_teacher,
    compare,
    figures,
    spoken_in_turn,
    texts,
    total,
    until_stopped,
)
from benchmarks.speech_judges import Recogniser, prepared
from benchmarks.understood import Speaker
from benchmarks.word_errors import Slips, slips
from training.evaluate.systems import Teacher
from tts.api.load import load


def judged(
    said: Iterable[Spoken], teacher: Speaker, recogniser: Listener
) -> Iterator[tuple[Compared, Slips]]:
    """Iterate over what is compared of our speech, and the teacher's slips in the same texts."""
    for spoken in said:
        text = spoken.text
        clip = teacher(text.spoken, text.voice)
        words = recogniser.words(prepared(clip.samples, clip.sample_rate))
        yield compare(spoken, recogniser), slips(text.spoken, words)


def run(args: argparse.Namespace) -> int:
    """Judge both, and print the report; Ctrl-C ends it with the texts so far."""
    recogniser, teacher = (
        Recogniser(args.moonshine),
        Teacher.open(args.teacher, args.package, args.device),
    )
    found, theirs = [], []
    with load(args.model) as voice:
        said = spoken_in_turn(voice, texts(args.words, args.seed))
        for one, slip in until_stopped(judged(said, teacher.speak, recogniser)):
            found.append(one)
            theirs.append(slip)
    rows = *figures(found), *above_teacher(found, total(theirs))
    return publish(Report("skipped", tuple(rows)))
