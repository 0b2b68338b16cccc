"""Comparisons of the built-in voice with its teacher, judged in the same run.

    python -m training.evaluate natural --teacher runs/teacher --package runs/teacher/package \
        --moonshine DIR [--model FOLDER] [--sentences N] [--out FOLDER]

`natural`: held-out sentences by the whole service over loopback gRPC and by the teacher, in the
voices of `benchmarks.understood`. Needs `.[teacher,listeners]` and a prepared teacher
(`training.lent.prepare`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch

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
from training.kokoro.network import SAMPLE_RATE
from training.kokoro.packages import symbols
from training.kokoro.phonemes import Speller, ids_of
from training.kokoro.studio import Studio
from training.kokoro.style import Voice
from training.speech_codec.clips import Line, say
from training.speech_lm.names import NAMES


def taught(teacher: Path, package: Path) -> Speaker:
    """Return a speaker for the teacher, by our names of its voices."""
    known, studio = symbols(package), Studio.open(teacher, torch.device("cpu"))
    spellers = {accent: Speller(accent) for accent in "ab"}
    theirs = {ours: name for name, ours in NAMES.items()}

    def speak(text: str, voice: str) -> Clip:
        own = Voice.named(theirs[voice])
        ids = tuple(ids_of(spellers[own.accent](text), known))
        samples, _ = say(studio, Line("named", voice, own.timbre, own.prosody, text, ids))
        return Clip(samples.astype(np.float32) / 32768.0, SAMPLE_RATE)

    return speak


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


def natural(args: argparse.Namespace) -> int:
    """Judge both, and print the report and both lists of worst sentences."""
    sentences = lines_of(HELD_OUT, args.sentences)
    judges: Judges = SpeechJudges(args.moonshine)
    rows, shown = [], []
    with serving(args.model) as server, SpeechClient(server.address) as client:
        speakers = {"": served(client), "teacher, ": taught(args.teacher, args.package)}
        for prefix, speaker in speakers.items():
            speak = kept(speaker, args.out / (prefix[:-2] or "service")) if args.out else speaker
            found = judge(speak, judges, VOICES, sentences)
            rows += figures(found, prefix)
            shown += [f"{prefix}{line}" for line in worst(found)]
    print("\n".join(shown), file=sys.stderr)
    return publish(Report("natural", tuple(rows)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("natural", help="naturalness and misheard words")
    for name in ("teacher", "package", "moonshine"):
        command.add_argument(f"--{name}", type=Path, required=True)
    command.add_argument("--model", default="", help="checkpoint folder (default: built-in voice)")
    command.add_argument("--sentences", type=int, help="only the first N")
    command.add_argument("--out", type=Path, help="folder for the clips")
    command.set_defaults(run=natural)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
