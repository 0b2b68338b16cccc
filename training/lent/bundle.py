"""Put together what a machine without network needs for a visit.

    python -m training.lent.bundle --teacher runs/teacher --package runs/teacher/package \
        --phonemes runs/phonemes --out bundle [--wheels DIR] [--clips FILE]

The folder holds code, the teacher's weights, thinned style rows, phonemes with their texts,
start.sh and poll.sh, and as clips.json the lines that `training.speech_codec.clips --spell` wrote.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training.kokoro.convert import VOICES_FILE, WEIGHTS_FILE
from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import ACCENTS, table
from training.kokoro.style import thin

ROOT = Path(__file__).parents[2]
CODE = ("training", "decoder")
STEP, LAST = 8, 256  # ids between style rows, and in the longest text
LIMIT_MIB = 60.0


def bundle(args: argparse.Namespace) -> float:
    """Replace the folder and return its size in MiB."""
    out: Path = args.out
    shutil.rmtree(out, ignore_errors=True)
    (out / "teacher").mkdir(parents=True)
    for package in CODE:
        ignore = shutil.ignore_patterns("__pycache__", "*.txt", "*.md")
        shutil.copytree(ROOT / package, out / package, ignore=ignore)
    shutil.copy(args.teacher / WEIGHTS_FILE, out / "teacher")
    with np.load(args.teacher / VOICES_FILE) as voices:
        rows = thin({name: voices[name] for name in voices.files}, STEP, LAST)
    np.savez_compressed(out / "teacher" / VOICES_FILE, allow_pickle=False, **rows)
    (out / "package" / SYMBOLS).parent.mkdir(parents=True)
    shutil.copy(args.package / SYMBOLS, out / "package" / SYMBOLS)
    (out / "phonemes").mkdir()
    for accent in ACCENTS:
        shutil.copy(table(args.phonemes, accent), out / "phonemes")
    if args.wheels:
        shutil.copytree(args.wheels, out / "wheels")
    if args.clips:
        shutil.copy(args.clips, out / "clips.json")
    for script in ("start.sh", "poll.sh"):
        shutil.copy(Path(__file__).with_name(script), out / script)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("teacher", "package", "phonemes", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--clips", type=Path, help="spelled lines")
    args = parser.parse_args(argv)
    size = bundle(args)
    print(f"{args.out}: {size:.1f} MiB")
    if size > LIMIT_MIB:
        raise SystemExit(f"{args.out} is larger than {LIMIT_MIB:.0f} MiB: spell fewer lines")


if __name__ == "__main__":
    main()
