"""Kernels of the codecs against their references; run by `tests/llm/kernels/test_kernels.py` with
Triton's interpreter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder import MaskPolicy, create_decoder, to_s16
from decoder.codecs.qwen3_tts.modules import Snake as ScaledSnake
from decoder.codecs.snake.decoder import ResidualUnit, Snake, SnakeConfig, SnakeDecoder
from decoder.codecs.snake.rows import RowDecoder
from decoder.codecs.xcodec2.decoder import Xcodec2Decoder
from decoder.codecs.xcodec2.fused import FusedNetwork, product_dtype
from decoder.codecs.xcodec2.modules import Xcodec2Network, normed_silu
from decoder.kernels.attention import attend
from decoder.kernels.finish import finish, keep_tails
from decoder.kernels.noise import noise_of
from decoder.kernels.norm import group_norm_silu, rms_norm
from decoder.kernels.rows import pack_unit, product, snake_rows, unit_rows
from decoder.kernels.snake import scaled_snake, snake
from decoder.keyed_noise import keyed_noise, noise_key
from decoder.streaming import blend
from decoder.window_inputs import PADDING, CallShape, PaddedRows, Span
from tests.closeness import error
from tests.decoder.small_codecs import random_codes
from tests.decoder.toys import windows_of
from tests.llm.kernels.triton_interpreter import repair_interpreter

repair_interpreter()
BOUNDS = torch.tensor([[1, 3], [-2, 100]])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("length", [5, 1024, 1500])
def test_snakes(length: int, is_padded: bool) -> None:
    """A cropped view, as the decoder uses it."""
    rows, channels = 2, 3
    own = Span(BOUNDS, length // 5, 2, 1) if is_padded else None
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(rows, channels, length + 9, generator=generator)[..., 4 : 4 + length]
    plain = Snake(channels)
    plain.alpha.data = 0.2 + torch.rand(1, channels, 1, generator=generator)
    torch.testing.assert_close(snake(x, plain.alpha.data, own), plain.plain(x, own))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("length", "dilation"), [(5, 1), (150, 3), (300, 9)])
def test_units_of_rows(length: int, dilation: int, is_padded: bool) -> None:
    """A cropped view, and more channels than a tile has."""
    rows, channels = 2, 70
    own = Span(BOUNDS, length // 5, 2, 1) if is_padded else None
    generator = torch.Generator().manual_seed(length)
    x = 3 * torch.randn(rows, length + 9, channels, generator=generator)[:, 4 : 4 + length]
    unit = ResidualUnit(channels, dilation, groups=channels).requires_grad_(False)
    alphas = unit.snake_in.alpha, unit.snake_out.alpha
    for alpha in alphas:
        alpha.copy_(0.2 + torch.rand(1, channels, 1, generator=generator))
    got = unit_rows(x, pack_unit(unit.dilated, *alphas), dilation, torch.float32, own)
    expected = unit.snake_out(unit.dilated(unit.snake_in(x.mT, own)))
    torch.testing.assert_close(got.mT, expected)


@pytest.mark.parametrize(
    ("batch", "length", "depth", "width", "dtype"),
    [
        (2, 75, 100, 130, torch.float32),
        (3, 50, 70, 200, torch.float16),
        (1, 1, 1, 1, torch.float32),
    ],
)
def test_products_of_rows(
    batch: int, length: int, depth: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    a, weights, offsets = (
        normal(batch, length, depth).to(dtype),
        normal(depth, width),
        normal(width),
    )
    weights = weights.to(dtype)
    plain = a.float() @ weights.float() + offsets
    assert error(product(a, weights, offsets), plain) < 1e-5
    onto = normal(batch, length, width)
    expected = onto + plain
    assert error(product(a, weights, offsets, onto=onto), expected) < 1e-5
    ahead = normal(batch, length + 1, depth).to(dtype)
    pairs = ahead.as_strided((batch, length, 2 * depth), (*ahead.stride()[:2], 1))
    both = torch.cat((weights, -weights))
    expected = torch.cat((ahead[:, :-1], ahead[:, 1:]), -1).float() @ both.float()
    assert error(product(pairs, both, None), expected) < 1e-5
    x, scales = normal(batch, length + 7, depth)[:, 3:-4], normal(batch, length)
    square = normal(depth, depth).to(dtype)
    expected = x + scales[..., None] * (x.to(dtype).float() @ square.float())
    assert error(product(x, square, None, scales=scales), expected) < 1e-5


def test_values_beyond_16_bits_become_the_largest() -> None:
    x = torch.tensor([[[1e6, -1e6, 2.0]]])
    table = torch.tensor([[1.0] * 3, [0.0] * 3])
    assert snake_rows(x, table, 0, torch.float16, None).tolist() == [[[65504, -65504, 2]]]


@pytest.mark.parametrize(
    ("rates", "has_noise", "bounds"), [((4, 3), True, [[1, 4], [-2, 5]]), ((2,), False, None)]
)
def test_a_decoder_of_rows(
    rates: tuple[int, ...], has_noise: bool, bounds: list[list[int]] | None
) -> None:
    """With products of float32, and of 16 bits as on a GPU."""
    own = None if bounds is None else Span(torch.tensor(bounds))
    config = SnakeConfig(8, 12, rates, (2, 1), 16, 2, depthwise=True, has_noise=has_noise)
    torch.manual_seed(len(rates))
    plain = SnakeDecoder(config).requires_grad_(False)
    for name, parameter in plain.named_parameters():
        if name.endswith("alpha"):
            parameter.uniform_(0.2, 1.2)
    codes = [torch.randint(16, (2, 5 * count)) for count in (1, 2)]
    shape = CallShape(left=1, right=4, num_samples=3 * config.hop)
    expected = plain(codes, shape, own, numbers)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        quick = RowDecoder(config, dtype).requires_grad_(False)
        quick.load_state_dict(plain.state_dict())
        got = quick(codes, shape, own, numbers)
        assert (got - expected).abs().max() < tolerance * expected.abs().max()


def numbers(stage: int, start: int, count: int) -> Tensor:
    """Return noise of two rows."""
    return torch.linspace(-2, 3, 2 * count).view(2, 1, count) + start + stage


@pytest.mark.parametrize("length", [4, 1500])
def test_scaled_snakes(length: int) -> None:
    """A cropped view, as a transposed convolution leaves it."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, 3, length + 9, generator=generator)[..., 4 : 4 + length]
    plain = ScaledSnake(3).requires_grad_(False)
    plain.alpha.copy_(torch.randn(3, generator=generator))
    plain.beta.copy_(torch.randn(3, generator=generator))
    plain.prepare()
    biases = torch.randn(3, generator=generator)
    plain.add_biases(biases)
    y = x + biases[:, None]
    expected = y + torch.sin(y * plain.alpha.exp()[:, None]) ** 2 / plain.beta.exp()[:, None]
    torch.testing.assert_close(plain.plain(x), expected)
    numbers = plain.biases, plain.rates, plain.heights
    torch.testing.assert_close(scaled_snake(x, *numbers), expected)
    joined = torch.zeros(2, 3, length + 6)  # behind six earlier columns
    scaled_snake(x, *numbers, joined[..., 6:])
    torch.testing.assert_close(joined[..., 6:], expected)
    assert not joined[..., :6].any()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("length", [5, 128, 300])
