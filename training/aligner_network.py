"""`AlignerNetwork`: the aligner during training; `tts.speech.aligner` computes it without torch."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from tts.speech.aligner import NUM_LABELS, AlignerConfig


class AlignerNetwork(nn.Module):
    """Maps codes to the spoken letters, see `tts.speech.aligner`."""

    def __init__(self, config: AlignerConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.codebook_size, config.table_width)
        self.layers = nn.ModuleList(
            nn.Conv1d(a, b, config.kernel, padding=config.kernel // 2)
            for a, b in pairwise(config.widths)
        )
        self.output = nn.Linear(config.width, config.frames_per_code * NUM_LABELS)

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [B, T] to logits [B, T * frames_per_code, NUM_LABELS]."""
        return self.letters(self.table(codes))

    def letters(self, x: Tensor) -> Tensor:
        """Map table rows [B, T, table_width] to logits."""
        x = x.transpose(1, 2)
        for number, layer in enumerate(self.layers):
            y = F.gelu(layer(x), approximate="tanh")
            x = y if number == 0 else x + y
        return self.output(x.transpose(1, 2)).reshape(x.shape[0], -1, NUM_LABELS)
