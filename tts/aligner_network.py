"""`AlignerNetwork`: speech codes to the letters being spoken, for every 10 ms.

    codes [B, T] --table--> [B, T, width] --convolutions over codes--> [B, T * frames, letters]

Label 0 is silence, 1 … 26 are a to z, 27 is the apostrophe. The letters of a word are spread
evenly over its time, so only words have exact times. Shared by serving and training.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
SILENCE = 0


@dataclass(frozen=True, slots=True)
class AlignerConfig:
    """Sizes. A frame is 1 / `frames_per_code` of a code."""

    codebook_size: int
    frames_per_code: int = 4
    table_width: int = 64
    width: int = 192
    layers: int = 3
    kernel: int = 5

    @property
    def reach(self) -> int:
        """How many codes to either side a frame depends on."""
        return self.layers * (self.kernel // 2)


class AlignerNetwork(nn.Module):
    """See the module."""

    def __init__(self, config: AlignerConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.codebook_size, config.table_width)
        widths = (config.table_width, *(config.width,) * config.layers)
        self.layers = nn.ModuleList(
            nn.Conv1d(a, b, config.kernel, padding=config.kernel // 2) for a, b in pairwise(widths)
        )
        self.output = nn.Linear(config.width, config.frames_per_code * (len(LETTERS) + 1))

    def forward(self, codes: Tensor) -> Tensor:
        """codes [B, T] to logits [B, T * frames_per_code, 28]."""
        return self.letters(self.table(codes))

    def letters(self, x: Tensor) -> Tensor:
        """Table rows [B, T, table_width] to logits."""
        x = x.transpose(1, 2)
        for number, layer in enumerate(self.layers):
            y = F.gelu(layer(x))
            x = y if number == 0 else x + y
        return self.output(x.transpose(1, 2)).reshape(x.shape[0], -1, len(LETTERS) + 1)
