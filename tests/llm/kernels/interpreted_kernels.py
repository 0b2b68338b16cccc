"""Sampling kernels and invariant products against their references; run by `test_kernels.py` with
Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from llm.kernels import invariant
from llm.kernels.invariant import ALIGNMENT, multiply_others, multiply_rows
from llm.kernels.rounding import quantize_rows
from llm.sampling.device import kernels
from llm.sampling.device.parts import CUT_END, EVERYTHING, WORDS, SamplingInputs, ranked
from llm.sampling.device.records import NO_ID
from llm.sampling.device.sampler import DeviceSampler
from tests.llm.kernels.kernel_comparison import compare_bitmasks, compare_kernels, compare_late_cuts
from tests.llm.kernels.triton_interpreter import repair_interpreter
from tests.llm.sampling.device_rows import CPU

repair_interpreter()


@triton.jit
def guess_below(
    inputs: SamplingInputs, row: tl.tensor, largest: tl.tensor, mass: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return tl.zeros([], tl.int32), tl.full([], 3, tl.int32)


@triton.jit
def guess_above(
    inputs: SamplingInputs, row: tl.tensor, largest: tl.tensor, mass: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    end = tl.load(inputs.records + row * WORDS + CUT_END)
    return end - 2, end


@triton.jit
def guess_nothing(
    inputs: SamplingInputs, row: tl.tensor, largest: tl.tensor, mass: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return tl.zeros([], tl.int32), tl.load(inputs.records + row * WORDS + CUT_END)


@pytest.mark.parametrize(
    ("rows", "num_in", "num_out"), [(1, 128, 64), (17, 200, 70), (130, 72, 130), (3, 8, 1)]
)
def test_invariant_products(rows: int, num_in: int, num_out: int) -> None:
    """Whole tiles and parts of them, in every direction."""
    made = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, num_in, generator=made) for count in (rows, num_out))
    out = torch.full((rows, num_out), torch.nan)
    multiply_rows(x, weight, out)
    torch.testing.assert_close(out, x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [16, 64, 70, 130, 300])
def test_products_of_a_head(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may have a second block of rows."""
    made = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, 72, generator=made).half() for count in (rows, 130))
    out, expected = (torch.full((rows, 130), torch.nan) for _ in range(2))
    multiply_rows(x, weight, expected)
    monkeypatch.setattr(invariant, "MANY_OUTPUTS", 1)
    multiply_rows(x, weight, out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out, x.float() @ weight.float().t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("common", [(128, 256), (0, 128), (128, 400)])
def test_products_of_other_outputs(rows: int, common: tuple[int, int]) -> None:
    """Outputs outside of `common` are written where one of them is needed, and nothing else."""
    made = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, 24, generator=made).half() for count in (rows, 400))
    wide = torch.full((rows, 500), torch.nan)
    out, (start, end) = wide[:, 30:430], common
    for needed in (common, (start + 1, end - 1), (NO_ID, 0)):
        multiply_others(x, weight, out, common, torch.tensor(needed, dtype=torch.int32))
        assert wide.isnan().all()
    needed = (start - 1, end) if start else (start, end + 1)
    multiply_others(x, weight, out, common, torch.tensor(needed, dtype=torch.int32))
    expected = x.float() @ weight.float().t()
    expected[:, slice(*common)] = torch.nan
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert wide[:, :30].isnan().all()
    assert wide[:, 430:].isnan().all()


@pytest.mark.parametrize("rows", [1, 40, 130, 300])
def test_programs_have_no_part_of_what_is_left_out(rows: int) -> None:
    for num_out in (64, 70_000):
        blocks = [invariant.blocks_for(rows, num_out), invariant.head_blocks(rows)]
        assert all(ALIGNMENT % chosen["block_out"] == 0 for chosen in blocks)


@pytest.mark.parametrize(("rows", "num_in", "num_out"), [(1, 128, 64), (17, 200, 70), (3, 8, 1)])
def test_invariant_float8_products(rows: int, num_in: int, num_out: int) -> None:
    """Products of float8 numbers equal those in double precision."""
    made = torch.Generator().manual_seed(0)
    x, weight = (
        quantize_rows(torch.randn(count, num_in, generator=made)) for count in (rows, num_out)
    )
    out = torch.full((rows, num_out), torch.nan)
    multiply_rows(x.values, weight.values, out, x.scales, weight.scales)
    left, right = (part.values.double() * part.scales[:, None] for part in (x, weight))
    torch.testing.assert_close(out, (left @ right.t()).float(), rtol=1e-5, atol=1e-4)


