"""Put together what a machine without network needs for a visit, in two parts to carry.

    python -m training.lent.bundle --teacher runs/teacher --package runs/teacher/package \
        --phonemes runs/phonemes --out bundle [--wheels DIR] [--clips FILE] [--plans] [--lm DIR]

OUT/machine holds code, the teacher's weights, thinned style rows, start.sh and poll.sh; OUT/texts
phonemes with their texts, coder.safetensors (with Spanish lines reader.safetensors, too) and, as
clips.json, the lines that `training.speech_codec.clips --spell` wrote. lay.sh in each copies it to
where start.sh finds it.
With --plans the teacher has nothing to speak with, a third of the size; --lm adds an exported
voice's language model and named voices, to continue it (`--lm-start lm/model.safetensors`).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training.kokoro.convert import VOICES_FILE, WEIGHTS_FILE
from training.kokoro.network import needed_to_speak
from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import SPANISH, accents_in, table
from training.kokoro.style import thin
from training.kokoro.weights import copy_without
from training.speech_codec.coder import CODER_FILE, READER_FILE

ROOT, SCRIPTS = Path(__file__).parents[2], Path(__file__).parent
CODE = ("training", "decoder")
STEP, LAST = 8, 256  # ids between style rows, and in the longest text
LIMIT_MIB = 60.0


def bundle(args: argparse.Namespace) -> dict[str, float]:
    """Replace the folder and return the size of each of its parts in MiB."""
    shutil.rmtree(args.out, ignore_errors=True)
    parts = args.out / "machine", args.out / "texts"
    for part, fill in zip(parts, (_machine, _texts), strict=True):
        part.mkdir(parents=True)
        fill(args, part)
        shutil.copy(SCRIPTS / "lay.sh", part)
    return {
        part.name: sum(p.stat().st_size for p in part.rglob("*") if p.is_file()) / 2**20
        for part in parts
    }


def _machine(args: argparse.Namespace, out: Path) -> None:
    for package in CODE:
        ignore = shutil.ignore_patterns("__pycache__", "*.txt", "*.md", "*.safetensors")
        shutil.copytree(ROOT / package, out / package, ignore=ignore)
    (out / "teacher").mkdir()
    weights = args.teacher / WEIGHTS_FILE
    if args.plans:
        copy_without(weights, needed_to_speak, out / "teacher" / WEIGHTS_FILE)
    else:
        shutil.copy(weights, out / "teacher")
    with np.load(args.teacher / VOICES_FILE) as voices:
        rows = thin({name: voices[name] for name in voices.files}, STEP, LAST)
    np.savez_compressed(out / "teacher" / VOICES_FILE, allow_pickle=False, **rows)
    (out / "package" / SYMBOLS).parent.mkdir(parents=True)
    shutil.copy(args.package / SYMBOLS, out / "package" / SYMBOLS)
    if args.wheels:
        shutil.copytree(args.wheels, out / "wheels")
    for script in ("start.sh", "poll.sh"):
        shutil.copy(SCRIPTS / script, out)


def _texts(args: argparse.Namespace, out: Path) -> None:
    (out / "phonemes").mkdir()
    accents = accents_in(args.phonemes)
    for accent in accents:
        shutil.copy(table(args.phonemes, accent), out / "phonemes")
    shutil.copy(CODER_FILE, out)
    if SPANISH in accents:
        shutil.copy(READER_FILE, out)
    if args.clips:
        shutil.copy(args.clips, out / "clips.json")
    if args.lm:
        (out / "lm").mkdir()
        for name in ("model.safetensors", "voices.json"):
            shutil.copy(args.lm / name, out / "lm")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("teacher", "package", "phonemes", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--clips", type=Path, help="spelled lines")
    parser.add_argument("--plans", action="store_true", help="a teacher that only plans")
    parser.add_argument("--lm", type=Path, help="exported voice whose language model to continue")
    args = parser.parse_args(argv)
    for part, size in bundle(args).items():
        print(f"{args.out / part}: {size:.1f} MiB")
        if size > LIMIT_MIB:
            raise SystemExit(f"{args.out / part} is larger than {LIMIT_MIB:.0f} MiB")


if __name__ == "__main__":
    main()
