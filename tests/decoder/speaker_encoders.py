"""Random speaker encoders of Qwen3-TTS Base, and their vectors by other code.

The reference has modules with the published names, and a spectrogram by numpy's Fourier transform
with the mel filters of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

CONFIG: dict[str, Any] = {
    "mel_dim": 128,
    "enc_dim": 48,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 8,
    "enc_res2net_scale": 4,
    "enc_se_channels": 8,
    "sample_rate": 24_000,
}


def speaker_tensors(config: Mapping[str, Any] = CONFIG, *, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights under their names in a language model's files."""
    generator = torch.Generator().manual_seed(seed)
    names = Network(CONFIG | dict(config)).state_dict()
    return {
        f"speaker_encoder.{name}": torch.randn(value.shape, generator=generator) * 0.2
        for name, value in names.items()
    }


def reference_vector(
    tensors: Mapping[str, Tensor], samples: np.ndarray, config: Mapping[str, Any] = CONFIG
) -> np.ndarray:
    """Return the vector of a clip at 24 kHz."""
    network = Network(CONFIG | dict(config))
    own = {name.removeprefix("speaker_encoder."): value for name, value in tensors.items()}
    network.load_state_dict(own)
    mels = torch.from_numpy(spectrogram(samples)).float()
    with torch.no_grad():
        vector: np.ndarray = network(mels[None]).numpy()
    return vector


def spectrogram(samples: np.ndarray) -> np.ndarray:
    """Return log-mels [128, T]: frames of 1,024 samples, one every 256."""
    padded = np.pad(samples.astype(np.float64), 384, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, 1024)[::256]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    magnitude = np.sqrt(np.abs(np.fft.rfft(frames * window)) ** 2 + 1e-9)
    filters = mel_filter_bank(513, 128, 0.0, 12_000.0, 24_000, "slaney", "slaney")
    return np.log(np.maximum(magnitude @ filters, 1e-5)).T


def layer(inner: int, outer: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(
        inner, outer, kernel, dilation=dilation, padding="same", padding_mode="reflect"
    )


class Rectified(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.conv = layer(*sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).clamp(min=0)


class Residual(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        size, scale = config["enc_channels"][index], config["enc_res2net_scale"]
        part, sizes = size // scale, (config["enc_kernel_sizes"], config["enc_dilations"])
        self.tdnn1, self.tdnn2 = Rectified(size, size), Rectified(size, size)
        self.res2net_block: Any = nn.Module()
        self.res2net_block.blocks = nn.ModuleList(
            Rectified(part, part, *(given[index] for given in sizes)) for _ in range(scale - 1)
        )
        self.se_block: Any = nn.Module()
        self.se_block.conv1 = layer(size, config["enc_se_channels"])
        self.se_block.conv2 = layer(config["enc_se_channels"], size)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.tdnn1(x)
        size = inner.shape[1] // (1 + len(self.res2net_block.blocks))
        done = inner[:, :size].clone()
        for index, block in enumerate(self.res2net_block.blocks):
            part = inner[:, (index + 1) * size : (index + 2) * size]
            done = torch.cat([done, block(part + done[:, -size:] if index else part)], 1)
        outer = self.tdnn2(done)
        gate = self.se_block.conv1(outer.mean(2)[..., None]).clamp(min=0)
        return outer * torch.sigmoid(self.se_block.conv2(gate)) + x


class Network(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        channels, kernels = config["enc_channels"], config["enc_kernel_sizes"]
        dilations, hidden = config["enc_dilations"], config["enc_attention_channels"]
        last = channels[-1]
        first = Rectified(config["mel_dim"], channels[0], kernels[0], dilations[0])
        others = [Residual(config, index) for index in range(1, len(channels) - 1)]
        self.blocks = nn.ModuleList([first, *others])
        self.mfa = Rectified(last, last, kernels[-1], dilations[-1])
        self.asp: Any = nn.Module()
        self.asp.tdnn, self.asp.conv = Rectified(3 * last, hidden), layer(hidden, last)
        self.fc = layer(2 * last, config["enc_dim"])

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        x = self.mfa(torch.cat(found[1:], 1))
        deviation = x.var(2, correction=0).clamp(min=1e-12).sqrt()
        around = torch.cat([x.mean(2), deviation], 1)[..., None].expand(-1, -1, x.shape[2])
        scores = self.asp.conv(torch.tanh(self.asp.tdnn(torch.cat([x, around], 1))))
        weights = scores.exp() / scores.exp().sum(2, keepdim=True)
        mean = (weights * x).sum(2)
        square = (weights * (x - mean[..., None]) ** 2).sum(2).clamp(min=1e-12)
        pooled = torch.cat([mean, square.sqrt()], 1)[..., None]
        vector: Tensor = self.fc(pooled)[0, :, 0]
        return vector
