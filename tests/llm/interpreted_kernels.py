"""Run the sampling kernels in Triton's interpreter and compare them with their twin.

    TRITON_INTERPRET=1 python -m tests.llm.interpreted_kernels SEED SEED …

A process of its own: whether kernels are compiled is settled when Triton is imported.
"""

from __future__ import annotations

import sys

from tests.llm.device_rows import CPU
from tests.llm.kernel_comparison import compare_kernels
from tests.llm.triton_interpreter import repair_interpreter

if __name__ == "__main__":
    repair_interpreter()
    for seed in map(int, sys.argv[1:]):
        compare_kernels(seed, CPU, tile=(128, 512, 256)[seed % 3])
    print("equal")
