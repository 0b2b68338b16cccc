"""Launches without Triton's checks: for a GPU that is not there, compared with Triton's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llm.batch import KVSlots
from llm.kernels.rounding import ScaledProduct
from llm.kv_cache.kv_pool import KVPool
from tests.llm.kernels.triton_driver import Driver, Launcher

triton = pytest.importorskip("triton")

ROWS, WIDTH, HEADS, KV_HEADS, SIZE = 3, 64, 4, 2, 16
HEIGHT = HEADS + 2 * KV_HEADS


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of all launches; no kernel is loaded before."""
    from triton import knobs
    from triton.runtime import driver

    from llm.kernels import elementwise, float8, heads

    for module in (elementwise, float8, heads):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                caches = kernel.device_caches
                fresh = type(caches)(caches.default_factory)
                monkeypatch.setattr(kernel, "device_caches", fresh)
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launcher, "launches", found)
    monkeypatch.setattr(driver, "_active", Driver())
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield found


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def scaled(size: int) -> ScaledProduct:
    factors = (random(ROWS, dtype=torch.float32), random(size, dtype=torch.float32))
    return ScaledProduct(random(ROWS, size), *factors)


def norm(level: int) -> None:
    from llm.kernels.elementwise import normalise

    normalise(random(ROWS, WIDTH), random(WIDTH), 1e-5, level=level)


def gated(level: int) -> None:
    from llm.kernels.elementwise import gate

    gate(random(ROWS, 2 * WIDTH), level=level)


def rounded(level: int) -> None:
    from llm.kernels.float8 import quantize

    quantize(random(ROWS, WIDTH), level=level)


def rounded_norm(level: int) -> None:
    from llm.kernels.float8 import normalise_quantized

    gain = random(WIDTH)
    normalise_quantized(random(ROWS, WIDTH), gain, 1e-5, added=scaled(WIDTH), level=level)


def rounded_gate(level: int) -> None:
    from llm.kernels.float8 import gate_quantized

    gate_quantized(scaled(2 * WIDTH), level=level)


def sum_of(level: int) -> None:
    from llm.kernels.float8 import add_scaled

    add_scaled(random(ROWS, WIDTH), scaled(WIDTH), level=level)


def rotated(level: int, *, stores: bool, has_gain: bool, is_scaled: bool) -> None:
    from llm.kernels.heads import rotate_heads

    pool = KVPool(1, 2, 16, KV_HEADS, SIZE, torch.bfloat16)
    target = KVSlots(pool.keys(0), pool.values(0), torch.arange(ROWS)) if stores else None
    product = scaled(HEIGHT * SIZE)
    rotate_heads(
        product.values.view(ROWS, HEIGHT, SIZE),
        torch.randn(ROWS, 1, SIZE // 2, dtype=torch.complex64),
        target,
        num_heads=HEADS,
        gain=random(HEADS + KV_HEADS, SIZE, dtype=torch.float32) if has_gain else None,
        epsilon=1e-5 if has_gain else 0.0,
        scales=(product.row_scales, product.scales) if is_scaled else None,
        level=level,
    )


def stored(level: int) -> None:
    rotated(level, stores=True, has_gain=False, is_scaled=False)


def in_place(level: int) -> None:
    rotated(level, stores=False, has_gain=True, is_scaled=False)


def stored_scaled(level: int) -> None:
    rotated(level, stores=True, has_gain=True, is_scaled=True)


CALLS = (
    norm,
    gated,
    rounded,
    rounded_norm,
    rounded_gate,
    sum_of,
    stored,
    in_place,
    stored_scaled,
)


def plain(argument: Any) -> Any:
    """Return addresses in place of tensors."""
    if isinstance(argument, tuple):
        return tuple(map(plain, argument))
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_launch_is_the_same_as_that_of_triton(
    launches: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[int], None],
    level: int,
) -> None:
    from llm.kernels.launches import Launches

    launch = Launches.__call__

    def twice(self: Launches, *arguments: Any, **options: Any) -> None:
        launch(self, *arguments, **options)
        launch(self, *arguments, **options)

    monkeypatch.setattr(Launches, "__call__", twice)
    call(level)
    first, second = launches
    assert any(isinstance(argument, Tensor) for argument in first[9:])  # Triton's
    assert not any(isinstance(argument, Tensor) for argument in second[9:])
    assert plain(first[:6]) == second[:6]  # grid, stream, function, metadata
    assert plain(first[9:]) == second[9:]  # behind what is for hooks


def table(kernel: Any) -> list[Any]:
    """Return the loaded kernels, each once."""
    return list({id(found): found for found in kernel.device_caches[0][0].values()}.values())


def test_other_arguments_are_another_kernel(launches: list[tuple[Any, ...]]) -> None:
    from llm.kernels.elementwise import _norm_kernel, normalise

    gain = random(WIDTH)
    memory = random(ROWS * WIDTH + 8)
    aligned, unaligned = (memory[n : n + ROWS * WIDTH].view(ROWS, WIDTH) for n in (0, 1))
    for x in (aligned, unaligned, aligned.float()):
        for _ in range(2):
            normalise(x, gain, 1e-5)
    for _ in range(2):
        normalise(aligned, gain, 1e-5, level=1)
    normalise(aligned[:2], gain, 1e-3)  # the same kernel as the first
    kernels = [launch[5] for launch in launches]
    assert len(launches) == 9
    assert len(table(_norm_kernel)) == 4
    assert [any(isinstance(a, Tensor) for a in launch) for launch in launches] == [
        *[True, False] * 4,
        False,
    ]
    assert kernels[0] is kernels[1] is kernels[8]


def test_hooks_of_triton_are_told(launches: list[tuple[Any, ...]]) -> None:
    from triton import knobs

    def hook(metadata: Any) -> None:
        return

    for _ in range(2):
        norm(0)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        norm(0)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    norm(0)
    is_tritons = [any(isinstance(a, Tensor) for a in launch) for launch in launches]
    assert is_tritons == [True, False, True, False]
