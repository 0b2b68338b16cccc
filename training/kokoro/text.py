"""The teacher's view of a text: ids to durations and features of every symbol."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from training.kokoro.blocks import STYLE_DIM, Pointwise, ResidualBlock

NUM_SYMBOLS = 178
QUESTION = 6  # the question mark's id
CLOSING = (11, 13, 15, 16)  # ids of what can follow a sentence's mark: " ) ” and a space
HIDDEN = 512
MAX_FRAMES = 50  # of a symbol, 25 ms each


class Prosody(NamedTuple):
    """What a text's symbols are to be: durations int64 [B, T] in frames of 25 ms, features for
    pitch and energy [B, T, 640], and for the sound [B, T, 512]."""

    durations: Tensor
    pitch: Tensor
    sound: Tensor


class Recurrence(nn.LSTM):
    """Bidirectional LSTM over padded rows."""

    def __init__(self, inputs: int) -> None:
        super().__init__(inputs, HIDDEN // 2, batch_first=True, bidirectional=True)

    def run(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [B, T, C], lengths [B] on the CPU, to [B, T, 512]; zeros in the padding."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class ChannelNorm(nn.Module):
    """Layer norm with the teacher's names."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C]."""
        return F.layer_norm(x, self.gamma.shape, self.gamma, self.beta)


class StyledLayerNorm(nn.Module):
    """Layer norm whose scale and shift a style says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(STYLE_DIM, 2 * HIDDEN)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """x [B, T, 512], style [B, 128]."""
        scale, shift = self.fc(style)[:, None].chunk(2, 2)
        return (1 + scale) * F.layer_norm(x, (HIDDEN,)) + shift


class SoundEncoder(nn.Module):
    """Ids to features of the sound, without a voice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_SYMBOLS, HIDDEN)
        self.cnn = nn.ModuleList(
            nn.ModuleList([nn.Conv1d(HIDDEN, HIDDEN, 5, padding=2), ChannelNorm(HIDDEN)])
            for _ in range(3)
        )
        self.lstm = Recurrence(HIDDEN)

    def forward(self, ids: Tensor, lengths: Tensor, own: Tensor) -> Tensor:
        """ids [B, T], own float [B, T, 1], to [B, T, 512]."""
        x = self.embedding(ids) * own
        for convolution, norm in self.cnn:
            x = convolution(x.transpose(1, 2)).transpose(1, 2)
            x = F.leaky_relu(norm(x), 0.2) * own
        return self.lstm.run(x, lengths)


class DurationEncoder(nn.Module):
    """LSTMs and styled norms in turn; every LSTM sees the style again."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(Recurrence(HIDDEN + STYLE_DIM), StyledLayerNorm()) for _ in range(3)]
        self.lstms = nn.ModuleList(part for pair in layers for part in pair)

    def forward(self, x: Tensor, style: Tensor, lengths: Tensor, own: Tensor) -> Tensor:
        """x [B, T, 512] to [B, T, 640]."""
        spread = style[:, None].expand(-1, x.shape[1], -1)
        x = torch.cat((x, spread), 2) * own
        for number in range(0, len(self.lstms), 2):
            y = self.lstms[number + 1](self.lstms[number].run(x, lengths), style)
            x = torch.cat((y, spread), 2) * own
        return x


class Predictor(nn.Module):
    """Durations of symbols; pitch and energy of frames."""

    def __init__(self, pointwise: Pointwise) -> None:
        super().__init__()
        self.text_encoder = DurationEncoder()
        self.lstm = Recurrence(HIDDEN + STYLE_DIM)
        self.duration_proj = nn.ModuleDict({"linear_layer": nn.Linear(HIDDEN, MAX_FRAMES)})
        self.shared = Recurrence(HIDDEN + STYLE_DIM)
        self.F0, self.N = _curve(pointwise), _curve(pointwise)
        self.F0_proj = nn.Conv2d(HIDDEN // 2, 1, 1)
        self.N_proj = nn.Conv2d(HIDDEN // 2, 1, 1)

    def durations(self, features: Tensor, lengths: Tensor, own: Tensor) -> Tensor:
        """features [B, T, 640] to frames of 25 ms int64 [B, T], at least one a symbol."""
        hidden = self.lstm.run(features, lengths)
        frames = torch.sigmoid(self.duration_proj["linear_layer"](hidden)).sum(2)
        return frames.round().clamp(min=1).long() * own[..., 0].long()


def _curve(pointwise: Pointwise) -> nn.ModuleList:
    return nn.ModuleList(
        [
            ResidualBlock(HIDDEN, HIDDEN, pointwise),
            ResidualBlock(HIDDEN, HIDDEN // 2, pointwise, doubles=True),
            ResidualBlock(HIDDEN // 2, HIDDEN // 2, pointwise),
        ]
    )
