"""Compare the built-in voice with its teacher, judged in the same run.

    python -m training.evaluate voices --teacher runs/teacher --package runs/teacher/package

`natural`: naturalness and misheard words; `voices`: whether every named voice is told from the
others; `cloning`: voices of clips, `people`: of recordings; `prosody`: questions and durations;
`timings`: times of words; `skipped`: missing and doubled words of hard texts; `phonemes`: IPA in a
request, and of a text; `codes`: made-up words and questions by the language model alone;
`spanish`: sentences of the Spanish voices, where a model has some. The lines are held out of
training. All need `.[teacher,listeners]`, and all but `people` a prepared teacher
(`training.lent.prepare`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.skipped import add_options
from training.evaluate import (
    cloning,
    codes,
    natural,
    phonemes,
    prosody,
    skipped,
    spanish,
    timings,
    voices,
)
from training.speech_codec.coder import CODER_FILE, READER_FILE
from training.speech_lm.writer import TEMPERATURE
from tts.config.defaults import embedded_folder

EMBEDDED_LM = embedded_folder() / "model.safetensors"
Commands = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command with the options that all have."""
    parser = commands.add_parser(name, help=text)
    for option in ("teacher", "package"):
        parser.add_argument(f"--{option}", type=Path, required=True)
    parser.add_argument("--model", default="", help="checkpoint folder (default: built-in voice)")
    parser.add_argument("--device", default="cpu", help="of the teacher, such as cuda:0")
    parser.set_defaults(run=run)
    return parser


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = add(commands, "natural", natural.run, "naturalness and misheard words")
    command.add_argument("--moonshine", type=Path, required=True, help="the recogniser's folder")
    command.add_argument("--sentences", type=int, help="only the first N")
    command.add_argument("--out", type=Path, help="folder for the clips and their verdicts")
    command = add(commands, "voices", voices.run, "named voices, told from each other")
    command.add_argument("--lines", type=int, default=200)
    command.add_argument("--references", type=int, default=2, help="lines of the teacher's voice")
    command = add(commands, "cloning", cloning.run, "voices of clips")
    command.add_argument("--voices", type=int, default=20)
    command.add_argument("--lines", type=int, default=5, help="of each voice")
    command.add_argument("--references", type=int, default=2, help="lines of the teacher's voice")
    command.add_argument("--seed", type=int, default=cloning.MIXTURES_SEED, help="of the voices")
    command = commands.add_parser("people", help="voices of recordings")
    command.add_argument("recordings", type=Path, nargs="+", metavar="FILE")
    command.add_argument("--model", default="", help="checkpoint folder (default: built-in voice)")
    command.add_argument("--lines", type=int, default=5, help="of each voice")
    command.set_defaults(run=cloning.run_people)
    command = add(commands, "prosody", prosody.run, "questions and durations")
    command.add_argument("--questions", type=int, default=400)
    command.add_argument("--lines", type=int, default=1_000, help="whose durations are compared")
    command = add(commands, "timings", timings.run, "times of words")
    command.add_argument("--lines", type=int, default=40)
    command.add_argument("--seed", type=int, default=0, help="of the teacher's noise")
    command = add(commands, "skipped", skipped.run, "missing and doubled words of hard texts")
    add_options(command)
    command = add(commands, "phonemes", phonemes.run, "IPA in a request, and of a text")
    command.add_argument("--reader", type=Path, help="reader.safetensors: with made-up words")
    command.add_argument("--coder", type=Path, default=CODER_FILE, help="that wrote the codes")
    command.add_argument("--words", type=int, default=500, help="made up")
    command.add_argument("--lines", type=int, help="written, only the first N")
    command.add_argument("--seed", type=int, default=0, help="of the words")
    command = add(commands, "spanish", spanish.run, "Spanish sentences")
    command.add_argument("--moonshine", type=Path, required=True, help="the recogniser's folder")
    command.add_argument("--reader", type=Path, default=READER_FILE, help="that reads the codes")
    command.add_argument("--coder", type=Path, default=CODER_FILE, help="that wrote the codes")
    command.add_argument("--spelled", type=Path, help="tables of phonemes, without phonemisers")
    command.add_argument("--sentences", type=int, help="only the first N")
    command.add_argument("--out", type=Path, help="folder for the clips")
    command = add(commands, "codes", codes.run, "the language model alone")
    command.add_argument("--weights", type=Path, default=EMBEDDED_LM, help="voices.json next to it")
    command.add_argument("--reader", type=Path, default=READER_FILE, help="that reads the codes")
    command.add_argument("--coder", type=Path, default=CODER_FILE, help="that wrote the codes")
    command.add_argument("--spelled", type=Path, help="tables of phonemes, without phonemisers")
    command.add_argument("--words", type=int, default=500, help="made up")
    command.add_argument("--questions", type=int, default=400)
    command.add_argument("--draws", type=int, default=1, help="of each")
    command.add_argument("--temperature", type=float, default=TEMPERATURE)
    command.add_argument("--seed", type=int, default=0, help="of the words")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