def test_norms(length: int, is_padded: bool) -> None:
    """With the columns on both sides."""
    rows, channels = 2, 12
    own = Span(BOUNDS, length // 5) if is_padded else None
    generator = torch.Generator().manual_seed(length)
    norm = nn.GroupNorm(4, channels, eps=1e-6)
    for parameter in (norm.weight, norm.bias):
        parameter.data = torch.randn(channels, generator=generator)
    x = 3 + torch.randn(rows, length, channels, generator=generator)
    expected = normed_silu(norm, x.transpose(1, 2), own)
    near = F.pad(expected, (1, 1)).unfold(2, 3, 1).permute(0, 2, 3, 1).flatten(2)
    torch.testing.assert_close(group_norm_silu(norm, x, own, torch.float32), near)
    torch.testing.assert_close(group_norm_silu(norm, x, own, torch.float16), near.half())


def test_rms_norm() -> None:
    norm = nn.RMSNorm(12, eps=1e-6)
    norm.weight.data = torch.linspace(-2, 2, 12)
    x = 3 + torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rms_norm(norm, x, torch.float32), norm(x))
    torch.testing.assert_close(rms_norm(norm, x, torch.float16), norm(x).half())


@pytest.mark.parametrize("kind", ["exact", "padded", "masked"])
@pytest.mark.parametrize(("length", "dim"), [(5, 16), (70, 12)])
def test_attention(length: int, dim: int, kind: str) -> None:
    count, heads = 3, 2
    generator = torch.Generator().manual_seed(length)
    qkv = torch.randn(count, length, 3 * heads * dim, generator=generator)
    numbers = torch.randint(0, 4, (count, 2 * length + 3), generator=generator)
    numbers[:, 0], numbers[:, length] = 3, 0  # a code that sees all, one that all see
    rows = PaddedRows(
        CallShape(2, length - 2, 1, kind == "masked", kind == "exact"),
        torch.zeros(count, length, 1, dtype=torch.int64),
        torch.zeros(count, 1, dtype=torch.int64),
        None if kind == "exact" else Span(torch.tensor([[1, length], [0, 3], [0, length]])),
    )
    if kind == "masked":
        rows = replace(rows, sees=numbers[:, :length], ranks=numbers[:, length : 2 * length])
        assert rows.own is not None
        assert rows.ranks is not None
        rows.ranks.masked_fill_(~rows.own.mask(length)[:, 0], PADDING)
    q, k, v = qkv.unflatten(2, (3, heads, dim)).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.attention_bias())
    got = attend(qkv, heads, rows)
    seen = rows.visible()
    is_own = torch.tensor(True) if seen is None else seen.any(-1)[..., None].expand(-1, length, -1)
    difference = (got - expected.transpose(1, 2).flatten(2)).abs()
    assert difference.where(is_own, torch.tensor(0.0)).max() < 1e-5
    difference = (attend(qkv.half(), heads, rows) - expected.transpose(1, 2).flatten(2)).abs()
    assert difference.where(is_own, torch.tensor(0.0)).max() < 3e-3


