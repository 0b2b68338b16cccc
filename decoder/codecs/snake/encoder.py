"""The encoder that SNAC and DAC share: the decoder's stages backwards, then residual codebooks.

    samples ──▶ convolution (7) ──▶ per rate: 3 dilated residual units, snake, strided convolution
            ──▶ exit convolution ──▶ latents
    residual := latents; per codebook: averaged over its stride, projected, the nearest vector by
    angle is the code; its value is subtracted from the residual

Loaded at the first recording only. Sources as in `decoder.codecs.snake.decoder`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.base import CodecSpec, EncoderUnavailableError
from decoder.clips import whole_frames
from decoder.codecs.common import load_network
from decoder.codecs.snake.decoder import DILATIONS, KERNEL, ResidualUnit, Snake, SnakeConfig
from decoder.cuda.devices import own_stream
from decoder.registry import CodecSource


@dataclass(frozen=True, slots=True)
class SnakeEncoderConfig:
    """Sizes of one encoder; latents and codebooks are the decoder's."""

    decoder: SnakeConfig
    encoder_dim: int
    rates: tuple[int, ...]
    exit_kernel: int
    has_exit_snake: bool


class Codebook(nn.Module):
    """A codebook with projections into and out of its small space."""

    def __init__(self, config: SnakeConfig) -> None:
        super().__init__()
        self.vectors = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.into = nn.Conv1d(config.latent_dim, config.codebook_dim, 1)
        self.projection = nn.Conv1d(config.codebook_dim, config.latent_dim, 1)

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Map latents [B, D, T] to codes [B, T] and their values [B, D, T]."""
        points = self.into(latents).transpose(1, 2)
        codes = (points @ F.normalize(self.vectors.weight).T).argmax(-1)
        return codes, self.projection(self.vectors(codes).transpose(1, 2))


class Stage(nn.Module):
    """Lowers the rate by `rate` and doubles the channels."""

    def __init__(self, channels: int, rate: int, *, depthwise: bool) -> None:
        super().__init__()
        groups = channels if depthwise else 1
        self.units = nn.ModuleList(
            ResidualUnit(channels, dilation, groups) for dilation in DILATIONS
        )
        self.snake = Snake(channels)
        self.down = nn.Conv1d(
            channels, 2 * channels, 2 * rate, stride=rate, padding=math.ceil(rate / 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return self.down(self.snake(x))


class SnakeEncoder(nn.Module):
    """Encoder and codebooks of one checkpoint."""

    def __init__(self, config: SnakeEncoderConfig) -> None:
        super().__init__()
        self.config = config
        own, dim = config.decoder, config.encoder_dim
        self.entry = nn.Conv1d(1, dim, KERNEL, padding=KERNEL // 2)
        self.stages = nn.ModuleList()
        for rate in config.rates:
            self.stages.append(Stage(dim, rate, depthwise=own.depthwise))
            dim *= 2
        self.exit_snake = Snake(dim) if config.has_exit_snake else None
        self.exit = nn.Conv1d(
            dim,
            own.latent_dim,
            config.exit_kernel,
            padding=config.exit_kernel // 2,
            groups=dim if own.depthwise else 1,
        )
        self.codebooks = nn.ModuleList(Codebook(own) for _ in own.vq_strides)

    def forward(self, samples: Tensor) -> list[Tensor]:
        """Map samples [B, F * hop] to one [B, F * n] of codes per codebook, with n codes per
        frame.
        """
        x = self.entry(samples[:, None])
        for stage in self.stages:
            x = stage(x)
        residual = self.exit(x if self.exit_snake is None else self.exit_snake(x))
        found = []
        for book, stride in zip(self.codebooks, self.config.decoder.vq_strides, strict=True):
            codes, meant = book(F.avg_pool1d(residual, stride))
            residual = residual - meant.repeat_interleave(stride, -1)
            found.append(codes)
        return found


class SnakeClipEncoder:
    """The encoder of one codec folder, loaded at its first use."""

    def __init__(
        self,
        source: CodecSource,
        spec: CodecSpec,
        config: SnakeEncoderConfig,
        names: Mapping[str, str],
    ) -> None:
        self._source = source
        self._spec = spec
        self._config = config
        self._names = names
        self._on_stream = own_stream(source.device)
        self._network: SnakeEncoder | None = None

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """Encode mono float32 [S] at the codec's rate to the flat codes of ceil(S / hop) frames.

        Raises AudioFormatError as `whole_frames` does; EncoderUnavailableError when there is no
        encoder.
        """
        clip = whole_frames(samples, self._spec)
        if not self._spec.can_encode:
            raise EncoderUnavailableError(
                f"the folder of codec '{self._spec.name}' holds no encoder"
            )
        with self._on_stream():
            if self._network is None:
                self._network = self._load()
            with torch.inference_mode():
                rows = self._network(torch.from_numpy(clip)[None].to(self._source.device))
            return self._flat([row[0] for row in rows])

    def _load(self) -> SnakeEncoder:
        config = self._config
        return load_network(lambda: SnakeEncoder(config), self._names, self._source)

    def _flat(self, rows: list[Tensor]) -> tuple[int, ...]:
        """Interleave one [F * n] per codebook to a flat row in the order of the layout."""
        layout = torch.tensor(self._spec.layout)
        num_frames = len(rows[0]) // self._spec.layout.count(0)
        frames = torch.empty(num_frames, len(layout), dtype=torch.int64)
        for book, row in enumerate(rows):
            frames[:, layout == book] = row.cpu().view(num_frames, -1)
        return tuple(frames.flatten().tolist())
