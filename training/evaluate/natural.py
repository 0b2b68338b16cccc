"""Naturalness and misheard words of held-out sentences, through the whole service.

The service speaks over loopback gRPC in the voices of `benchmarks.understood`; the teacher says the
same sentences.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import soundfile

from benchmarks.report import Report, lines_of, publish
from benchmarks.speech_judges import SpeechJudges
from benchmarks.understood import (
    HELD_OUT,
    VOICES,
    Clip,
    Judges,
    Speaker,
    figures,
    judge,
    served,
    worst,
)
from tests.speech_server import SpeechClient, serving
from training.evaluate.systems import Teacher


def kept(speak: Speaker, folder: Path) -> Speaker:
    """Return the same speaker, which also writes each clip below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}

    def also_write(text: str, voice: str) -> Clip:
        clip = speak(text, voice)
        number = counts[voice] = counts.get(voice, -1) + 1
        soundfile.write(folder / f"{voice}_{number:02d}.wav", clip.samples, clip.sample_rate)
        return clip

    return also_write


def run(args: argparse.Namespace) -> int:
    """Judge both, and print the report and both lists of worst sentences."""
    sentences = lines_of(HELD_OUT, args.sentences)
    judges: Judges = SpeechJudges(args.moonshine)
    rows, shown = [], []
    with serving(args.model) as server, SpeechClient(server.address) as client:
        teacher = Teacher.open(args.teacher, args.package, args.device)
        speakers = {"": served(client), "teacher, ": teacher.speak}
        for prefix, speaker in speakers.items():
            speak = kept(speaker, args.out / (prefix[:-2] or "service")) if args.out else speaker
            found = judge(speak, judges, VOICES, sentences)
            rows += figures(found, prefix)
            shown += [f"{prefix}{line}" for line in worst(found)]
            if args.out:
                verdicts = [asdict(one) for one in found]
                path = args.out / f"{prefix[:-2] or 'service'}.json"
                path.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    print("\n".join(shown), file=sys.stderr)
    return publish(Report("natural", tuple(rows)))
