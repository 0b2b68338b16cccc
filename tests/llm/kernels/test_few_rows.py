"""Float8 products of a row as they are compiled for Hopper; `interpreted_layers.py` and tests/gpu
compare their results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llm.kernels.tuning import blocks_for
from tests.llm.kernels.triton_driver import Driver

SHAPES = {"qkv": (5120, 3072), "output": (3072, 3072), "down": (3072, 8192)}
PLACES = [["tt.divisibility", 16]]


def compiled(name: str) -> Any:
    """Return the kernel with arguments as `product` has them."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from llm.kernels import products

    num_out, num_in = SHAPES[name]
    blocks = blocks_for(num_out, num_in, 1, weight_bytes=1, in_half=True)
    assert blocks is not None
    kernel, is_normed = products._few_rows_kernel, name == "qkv"
    pointers = {"x": "*bf16", "gain": "*bf16", "weight": "*fp8e4nv", "weight_scales": "*fp32"}
    types = {**pointers, "values": ("*bf16", "*bf16", "i32"), "num_out": "i32", "epsilon": "fp32"}
    types |= {"needed": "*bf16", "first_id": "i32"}  # not used
    constants = {
        "num_rows": 1,
        "END": products._put,
        "OPTIONS": (0, int(not is_normed)),
        "PARTS": 1,
        "IN": num_in,
        "ROWS": 1,
        "BLOCK_OUT": blocks.block_out,
        "BLOCK_IN": blocks.block_in,
        "LOOPS": blocks.programs > 0,
        "HAS_GAIN": is_normed,
        "IS_FLOAT8": True,
        "IN_HALF": blocks.in_half,
        "IS_LIMITED": False,
        "LEVEL": 2,
    }
    place = {argument: number for number, argument in enumerate(kernel.arg_names)}
    aligned: list[tuple[int, ...]] = [(place[argument],) for argument in (*pointers, "num_out")]
    aligned += [(place["values"], part) for part in range(2)]
    source = ASTSource(
        kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(place[argument],): value for argument, value in constants.items()},
        attrs=dict.fromkeys(aligned, PLACES),
    )
    options = {"num_warps": blocks.num_warps, "launch_pdl": True, "maxnreg": blocks.registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("name", SHAPES)
def test_numbers_of_a_row_are_rounded_before_threads_exchange_them(name: str) -> None:
    """Else each thread would round or convert all those that it needs, which takes more time than
    its products.
    """
    found = compiled(name)
    exchanges = [line for line in found.asm["ttgir"].splitlines() if "convert_layout" in line]
    num_in = SHAPES[name][1]
    of_rows = [line for line in exchanges if "f16" in line and "slice<{dim = 0" in line]
    assert len(of_rows) == num_in // (2048 if name == "down" else 512)
    assert all("xf16," in line and "bf16" not in line for line in of_rows)
    assert not any("f8E4M3FN" in line for line in exchanges)
    registers = ".maxnreg 80" in found.asm["ptx"]
    assert registers == (name != "down")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("is_float8", "in_half"), [(False, False), (True, False), (True, True)])
def test_forms_of_the_kernel_compile_as_they_are_launched(
    rows: int, is_float8: bool, in_half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime import driver

    from llm.kernels import products
    from llm.kernels.products import gated_product, product

    caches = products._few_rows_kernel.device_caches
    fresh = type(caches)(caches.default_factory)
    monkeypatch.setattr(products._few_rows_kernel, "device_caches", fresh)
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    size = 512
    blocks = blocks_for(size, size, rows, weight_bytes=2 - is_float8, in_half=in_half)
    assert blocks is not None
    dtype = torch.float8_e4m3fn if is_float8 else torch.bfloat16
    x, weight = torch.ones(rows, size, dtype=torch.bfloat16), torch.ones(2 * size, size).to(dtype)
    scales = torch.ones(2 * size) if is_float8 else None
    for gain in (None, x[0]):
        out = torch.empty(rows, 2 * size)
        product(x, weight, out, blocks, scales=scales, gain=gain, level=2)
    needed = torch.zeros(2, dtype=torch.int32)
    product(x, weight, out, blocks, scales=scales, needed=needed, first_id=7, level=2)
    gated_product(x, weight, blocks, scales=scales, gain=x[0], level=0)
