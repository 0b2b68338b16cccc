"""Plans to codes and voice tokens for the language model, as plans appear.

    python -m training.speech_codec.tokenise --plans runs/plans \
        --coder runs/coder/coder.safetensors --out runs/tokens [--until runs/plans/finished]

With --until it runs until that file is there and every plan is done; of several at once each takes
the plans of some seeds (--part 0 --parts 2). --emphasis lets questions end as clearly as they do
in the plan after a language model has learned them, which has smaller rises than its teacher.
OUT/tokens_SEED_NUMBER.npz, of a plan's name, holds:
    codes      uint16 [C]     all lines one after the other
    size       uint16 [L]     codes of each line
    session    uint16 [L]
    row        uint32 [L]     number in the accent's table of phonemes and texts
    symbols    uint8 [L]      of the line, with the one before and the one after it
    durations  uint8 [D]      of all symbols, in the teacher's frames of 25 ms
    voiced     uint16 [L]     codes of each line up to where its voice ends; 0 without voice
    rise       float16 [L]    semitones by which the plan's pitch rises there (`training.rises`),
                              or NaN
    voice      int16 [N]      number of a named voice (`StyleBook.named`), -1: a mixture, whose name
                              is this file's and the session's number
    accent     uint8 [N]
    rows       uint16 [N, R, K]  voice tokens: the voice's own, then some with random errors, as
                              those of a clip have
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.kokoro.text import CLOSING, QUESTION
from training.kokoro.vocoder import SAMPLE_RATE
from training.rises import emphasised, rise_at_end, steady
from training.speech_codec.coder import Coder, load_coder, points_of
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_codec.plans import CURVE_GRID, PHONE_GRID, POINT, SILENCE, plan_at

CURVES = ("phones", "pitch", "energy")
MARGIN = 14  # codes of silence after a line: as many as the encoder sees after a code
CODES_PER_CALL = 131_072  # padding included
ERRORS = (0.0, 0.15, 0.3, 0.45)  # of voice tokens' latent values, whose deviation is 1
LOOK_EVERY_S = 0.5


@torch.inference_mode()
def codes_of_lines(coder: Coder, takes: dict[str, Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int64 [C] of all lines, whose first samples are `first` [L], and their places [L].

    Every line is encoded by itself, on a grid from its first sample, with silence behind it: its
    codes do not depend on its neighbours.
    """
    sizes = coder.sizes
    hop = sizes.points_per_code * POINT
    total = torch.tensor([CURVE_GRID * len(takes["pitch"])], device=first.device)
    ends = torch.cat((first[1:], total))
    count = -(-(ends - first) // hop)
    at = count.cumsum(0) - count
    codes = torch.zeros(int(count.sum()), dtype=torch.int64, device=first.device)
    for lines in alike(count.cpu().numpy(), CODES_PER_CALL):
        line = torch.tensor(lines, device=first.device)
        longest = int(count[line].max())
        points = points_of(first[line], longest + MARGIN, sizes)
        plan = plan_at(takes, points, first[line, None], ends[line, None])
        found = coder.codes(plan)[1][:, :longest]
        inside = torch.arange(longest, device=first.device) < count[line, None]
        place = at[line, None] + torch.arange(longest, device=first.device)
        codes[place[inside]] = found[inside]
    return codes, at


def alike(size: np.ndarray, limit: int) -> Iterator[list[int]]:
    """Lines in order of size, as many at once as fit `limit` codes with their padding."""
    batch: list[int] = []
    for line in np.argsort(size, kind="stable").tolist():
        if batch and (len(batch) + 1) * (size[line] + MARGIN) > limit:
            yield batch
            batch = []
        batch.append(line)
    if batch:
        yield batch


@torch.inference_mode()
def tokens(
    plan: dict[str, np.ndarray], coder: Coder, device: torch.device, emphasis: float = 0.0
) -> dict[str, np.ndarray]:
    """Tokens of a plan, as the module says. `emphasis`: semitones by which rising questions rise
    more; 0 leaves all as planned."""
    first = plan["lines"][:, 1]
    ends = np.append(first[1:], CURVE_GRID * len(plan["pitch"]))
    curves = plan | {"pitch": clearer(plan, first, ends, emphasis)} if emphasis else plan
    held = {part: torch.from_numpy(curves[part]).to(device) for part in CURVES}
    codes, _ = codes_of_lines(coder, held, torch.from_numpy(first).to(device))
    style = torch.from_numpy(plan["style"]).to(device).float()
    rows = [coder.voice(style, error)[1] for error in ERRORS]
    hop = coder.sizes.points_per_code * POINT
    voiced, rise = ends_of_voice(plan["pitch"], first, ends, hop)
    return {
        "codes": codes.cpu().numpy().astype(np.uint16),
        "size": (-(-(ends - first) // hop)).astype(np.uint16),
        "session": plan["lines"][:, 0].astype(np.uint16),
        "row": plan["row"].astype(np.uint32),
        "symbols": plan["symbols"].astype(np.uint8),
        "durations": plan["durations"],
        "voiced": voiced,
        "rise": rise,
        "voice": plan["voice"],
        "accent": plan["accent"],
        "rows": torch.stack(rows, 1).cpu().numpy().astype(np.uint16),
    }


def clearer(
    plan: dict[str, np.ndarray], first: np.ndarray, ends: np.ndarray, semitones: float
) -> np.ndarray:
    """Return a plan's pitch with clearer ends of its questions, lines of the samples `first` to
    `ends` [L] (`training.rises.emphasised`)."""
    pitch = plan["pitch"].copy()
    for start, end in zip(first, ends, strict=True):
        phones = plan["phones"][start // PHONE_GRID : end // PHONE_GRID]
        if phones[~np.isin(phones, (SILENCE, *CLOSING))][-1:].tolist() == [QUESTION]:
            own = slice(start // CURVE_GRID, end // CURVE_GRID)
            pitch[own] = emphasised(pitch[own], CURVE_GRID / SAMPLE_RATE, semitones)
    return pitch


def ends_of_voice(
    pitch: np.ndarray, first: np.ndarray, ends: np.ndarray, hop: int
) -> tuple[np.ndarray, np.ndarray]:
    """For lines of the samples `first` to `ends` [L] of a plan's pitch: codes (of `hop` samples) up
    to the last voice, uint16 [L], and the rise there in semitones, float16 [L]."""
    voiced, rise = np.zeros(len(first), np.uint16), np.full(len(first), np.nan, np.float16)
    for line, (start, end) in enumerate(zip(first // CURVE_GRID, ends // CURVE_GRID, strict=True)):
        own = steady(pitch[start:end].astype(np.float64), CURVE_GRID / SAMPLE_RATE)
        spoken = np.flatnonzero(own > 0)
        if len(spoken):
            voiced[line] = -(-(int(spoken[-1]) + 1) * CURVE_GRID // hop)
        rise[line] = rise_at_end(own, CURVE_GRID / SAMPLE_RATE)
    return voiced, rise


def waiting(plans: Path, out: Path, part: int = 0, parts: int = 1) -> list[Path]:
    """Finished plans without tokens, of every `parts`-th seed from `part` on."""
    found = sorted(plans.glob("plan_*[0-9].npz"))
    mine = [path for path in found if int(path.stem.split("_")[1]) % parts == part]
    return [path for path in mine if not result(path, out).exists()]


def result(plan: Path, out: Path) -> Path:
    """Where a plan's tokens are."""
    return out / f"tokens{plan.name.removeprefix('plan')}"


def write(found: dict[str, np.ndarray], path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".tmp.npz")
    np.savez_compressed(partial, allow_pickle=False, **found)
    partial.rename(path)


def follow(args: argparse.Namespace) -> None:
    """Every plan that is there, and with `args.until` those that come."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    coder = load_coder(args.coder, coder_sizes(DESIGNS[args.design])).to(device)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    began, codes = time.monotonic(), 0
    while True:
        last = args.until is None or args.until.exists()  # before the look for plans
        for path in waiting(args.plans, args.out, args.part, args.parts):
            with np.load(path) as stored:
                found = tokens(dict(stored), coder, device, args.emphasis)
            write(found, result(path, args.out))
            codes += found["codes"].size
            hours = codes * coder.sizes.points_per_code * POINT / SAMPLE_RATE / 3600
            print(f"[{time.monotonic() - began:6.0f}] {path.name}: {hours:.2f} h, "
                  f"{len(np.unique(found['codes']))} different codes", flush=True)  # fmt: skip
        if last:
            return
        time.sleep(LOOK_EVERY_S)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("plans", "coder", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--design", choices=sorted(DESIGNS), default="source_free")
    parser.add_argument("--until", type=Path, help="run until this file is there")
    parser.add_argument("--seed", type=int, default=0, help="of the voice tokens' errors")
    parser.add_argument(
        "--emphasis", type=float, default=0.0, help="semitones by which rising questions rise more"
    )
    parser.add_argument("--part", type=int, default=0, help="which of several at once this is")
    parser.add_argument("--parts", type=int, default=1, help="how many work at once")
    follow(parser.parse_args(argv))


if __name__ == "__main__":
    main()