SMALL_XCODEC2 = {
    "model_type": "xcodec2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "quantization_levels": [4, 4, 5],
    "semantic_model_config": {"hidden_size": 16},
}


@pytest.mark.parametrize("kind", ["first", "padded", "masked"])
def test_the_network_of_xcodec2(tmp_path: Path, kind: str) -> None:
    """The first blocks, and others with a history, a look-ahead and a voice prompt."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_XCODEC2))
    plain = create_decoder(tmp_path, test_mode=True)
    assert isinstance(plain, Xcodec2Decoder)
    assert isinstance(plain._network, Xcodec2Network)
    fused = copy(plain)
    fused._network = FusedNetwork(plain._network, torch.float32)
    options = replace(
        plain.spec.recommended,
        chunk_sizes=(5, 6),
        buffer=20,
        masks=MaskPolicy(block_causal=kind == "masked"),
        look_ahead=0 if kind == "first" else 5,
    )
    streams = [
        windows_of(plain.spec, options, random_codes(plain, 40, k), prompt_codes=[1] * 4 * k)
        for k in range(2)
    ]
    windows = streams[0][:1] if kind == "first" else [streams[0][0], streams[1][1], streams[0][3]]
    inputs = plain.inputs(windows)
    assert inputs.key.is_exact == (kind == "first")
    expected, got = plain.run(inputs), fused.run(inputs)
    assert got.shape == expected.shape
    for row, window, other in zip(got, windows, expected, strict=True):
        size = window.num_samples
        assert error(row[:size], other[:size]) < 1e-5


@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (12345, 3), (2**63, 1)])
@pytest.mark.parametrize("count", [1, 300])
def test_noise(seed: int, stream: int, count: int) -> None:
    """Indices on both sides of 0, in lines of a larger tensor."""
    frames = torch.tensor([[0, 7], [-2, 7], [10**12, 7]])[:, :1]
    got = noise_of(noise_key(seed, stream), frames, 16, -3, count)
    expected = keyed_noise(seed, stream, frames * 16 - 3, count)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("size", "fade"), [(5, 4), (1500, 480), (3000, 1200)])
def test_finishing(size: int, fade: int) -> None:
    """Rows of one stream and of several against the blend and conversion on the host, bit for
    bit.
    """
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(4, size + fade, generator=generator)
    rows[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    tails = torch.randn(3, fade, generator=generator)
    # the second row continues the first one; the third is shorter than its tail
    about = torch.tensor(
        [
            [size, 0, 0, 0, fade],
            [size, 0, fade, 1, fade // 2],
            [3, 2, fade, 0, 0],
            [size - 1, 1, fade // 2, 2, 0],
        ]
    )
    former = [None, rows[0, size:].numpy(), tails[2].numpy(), rows[1, size:].numpy()[: fade // 2]]
    keep_tails(rows, about, tails)
    for dtype in (torch.float32, torch.int16):
        got = finish(rows, about, tails, dtype).numpy()
        for row, numbers, tail, found in zip(rows.numpy(), about, former, got, strict=True):
            expected = row[: numbers[0]].copy()
            blend(expected, tail)
            if dtype is torch.int16:
                expected = to_s16(expected)
            np.testing.assert_array_equal(found[: len(expected)], expected)


@pytest.mark.parametrize("part", ["none", "norm_in", "conv_out", "ff_norm", "query", "ff_out"])
def test_products_of_xcodec2_read_float16_if_nothing_can_exceed_it(
    tmp_path: Path, part: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_XCODEC2))
    plain = create_decoder(tmp_path, test_mode=True)
    assert isinstance(plain, Xcodec2Decoder)
    network = plain._network
    assert isinstance(network, Xcodec2Network)
    for name, weight in network.named_parameters():
        if part in name and name.endswith("weight"):
            weight.flatten()[-1] = 1e6
    expected = torch.float16 if part == "none" else torch.float32
    assert product_dtype(network) is expected
