"""Built-in kernels against their references on the CPU; run by `test_kernels.py` with Triton's
interpreter.

The interpreter executes a kernel block by block, without compilation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.attention.base import AttentionOptions, PlannedAttention
from llm.attention.few_rows import FewRowsDecode
from llm.attention.gathered import GatheredBackend
from llm.attention.many_rows import ManyRowsDecode
from llm.attention.page_lists import PageLists
from llm.attention.sdpa import SdpaBackend
from llm.batch import ForwardBatch, ForwardMode
from llm.kernels.blocks import Blocks, Tiles
from llm.kernels.elementwise import gate, normalise
from llm.kernels.experts import choose_experts, sort_pairs
from llm.kernels.float8 import gate_quantized, normalise_quantized, quantize
from llm.kernels.frames import attend_frame
from llm.kernels.products import gated_product, product
from llm.kernels.registry import KernelSet
from llm.kernels.rounding import FLOAT8, ScaledProduct, quantize_rows
from llm.kernels.split_products import add_normalised, multiply_gated, multiply_split
from llm.kernels.tuning import MANY_OUTPUTS, MAX_ROWS
from llm.kernels.words import Words
from llm.kv_cache.kv_pool import KVPool
from llm.layers.decoder import (
    AttentionShape,
    AttentionWeights,
    DecoderLayer,
    GatedMLP,
    HeadNorm,
    LogitsHead,
    RMSNorm,
    Rotary,
    SelfAttention,
    rotate_,
    silu_and_multiply,
)
from llm.layers.depth import DepthTransformer
from llm.layers.experts import (
    ExpertMatrix,
    ExpertsShape,
    GroupedExperts,
    SeparateExperts,
    SparseExperts,
    choose,
)
from llm.layers.factory import LinearFactory
from llm.layers.fused import FusedHead, FusedLayer, NormedProduct
from llm.layers.groups import Groups
from llm.layers.linear import Linear
from llm.layers.rotary import RotaryConfig
from llm.layers.split_depth import SplitFrames
from llm.layers.weight import LinearWeight
from llm.parallel.group import NullGroup
from llm.request import FrameShape
from llm.sampling.device.records import NO_ID
from tests.llm.kernels.triton_interpreter import repair_interpreter

repair_interpreter()

EPSILON = 1e-4
HALF = torch.bfloat16
ALL = KernelSet.choose(vendor_blas=False, experimental=True, launch_level=0)
STABLE = KernelSet.choose(vendor_blas=False, experimental=False, launch_level=0)
VENDOR = KernelSet.choose(vendor_blas=True, experimental=False, launch_level=0)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def normalised(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + EPSILON) * gain.double()


BLOCKS = [Blocks(4, 64, 4), Blocks(2, 32, 4, 3)]


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("rows", "num_out", "num_in", "dtype"),
    [(1, 16, 64, HALF), (3, 13, 100, torch.float32), (5, 7, 33, HALF)],
)
def test_a_product(
    blocks: Blocks, rows: int, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    x, weight = normal(rows, num_in, dtype=dtype), normal(num_out, num_in, dtype=dtype)
    gain, bias = normal(num_in, dtype=dtype), normal(num_out, dtype=dtype)
    expected = x.double() @ weight.double().t()
    out = torch.full((rows, num_out), float("nan"))
    product(x, weight, out, blocks)
    assert relative_error(out, expected) < 1e-6
    product(x, weight, out, blocks, bias=bias, adds=True)
    assert relative_error(out, 2 * expected + bias.double()) < 1e-6
    product(x, weight, out, blocks, gain=gain, epsilon=EPSILON)
    assert relative_error(out, normalised(x, gain) @ weight.double().t()) < 1e-6


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize(
    "needed", [(107, 112), (90, 104), (110, 500), (0, NO_ID), (NO_ID, 0), (0, 90)]
)
def test_a_product_of_needed_outputs(blocks: Blocks, needed: tuple[int, int]) -> None:
    """Outputs are ids from 100 on; those of the tiles that have a needed one are computed, but none
    from the end of the needed ones on, other than one where none is needed.
    """
    first_id, num_out = 100, 13
    x, weight = normal(2, 33), normal(num_out, 33)
    ids = torch.arange(first_id, first_id + num_out)
    first = min(max(needed[0] - first_id, 0), num_out - 1)
    tile_id = first // blocks.block_out * blocks.block_out + first_id
    computed = (ids >= tile_id) & (ids < max(needed[1], first + first_id + 1))
    out = torch.full((2, num_out), float("nan"))
    bounds = torch.tensor(needed, dtype=torch.int32)
    product(x, weight, out, blocks, needed=bounds, first_id=first_id)
    assert out[:, ~computed].isnan().all()
    expected = x.double() @ weight[computed].double().t()
    torch.testing.assert_close(out[:, computed].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_gated_product(blocks: Blocks, rows: int) -> None:
    x, weight, gain = normal(rows, 100), normal(2 * 13, 100), normal(100)
    left, right = (normalised(x, gain) @ weight.double().t()).chunk(2, dim=1)
    found = gated_product(x, weight, blocks, gain=gain, epsilon=EPSILON)
    assert relative_error(found, F.silu(left) * right) < 1e-6


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = normal(4, 100, dtype=HALF), normal(13, 100, dtype=HALF)
    together, alone = torch.empty(4, 13), torch.empty(4, 13)
    product(x, weight, together, BLOCKS[0])
    for row in range(4):
        product(x[row, None], weight, alone[row, None], BLOCKS[0])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("rows", [1, 5])
def test_norm_and_gate(size: int, rows: int) -> None:
    x, norm = normal(rows, size), RMSNorm(normal(size), 1e-5)
    assert torch.allclose(normalise(x, norm.gain, norm.epsilon), norm(x), atol=1e-6)
    assert torch.allclose(gate(x), silu_and_multiply(x.clone()), atol=1e-6)


def plain(dtype: torch.dtype = HALF) -> LinearFactory:
    """Return the factory of matrices in floating point."""
    return LinearFactory(dtype=dtype, device=torch.device("cpu"), int8=False, vendor_blas=True)


class Parts:
    """A layer with random weights, and a step of rows over a pool that holds some tokens."""

    hidden, inner, page_size = 48, 32, 8

    def __init__(
        self,
        *,
        head_dim: int = 8,
        bias: bool = False,
        head_norm: bool = False,
        float8: bool = False,
        packed: bool = False,
    ) -> None:
        self.head_dim = head_dim
        factory = LinearFactory(
            dtype=HALF, device=torch.device("cpu"), int8=False, float8=float8, vendor_blas=True
        )
        factory._reads_words = packed  # as on a GPU

        def linear(num_out: int, num_in: int) -> LinearWeight:
            weight = normal(num_out, num_in) * num_in**-0.5
            groups = None
            if packed:
                groups = PackedCase(8, 16, num_in, num_out=num_out).make()
                weight = groups.values
            return LinearWeight(weight, None, normal(num_out) if bias else None, (), groups)

        heads, kv_heads, group = 4, 2, NullGroup()
        self.kv_heads = kv_heads
        weights = AttentionWeights(
            factory.linear(linear((heads + 2 * kv_heads) * head_dim, self.hidden)),
            factory.linear(linear(self.hidden, heads * head_dim)),
            HeadNorm(normal(heads + kv_heads, head_dim), 1e-5) if head_norm else None,
        )
        shape = AttentionShape(heads, kv_heads, head_dim)
        self.counterpart = DecoderLayer(
            self.norm(),
            SelfAttention(0, shape, weights, group),
            self.norm(),
            GatedMLP(
                factory.linear(linear(2 * self.inner, self.hidden)),
                factory.linear(linear(self.hidden, self.inner)),
                group,
            ),
        )
        self.head = LogitsHead(self.norm(), factory.head(linear(50, self.hidden)))
        self.rotary = Rotary(RotaryConfig(head_dim), 64, torch.device("cpu"))

    def norm(self) -> RMSNorm:
        return RMSNorm(normal(self.hidden, dtype=HALF), 1e-5)

    def batch(self, rows: int) -> ForwardBatch:
        """Return one token of each row, the n-th at position 5 + n."""
        positions = torch.arange(rows) + 5
        pages = tuple((1 + 2 * row, 2 + 2 * row) for row in range(rows))
        slots = [
            pages[row][position // self.page_size] * self.page_size + position % self.page_size
            for row, position in enumerate(positions.tolist())
        ]
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            request_ids=tuple(map(str, range(rows))),
            query_lens=(1,) * rows,
            context_lens=tuple((positions + 1).tolist()),
            pages=pages,
            page_size=self.page_size,
            input_ids=torch.zeros(rows, dtype=torch.int64),
            positions=positions,
            slot_mapping=torch.tensor(slots),
        )

    def run(
        self, kernels: KernelSet | None, x: Tensor, backend: type = GatheredBackend
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's result for x, and the pool afterwards."""
        layer = self.counterpart if kernels is None else FusedLayer(self.counterpart, kernels)
        pool = KVPool(1, 40, self.page_size, self.kv_heads, self.head_dim, HALF)
        generator = torch.Generator().manual_seed(1)
        pool.storage[0].copy_(torch.randn(pool.storage[0].shape, generator=generator))
        batch = self.batch(len(x))
        options = AttentionOptions(num_heads=4, dtype=HALF)
        cache = PlannedAttention.create(batch, backend(pool, options))
        found = x.clone()
        layer(found, self.rotary.at(batch.positions), cache)
        return found, pool.storage[0]


