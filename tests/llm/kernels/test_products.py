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
from llm.kernels.cpu.products import LANES, Form, Kernel, multiply
from llm.kernels.rounding import quantize_rows
from llm.layers.groups import Groups
from tests.deadlines import HANG_S

NUM_OUT, NUM_IN = 2100, 512  # enough bytes for a team, in every format
PROCESSORS = {
    "SSE2": Machine("x86-64", "", has_wide_vectors=False),  # no fused multiply-add: a function
    "AVX2": Machine("haswell", "", has_wide_vectors=False),
    "this one in narrow tiles": replace(this_machine(), has_wide_vectors=False),
}


FORMS = {
    "float32": Form(torch.float32),
    "bfloat16": Form(torch.bfloat16),
    "int8": Form(torch.int8),
    "float8": Form(torch.float8_e4m3fn),
    "4 bits in groups": Form(torch.uint8, is_grouped=True),
    "4 bits in groups with minimums": Form(torch.uint8, is_grouped=True, has_minimums=True),
    "8 bits in groups": Form(torch.int8, is_grouped=True),
    "8 bits in groups with minimums": Form(torch.int8, is_grouped=True, has_minimums=True),
}
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def operands(form: Form, num_rows: int = 70) -> Operands:
    """Return inputs, weights, scales and minimums."""
    generator = torch.Generator().manual_seed(num_rows)
    inputs = torch.randn(num_rows, NUM_IN, generator=generator)
    weights = torch.randn(NUM_OUT, NUM_IN, generator=generator)
    if form.is_grouped:
        groups = random_groups(form, generator)
        return inputs, groups.values, groups.scales, groups.minimums
    if form.dtype is torch.float8_e4m3fn:
        return inputs, *quantize_rows(weights), None
    if form.dtype is not torch.int8:
        return inputs, weights.to(form.dtype), None, None
    scales = weights.abs().amax(1) / 127
    return inputs, (weights / scales[:, None]).round().to(torch.int8), scales, None


def random_groups(form: Form, generator: torch.Generator, size: int = 64) -> Groups:
    """Return a matrix [NUM_OUT, NUM_IN] with scales of float16, as checkpoints have them."""
    bounds = (0, 16) if form.dtype is torch.uint8 else (-128, 128)
    q = torch.randint(*bounds, (NUM_OUT, NUM_IN), generator=generator, dtype=form.dtype)
    shape = (NUM_OUT, NUM_IN // size)
    scales, minimums = (torch.randn(shape, generator=generator).half().float() for _ in range(2))
    groups = Groups.pack(q, scales, minimums if form.has_minimums else None, size)
    assert groups is not None
    return groups


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def test_sums_are_taken_in_the_order_that_is_written_down() -> None:
    """With numbers of few bits, whose products and sums float64 holds without rounding."""
    inputs, weights, *_ = operands(Form(torch.bfloat16), num_rows=5)
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
def test_another_processor_computes_the_same_bits(name: str, form: Form) -> None:
    if name == "AVX2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this processor has no AVX2")
    inputs, *matrix = operands(form, num_rows=7)
    other = Kernel(form, PROCESSORS[name])
    for count in (1, 2, 7):
        found = other.multiply(inputs[:count].contiguous(), *matrix, None)
        assert torch.equal(found, multiply(inputs[:count].contiguous(), *matrix))


@pytest.mark.parametrize("num_rows", [1, 2, 7, 70])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.is_grouped])
def test_groups_have_the_bits_of_their_float32(name: str, num_rows: int) -> None:
    """And are those of float64 up to the rounding of sums."""
    inputs, weights, scales, minimums = operands(FORMS[name], num_rows)
    assert scales is not None
    expanded = Groups(weights, scales, minimums).expand()
    found = multiply(inputs, weights, scales, minimums)
    assert torch.equal(found, multiply(inputs, expanded))
    exact = inputs.double() @ expanded.double().t()
    size = inputs.double().abs() @ expanded.double().abs().t()
    assert ((found - exact).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("size", [16, 32, 128, 512])
def test_groups_of_every_size_are_read(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    kind = FORMS["8 bits in groups" if size == 16 else "4 bits in groups with minimums"]
    groups = random_groups(kind, generator, size)
    inputs = torch.randn(3, NUM_IN, generator=generator)
    for rows in (inputs, inputs[:1]):
        found = multiply(rows, groups.values, groups.scales, groups.minimums)
        assert torch.equal(found, multiply(rows, groups.expand()))


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_threads_change_no_bit(num_threads: int, form: Form) -> None:
    """Also with more threads than cores, so that some start late."""
    inputs, *matrix = operands(form)
    expected = multiply(inputs, *matrix)
    set_product_threads(num_threads)
    try:
        for _ in range(30):
            assert torch.equal(multiply(inputs, *matrix), expected)
            assert torch.equal(multiply(inputs[3:4].contiguous(), *matrix), expected[3:4])
    finally:
        set_product_threads(1)


def test_concurrent_callers_get_the_same_results_as_alone() -> None:
    """One of them has the team, the others compute alone."""
    inputs, weights, scales, _ = operands(Form(torch.int8))
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
    inputs, weights, *_ = operands(Form(torch.float32), num_rows=1)
    expected = multiply(inputs, weights)
    for _ in range(20):
        set_product_threads(8)
        assert torch.equal(multiply(inputs, weights), expected)
        set_product_threads(1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("product-")]


def test_no_threads_are_an_error() -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        set_product_threads(0)
