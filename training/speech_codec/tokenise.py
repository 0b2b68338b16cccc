"""Takes to codes and voice tokens, as takes appear.

    python -m training.speech_codec.tokenise --takes runs/speech --weights one.safetensors \
        --config one.json --out runs/tokens [--until runs/speech/finished]

With --until it runs until that file is there and every take is done. Both timbres of a session
are tokenised: the partner's speech is another voice's. OUT/tokens_SEED_NUMBER.npz, of a take's
name, holds:
    codes      uint16 [2, C]  all lines one after the other; own timbre, then the partner's
    size       uint16 [L]     codes of each line
    session    uint16 [L]
    row        uint32 [L]     number in the accent's table of phonemes and texts
    symbols    uint8 [L]      of the line, with the one before and the one after it
    durations  uint8 [D]      of all symbols, in the teacher's frames of 25 ms
    voice      int16 [N]      number of a named voice among the English ones, -1: a mixture, whose
                              name is this file's and the session's number
    accent     uint8 [N]
    partner    uint16 [N]     the session whose timbre the second codes have
    style      uint32 [N]     CRC-32 of the style vector: the same voice has the same
    rows       uint16 [R, K]  voice tokens of references of 3 to 8 s
    heard      uint16 [R, 4]  their session, timbre (0 own), first and last line of the file
    named      uint16 [M, K]  voice tokens of a long reference of a named voice's own speech
    named_by   uint16 [M]     its session
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decoder.codecs.source_filter.modules import SpeechCodec
from training.speech_codec.checkpoint import load

MARGIN = 20  # codes of silence after a line: what the encoder sees of a row's end
CODES_PER_CALL = 16_384  # padding included
REFERENCES_S = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
LONG_S = 20.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Reference:
    """A piece of a session in one of its timbres."""

    session: int
    side: int  # 0: own timbre, 1: the partner's
    start: int  # first sample of the take
    size: int  # samples


class Tokeniser:
    """A codec's encoders on one device."""

    def __init__(self, codec: SpeechCodec, device: torch.device) -> None:
        self.codec, self.device = codec.to(device).eval(), device
        self.hop = codec.config.hop

    @torch.inference_mode()
    def tokens(
        self, take: dict[str, np.ndarray], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Tokens of a take, as the module says, with `rng`'s references."""
        samples = torch.from_numpy(np.stack((take["own"], take["other"]))).to(self.device)
        starts = take["lines"][:, 1]
        ends = np.append(starts[1:], len(take["own"]))
        size = -(-(ends - starts) // self.hop)
        references = list(draw_references(take, self.codec.config.sample_rate, self.hop, rng))
        long = list(long_references(take, self.codec.config.sample_rate, self.hop))
        return {
            "codes": self._codes(samples, starts, ends),
            "size": size.astype(np.uint16),
            "session": take["lines"][:, 0].astype(np.uint16),
            "row": take["row"].astype(np.uint32),
            "symbols": take["symbols"].astype(np.uint8),
            "durations": take["durations"],
            "voice": take["voice"],
            "accent": take["accent"],
            "partner": take["partner"].astype(np.uint16),
            "style": np.array([zlib.crc32(style.tobytes()) for style in take["style"]], np.uint32),
            "rows": self._rows(samples, references),
            "heard": heard(references, starts, ends),
            "named": self._rows(samples, long),
            "named_by": np.array([reference.session for reference in long], np.uint16),
        }

    def _codes(self, samples: Tensor, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """uint16 [2, C] of lines; each is encoded by itself, on a grid from its first sample."""
        size = -(-(ends - starts) // self.hop)
        at = np.cumsum(size) - size
        codes = np.empty((2, int(size.sum())), np.uint16)
        for lines in alike(size, CODES_PER_CALL // 2):
            longest = int(size[lines].max()) + MARGIN
            padded = torch.zeros(2, len(lines), longest * self.hop, device=self.device)
            for place, line in enumerate(lines):
                own = samples[:, starts[line] : ends[line]]
                padded[:, place, : own.shape[1]] = own.float() / 32768
            found = self.codec.encode(padded.flatten(0, 1))[1]
            found = found.view(2, len(lines), longest).to(torch.int32).cpu()
            for place, line in enumerate(lines):
                codes[:, at[line] : at[line] + size[line]] = found[:, place, : size[line]]
        return codes

    def _rows(self, samples: Tensor, references: Sequence[Reference]) -> np.ndarray:
        """uint16 [R, K]: voice tokens, those of equally long references at once."""
        rows = np.empty((len(references), self.codec.config.voice_tokens), np.uint16)
        by_size: dict[int, list[int]] = defaultdict(list)
        for number, reference in enumerate(references):
            by_size[reference.size].append(number)
        for size, group in by_size.items():
            step = max(1, CODES_PER_CALL * self.hop // size)
            for numbers in (group[i : i + step] for i in range(0, len(group), step)):
                cut = [
                    samples[r.side, r.start : r.start + size]
                    for r in (references[number] for number in numbers)
                ]
                _, tokens = self.codec.voice(torch.stack(cut).float() / 32768)
                rows[numbers] = tokens.to(torch.int32).cpu().numpy()
        return rows


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


def draw_references(
    take: dict[str, np.ndarray], rate: int, hop: int, rng: np.random.Generator, count: int = 3
) -> Iterator[Reference]:
    """`count` of every session in both timbres, at random places; of all of a short session."""
    for session, (start, end) in enumerate(zip(take["start"], take["end"], strict=True)):
        for side in (0, 1):
            for seconds in rng.choice(REFERENCES_S, count):
                size = min(int(seconds * rate), int(end - start)) // hop * hop
                place = start + int(rng.random() * (end - start - size))
                yield Reference(session, side, int(place), size)


def long_references(take: dict[str, np.ndarray], rate: int, hop: int) -> Iterator[Reference]:
    """The beginning of each named voice's session, in its own timbre."""
    for session, (start, end) in enumerate(zip(take["start"], take["end"], strict=True)):
        if take["voice"][session] >= 0:
            size = min(int(LONG_S * rate), int(end - start)) // hop * hop
            yield Reference(session, 0, int(start), size)


def heard(references: Sequence[Reference], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint16 [R, 4]: session, timbre, first and last line of each reference."""
    first = np.array([reference.start for reference in references], np.int64)
    last = first + [reference.size - 1 for reference in references]
    lines = [np.searchsorted(ends, place, side="right") for place in (first, last)]
    whose = np.array([(r.session, r.side) for r in references], np.int64).reshape(-1, 2)
    return np.column_stack((whose, *lines)).astype(np.uint16)


def waiting(takes: Path, out: Path, share: tuple[int, int]) -> list[Path]:
    """Finished takes without tokens, of this process's share (number, of how many)."""
    number, of = share
    return [
        path
        for path in sorted(takes.glob("take_*[0-9].npz"))
        if zlib.crc32(path.name.encode()) % of == number and not result(path, out).exists()
    ]


def result(take: Path, out: Path) -> Path:
    """Where a take's tokens are."""
    return out / f"tokens{take.name.removeprefix('take')}"


def write(tokens: dict[str, np.ndarray], path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".tmp.npz")
    np.savez_compressed(partial, **tokens)
    partial.rename(path)


def follow(args: argparse.Namespace) -> None:
    """Every take that is there, and with `args.until` those that come."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokeniser = Tokeniser(load(args.weights, args.config), device)
    args.out.mkdir(parents=True, exist_ok=True)
    began, codes = time.monotonic(), 0
    while True:
        last = args.until is None or args.until.exists()  # before the look for takes
        for path in waiting(args.takes, args.out, args.share):
            with np.load(path) as stored:
                take = dict(stored)
            rng = np.random.default_rng(zlib.crc32(path.name.encode()))
            found = tokeniser.tokens(take, rng)
            write(found, result(path, args.out))
            codes += found["codes"].size
            hours = codes * tokeniser.hop / tokeniser.codec.config.sample_rate / 3600
            print(f"[{time.monotonic() - began:6.0f}] {path.name}: {hours:.2f} h, "
                  f"{len(np.unique(found['codes']))} different codes", flush=True)  # fmt: skip
        if last:
            return
        time.sleep(LOOK_EVERY_S)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("takes", "weights", "config", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--until", type=Path, help="run until this file is there")
    parser.add_argument(
        "--share", type=int, nargs=2, default=(0, 1), help="number of this process, and of how many"
    )
    follow(parser.parse_args(argv))


if __name__ == "__main__":
    main()
