"""The source of the kernels for packed matrices: it compiles, and its layout is that of `Words`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.kernels import cuda
from llm.kernels.cuda import compiled, source_text
from llm.kernels.packed import SOURCE, Variant
from llm.kernels.words import Words

VARIANTS = [
    Variant(4, 4, wide=False, lows=False, warps=20, rows=1, stages=5),
    Variant(4, 1, wide=False, lows=True, warps=16, parts=2, rows=2, stages=4, refills=True),
    Variant(8, 4, wide=False, lows=True, factors=True, warps=16, rows=1, stages=4, heads=True),
    Variant(8, 2, wide=False, lows=True, tiles=4, outs=4, stages=2),
    Variant(4, 2, wide=True, lows=True),
]
ARCHITECTURES = ("sm_80", "sm_90", "sm_120")


def require_nvrtc() -> None:
    """Skip a test where NVRTC is not installed."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings' own, by their version
        pytest.skip(f"no NVRTC: {error}")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_source_compiles(variant: Variant) -> None:
    """For the oldest architecture, and for those with programmatic dependent launch."""
    require_nvrtc()
    architecture = ARCHITECTURES[VARIANTS.index(variant) % len(ARCHITECTURES)]
    code = compiled(source_text(SOURCE), SOURCE, variant.macros(), architecture)
    assert code.startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match="BITS"):
        compiled(source_text(SOURCE), SOURCE, {}, architecture)


def test_machine_code_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_nvrtc()
    knobs = pytest.importorskip("triton").knobs
    calls = []

    def compile_once(source: str, name: str, macros: dict[str, int], architecture: str) -> bytes:
        calls.append((macros, architecture))
        return f"{source} {macros} {architecture}".encode()

    monkeypatch.setattr(cuda, "compiled", compile_once)
    given: tuple[str, str, dict[str, int], str] = ("a", SOURCE, {"BITS": 4}, "sm_90")
    others: list[tuple[str, str, dict[str, int], str]] = [
        ("b", SOURCE, {"BITS": 4}, "sm_90"),
        ("a", SOURCE, {"BITS": 8}, "sm_90"),
        ("a", SOURCE, {"BITS": 4}, "sm_80"),
    ]
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        found = {cuda.machine_code(*which) for which in (given, given, *others)}
        assert len(found) == len(calls) == 4
        (kept,) = (p for p in tmp_path.rglob("*.cubin") if b"a {'BITS': 4} sm_90" in p.read_bytes())
        whole = kept.read_bytes()
        for broken in (b"", whole[:-1], whole[:40] + b"x" + whole[41:], whole[:20]):
            kept.write_bytes(broken)
            assert cuda.machine_code(*given) == compile_once(*given)
            assert kept.read_bytes() == whole
    assert len(calls) == 4 + 2 * 4


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 256), (8, 16), (8, 32)])
def test_lanes_find_their_numbers(bits: int, group: int) -> None:
    """Read by the rule of the kernels: the word of a lane, two numbers at a time."""
    num_out, num_in, unit = 20, 512, 128 // bits
    numbers = torch.randint(0, 1 << bits, (num_out, num_in), dtype=torch.uint8)
    scales = torch.randn(num_out, num_in // group).half().float()
    words = Words.pack(numbers, scales, None, bits)
    octets, groups = words.values.flatten(2), words.scales.shape[3]
    for output, i in torch.cartesian_prod(torch.arange(num_out), torch.arange(num_in)).tolist():
        (tile, half, g), (block, c) = (
            (output // 16, output // 8 % 2, output % 8),
            divmod(i // unit, 4),
        )
        t, place = divmod(i % unit, unit // 4)
        word = int(octets[tile, block, half * 128 + (4 * g + t) * 4 + c])
        pairs = [word >> 4 * n & 0x000F000F for n in range(4)]
        pair = place // 2 if bits == 4 else place // 2 * 2
        found = pairs[pair] >> 16 * (place % 2) & 15
        if bits == 8:
            found += 16 * (pairs[pair + 1] >> 16 * (place % 2) & 15)
        assert found == numbers[output, i]
        assert words.scales[tile, block, g, c // (4 // groups), half] == scales[output, i // group]


def test_scales_that_are_no_products_stay_wide() -> None:
    """One of many blocks is enough; zeros are products."""
    numbers = torch.randint(0, 256, (48, 512), dtype=torch.uint8)
    common = torch.randn(48, 1).half().float()
    scales = torch.randint(-128, 128, (48, 32)) * common
    scales[5], scales[7, :4] = 0, 0
    words = Words.pack(numbers, scales, scales, 8)
    assert words.has_factors
    assert words.groups == 4
    expected = (numbers.float() - 128) * scales.repeat_interleave(16, 1)
    assert torch.equal(words.expand(), expected + scales.repeat_interleave(16, 1))
    assert torch.equal(words.tiles(1, 2).expand(), words.expand()[16:32])
    scales[40, 7] *= 1 + 2**-20
    other = Words.pack(numbers, scales, None, 8)
    assert other.scales.dtype is torch.float32
    assert torch.equal(other.expand()[:40], expected[:40])


def test_a_factor_has_eight_bits() -> None:
    """A group's scale may be 127 times a factor, or -128 times, never 128 times."""
    scales = torch.tensor([[128.0, -128.0, 3.0, 1.0]]).repeat(16, 1) * 1024  # too wide for float16
    numbers = torch.full((16, 64), 129, dtype=torch.uint8)
    words = Words.pack(numbers, scales, None, 8)
    assert not words.has_factors
    assert torch.equal(words.expand(), scales.repeat_interleave(16, 1))
    scales[:, 0] = 127 * 1024
    words = Words.pack(numbers, scales, None, 8)
    assert words.has_factors
    assert torch.equal(words.expand(), scales.repeat_interleave(16, 1))
