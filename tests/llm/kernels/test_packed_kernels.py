"""The kernels for packed matrices, run by an emulator of a CUDA device on the CPU; tests/gpu runs
them on a device.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import KVSlots
from llm.kernels import packed
from llm.kernels.cuda import source_text
from llm.kernels.packed import (
    expand,
    is_few,
    multiply_packed,
    packed_gated_product,
    packed_heads,
    packed_product,
)
from llm.kernels.words import Words
from llm.kv_cache.kv_pool import KVPool
from llm.layers.decoder import RMSNorm, Rotary, rotate_
from llm.layers.rotary import RotaryConfig
from tests.llm.kernels.cuda_emulator import EmulatedKernel

HALF = torch.bfloat16
EPSILON = 1e-5
CASES = [
    # bits, inputs of a group, minimums, kind of scales, outputs, inputs
    (4, 32, False, "float16", 70, 160),
    (4, 128, True, "float16", 120, 896),
    (4, 32, True, "factors", 40, 256),
    (8, 16, False, "factors", 40, 96),
    (8, 32, True, "factors", 40, 192),
    (8, 16, False, "float32", 40, 96),
    (8, 64, True, "float32", 40, 192),
]
Case = tuple[int, int, bool, str, int, int]
KINDS = {"float16": torch.float16, "float32": torch.float32, "factors": torch.uint8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def emulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two processors, so that programs have several tiles."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(EmulatedKernel, "folder", folder, raising=False)
    monkeypatch.setattr(packed, "CudaKernel", EmulatedKernel)
    monkeypatch.setattr(packed, "_processors", lambda device: 2)
    monkeypatch.setattr(packed, "most_shared_bytes", lambda device: 227 * 1024)
    packed._kernel.cache_clear()
    torch.manual_seed(0)
    yield
    packed._kernel.cache_clear()


def matrix(bits: int, group: int, lows: bool, kind: str, num_out: int, num_in: int) -> Words:
    numbers = torch.randint(0, 1 << bits, (num_out, num_in), dtype=torch.uint8)
    shape = num_out, num_in // group
    scales, minimums = (torch.randn(shape) * num_in**-0.5 for _ in range(2))
    scales *= 2 ** (2 - bits)
    if kind == "factors":
        common = ((scales[:, :1] / 128).half(), (minimums[:, :1] / 128).half())
        scales, minimums = (torch.randint(-128, 128, shape) * part.float() for part in common)
    if kind == "float16":
        scales, minimums = scales.half().float(), minimums.half().float()
    words = Words.pack(numbers, scales, minimums if lows else None, bits)
    assert words.scales.dtype is KINDS[kind]
    return words


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).to(HALF)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def normalised(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + EPSILON) * gain.double()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_of_few_rows(case: Case) -> None:
    """With the numbers themselves, up to float32's rounding of the sums of groups."""
    words = matrix(*case)
    num_out, num_in = words.shape
    exact = words.expand().double().t()
    for rows in (1, 2):
        x, gain, bias = normal(rows, num_in), normal(num_in), normal(num_out)
        out = torch.full((rows, num_out), float("nan"))
        packed_product(x, words, out)
        expected = x.double() @ exact
        assert relative_error(out, expected) < 1e-6
        packed_product(x, words, out, adds=True, bias=bias)
        assert relative_error(out, 2 * expected + bias.double()) < 1e-6
        narrow = torch.full((rows, num_out), float("nan"), dtype=HALF)
        packed_product(x, words, narrow, gain=gain, epsilon=EPSILON)
        assert relative_error(narrow, normalised(x, gain) @ exact) < 0.003


def test_rows_of_unlike_numbers() -> None:
    """Small numbers next to great ones, zeros, and what is not a number."""
    words = matrix(4, 32, False, "float16", 24, 512)
    x = normal(2, 512) * torch.logspace(-12, 12, 512).to(HALF)
    x[1, :256] = 0
    out = torch.empty(2, 24)
    packed_product(x, words, out)
    assert relative_error(out, x.double() @ words.expand().double().t()) < 1e-6
    x = torch.zeros_like(x)
    packed_product(x, words, out)
    assert not out.any()
    for value in (float("nan"), float("inf")):
        x[1, 300] = value
        packed_product(x, words, out)
        assert not out[0].any()
        assert not out[1].isfinite().any()


def test_a_gated_product() -> None:
    words = matrix(4, 128, True, "float16", 2 * 80, 384)
    x, gain = normal(2, 384), normal(384)
    found = packed_gated_product(x, words, gain=gain, epsilon=EPSILON)
    gate, up = (normalised(x, gain) @ words.expand().double().t()).chunk(2, 1)
    assert relative_error(found, F.silu(gate) * up) < 0.003


