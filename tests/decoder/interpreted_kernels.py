"""Run the codecs' kernels in Triton's interpreter and compare them with their plain twins.

    TRITON_INTERPRET=1 python -m tests.decoder.interpreted_kernels

A process of its own: whether kernels are compiled is settled when Triton is imported.
"""

from __future__ import annotations

import torch
from torch import nn

from decoder.norm_kernels import group_norm_silu
from decoder.padding import Span
from decoder.snake_decoder import ResidualUnit, Snake
from decoder.snake_kernels import depthwise_unit, pack_unit, snake
from decoder.xcodec2_modules import normed_silu, normed_silu_plain
from tests.llm.triton_interpreter import repair_interpreter


def compare_snakes(rows: int, channels: int, length: int, dilation: int, own: Span | None) -> None:
    """A cropped view, as the decoder has it."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(rows, channels, length + 9, generator=generator)[..., 4 : 4 + length]
    plain = Snake(channels)
    plain.alpha.data = 0.2 + torch.rand(1, channels, 1, generator=generator)
    torch.testing.assert_close(snake(x, plain.alpha.data, own), plain.plain(x, own))
    unit = ResidualUnit(channels, dilation, groups=channels).requires_grad_(False)
    unit.snake_in.alpha.data = plain.alpha.data
    packed = pack_unit(unit.snake_in.alpha, unit.snake_out.alpha, unit.dilated)
    got = depthwise_unit(x, packed, dilation, own)
    torch.testing.assert_close(got, unit.snake_out(unit.dilated(unit.snake_in(x, own))))


def compare_norms(rows: int, channels: int, length: int, own: Span | None) -> None:
    """Frames before channels, as the transformer leaves them, and contiguous."""
    generator = torch.Generator().manual_seed(length)
    norm = nn.GroupNorm(4, channels, eps=1e-6)
    for parameter in (norm.weight, norm.bias):
        parameter.data = torch.randn(channels, generator=generator)
    x = 3 + torch.randn(rows, length, channels, generator=generator).transpose(1, 2)
    for form in (x, x.contiguous()):
        expected = normed_silu(norm, x, None) if own is None else normed_silu_plain(norm, x, own)
        torch.testing.assert_close(group_norm_silu(norm, form, own), expected)


if __name__ == "__main__":
    repair_interpreter()
    with torch.inference_mode():
        bounds = torch.tensor([[1, 3], [-2, 100]])
        for length, dilation in ((5, 1), (1024, 3), (1500, 9)):
            compare_snakes(2, 3, length, dilation, None)
            compare_snakes(2, 3, length, dilation, Span(bounds, length // 5, 2, 1))
        for length in (5, 128, 300):
            compare_norms(2, 12, length, None)
            compare_norms(2, 12, length, Span(bounds, length // 5))
    print("equal")
