"""Train the aligner, which predicts the spoken letter from the codes alone.

    python -m training.aligner --codes runs/codes --config runs/codec/source_free.json \
        --out tts/embedded/aligner --until 300

Files runs/codes*.npz hold `codes` (uint16, all clips one after another) and `letters` (uint8, a
label for every 10 ms, four to a code, see `training.labels`). The targets are the teacher's own
times. The folder that is written is a checkpoint's `aligner`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from decoder.codecs.source_filter.modules import FiniteScalarQuantizer
from training.aligner_network import AlignerNetwork
from training.distributed import Clock, Deadline, Group
from training.export import write_json
from training.speech_codec.config import load_config
from tts.speech.aligner import AlignerConfig

CROP_CODES = 128
WARM_UP = 200


def part_files(prefix: Path) -> list[Path]:
    """Return parts prefix*.npz in the order of their numbers."""
    found = prefix.parent.glob(f"{prefix.name}*.npz")
    return sorted(found, key=lambda path: int(re.sub(r"\D", "", path.stem) or 0))


class LevelTable(nn.Module):
    """A row per code and a row per FSQ level, so that similar codes share most of their values."""

    level_index: Tensor

    def __init__(self, levels: tuple[int, ...], width: int) -> None:
        super().__init__()
        quantizer = FiniteScalarQuantizer(levels)
        codes = torch.arange(math.prod(levels))
        index = (codes[:, None] // quantizer.strides) % quantizer.levels
        starts = torch.tensor([sum(levels[:i]) for i in range(len(levels))])
        self.register_buffer("level_index", index + starts, persistent=False)
        self.rows = nn.Embedding(sum(levels), width)
        self.own = nn.Embedding(math.prod(levels), width)
        nn.init.normal_(self.own.weight, std=0.02)

    def forward(self) -> Tensor:
        """Return the table [codebook, width]."""
        return self.own.weight + self.rows(self.level_index).sum(1)


class Crops:
    """Codes and letters of some hours of speech on the device."""

    def __init__(self, prefix: Path, max_hours: float, device: torch.device) -> None:
        most = int(max_hours * 3600 * 25)
        codes, letters = [], []
        for path in part_files(prefix):
            with np.load(path) as data:
                codes.append(data["codes"][:most].astype(np.int32))
                letters.append(data["letters"][: most * 4])
            most -= len(codes[-1])
        self.codes = torch.from_numpy(np.concatenate(codes)).to(device)
        self.letters = torch.from_numpy(np.concatenate(letters)).to(device)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return codes [size, T] and labels [size, 4 T]."""
        device = self.codes.device
        start = torch.randint(0, len(self.codes) - CROP_CODES, (size, 1), device=device)
        codes = self.codes[start + torch.arange(CROP_CODES, device=device)]
        frames = self.letters[4 * start + torch.arange(4 * CROP_CODES, device=device)]
        return codes.long(), frames.long()


def train(args: argparse.Namespace, levels: tuple[int, ...]) -> None:
    clock = Clock()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    crops = Crops(args.codes, args.max_hours, device)
    network = AlignerNetwork(AlignerConfig(math.prod(levels))).to(device)
    table = LevelTable(levels, network.config.table_width).to(device)
    parameters = [*network.layers.parameters(), *network.output.parameters(), *table.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.01)
    deadline, step = Deadline(clock, Group(), args.until, args.steps), 0
    while (share := deadline.share(step)) < 1:
        for setting in optimiser.param_groups:
            setting["lr"] = args.lr * min(1.0, (step + 1) / WARM_UP) * max(0.02, 1 - share)
        codes, letters = crops.batch(args.batch)
        logits = network.letters(F.embedding(codes, table()))
        loss = F.cross_entropy(logits.flatten(0, 1), letters.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        step += 1
        if step % 500 == 0:
            clock.log(f"aligner step {step} loss {loss.item():.3f}")
    with torch.no_grad():
        network.table.weight.copy_(table())
    state = {k: v.detach().half().cpu().contiguous() for k, v in network.state_dict().items()}
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "config.json", asdict(network.config))
    save_file(state, args.out / "model.safetensors")
    clock.log(f"aligner done: {step} steps")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codes", type=Path, required=True, help="prefix of codes*.npz")
    parser.add_argument("--config", type=Path, required=True, help="the codec's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since RECIPE_START")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-hours", type=float, default=150.0)
    parser.add_argument("--steps", type=int, default=0, help="at most (0: no limit)")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args(argv)
    train(args, load_config(args.config).levels)


if __name__ == "__main__":
    main()