def test_projected_heads() -> None:
    heads, kv_heads, size, hidden = 3, 2, 32, 256
    x, norm = normal(2, hidden), RMSNorm(normal(hidden), EPSILON)
    words = matrix(4, 32, False, "float16", (heads + 2 * kv_heads) * size, hidden)
    bias = normal(words.shape[0])
    rotations = Rotary(RotaryConfig(size), 64, torch.device("cpu")).at(torch.tensor([5, 17]))
    expected = (norm(x).float() @ words.expand().t() + bias).to(HALF).view(2, -1, size)
    rotate_(expected[:, : heads + kv_heads], rotations)
    pool, counterpart = (KVPool(1, 4, 16, kv_heads, size, HALF, "cpu") for _ in range(2))
    slots = torch.tensor([33, 7])
    counterpart.write(0, slots, expected[:, heads:].view(2, 2, kv_heads, size))
    query = packed_heads(
        x,
        words,
        rotations,
        KVSlots(pool.keys(0), pool.values(0), slots),
        gain=norm.gain,
        epsilon=norm.epsilon,
        bias=bias,
        num_heads=heads,
    )
    assert relative_error(query, expected[:, :heads]) < 0.01
    assert relative_error(pool.storage[0], counterpart.storage[0]) < 0.01


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_of_more_rows(case: Case) -> None:
    """A row's result is its own, bit for bit."""
    words = matrix(*case)
    num_out, num_in = words.shape
    x = normal(33, num_in)
    whole = torch.full((33, num_out), float("nan"))
    multiply_packed(x, words, whole, in_one_order=True)
    assert relative_error(whole, x.double() @ words.expand().double().t()) < 1e-6
    for first, count in ((0, 1), (20, 9)):
        part = torch.full((count, num_out), float("nan"))
        multiply_packed(x[first : first + count].contiguous(), words, part)
        assert torch.equal(part, whole[first : first + count])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_rows_are_multiplied_with_the_expanded_matrix(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = matrix(*case)
    num_out, num_in = words.shape
    found = expand(words, torch.empty(num_out, num_in, dtype=HALF))
    assert torch.equal(found, words.expand().to(HALF))
    monkeypatch.setattr(packed, "EXPANDED_BYTES", 2 * 2 * num_in * 16)  # two tiles at a time
    x = normal(packed.MANY_ROWS, num_in)
    out = torch.full((len(x), num_out), float("nan"), dtype=HALF)
    multiply_packed(x, words, out)
    assert relative_error(out, x.double() @ found.double().t()) < 0.003


def test_rows_of_many_inputs() -> None:
    words = matrix(4, 128, False, "float16", 16, 24_576)
    x, out = normal(2, 24_576), torch.empty(2, 16)
    assert is_few(words, 2)
    packed_product(x, words, out)
    assert relative_error(out, x.double() @ words.expand().double().t()) < 1e-6
    assert not is_few(words, 3)
    assert not is_few(matrix(4, 128, False, "float16", 16, 40_960), 2)
    wide = matrix(8, 16, True, "float32", 256, 24_576)  # its scales and sums of groups need more
    assert is_few(wide, 1)
    assert not is_few(wide, 2)


def test_a_processor_has_programs_of_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products in turn share a processor, two programs of one never do; sizes of Llama 3B."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(packed, "_processors", lambda device: 132)

    class Recorded:
        def launch(
            self, grid: Any, num_threads: int, shared_bytes: int, *arguments: Any, **others: Any
        ) -> None:
            assert grid == (132, 1)
            given.append((num_threads * registers, shared_bytes + packed.RESERVED_BYTES))

    (registers,) = map(int, re.findall(r"#define REGISTERS (\d+)", source_text(packed.SOURCE)))
    monkeypatch.setattr(packed, "CudaKernel", lambda *names: Recorded())
    for rows in (1, 2):
        given.clear()
        for num_out, num_in, is_normed in (
            (5120, 3072, True),
            (3072, 3072, False),
            (8192, 3072, True),
            (3072, 8192, False),
        ):
            values = torch.empty(num_out // 16, num_in // 128, 2, 32, 4, dtype=torch.int32)
            scales = torch.empty(*values.shape[:2], 8, 4, 2, dtype=torch.half)
            words = Words(values, scales, None, 4, (num_out, num_in))
            gain = torch.empty(num_in, dtype=HALF) if is_normed else None
            x, out = torch.empty(rows, num_in, dtype=HALF), torch.empty(rows, num_out)
            packed_product(x, words, out, gain=gain)

        def fits(*programs: tuple[int, int]) -> bool:
            amounts = [sum(part) for part in zip(*programs, strict=True)]
            return amounts[0] <= 65_536 and amounts[1] <= 228 * 1024

        for first, second in pairwise([*given, given[0]]):
            assert fits(first, second)
            assert not fits(first, first)


@pytest.fixture(scope="module")
def large_matrices() -> list[Words]:
    """Matrices of three formats in three sizes, which take a second to write."""
    cases = ((4, 32, False, "float16"), (4, 32, True, "float32"), (8, 16, True, "float32"))
    return [matrix(*case, 256, num_in) for case in cases for num_in in (3072, 8192, 28_672)]


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_a_program_has_the_shared_memory_of_its_device(
    kib: int, large_matrices: list[Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices of compute capability 8.6, 8.9 and 12.0 have 99 KiB, of 8.0 163, of 9.0 227."""
    given: list[int] = []
    monkeypatch.setattr(packed, "_processors", lambda device: 1)
    monkeypatch.setattr(packed, "most_shared_bytes", lambda device: kib * 1024)

    class Recorded:
        def launch(
            self, grid: Any, num_threads: int, shared_bytes: int, *arguments: Any, **others: Any
        ) -> None:
            given.append(shared_bytes)

    monkeypatch.setattr(packed, "CudaKernel", lambda *names: Recorded())
    for words in large_matrices:
        num_out, num_in = words.shape
        gain = normal(num_in)
        for rows in (1, 2):
            x = normal(rows, num_in)
            if is_few(words, rows):
                packed_product(x, words, torch.empty(rows, num_out))
            if is_few(words, rows, parts=2):
                packed_gated_product(x, words, gain=gain, epsilon=EPSILON)
        for rows in (1, 12, 64):
            multiply_packed(normal(rows, num_in), words, torch.empty(rows, num_out))
        assert is_few(words, 1) or num_in > 3072
    assert max(given) <= kib * 1024
