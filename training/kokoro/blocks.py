"""The teacher's building blocks, for padded batches.

Frames are laid out [B, C, 1, T], so that a GPU may keep the channels last. Statistics of instance
norms are over a sentence's own frames (`Valid`): a sentence sounds the same alone and in a batch.
Sources: StyleTTS 2, arXiv 2306.07691; iSTFTNet, arXiv 2203.02395.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STYLE_DIM = 128  # of each half of a style vector
EPSILON = 1e-5


class Valid(NamedTuple):
    """Which frames are a sentence's own: mask float [B, 1, 1, T], and how many [B, 1, 1, 1]."""

    mask: Tensor
    count: Tensor


def valid_frames(counts: Tensor, length: int) -> Valid:
    """The first `counts` [B] of `length` frames."""
    count = counts[:, None, None, None]
    mask = torch.arange(length, device=counts.device) < count
    return Valid(mask.float(), count.float())


def styled_norm(x: Tensor, scale: Tensor, shift: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Instance norm over the valid frames, then (1 + scale) and shift [B, C, 1, 1]."""
    mean = (x * mask).sum(3, keepdim=True) / count
    centred = (x - mean) * mask
    variance = centred.square().sum(3, keepdim=True) / count
    return (x - mean) * (torch.rsqrt(variance + EPSILON) * (1 + scale)) + shift


def leaky_norm(x: Tensor, scale: Tensor, shift: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """`styled_norm`, then a leaky ramp; zero in the padding."""
    return F.leaky_relu(styled_norm(x, scale, shift, mask, count), 0.2) * mask


def snake_norm(
    x: Tensor, scale: Tensor, shift: Tensor, alpha: Tensor, mask: Tensor, count: Tensor
) -> Tensor:
    """`styled_norm`, then x + sin²(alpha x) / alpha; zero in the padding."""
    y = styled_norm(x, scale, shift, mask, count)
    return (y + torch.sin(alpha * y).square() / alpha) * mask


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Chains of elementwise operations, where a GPU spends most of its time unless compiled."""

    leaky: Callable[..., Tensor] = leaky_norm
    snake: Callable[..., Tensor] = snake_norm

    @classmethod
    def compiled(cls) -> Pointwise:
        """One kernel each, for all lengths. Where a compilation fails, the plain function runs."""
        import torch._dynamo

        torch._dynamo.config.cache_size_limit = 64  # of layouts and widths
        torch._dynamo.config.suppress_errors = True
        return cls(torch.compile(leaky_norm, dynamic=True), torch.compile(snake_norm, dynamic=True))


class Conv(nn.Conv2d):
    """Convolution over frames [B, C, 1, T]."""

    def __init__(self, inputs: int, outputs: int, kernel: int, **settings: int | bool) -> None:
        dilation = int(settings.get("dilation", 1))
        padding = int(settings.get("padding", (kernel - 1) * dilation // 2))
        super().__init__(
            inputs,
            outputs,
            (1, kernel),
            stride=(1, int(settings.get("stride", 1))),
            padding=(0, padding),
            dilation=(1, dilation),
            bias=bool(settings.get("bias", True)),
        )


class Upsampling(nn.ConvTranspose2d):
    """Transposed convolution over frames [B, C, 1, T], to `rate` times as many."""

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int, groups: int = 1) -> None:
        extra = (kernel - rate) % 2
        super().__init__(
            inputs,
            outputs,
            (1, kernel),
            (1, rate),
            (0, (kernel - rate + extra) // 2),
            (0, extra),
            groups=groups,
        )


class Style(nn.Module):
    """A style vector to a norm's scale and shift."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(STYLE_DIM, 2 * channels)

    def forward(self, style: Tensor) -> tuple[Tensor, Tensor]:
        """style [B, 128] to two [B, C, 1, 1]."""
        scale, shift = self.fc(style)[:, :, None, None].chunk(2, 1)
        return scale, shift


class ResidualBlock(nn.Module):
    """Two styled convolutions of three frames; `doubles` the rate on the way."""

    def __init__(
        self, inputs: int, outputs: int, pointwise: Pointwise, *, doubles: bool = False
    ) -> None:
        super().__init__()
        self._pointwise = pointwise
        self.norm1, self.norm2 = Style(inputs), Style(outputs)
        self.conv1, self.conv2 = Conv(inputs, outputs, 3), Conv(outputs, outputs, 3)
        self.pool = Upsampling(inputs, inputs, 3, 2, groups=inputs) if doubles else None
        self.conv1x1 = Conv(inputs, outputs, 1, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor, style: Tensor, before: Valid, after: Valid) -> Tensor:
        """x [B, inputs, 1, T] to [B, outputs, 1, T or 2 T]."""
        y = self._pointwise.leaky(x, *self.norm1(style), *before)
        if self.pool is not None:
            y = self.pool(y) * after.mask
            x = x.repeat_interleave(2, 3)
        y = self._pointwise.leaky(self.conv1(y), *self.norm2(style), *after)
        if self.conv1x1 is not None:
            x = self.conv1x1(x)
        return (self.conv2(y) + x) * 0.5**0.5


class SnakeBlock(nn.Module):
    """Three pairs of convolutions, the first of each dilated by 1, 3 and 5."""

    def __init__(self, channels: int, kernel: int, pointwise: Pointwise) -> None:
        super().__init__()
        self._pointwise = pointwise
        dilations = (1, 3, 5)
        self.convs1 = nn.ModuleList(Conv(channels, channels, kernel, dilation=d) for d in dilations)
        self.convs2 = nn.ModuleList(Conv(channels, channels, kernel) for _ in dilations)
        self.adain1 = nn.ModuleList(Style(channels) for _ in dilations)
        self.adain2 = nn.ModuleList(Style(channels) for _ in dilations)
        self.alpha1 = _alphas(channels, len(dilations))
        self.alpha2 = _alphas(channels, len(dilations))

    def forward(self, x: Tensor, style: Tensor, valid: Valid) -> Tensor:
        """x [B, C, 1, T] to the same shape."""
        halves = (
            (self.convs1, self.adain1, self.alpha1),
            (self.convs2, self.adain2, self.alpha2),
        )
        for stage in range(len(self.convs1)):
            y = x
            for convolutions, styles, alphas in halves:
                scale, shift = styles[stage](style)
                y = self._pointwise.snake(y, scale, shift, alphas[stage], *valid)
                y = convolutions[stage](y)
            x = x + y
        return x


def _alphas(channels: int, count: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(1, channels, 1, 1)) for _ in range(count))
