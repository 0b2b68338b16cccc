"""Run kernels in Triton's interpreter and compare them with their twins.

    TRITON_INTERPRET=1 python -m tests.llm.interpreted_kernels sampling SEED SEED …
    TRITON_INTERPRET=1 python -m tests.llm.interpreted_kernels cuts
    TRITON_INTERPRET=1 python -m tests.llm.interpreted_kernels products

A process of its own: whether kernels are compiled is settled when Triton is imported.
"""

from __future__ import annotations

import sys

import torch

from llm.layers.invariant_kernels import multiply_rows
from tests.llm.device_rows import CPU
from tests.llm.kernel_comparison import compare_bitmasks, compare_kernels, compare_late_cuts
from tests.llm.triton_interpreter import repair_interpreter


def compare_products() -> None:
    """Whole tiles and parts of them, in every direction."""
    made = torch.Generator().manual_seed(0)
    for rows, num_in, num_out in ((1, 128, 64), (17, 200, 70), (130, 72, 130), (3, 8, 1)):
        x, weight = (torch.randn(count, num_in, generator=made) for count in (rows, num_out))
        out = torch.full((rows, num_out), torch.nan)
        multiply_rows(x, weight, out)
        torch.testing.assert_close(out, x @ weight.t(), rtol=1e-5, atol=1e-4)


if __name__ == "__main__":
    repair_interpreter()
    if sys.argv[1] == "products":
        compare_products()
    if sys.argv[1] == "cuts":
        compare_late_cuts(CPU, tile=512)
        compare_bitmasks(CPU, tile=128)
    for seed in map(int, sys.argv[2:]):
        compare_kernels(seed, CPU, tile=(128, 512, 256)[seed % 3])
    print("equal")
