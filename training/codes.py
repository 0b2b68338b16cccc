"""Tokenise the synthesised speech: samples to codes, kept for every later training run.

    python -m training.codes --speech runs/speech --codec runs/codec_stage1.safetensors \
        --out runs/codes.npz

The file holds `codes` (uint16, all clips one after another) and `clips` (int64 [N, 4]: first code,
codes, line, voice), `phones` (uint8, the phones of all clips as ASCII text, joined by newlines).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from decoder.embedded_modules import CodecConfig, EmbeddedCodec
from training.distributed import Clock
from training.shards import read_clips

WINDOW_CODES, BATCH = 400, 64


@torch.no_grad()
def encode(codec: EmbeddedCodec, samples: np.ndarray, device: torch.device) -> np.ndarray:
    """Codes of a long recording [T * hop], in windows with as much context as the encoder sees."""
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
    """Everything that goes into the file."""

    codes: np.ndarray  # uint16
    clips: np.ndarray  # int64 [N, 4]: first code, codes, line, voice
    phones: np.ndarray  # uint8

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, codes=self.codes, clips=self.clips, phones=self.phones)
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


def tokenise(codec: EmbeddedCodec, speech: Path, device: torch.device) -> Tokenised:
    """Encode every clip that is on disk now."""
    hop = codec.config.hop
    codes: list[np.ndarray] = []
    table: list[tuple[int, int, int, int]] = []
    phones: list[str] = []
    base = 0
    for pcm, clips in read_clips(speech):
        if not clips:
            continue
        samples = np.fromfile(pcm, dtype=np.int16, count=clips[-1].offset + clips[-1].length)
        codes.append(encode(codec, samples, device))
        for clip in clips:
            table.append((base + clip.offset // hop, clip.length // hop, clip.line, clip.voice))
            phones.append(clip.phones)
        base += len(codes[-1])
    text = np.frombuffer("\n".join(phones).encode(), np.uint8)
    return Tokenised(np.concatenate(codes), np.array(table, dtype=np.int64), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    clock = Clock()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    codec = EmbeddedCodec(CodecConfig())
    codec.load_state_dict({k: v.float() for k, v in load_file(args.codec).items()})
    tokenised = tokenise(codec.to(device).eval(), args.speech, device)
    tokenised.save(args.out)
    clock.log(tokenised.describe(codec.config))


if __name__ == "__main__":
    main()
