"""What the teacher says of texts that were never learned from, as sound files to judge a codec by.

    python -m training.speech_codec.clips --teacher runs/teacher --package runs/teacher/package \
        --out runs/clips

Named voices, and mixtures that no take has (another seed). Every voice says one reference line and
some more. OUT/clips.tsv: kind, voice, file, text; a voice's first row is its reference.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import soundfile
import torch

from training.kokoro.network import SAMPLE_RATE, Kokoro
from training.kokoro.packages import symbols
from training.kokoro.phonemes import Speller, ids_of
from training.kokoro.studio import Studio
from training.kokoro.style import Voice

NAMED = ("af_heart", "bf_emma", "am_michael", "bm_george")
ROOT = Path(__file__).parents[2]
TEXTS = ROOT / "training" / "prose.txt"  # held out of the corpus
SHORTEST = 45  # characters
TABLE = "clips.tsv"


@dataclass(frozen=True, slots=True)
class Clip:
    """One sound file and what it says."""

    kind: str
    voice: str
    path: Path
    text: str


def read_clips(folder: Path) -> list[Clip]:
    """Read the clips of a folder that this module wrote."""
    rows = (folder / TABLE).read_text(encoding="utf-8").splitlines()
    parts = [row.split("\t") for row in rows]
    return [Clip(kind, voice, folder / name, text) for kind, voice, name, text in parts]


def voices(studio: Studio, args: argparse.Namespace) -> Iterator[tuple[str, str, Voice]]:
    """Kind, name and voice."""
    for name in args.named:
        yield "named", name, Voice.named(name)
    rng = random.Random(args.seed)
    for number in range(args.mixtures):
        yield "mixture", f"mixture{number}", studio.book.mixture(rng)


@torch.inference_mode()
def say(studio: Studio, ids: Sequence[int], voice: Voice) -> torch.Tensor:
    """Samples float32 [S] of one line."""
    teacher: Kokoro = studio.teacher
    style = studio.book.style(voice, len(ids))[None]
    row = torch.tensor([[0, *ids, 0]], device=studio.device)
    prosody = teacher.prosody(row, torch.tensor([row.shape[1]]), style)
    return teacher.speak(prosody, teacher.curves(prosody, style), style)[0].clamp(-1, 1).cpu()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("teacher", "package", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=5, help="per named voice")
    parser.add_argument("--named", nargs="+", default=NAMED)
    parser.add_argument("--mixtures", type=int, default=6)
    parser.add_argument("--mixture-lines", type=int, default=3)
    parser.add_argument("--seed", type=int, default=20_000)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    known = symbols(args.package)
    studio = Studio.open(args.teacher, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    spellers = {accent: Speller(accent) for accent in "ab"}
    lines = [line for line in TEXTS.read_text().splitlines() if len(line) >= SHORTEST]
    random.Random(args.seed).shuffle(lines)
    rows = []
    for kind, name, voice in voices(studio, args):
        for number in range(1 + (args.lines if kind == "named" else args.mixture_lines)):
            text = lines.pop()
            samples = say(studio, ids_of(spellers[voice.accent](text), known), voice)
            file = f"{name}_{number}.wav"
            soundfile.write(args.out / file, samples.numpy(), SAMPLE_RATE)
            rows.append(f"{kind}\t{name}\t{file}\t{text}")
            print(rows[-1], flush=True)
            (args.out / TABLE).write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
