"""Products whose matrix is read early: they compile for Hopper, and wait for what they use.

tests/gpu compares them with `llm.kernels.split_products` on a device.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.kernels.tuning import EARLY_BYTES, MAX_SPLIT_ROWS, split_tiles
from tests.llm.kernels.triton_driver import Driver

pytest.importorskip("triton")

SIZES = [(4096, 1024, 1), (1024, 2048, 1), (1024, 3072, 1), (3072, 1024, 2), (1024, 1024, 1)]


@pytest.mark.parametrize(("num_out", "num_in", "parts"), [SIZES[0], SIZES[3]])
@pytest.mark.parametrize("level", [0, 2])
def test_the_kernel_compiles(
    num_out: int,
    num_in: int,
    parts: int,
    level: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every copy of the matrix before the wait for the kernel before, and rows after it."""
    from triton import knobs
    from triton.runtime import driver

    from llm.kernels import early_products

    compiled: list[Any] = []
    kernel = early_products._early_kernel

    class Kept:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **given: compiled.append(kernel[grid](*args, **given))

    monkeypatch.setattr(early_products, "_early_kernel", Kept())
    caches = kernel.device_caches
    monkeypatch.setattr(kernel, "device_caches", type(caches)(caches.default_factory))
    monkeypatch.setattr(driver, "_active", Driver())
    x = torch.empty(MAX_SPLIT_ROWS, num_in, dtype=torch.bfloat16)
    weight = torch.empty(parts * num_out, num_in, dtype=torch.bfloat16)
    tiles = split_tiles(num_out, num_in, len(x), parts=parts)
    out = torch.empty(tiles.splits, len(x), num_out)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        early_products.multiply_early(x, weight, out, num_out, tiles, gates=parts == 2, level=level)
    (found,) = compiled
    assert found.metadata.shared <= EARLY_BYTES
    if level > 0:
        before, after = found.asm["ptx"].split("griddepcontrol.wait;")
        copies = [len(re.findall(r"cp\.async\.cg", half)) for half in (before, after)]
        own = parts * tiles.block_out * num_in // tiles.splits
        assert copies == [count // (128 * 8) for count in (own, len(x) * num_in // tiles.splits)]


@pytest.mark.parametrize(("slots", "chunks"), [(1, 1), (2, 2), (2, 5), (3, 4), (4, 8), (8, 8)])
def test_chunks_are_there_before_they_are_multiplied(slots: int, chunks: int) -> None:
    """And are overwritten only by chunks that are multiplied later."""
    from llm.kernels.early_products import _unread

    asked, places = list(range(slots)), dict(enumerate(range(slots)))
    for step in range(chunks):
        unread = int(_unread(step, slots, chunks))
        assert unread >= 0
        assert step == asked[: len(asked) - unread][-1]
        assert places[step % slots] == step
        if step > 0 and slots + step - 1 < chunks:
            asked.append(slots + step - 1)
            places[(step - 1) % slots] = slots + step - 1
    assert asked == list(range(chunks))


@pytest.mark.parametrize(("num_out", "num_in", "parts"), SIZES)
def test_a_program_has_room(num_out: int, num_in: int, parts: int) -> None:
    tiles = split_tiles(num_out, num_in, MAX_SPLIT_ROWS, parts=parts)
    assert tiles.slots > 0
    matrix = 2 * parts * tiles.block_out * num_in // tiles.splits
    assert matrix + 2 * tiles.slots * MAX_SPLIT_ROWS * tiles.block_in <= EARLY_BYTES
    assert split_tiles(num_out, num_in, 2 * MAX_SPLIT_ROWS, parts=parts).slots == 0
