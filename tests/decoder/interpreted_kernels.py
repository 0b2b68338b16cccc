"""Run the codecs' kernels in Triton's interpreter and compare them with their plain twins.

    TRITON_INTERPRET=1 python -m tests.decoder.interpreted_kernels

A process of its own: whether kernels are compiled is settled when Triton is imported.
"""

from __future__ import annotations

import torch

from decoder.snake_decoder import ResidualUnit, Snake
from decoder.snake_kernels import depthwise_unit, pack_unit, snake
from tests.llm.triton_interpreter import repair_interpreter


def compare(rows: int, channels: int, length: int, dilation: int, seed: int) -> None:
    """A cropped view, as the decoder has it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, channels, length + 9, generator=generator)[..., 4 : 4 + length]
    plain = Snake(channels)
    plain.alpha.data = 0.2 + torch.rand(1, channels, 1, generator=generator)
    torch.testing.assert_close(snake(x, plain.alpha.data), plain.plain(x))
    unit = ResidualUnit(channels, dilation, groups=channels).requires_grad_(False)
    unit.snake_in.alpha.data = plain.alpha.data
    packed = pack_unit(unit.snake_in.alpha, unit.snake_out.alpha, unit.dilated)
    got = depthwise_unit(x, packed, dilation)
    torch.testing.assert_close(got, unit.snake_out(unit.dilated(unit.snake_in(x))))


if __name__ == "__main__":
    repair_interpreter()
    with torch.inference_mode():
        for seed, dilation in enumerate((1, 3, 9)):
            compare(2, 3, (5, 1024, 1500)[seed], dilation, seed)
    print("equal")