@triton.jit
def _rank_kernel(
    values: tl.tensor, ranks: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, COUNT: tl.constexpr
) -> None:
    own = tl.load(values + tl.arange(0, SIZE))
    for n in range(COUNT):
        tl.store(out + n, ranked(own, tl.load(ranks + n)))


@pytest.mark.parametrize("size", [8, 64, 4096])
@pytest.mark.parametrize("end", [2, 5, 300, 2**24])
def test_the_value_of_a_rank(size: int, end: int) -> None:
    made = torch.Generator().manual_seed(size)
    values = torch.randint(0, end, (size,), generator=made, dtype=torch.int32)
    values[size // 2 :: 5] = EVERYTHING.value  # of columns that have no weight
    ranks = torch.randint(1, size + 1, (8,), generator=made, dtype=torch.int32)
    found = torch.empty(8, dtype=torch.int32)
    _rank_kernel[(1,)](values, ranks, found, SIZE=size, COUNT=8)
    assert torch.equal(found, values.sort().values[ranks.long() - 1])


@pytest.mark.parametrize("tile", [256, None])
def test_late_cuts(tile: int | None) -> None:
    compare_late_cuts(CPU, tile, vocab=1000, seeds=1)


@pytest.mark.parametrize("guess", [guess_below, guess_above, guess_nothing])
def test_wrong_guesses(guess: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut is on either side of the deficits that are searched first, or these are too many."""
    monkeypatch.setattr(kernels, "guess", guess)
    compare_late_cuts(CPU, 256, vocab=1000, seeds=1)


class OnlyCompiled:
    """In place of a kernel that `compile_together` does not launch."""

    def __getitem__(self, grid: object) -> object:
        return lambda *_, **__: None


@pytest.mark.parametrize(
    ("tile", "early"), [(256, [False, True, True, True, True]), (None, [True])]
)
def test_launches_start_early_only_at_a_launch_level(
    monkeypatch: pytest.MonkeyPatch, tile: int | None, early: list[bool]
) -> None:
    launched: list[dict[str, Any]] = []

    class Recorded:
        """In place of a kernel."""

        def __getitem__(self, grid: object) -> object:
            return lambda *_, **options: launched.append(dict(options))

    for name in ("_whole", "_tops", "_collect", "_narrow", "_masses"):
        monkeypatch.setattr(kernels, name, Recorded())
    sampler = DeviceSampler(1000, CPU, 2, max_window=64)
    buffers, scratch = sampler.create_buffers(), kernels.Scratch(1000, CPU, 2, tile)
    logits, history = torch.zeros(2, 1000), sampler._history
    for level in range(3):
        launched.clear()
        kernels.sample_with_kernels(
            logits, buffers.records, buffers.masks, history, scratch, level=level
        )
        assert [options["launch_pdl"] for options in launched] == (
            early if level else [False] * len(early)
        )
        assert {options["level"] for options in launched} == {level}


def test_launches_behind_one_that_is_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are loaded already; nothing is left to do for them."""
    sampler = DeviceSampler(1000, CPU, 2, max_window=64)
    buffers = sampler.create_buffers()
    torch.set_deterministic_debug_mode("error")  # fills new memory, without torch's compiler
    try:
        scratch = kernels.Scratch(1000, CPU, 2, 256)
    finally:
        torch.set_deterministic_debug_mode("default")
    monkeypatch.setattr(kernels, "_tops", OnlyCompiled())
    logits, history = torch.zeros(2, 1000), sampler._history
    kernels.sample_with_kernels(logits, buffers.records, buffers.masks, history, scratch)
    written = (buffers.records, scratch.workspace.bins, scratch.workspace.arrived)
    assert not any(part.any() for part in (*written, scratch.workspace.states))


@pytest.mark.parametrize("tile", [256, None])
def test_bitmasks(tile: int | None) -> None:
    compare_bitmasks(CPU, tile, seeds=2)


@pytest.mark.parametrize(("seed", "tile"), [(1, 512), (3, 256), (1, None), (3, None)])
def test_kernels_of_the_sampler(seed: int, tile: int | None) -> None:
    """Three of the five kinds of logits each, all together; one tile of the vocabulary, two, and
    whole rows.
    """
    compare_kernels(seed, CPU, tile)
