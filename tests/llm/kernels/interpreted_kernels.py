"""Run kernels in Triton's interpreter and compare them with their references.

    TRITON_INTERPRET=1 python -m tests.llm.kernels.interpreted_kernels

A separate process, because Triton chooses between compiler and interpreter at import.
"""

from __future__ import annotations

import torch

from llm.kernels.invariant import multiply_rows
from llm.kernels.rounding import quantize_rows
from tests.llm.kernels.kernel_comparison import compare_bitmasks, compare_kernels, compare_late_cuts
from tests.llm.kernels.triton_interpreter import repair_interpreter
from tests.llm.sampling.device_rows import CPU


def compare_products() -> None:
    """Compare whole tiles and parts of them, in every direction."""
    made = torch.Generator().manual_seed(0)
    for rows, num_in, num_out in ((1, 128, 64), (17, 200, 70), (130, 72, 130), (3, 8, 1)):
        x, weight = (torch.randn(count, num_in, generator=made) for count in (rows, num_out))
        out = torch.full((rows, num_out), torch.nan)
        multiply_rows(x, weight, out)
        torch.testing.assert_close(out, x @ weight.t(), rtol=1e-5, atol=1e-4)


def compare_float8_products() -> None:
    """Compare products of float8 numbers with those in double precision."""
    made = torch.Generator().manual_seed(0)
    for rows, num_in, num_out in ((1, 128, 64), (17, 200, 70), (3, 8, 1)):
        x, weight = (
            quantize_rows(torch.randn(count, num_in, generator=made)) for count in (rows, num_out)
        )
        out = torch.full((rows, num_out), torch.nan)
        multiply_rows(x.values, weight.values, out, x.scales, weight.scales)
        left, right = (part.values.double() * part.scales[:, None] for part in (x, weight))
        torch.testing.assert_close(out, (left @ right.t()).float(), rtol=1e-5, atol=1e-4)


if __name__ == "__main__":
    repair_interpreter()
    compare_products()
    compare_float8_products()
    compare_late_cuts(CPU, tile=256, vocab=1000, seeds=1)
    compare_bitmasks(CPU, tile=256, seeds=2)
    for seed, tile in ((1, 512), (3, 128)):  # three of the five kinds of logits each, all together
        compare_kernels(seed, CPU, tile)
    print("equal")