@pytest.mark.parametrize("kernels", [ALL, STABLE, VENDOR], ids=["all", "stable", "vendor"])
@pytest.mark.parametrize("rows", [1, MAX_ROWS, MAX_ROWS + 1])
def test_a_layer(kernels: KernelSet, rows: int) -> None:
    parts = Parts()
    x = normal(rows, parts.hidden, dtype=HALF)
    expected, pool = parts.run(None, x)
    found, stored = parts.run(kernels, x)
    assert relative_error(found - x, expected - x) < 0.02
    assert relative_error(stored, pool) < 0.01


@pytest.mark.parametrize(
    "parts",
    [Parts(head_dim=12), Parts(bias=True), Parts(head_norm=True)],
    ids=["odd heads", "biases", "normalised heads"],
)
def test_layers_of_other_architectures(parts: Parts) -> None:
    x = normal(2, parts.hidden, dtype=HALF)
    expected, pool = parts.run(None, x)
    found, stored = parts.run(ALL, x)
    assert relative_error(found - x, expected - x) < 0.02
    assert relative_error(stored, pool) < 0.01


@pytest.mark.parametrize("kernels", [ALL, STABLE, VENDOR], ids=["all", "stable", "vendor"])
@pytest.mark.parametrize("rows", [1, MAX_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_float8_layer(kernels: KernelSet, rows: int, bias: bool) -> None:
    """Few rows are rounded to float8 from a norm in float32, not in bfloat16 as many and those of
    the reference. What differs in the last bit of bfloat16 may differ in the last of float8's four.
    """
    parts = Parts(float8=True, bias=bias)
    x = normal(rows, parts.hidden, dtype=HALF)
    expected, pool = parts.run(None, x)
    found, stored = parts.run(kernels, x)
    assert relative_error(found - x, expected - x) < 0.05
    assert relative_error(stored, pool) < 0.02
    layer = FusedLayer(parts.counterpart, kernels)
    projected, matrix = layer._qkv.scaled(x), layer._qkv.matrix
    is_scaled = kernels is not VENDOR and rows > MAX_ROWS and not bias
    assert isinstance(projected, ScaledProduct) == is_scaled
    assert matrix is None or matrix.in_half
    own = 4 - bias  # a gated product has no bias
    assert layer.num_kernel_products == (0 if kernels is VENDOR else own)
    parts.head(x)
    assert FusedHead(parts.head, STABLE).num_kernel_products == 1


@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_float8_product(blocks: Blocks, rows: int, in_half: bool) -> None:
    """Float8 numbers multiply exactly, and only in half are some of their sums rounded."""
    blocks, most = replace(blocks, in_half=in_half), 1e-3 if in_half else 1e-6
    x, weight = normal(rows, 100, dtype=HALF), quantize_rows(normal(13, 100))
    rounded = quantize_rows(x)
    matrix = weight.values.double() * weight.scales.double()[:, None]
    expected = (rounded.values.double() * rounded.scales.double()[:, None]) @ matrix.t()
    out = torch.full((rows, 13), float("nan"))
    product(x, weight.values, out, blocks, scales=weight.scales)
    assert relative_error(out, expected) < most
    product(x, weight.values, out, blocks, scales=weight.scales, adds=True)
    assert relative_error(out, 2 * expected) < most


@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_gated_float8_product(rows: int, in_half: bool) -> None:
    x, weight, gain = normal(rows, 100), quantize_rows(normal(26, 100)), normal(100)
    rounded = quantize_rows(x * gain)  # the root is in the scale
    root = torch.rsqrt((x.double() ** 2).sum(1, keepdim=True) + EPSILON)
    matrix = weight.values.double() * weight.scales.double()[:, None]
    inputs = rounded.values.double() * rounded.scales.double()[:, None] * root
    left, right = (inputs @ matrix.t()).chunk(2, dim=1)
    blocks = replace(BLOCKS[0], in_half=in_half)
    found = gated_product(
        x, weight.values, blocks, scales=weight.scales, gain=gain, epsilon=EPSILON
    )
    assert relative_error(found, F.silu(left) * right) < (1e-3 if in_half else 1e-6)


@dataclass(frozen=True)
class PackedCase:
    """A random packed matrix [num_out, num_in]."""

    bits: int
    group: int
    num_in: int
    has_minimums: bool = False
    is_wide: bool = False  # scales need more bits than float16 has
    num_out: int = 5

    def make(self) -> Groups:
        bounds = (0, 16) if self.bits == 4 else (-128, 128)
        dtype = torch.uint8 if self.bits == 4 else torch.int8
        numbers = torch.randint(*bounds, (self.num_out, self.num_in), dtype=dtype)
        parts = torch.randn(2, self.num_out, self.num_in // self.group) * self.num_in**-0.5
        parts[0] /= 4.6 if self.bits == 4 else 74.0  # the deviation of the numbers
        scales, minimums = parts if self.is_wide else parts.half()
        found = Groups.pack(numbers, scales, minimums if self.has_minimums else None, self.group)
        assert found is not None
        assert found.has_pairs == (self.bits == 4)
        return found


PACKED_CASES = [
    PackedCase(4, 32, 96),
    PackedCase(4, 32, 160, has_minimums=True, is_wide=True),
    PackedCase(4, 128, 256),
    PackedCase(8, 16, 48, is_wide=True),
    PackedCase(8, 32, 96, has_minimums=True),
]
packed_cases = pytest.mark.parametrize("case", PACKED_CASES, ids=str)


@packed_cases
def test_words_keep_every_number(case: PackedCase) -> None:
    groups = case.make()
    words = groups.to_words(torch.device("cpu"))
    assert words.shape == (case.num_out, case.num_in)
    assert words.scales.dtype is (torch.float32 if case.is_wide else torch.float16)
    assert torch.equal(words.expand(), groups.expand())


def test_a_packed_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With products in float32 for those of a GPU."""

    def multiply(x: Tensor, weight: Words, out: Tensor, *, in_one_order: bool) -> None:
        out.copy_(x.float() @ weight.expand().t())

    monkeypatch.setattr("llm.kernels.packed.multiply_packed", multiply)
    parts = Parts(packed=True)
    x = normal(1, parts.hidden, dtype=HALF)
    expected, pool = parts.run(None, x)
    found, stored = parts.run(VENDOR, x)
    assert relative_error(found - x, expected - x) < 0.02
    assert relative_error(stored, pool) < 0.01
    layer = FusedLayer(parts.counterpart, ALL)
    assert layer.num_kernel_products == 4


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_rounded_to_float8(rows: int) -> None:
    """Bit for bit without an operation before; else it is float32's rounding that differs."""
    x, norm = normal(rows, 96, dtype=HALF), RMSNorm(normal(96), 1e-5)
    x[0, :7] *= 1e-4
    found, expected = quantize(x), quantize_rows(x)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    for found, exact in (
        (normalise_quantized(x, norm.gain, norm.epsilon), norm(x)),
        (gate_quantized(x), (F.silu(x[:, :48].float()) * x[:, 48:].float()).to(HALF)),
    ):
        expected = quantize_rows(exact)
        same = found.values.float() == expected.values.float()
        assert same.float().mean() > 0.98
        values = found.values.float() * found.scales[:, None]
        assert relative_error(values, expected.values.float() * expected.scales[:, None]) < 0.01
    zeros = quantize(torch.zeros(rows, 96))
    assert not zeros.values.float().any()


@dataclass(frozen=True)
class ExpertCase:
    """A sparse layer of hidden size 48 and inner size 40, and the experts of a rank."""

    num_experts: int
    num_chosen: int
    normalizes: bool = True
    first: int = 0
    count: int | None = None  # None: all

    @property
    def own(self) -> range:
        count = self.num_experts if self.count is None else self.count
        return range(self.first, self.first + count)


EXPERT_CASES = [
    ExpertCase(6, 2),
    ExpertCase(5, 3, normalizes=False),
    ExpertCase(8, 3, first=4, count=4),
    ExpertCase(3, 3),
    ExpertCase(2, 1, first=1, count=1),
]


def experts_of(
    case: ExpertCase, dtype: torch.dtype = torch.float32, *, float8: bool = False
) -> tuple[SeparateExperts, GroupedExperts]:
    """Return the same experts one by one and grouped."""
    hidden, inner = 48, 40
    factory = LinearFactory(
        dtype=dtype, device=torch.device("cpu"), int8=False, float8=float8, vendor_blas=True
    )
    gate_ups, downs = (
        [LinearWeight(normal(num_out, num_in) * num_in**-0.5) for _ in case.own]
        for num_out, num_in in ((2 * inner, hidden), (hidden, inner))
    )
    shape = ExpertsShape(case.num_experts, case.num_chosen, inner, 0, case.normalizes)
    mlps = [
        GatedMLP(factory.linear(gate_up), factory.linear(down), NullGroup())
        for gate_up, down in zip(gate_ups, downs, strict=True)
    ]
    matrices = [ExpertMatrix.load(each, len(case.own), factory) for each in (gate_ups, downs)]
    first = case.own.start
    return SeparateExperts(shape, first, mlps), GroupedExperts(shape, first, *matrices)


# Rows of a rank's experts that no token has chosen are not set, and numpy warns of their values.
any_values = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@any_values
@pytest.mark.parametrize(
    ("case", "rows"),
    [*((case, 9) for case in EXPERT_CASES), *((EXPERT_CASES[n], 1) for n in (0, 4))],
)
def test_experts(case: ExpertCase, rows: int) -> None:
    for dtype, error in ((torch.float32, 1e-6), (torch.float16, 3e-3)):
        separate, grouped = experts_of(case, dtype)
        x, logits = normal(rows, 48, dtype=dtype), normal(rows, case.num_experts, dtype=dtype)
        expected = separate(x, logits)
        found = grouped(x, logits)
        assert (found - expected).norm() <= error * expected.norm()
        assert expected.any() or rows == 1


def test_an_experts_rows_fill_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows choose the same expert; their pairs are read in several blocks, too."""
    monkeypatch.setattr("llm.kernels.experts.SORT_BLOCK", 16)
    separate, grouped = experts_of(ExpertCase(16, 1))
    x, logits = normal(20, 48), normal(1, 16).expand(20, 16).contiguous()
    assert torch.allclose(grouped(x, logits), separate(x, logits), atol=1e-5)


@any_values
@pytest.mark.parametrize("case", EXPERT_CASES[:3], ids=str)
def test_float8_experts(case: ExpertCase) -> None:
    separate, grouped = experts_of(case, float8=True)
    x, logits = normal(9, 48), normal(9, case.num_experts)
    assert relative_error(grouped(x, logits), separate(x, logits)) < 0.01


def test_a_choice_of_experts() -> None:
    """The first of equal experts are chosen."""
    shape = ExpertsShape(20, 4, 8, 0, normalizes=True)
    logits = normal(9, 20)
    chosen, shares = choose_experts(logits, 4, normalizes=True)
    numbers, parts = choose(logits, shape)
    assert torch.equal(chosen.long(), numbers)
    assert torch.allclose(shares, parts)
    chosen, shares = choose_experts(torch.zeros(2, 20), 4, normalizes=False)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.allclose(shares, torch.full((2, 4), 1 / 20))


def test_pairs_are_sorted_by_expert_and_token() -> None:
    chosen = torch.tensor([[3, 0], [1, 3], [0, 2], [3, 1]], dtype=torch.int32)
    order, starts = sort_pairs(chosen, 0, 4)
    assert order.tolist() == [1, 4, 2, 7, 5, 0, 3, 6]
    assert starts.tolist() == [0, 2, 4, 5, 8]
    order, starts = sort_pairs(chosen, 2, 2)
    assert starts.tolist() == [0, 1, 4]
    assert order[:4].tolist() == [5, 0, 3, 6]


def test_a_layer_with_experts() -> None:
    parts = Parts()
    separate, _ = experts_of(ExpertCase(6, 2), HALF)
    router = plain().linear(LinearWeight(normal(6, parts.hidden)))
    sparse = SparseExperts(router, separate, None, NullGroup())
    parts.counterpart = replace(parts.counterpart, mlp=sparse)
    x = normal(2, parts.hidden, dtype=HALF)
    expected, _ = parts.run(None, x)
    found, _ = parts.run(ALL, x)
    assert relative_error(found - x, expected - x) < 0.02
    assert FusedLayer(parts.counterpart, ALL).num_kernel_products == 2


def test_a_layer_over_a_backend_that_stores_for_itself() -> None:
    parts = Parts()
    x = normal(2, parts.hidden, dtype=HALF)
    expected, pool = parts.run(None, x, SdpaBackend)
    found, stored = parts.run(ALL, x, SdpaBackend)
    assert relative_error(found - x, expected - x) < 0.02
    assert relative_error(stored, pool) < 0.01


@pytest.mark.parametrize("rows", [1, MAX_ROWS + 1])
def test_a_head(rows: int) -> None:
    parts = Parts()
    hidden, out = normal(rows, parts.hidden, dtype=HALF), torch.empty(rows, 50)
    head = FusedHead(parts.head, ALL)
    expected = parts.head(hidden)
    assert head(hidden).dtype is torch.float32
    assert relative_error(head(hidden), expected) < 0.01
    assert torch.equal(head(hidden, out), out)
    assert torch.equal(out, head(hidden))


@pytest.mark.parametrize("rows", [1, MAX_ROWS + 1])
def test_a_head_of_common_ids(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of other ids are only written where they are needed. The interpreter multiplies no
    tiles of bfloat16.
    """
    monkeypatch.setattr("llm.layers.fused.MANY_OUTPUTS", 600)
    parts, outputs = Parts(), 700
    norm, matrix = parts.norm(), normal(outputs, parts.hidden, dtype=torch.float16)
    reference = LogitsHead(norm, plain(torch.float16).linear(LinearWeight(matrix)))
    hidden = normal(rows, parts.hidden, dtype=torch.float16)
    every, needed = (torch.tensor(ids, dtype=torch.int32) for ids in ((0, outputs), (340, 380)))
    expected, head = reference(hidden), FusedHead(reference, ALL)
    out = torch.full((rows, outputs), torch.nan)
    assert relative_error(head(hidden, out, needed), expected) < 0.01  # not limited yet
    assert not head.limit((0, 351))
    assert head.limit((300, 390))
    out.fill_(torch.nan)
    found = head(hidden, out, needed)
    assert relative_error(found[:, 340:380], expected[:, 340:380]) < 0.01
    first, end = (320, 400) if rows <= MAX_ROWS else (256, 512)
    assert found[:, :first].isnan().all()
    assert found[:, end:].isnan().all()
    assert relative_error(head(hidden, out, every), expected) < 0.01
    assert relative_error(head(hidden), expected) < 0.01


def test_heads_that_are_not_limited() -> None:
    """Heads with few outputs, or with a matrix of wider numbers, compute all logits."""
    parts = Parts()
    assert not FusedHead(parts.head, ALL).limit((0, 10))
    assert not parts.head.limit((0, 10))


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [
        (64, MANY_OUTPUTS + 1, ["kernel"]),
        (65, MANY_OUTPUTS, [MANY_OUTPUTS]),
        (65, MANY_OUTPUTS + 1, [MANY_OUTPUTS, 1]),
        (9, 7, [7]),
    ],
)
def test_what_multiplies_the_head_of_a_large_vocabulary(
    rows: int, outputs: int, expected: list[str | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str | int] = []
    monkeypatch.setattr("llm.layers.fused.multiply_rows", lambda *_: chosen.append("kernel"))
    monkeypatch.setattr(torch, "mm", lambda x, matrix, **_: chosen.append(matrix.shape[1]))
    weight = torch.zeros(outputs, 8, dtype=HALF)
    product = NormedProduct(Parts().norm(), plain().linear(LinearWeight(weight)), ALL)
    product.multiply_wide(torch.zeros(rows, 8, dtype=HALF), weight, torch.empty(rows, outputs))
    assert chosen == expected


def test_the_selection_of_products() -> None:
    """Int8 matrices and those of another number format are computed by the layer."""
    parts = Parts()
    assert FusedLayer(parts.counterpart, ALL).num_kernel_products == 4
    assert FusedHead(parts.head, STABLE).num_kernel_products == 1
    assert FusedLayer(parts.counterpart, VENDOR).num_kernel_products == 0
    wide = plain(torch.float32)
    head = LogitsHead(parts.norm(), wide.linear(LinearWeight(normal(50, parts.hidden))))
    assert FusedHead(head, ALL).num_kernel_products == 0


def decoding(contexts: list[int], page_size: int) -> ForwardBatch:
    """Return a step of rows with these contexts, over pages in random order."""
    counts = [-(-context // page_size) for context in contexts]
    ids = (torch.randperm(sum(counts)) + 1).tolist()
    positions = torch.tensor(contexts) - 1
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        request_ids=tuple(map(str, contexts)),
        query_lens=(1,) * len(contexts),
        context_lens=tuple(contexts),
        pages=tuple(tuple(ids.pop() for _ in range(count)) for count in counts),
        page_size=page_size,
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=torch.zeros_like(positions),
    )


@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize(
    ("contexts", "splits", "window", "soft_cap"),
    [
        ([50], 4, None, None),
        ([130, 7, 1], 2, None, None),
        ([72, 65], 2, 20, None),
        ([66], 1, None, 5.0),
    ],
)
def test_decoding_a_few_rows(
    contexts: list[int],
    splits: int,
    window: int | None,
    soft_cap: float | None,
    is_float8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One split and several, some of several tiles, some without keys."""
    monkeypatch.setattr("llm.attention.few_rows.MAX_SPLITS", splits)
    page_size, heads, kv_heads, size = 8, 6, 2, 16
    batch = decoding(contexts, page_size)
    num_pages, dtype = sum(map(len, batch.pages)) + 1, torch.float32
    pool = KVPool(1, num_pages, page_size, kv_heads, size, FLOAT8 if is_float8 else dtype)
    pool.storage[0].copy_(normal(*pool.storage[0].shape).to(pool.dtype))
    options = AttentionOptions(heads, dtype, (window,), soft_cap, decode_level=0)
    query = normal(len(contexts), heads + 3, size)[:, :heads]
    expected = PlannedAttention.create(batch, GatheredBackend(pool, options))
    own = FewRowsDecode(pool, options, PageLists.of(batch, 0, len(contexts)))
    for _ in range(2):
        found = own.attend(0, query, window)
        error = relative_error(found, expected.attend_stored(0, query))
        assert error < (1e-3 if is_float8 else 1e-6)


@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize(
    ("contexts", "window", "soft_cap"),
    [([130, 7, 1, 64], None, None), ([72, 65], 20, None), ([200], 70, 5.0)],
)
def test_decoding_many_rows(
    contexts: list[int],
    window: int | None,
    soft_cap: float | None,
    is_float8: bool,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contexts of one split and of several, next to a row that another kernel computes."""
    monkeypatch.setattr("llm.attention.many_rows.SPLIT_KEYS", 64)
    heads, kv_heads, size = 6, 2, 16
    batch = decoding([*contexts, 9], page_size)
    num_pages, dtype = sum(map(len, batch.pages)) + 1, torch.float32
    pool = KVPool(1, num_pages, page_size, kv_heads, size, FLOAT8 if is_float8 else dtype)
    pool.storage[0].copy_(normal(*pool.storage[0].shape).to(pool.dtype))
    options = AttentionOptions(heads, dtype, (window,), soft_cap, decode_level=0)
    query = normal(len(contexts) + 1, heads + 3, size)[:, :heads]
    counterpart = PlannedAttention.create(batch, GatheredBackend(pool, options))
    expected = counterpart.attend_stored(0, query)
    count, scratch = len(contexts), torch.empty(4 * len(contexts) * kv_heads * 4 * (size + 2))
    own = ManyRowsDecode(pool, options, PageLists.of(batch, 0, count + 1), count, scratch)
    out = torch.full((count, heads * size), float("nan"))
    for _ in range(2):
        own.attend(0, query[:count], window, out)
        assert relative_error(out, expected[:count]) < (1e-3 if is_float8 else 1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 3, 24), (8, 1, 8)])
@pytest.mark.parametrize(("parts", "has_gain"), [(1, False), (3, True)])
def test_attention_within_a_frame(
    heads: int, kv_heads: int, size: int, parts: int, has_gain: bool
) -> None:
    """Position by position, in a cache with garbage after the position."""
    rows, positions = 3, 6
    cache = torch.full((2, rows, positions, kv_heads, size), torch.nan)
    rotations = Rotary(RotaryConfig(size), positions, torch.device("cpu")).at(
        torch.arange(positions)
    )
    norm = HeadNorm(normal(heads + kv_heads, size), EPSILON) if has_gain else None
    keys, values = [], []
    for position in range(positions):
        projected = normal(parts, rows, (heads + 2 * kv_heads) * size)
        own = projected.sum(0).view(rows, -1, size)
        if norm is not None:
            norm(own[:, : heads + kv_heads])
        rotate_(own[:, : heads + kv_heads], rotations[position].expand(rows, 1, -1))
        found = attend_frame(
            projected,
            rotations,
            cache,
            position,
            num_heads=heads,
            gain=None if norm is None else norm.gain,
            epsilon=0.0 if norm is None else norm.epsilon,
        )
        keys.append(own[:, heads : heads + kv_heads])
        values.append(own[:, heads + kv_heads :])
        past = [torch.stack(part, dim=2) for part in (keys, values)]  # [B, Hkv, P, D]
        query = own[:, :heads].unsqueeze(2)
        expected = F.scaled_dot_product_attention(query, *past, enable_gqa=True)
        torch.testing.assert_close(found, expected.reshape(rows, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache[0], torch.stack(keys, dim=1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache[1], torch.stack(values, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "has_gain"), [(4, 2, 8, True), (3, 1, 6, False)]
)
def test_the_first_two_positions_of_a_frame_come_together(
    heads: int, kv_heads: int, size: int, has_gain: bool, parts: int
) -> None:
    """With the results, and the keys and values, of one after the other."""
    rows, positions = 3, 4
    rotations = Rotary(RotaryConfig(size), positions + 1, torch.device("cpu")).at(
        torch.arange(1, positions + 1)  # of which none is the identity
    )
    gain = normal(heads + kv_heads, size) if has_gain else None
    projected = normal(parts, 2 * rows, (heads + 2 * kv_heads) * size, dtype=torch.float32)
    shape = (2, rows, positions, kv_heads, size)
    given = {"num_heads": heads, "gain": gain, "epsilon": EPSILON}
    cache, own = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    expected = [
        attend_frame(half, rotations, cache, position, **given)
        for position, half in enumerate(projected.split(rows, dim=1))
    ]
    found = attend_frame(projected, rotations, own, 0, **given)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own, cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("tiles", "num_out", "num_in"),
    [
        (Tiles(16, 1, 32, 4, 3), 32, 64),
        (Tiles(32, 2, 32, 4, 3), 50, 128),  # not all outputs of the last tile
        (Tiles(16, 3, 16, 4, 3), 13, 72),  # a shorter part, and a remainder
        (Tiles(16, 4, 32, 4, 3), 16, 64),  # parts without inputs
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [3, 33, 70])
def test_split_products(tiles: Tiles, num_out: int, num_in: int, rows: int) -> None:
    x, weight = normal(rows, num_in), normal(2 * num_out, num_in)
    expected = x.double() @ weight.double().t()
    found = multiply_split(x, weight, tiles)
    assert found.shape == (tiles.splits, rows, 2 * num_out)
    assert relative_error(found.sum(0), expected) < 1e-6
    if tiles.splits == 1:
        wide = torch.full((rows, 2 * num_out + 8), torch.nan)
        multiply_split(x, weight, tiles, out=wide[:, : 2 * num_out])
        assert torch.equal(wide[:, : 2 * num_out], found[0])
        assert bool(wide[:, 2 * num_out :].isnan().all())
        gate_half, up = expected.chunk(2, dim=1)
        gated = multiply_gated(x, weight, tiles)
        assert relative_error(gated, F.silu(gate_half) * up) < 1e-6


@pytest.mark.parametrize("parts", [0, 3])
def test_rows_are_added_and_normalised(parts: int) -> None:
    x, norm = normal(5, 48), RMSNorm(normal(48), 1e-5)
    sums = normal(parts, 5, 48) if parts else None
    expected = x + sums.sum(0) if sums is not None else x.clone()
    found = add_normalised(x, sums, norm.gain, norm.epsilon, x)
    assert torch.allclose(x, expected, atol=1e-6)
    assert torch.allclose(found, norm(expected), atol=1e-5)
    table, codes = normal(9, 48), torch.tensor([3, 0, 8, 8, 1], dtype=torch.int32)
    found = add_normalised(table, None, norm.gain, norm.epsilon, x, codes=codes)
    assert torch.equal(x, table[codes])
    assert torch.allclose(found, norm(x), atol=1e-6)


def depth_transformer(kernels: KernelSet, *, head_norm: bool, projects: bool) -> DepthTransformer:
    """Return the same random one for any kernels: frames of a code of 20 and three of 12."""
    made = torch.Generator().manual_seed(5)
    hidden, inner, heads, kv_heads, size = 48, 80, 4, 2, 16
    wide = hidden + 8 if projects else hidden
    dtype = torch.float16
    factory = LinearFactory(dtype=dtype, device=torch.device("cpu"), int8=False, vendor_blas=True)

    def linear(num_out: int, num_in: int) -> Linear:
        weight = torch.randn(num_out, num_in, generator=made) * num_in**-0.5
        return factory.linear(LinearWeight(weight))

    def norm() -> RMSNorm:
        return RMSNorm((1 + 0.1 * torch.randn(hidden, generator=made)).to(dtype), 1e-5)

    def layer(number: int) -> DecoderLayer:
        gains = 1 + 0.1 * torch.randn(heads + kv_heads, size, generator=made)
        weights = AttentionWeights(
            linear((heads + 2 * kv_heads) * size, hidden),
            linear(hidden, heads * size),
            HeadNorm(gains, 1e-5) if head_norm else None,
        )
        attention = SelfAttention(
            number, AttentionShape(heads, kv_heads, size), weights, NullGroup()
        )
        mlp = GatedMLP(linear(2 * inner, hidden), linear(hidden, inner), NullGroup())
        return DecoderLayer(norm(), attention, norm(), mlp)

    return DepthTransformer(
        shape=FrameShape(4, 20, 100, (1, 0, 0, 0), 12),
        embedding=torch.randn(20 + 3 * 12, wide, generator=made).to(dtype),
        projection=linear(hidden, wide) if projects else None,
        layers=[layer(number) for number in range(2)],
        rotary=Rotary(RotaryConfig(size), 4, torch.device("cpu")),
        heads=[LogitsHead(norm(), linear(12, hidden)) for _ in range(3)],
        kernels=kernels,
    )


@pytest.mark.parametrize(
    ("kernels", "head_norm", "projects", "counts"),
    [(ALL, True, False, (1, 4, 5)), (ALL, False, True, (4,)), (VENDOR, True, True, (1, 4))],
    ids=["head norm", "projection", "vendor"],
)
def test_a_depth_transformer(
    kernels: KernelSet,
    head_norm: bool,
    projects: bool,
    counts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For one row, some, and so many that each product is one of BLAS."""
    monkeypatch.setattr("llm.layers.split_depth.MAX_SPLIT_ROWS", 4)
    options = {"head_norm": head_norm, "projects": projects}
    plain, own = (depth_transformer(chosen, **options) for chosen in (KernelSet(), kernels))
    for rows in counts:
        hidden = normal(rows, plain.embedding.shape[1], dtype=torch.float16)
        frames, expected = own.begin(hidden), plain.begin(hidden)
        assert isinstance(frames, SplitFrames) == (rows == 4 and kernels is ALL)
        for code in range(3):
            codes = torch.randint(0, 12 + 8 * (code == 0), (rows,), dtype=torch.int32)
            found = frames.next_logits(codes)
            assert found.shape == (rows, 12)
            assert relative_error(found, expected.next_logits(codes)) < 5e-3
