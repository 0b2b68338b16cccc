"""The convolutional decoder that SNAC and DAC share: summed codebooks, then ever finer stages.

    codes ──▶ sum of projected codebook vectors      [latent_dim x latents]
          ──▶ entry convolution
          ──▶ stage: snake, transposed convolution (x stride), noise, 3 dilated residual units
          ──▶ …                                      channels halve with every stage
          ──▶ snake, exit convolution, tanh          samples

SNAC's convolutions are depthwise, its codebooks run at several rates and its stages add noise;
DAC is plain, and the tokenizer of Higgs Audio v2 is a DAC without tanh. Sources: SNAC, arXiv
2410.14411; DAC, arXiv 2306.06546; snake, arXiv 2006.08195.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.window_inputs import CallShape, Span

DILATIONS = (1, 3, 9)
KERNEL = 7
Noise = Callable[[int, int, int], Tensor]
"""Function (stage, first, count) to noise [B, 1, count] at a stage's rate, from an index in the
window.
"""

StageNoise = Callable[[int, int], Tensor]
"""The same function for one stage."""


@dataclass(frozen=True, slots=True)
class SnakeConfig:
    """Sizes of one decoder. `vq_strides` are latents per code, one per codebook."""

    latent_dim: int
    decoder_dim: int
    rates: tuple[int, ...]
    vq_strides: tuple[int, ...]
    codebook_size: int
    codebook_dim: int
    depthwise: bool = False
    has_noise: bool = False
    is_padded: bool = True  # odd rates give all their samples; DAC drops the last ones
    is_bounded: bool = True  # ends with tanh

    @property
    def latents_per_frame(self) -> int:
        return math.lcm(*self.vq_strides)

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return math.prod(self.rates) * self.latents_per_frame

    @property
    def stage_rates(self) -> tuple[int, ...]:
        """Values per latent after each stage."""
        return tuple(accumulate(self.rates, mul))

    def spans(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the spans that samples first … last depend on.

        They are the span of latents, of each stage's input, and of the exit's input, computed
        backwards through the layers without regard to edges.
        """
        side = KERNEL // 2
        found = [(first - side, last + side)]
        for rate in reversed(self.rates):
            first, last = found[0]
            units, pad = sum(DILATIONS) * side, math.ceil(rate / 2)
            first, last = first - units, last + units
            found.insert(0, (-((2 * rate - 1 - pad - first) // rate), (last + pad) // rate))
        first, last = found[0]
        return [(first - side, last + side), *found]

    def reach(self) -> tuple[int, int]:
        """Number of frames before and after a frame that can change its samples."""
        first, last = self.spans(0, self.hop - 1)[0]
        return -(first // self.latents_per_frame), last // self.latents_per_frame


class Codebook(nn.Module):
    """One codebook and its projection to the latents."""

    def __init__(self, config: SnakeConfig) -> None:
        super().__init__()
        self.vectors = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.projection = nn.Conv1d(config.codebook_dim, config.latent_dim, 1)

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [B, T] to latents [B, latent_dim, T]."""
        return self.projection(self.vectors(codes).transpose(1, 2))


class Snake(nn.Module):
    """Activation x + sin²(a x) / a with one a per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor, own: Span | None = None) -> Tensor:
        """Apply to x [B, C, T]; the result is zero in padding."""
        if x.is_cuda:
            from decoder.kernels.snake import snake

            return snake(x, self.alpha, own)
        return self.plain(x, own)

    def plain(self, x: Tensor, own: Span | None = None) -> Tensor:
        """Compute the activation with torch's operations."""
        wave = (self.alpha * x).sin_().square_()
        wave.mul_((self.alpha + 1e-9).reciprocal()).add_(x)
        return wave if own is None else wave.mul_(own.mask(x.shape[-1]))


class ResidualUnit(nn.Module):
    """Snake, dilated convolution, snake, mixing of channels; added to the input."""

    def __init__(self, channels: int, dilation: int, groups: int) -> None:
        super().__init__()
        pad = dilation * (KERNEL // 2)
        self.snake_in = Snake(channels)
        self.dilated = nn.Conv1d(
            channels, channels, KERNEL, dilation=dilation, padding=pad, groups=groups
        )
        self.snake_out = Snake(channels)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, own: Span | None = None) -> Tensor:
        """Apply to x [B, C, T]; padding is undefined in input and output."""
        return self.mix(self.snake_out(self.dilated(self.snake_in(x, own)))).add_(x)


class Stage(nn.Module):
    """Raises the rate by `rate` and halves the channels."""

    def __init__(self, config: SnakeConfig, channels: int, rate: int) -> None:
        super().__init__()
        out, groups = channels // 2, channels // 2 if config.depthwise else 1
        self.rate, self.missing = rate, 0 if config.is_padded else rate % 2
        self.snake = Snake(channels)
        self.up = nn.ConvTranspose1d(
            channels,
            out,
            2 * rate,
            stride=rate,
            padding=math.ceil(rate / 2),
            output_padding=rate % 2 if config.is_padded else 0,
        )
        self.noise = nn.Conv1d(out, out, 1, bias=False) if config.has_noise else None
        self.units = nn.ModuleList(ResidualUnit(out, dilation, groups) for dilation in DILATIONS)

    def forward(
        self, x: Tensor, start: int, own: Span | None, noise: StageNoise | None
    ) -> tuple[Tensor, Span | None]:
        """Map x [B, C, T] that begins at the index `start` to [B, C / 2, T * rate] and its valid
        span.
        """
        x = self.up(self.snake(x, own and own.beginning(start)))
        start *= self.rate
        own = own and own.raised(self.rate, self.missing)
        if self.noise is not None and noise is not None:
            x = x + noise(start, x.shape[-1]) * self.noise(x)
        for unit in self.units:
            x = unit(x, own and own.beginning(start))
        return x, own


class SnakeDecoder(nn.Module):
    """Codebooks and decoder of one checkpoint."""

    def __init__(self, config: SnakeConfig) -> None:
        super().__init__()
        self.config = config
        latent, dim = config.latent_dim, config.decoder_dim
        self.codebooks = nn.ModuleList(Codebook(config) for _ in config.vq_strides)
        side, groups = KERNEL // 2, latent if config.depthwise else 1
        wide = latent if config.depthwise else dim
        self.entry = nn.ModuleList([nn.Conv1d(latent, wide, KERNEL, padding=side, groups=groups)])
        if config.depthwise:
            self.entry.append(nn.Conv1d(latent, dim, 1))
        self.stages = nn.ModuleList(
            Stage(config, dim // 2**index, rate) for index, rate in enumerate(config.rates)
        )
        last = dim // 2 ** len(config.rates)
        self.exit_snake = Snake(last)
        self.exit = nn.Conv1d(last, 1, KERNEL, padding=KERNEL // 2)

    def forward(
        self,
        codes: Sequence[Tensor],
        shape: CallShape,
        own: Span | None,
        noise: Noise | None = None,
    ) -> Tensor:
        """Return samples [B, num_samples] from frame `left` on.

        `codes` has one [B, F * n] per codebook, with n codes per frame. Each layer computes only
        what the samples depend on. Samples that an odd rate drops at the end are zero. `noise` None
        adds none.
        """
        config = self.config
        first = shape.left * config.hop
        spans = config.spans(first, first + shape.num_samples - 1)
        own = own and own.raised(config.latents_per_frame)
        x, start = self._enter(codes, own, spans[0])
        for index, rate in enumerate(config.rates):
            x, start = crop(x, start, spans[index + 1])
            x, own = self._stage(index, x, start, own, partial(noise, index) if noise else None)
            start *= rate
        x, start = crop(x, start, spans[-1])
        samples = self._end(x, own and own.beginning(start))
        samples = samples[:, first - start :][:, : shape.num_samples]
        return F.pad(samples, (0, shape.num_samples - samples.shape[1]))

    def _enter(
        self, codes: Sequence[Tensor], own: Span | None, span: tuple[int, int]
    ) -> tuple[Tensor, int]:
        """Map codes to the first stage's input [B, C, T] in a span of latents, and its start."""
        x = torch.stack(
            [
                book(part).repeat_interleave(stride, -1)
                for book, part, stride in zip(
                    self.codebooks, codes, self.config.vq_strides, strict=True
                )
            ]
        ).sum(0)
        if own is not None:
            x = x * own.mask(x.shape[-1])
        x, start = crop(x, 0, span)
        for layer in self.entry:
            x = layer(x)
        return x, start

    def _stage(
        self, index: int, x: Tensor, start: int, own: Span | None, noise: StageNoise | None
    ) -> tuple[Tensor, Span | None]:
        """Compute one stage; see `Stage.forward`."""
        raised: tuple[Tensor, Span | None] = self.stages[index](x, start, own, noise)
        return raised

    def _end(self, x: Tensor, own: Span | None) -> Tensor:
        """Map x [B, C, T] to samples [B, T], zero in padding."""
        samples: Tensor = self.exit(self.exit_snake(x, own)).squeeze(1)
        if self.config.is_bounded:
            samples = samples.tanh()
        return samples if own is None else samples * own.mask(samples.shape[1])[:, 0]


def crop(x: Tensor, start: int, span: tuple[int, int]) -> tuple[Tensor, int]:
    """Cut x [B, C, T], whose first column has the index `start`, to a span as far as it reaches."""
    first = max(span[0], start)
    return x[..., first - start : max(span[1] + 1 - start, 0)], first
