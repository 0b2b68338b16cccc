"""Products on a CPU: a fixed order of sums, for any processor, threads and number of rows."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from llm import set_product_threads
from llm.kernels.cpu.jit import Machine, this_machine
from llm.kernels.cpu.products import LANES, Kernel, multiply
from llm.kernels.rounding import quantize_rows
from tests.deadlines import HANG_S

NUM_OUT, NUM_IN = 1100, 512  # enough bytes for a team, in every format
PROCESSORS = {
    "SSE2": Machine("x86-64", "", has_wide_vectors=False),  # no fused multiply-add: a function
    "AVX2": Machine("haswell", "", has_wide_vectors=False),
    "this one in narrow tiles": replace(this_machine(), has_wide_vectors=False),
}


def operands(dtype: torch.dtype, num_rows: int = 70) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return inputs, weights and scales."""
    generator = torch.Generator().manual_seed(num_rows)
    inputs = torch.randn(num_rows, NUM_IN, generator=generator)
    weights = torch.randn(NUM_OUT, NUM_IN, generator=generator)
    if dtype is torch.float8_e4m3fn:
        return inputs, *quantize_rows(weights)
    if dtype is not torch.int8:
        return inputs, weights.to(dtype), None
    scales = weights.abs().amax(1) / 127
    return inputs, (weights / scales[:, None]).round().to(torch.int8), scales


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def test_sums_are_taken_in_the_order_that_is_written_down() -> None:
    """With numbers of few bits, whose products and sums float64 holds without rounding."""
    inputs, weights, _ = operands(torch.bfloat16, num_rows=5)
    inputs = inputs.bfloat16().float()
    found = multiply(inputs, weights).numpy()
    x, w = inputs.double().numpy(), weights[:40].double().numpy()
    sums = np.zeros((5, 40, LANES), np.float32)
    for first in range(0, NUM_IN, LANES):
        part = slice(first, first + LANES)
        sums = (x[:, None, part] * w[None, :, part] + sums).astype(np.float32)
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    assert np.array_equal(found[:, :40], sums[..., 0])


def test_every_number_of_float8_is_read_as_it_is() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = codes[numbers.isfinite()]
    weights = torch.zeros(len(finite), LANES, dtype=torch.uint8)
    weights[:, 3] = finite
    inputs = torch.zeros(1, LANES)
    inputs[0, 3] = 1
    found = multiply(inputs, weights.view(torch.float8_e4m3fn), torch.ones(len(finite)))
    assert len(finite) == 254
    assert torch.equal(found[0], numbers[numbers.isfinite()])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.parametrize("name", PROCESSORS)
def test_another_processor_computes_the_same_bits(name: str, dtype: torch.dtype) -> None:
    if name == "AVX2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this processor has no AVX2")
    inputs, weights, scales = operands(dtype, num_rows=7)
    other = Kernel(dtype, PROCESSORS[name])
    for count in (1, 2, 7):
        found = other.multiply(inputs[:count].contiguous(), weights, scales, None)
        assert torch.equal(found, multiply(inputs[:count].contiguous(), weights, scales))


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_threads_change_no_bit(num_threads: int, dtype: torch.dtype) -> None:
    """Also with more threads than cores, so that some start late."""
    inputs, weights, scales = operands(dtype)
    expected = multiply(inputs, weights, scales)
    set_product_threads(num_threads)
    try:
        for _ in range(30):
            assert torch.equal(multiply(inputs, weights, scales), expected)
            assert torch.equal(multiply(inputs[3:4].contiguous(), weights, scales), expected[3:4])
    finally:
        set_product_threads(1)


def test_concurrent_callers_get_the_same_results_as_alone() -> None:
    """One of them has the team, the others compute alone."""
    inputs, weights, scales = operands(torch.int8)
    rows = [inputs[index : index + 9].contiguous() for index in range(6)]
    expected = [multiply(row, weights, scales) for row in rows]
    wrong: list[int] = []

    def compute(index: int) -> None:
        for _ in range(40):
            if not torch.equal(multiply(rows[index], weights, scales), expected[index]):
                wrong.append(index)

    set_product_threads(3)
    try:
        threads = [threading.Thread(target=compute, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        set_product_threads(1)
    assert not wrong


def test_a_process_ends_while_its_helpers_sleep() -> None:
    code = (
        "import torch; from llm import set_product_threads;"
        "from llm.kernels.cpu.products import multiply; set_product_threads(3);"
        "print(multiply(torch.ones(2, 512), torch.ones(1024, 512)).sum().item())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1048576.0\n", "")


def test_a_team_ends_before_its_helpers_have_begun() -> None:
    """A helper whose thread starts after the end returns, too; each change waits for all."""
    inputs, weights, _ = operands(torch.float32, num_rows=1)
    expected = multiply(inputs, weights)
    for _ in range(20):
        set_product_threads(8)
        assert torch.equal(multiply(inputs, weights), expected)
        set_product_threads(1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("product-")]


def test_no_threads_are_an_error() -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        set_product_threads(0)
