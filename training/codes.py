"""Tokenise the synthesised speech: samples to codes, stored for every later training run.

    python -m training.codes --speech runs/speech --codec runs/codec_stage1.safetensors \
        --out runs/codes1.npz

Files runs/codes*.npz are parts of one set: a run only tokenises speech that no earlier part has.
A part holds `codes` (uint16, all clips one after another) and `clips` (int64 [N, 4]: first code,
codes, line, voice), `sounds` (uint8, the sounds of all clips' lines, joined by newlines),
`letters` (uint8, a label for every 10 ms, see `training.labels`), and `shards`, `ends`: how far
each shard of samples has been taken.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from training.distributed import Clock
from training.labels import FRAME
from training.recipe import load_recipe
from training.shards import read_clips

WINDOW_CODES, BATCH = 400, 64


@torch.no_grad()
def encode(codec: EmbeddedCodec, samples: np.ndarray, device: torch.device) -> np.ndarray:
    """Return codes of a long recording [T * hop], encoded in windows with the encoder's full
    context.
    """
    config = codec.config
    margin = config.encoder_layers * config.encoder_window
    hop, total = config.hop, len(samples) // config.hop
    windows = -(-total // WINDOW_CODES)
    padded = np.zeros((windows * WINDOW_CODES + 2 * margin) * hop, np.int16)
    padded[margin * hop : margin * hop + total * hop] = samples[: total * hop]
    data = torch.from_numpy(padded).to(device)
    views = data.unfold(0, (WINDOW_CODES + 2 * margin) * hop, WINDOW_CODES * hop)
    parts = [
        codec.encode(views[i : i + BATCH].float() / 32768)[1][:, margin : margin + WINDOW_CODES]
        for i in range(0, len(views), BATCH)
    ]
    return torch.cat(parts).reshape(-1)[:total].to(torch.int32).cpu().numpy().astype(np.uint16)


@dataclass(frozen=True, slots=True)
class Tokenised:
    """Content of one part."""

    codes: np.ndarray  # uint16
    clips: np.ndarray  # int64 [N, 4]: first code, codes, line, voice
    sounds: np.ndarray  # uint8
    letters: np.ndarray  # uint8
    ends: dict[str, int]  # samples taken of each shard, by its name

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp.npz")
        np.savez(
            temporary, codes=self.codes, clips=self.clips, sounds=self.sounds,
            letters=self.letters, shards=np.array(list(self.ends)),
            ends=np.array(list(self.ends.values()), dtype=np.int64),
        )  # fmt: skip
        temporary.rename(path)

    def describe(self, config: CodecConfig) -> str:
        sample = self.codes[:3_000_000].astype(np.int64)
        count = np.bincount(sample, minlength=config.codebook_size)
        share = count[count > 0] / count.sum()
        spoken = len(self.codes) * config.hop / config.sample_rate / 3600
        return (
            f"tokenised {len(self.clips)} clips, {len(self.codes)} codes, {spoken:.1f} h; "
            f"{len(share)} of {config.codebook_size} codes used, "
            f"{float(-(share * np.log2(share)).sum()):.2f} bits"
        )


def part_files(prefix: Path) -> list[Path]:
    """Return finished parts prefix*.npz, oldest first."""
    found = (path for path in prefix.parent.glob(f"{prefix.name}*.npz") if ".tmp" not in path.name)
    return sorted(found, key=lambda path: int(re.sub(r"\D", "", path.stem) or 0))


def taken(parts: Iterable[Path]) -> dict[str, int]:
    """Return the number of samples of each shard in earlier parts."""
    ends: dict[str, int] = {}
    for path in parts:
        with np.load(path) as data:
            for name, end in zip(data["shards"].tolist(), data["ends"].tolist(), strict=True):
                ends[name] = max(end, ends.get(name, 0))
    return ends


def tokenise(
    codec: EmbeddedCodec, speech: Path, device: torch.device, start: dict[str, int]
) -> Tokenised:
    """Encode every clip that is on disk now, from `start` in each shard."""
    hop = codec.config.hop
    codes: list[np.ndarray] = [np.empty(0, np.uint16)]
    letters: list[np.ndarray] = [np.empty(0, np.uint8)]
    table: list[tuple[int, int, int, int]] = []
    sounds: list[str] = []
    ends: dict[str, int] = {}
    base = 0
    for pcm, all_clips in read_clips(speech):
        first = start.get(pcm.stem, 0)
        clips = [clip for clip in all_clips if clip.offset >= first]
        if not clips:
            continue
        end = clips[-1].offset + clips[-1].length
        samples = np.fromfile(pcm, np.int16, count=end - first, offset=2 * first)
        spoken = pcm.with_suffix(".letter")
        codes.append(encode(codec, samples, device))
        letters.append(
            np.fromfile(spoken, np.uint8, count=(end - first) // FRAME, offset=first // FRAME)
        )
        for clip in clips:
            at = base + (clip.offset - first) // hop
            table.append((at, clip.length // hop, clip.line, clip.voice))
            sounds.append(clip.sounds)
        base += len(codes[-1])
        ends[pcm.stem] = end
    text = np.frombuffer("\n".join(sounds).encode(), np.uint8)
    clips_ = np.array(table, dtype=np.int64).reshape(-1, 4)
    return Tokenised(np.concatenate(codes), clips_, text, np.concatenate(letters), ends)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="values other than those of recipe.toml")
    args = parser.parse_args(argv)
    clock = Clock()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    codec = EmbeddedCodec(load_recipe(args.config).codec)
    codec.load_state_dict({k: v.float() for k, v in load_file(args.codec).items()})
    prefix = args.out.parent / re.sub(r"\d+$", "", args.out.stem)
    start = taken(path for path in part_files(prefix) if path != args.out)
    tokenised = tokenise(codec.to(device).eval(), args.speech, device, start)
    tokenised.save(args.out)
    clock.log(tokenised.describe(codec.config))


if __name__ == "__main__":
    main()
