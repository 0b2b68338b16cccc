"""Clips of the teacher that no training has seen, to judge a codec by: sounds, plans and styles.

    python -m training.speech_codec.clips --teacher runs/teacher --package runs/teacher/package \
        --out runs/clips

Named voices, and mixtures that no take has (another seed). Every voice says one reference line and
some more. OUT/clips.tsv: kind, voice, file, text; a voice's first row is its reference. Next to
every sound is a file of its plan, with the arrays of a take: phones, pitch, energy, style.

On a machine without phonemisers --spelled FILE says the lines of a file that --spell FILE wrote
elsewhere, a JSON list of objects: kind, name, timbre, prosody, text, ids.
"""

from __future__ import annotations

import argparse
import json
import random
import wave
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from training.kokoro.convert import VOICES_FILE
from training.kokoro.network import SAMPLE_RATE, Kokoro
from training.kokoro.packages import symbols
from training.kokoro.phonemes import Speller, ids_of
from training.kokoro.studio import MIDDLING, Studio
from training.kokoro.style import StyleBook, Voice, Weights

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

    def plan(self) -> dict[str, torch.Tensor]:
        """Return phones [S / 600], pitch and energy [S / 300] and the voice's style [256]."""
        with np.load(self.path.with_suffix(".npz")) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}


def read_clips(folder: Path) -> list[Clip]:
    """Read the clips of a folder that this module wrote."""
    rows = (folder / TABLE).read_text(encoding="utf-8").splitlines()
    parts = [row.split("\t") for row in rows]
    return [Clip(kind, voice, folder / name, text) for kind, voice, name, text in parts]


@dataclass(frozen=True, slots=True)
class Line:
    """A text that a voice is to say, and its symbols' ids."""

    kind: str
    name: str
    timbre: Weights
    prosody: Weights
    text: str
    ids: tuple[int, ...]

    @property
    def voice(self) -> Voice:
        return Voice(self.timbre, self.prosody)


def spell(args: argparse.Namespace) -> list[Line]:
    """Draw voices and texts, and spell the texts: needs the phonemisers' packages."""
    known = symbols(args.package)
    book = StyleBook.load(args.teacher / VOICES_FILE, torch.device("cpu"))
    spellers = {accent: Speller(accent) for accent in "ab"}
    texts = [text for text in TEXTS.read_text().splitlines() if len(text) >= SHORTEST]
    random.Random(args.seed).shuffle(texts)
    lines = []
    for kind, name, voice in voices(book, args):
        for _ in range(1 + (args.lines if kind == "named" else args.mixture_lines)):
            text = texts.pop()
            ids = ids_of(spellers[voice.accent](text), known)
            lines.append(Line(kind, name, voice.timbre, voice.prosody, text, tuple(ids)))
    return lines


def voices(book: StyleBook, args: argparse.Namespace) -> Iterator[tuple[str, str, Voice]]:
    """Iterate over kind, name and voice."""
    for name in args.named:
        yield "named", name, Voice.named(name)
    rng = random.Random(args.seed)
    for number in range(args.mixtures):
        yield "mixture", f"mixture{number}", book.mixture(rng)


def write_lines(lines: Sequence[Line], path: Path) -> None:
    """Write spelled lines as JSON."""
    path.write_text(json.dumps([asdict(line) for line in lines], indent=0), encoding="utf-8")


def read_lines(path: Path) -> list[Line]:
    """Read the file of `write_lines`."""
    return [
        Line(
            row["kind"],
            row["name"],
            tuple((name, share) for name, share in row["timbre"]),
            tuple((name, share) for name, share in row["prosody"]),
            row["text"],
            tuple(row["ids"]),
        )
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]


@torch.inference_mode()
def say(studio: Studio, line: Line) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the samples int16 [S] of one line, and its plan and style as a take has them."""
    teacher: Kokoro = studio.teacher
    ids = (0, *line.ids, 0)
    style = studio.book.style(line.voice, len(line.ids))[None]
    row = torch.tensor([ids], device=studio.device)
    prosody = teacher.prosody(row, torch.tensor([len(ids)]), style)
    curves = teacher.curves(prosody, style)
    samples = teacher.speak(prosody, curves, style)[0].clamp(-1, 1)
    plan = {
        "phones": np.repeat(np.array(ids, np.uint8), prosody.durations[0].cpu().numpy()),
        "pitch": curves.pitch[0].half().cpu().numpy(),
        "energy": curves.energy[0].half().cpu().numpy(),
        "style": studio.book.style(line.voice, MIDDLING).half().cpu().numpy(),
    }
    return (samples * 32767).to(torch.int16).cpu().numpy(), plan


def record(studio: Studio, lines: Sequence[Line], out: Path) -> None:
    """Say lines to files, and write the table of those that are there after each."""
    rows: list[str] = []
    numbers: dict[str, int] = {}
    for line in lines:
        number = numbers[line.name] = numbers.get(line.name, -1) + 1
        path = out / f"{line.name}_{number}.wav"
        samples, plan = say(studio, line)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", "not compressed"))
            file.writeframes(samples.astype("<i2").tobytes())
        np.savez(path.with_suffix(".npz"), allow_pickle=False, **plan)
        rows.append(f"{line.kind}\t{line.name}\t{path.name}\t{line.text}")
        print(rows[-1], flush=True)
        (out / TABLE).write_text("\n".join(rows) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--package", type=Path, help="folder with the symbols, to spell texts")
    parser.add_argument("--out", type=Path, help="folder for the clips")
    parser.add_argument("--spell", type=Path, metavar="FILE", help="write spelled lines here")
    parser.add_argument("--spelled", type=Path, metavar="FILE", help="say the lines of this file")
    parser.add_argument("--lines", type=int, default=5, help="per named voice")
    parser.add_argument("--named", nargs="+", default=NAMED)
    parser.add_argument("--mixtures", type=int, default=6)
    parser.add_argument("--mixture-lines", type=int, default=3)
    parser.add_argument("--seed", type=int, default=20_000)
    args = parser.parse_args(argv)
    if not args.package and not args.spelled:
        parser.error("name --package to spell texts, or --spelled")
    if not args.out and not args.spell:
        parser.error("name --out, --spell or both")
    lines = read_lines(args.spelled) if args.spelled else spell(args)
    if args.spell:
        write_lines(lines, args.spell)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        record(Studio.open(args.teacher, device), lines, args.out)


if __name__ == "__main__":
    main()
