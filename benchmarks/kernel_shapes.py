"""Products and layers of published shapes with random weights, measured inside of CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import ForwardBatch, KVSlots
from llm.kernels.blocks import Blocks
from llm.kernels.float8 import normalise_quantized
from llm.kernels.packed import FEW_ROWS_WARPS, packed_gated_product, packed_product
from llm.kernels.products import gated_product, product
from llm.kernels.registry import KernelSet
from llm.kernels.rounding import quantize_rows
from llm.kernels.tuning import MAX_ROWS, blocks_for
from llm.kernels.words import OUTPUTS, UNIT_BITS, UNITS, Words, joined
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
)
from llm.layers.linear import Float8Linear, FloatLinear, PackedLinear
from llm.layers.rotary import RotaryConfig
from llm.layers.stack import create_stack
from llm.layers.weight import LinearWeight
from llm.parallel.group import NullGroup

Matrix = FloatLinear | Float8Linear | PackedLinear

WORKING_SET = 512 * 2**20  # bytes of weights that are read in turn: several times the cache
REPLAYS = 9
EPSILON = 1e-5
PACKED = {
    "gptq": (4, 128, False),
    "awq": (4, 128, True),
    "q4_0": (4, 32, False),
    "q4_1": (4, 32, True),
    "q4_k": (4, 32, True),
    "q6_k": (8, 16, False),
    "q8_0": (8, 32, False),
}
"""Bits, inputs of a group, and whether there are minimums, by format of packed matrices."""
FACTORED = ("q4_k", "q6_k")
"""Formats whose scales are products of two factors, of a block and of a group."""
HEADS = {name: "q6_k" if name.startswith("q4") else "" for name in PACKED}
"""Formats of the head of a file whose layers are packed; else it is bfloat16."""
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
FLOAT8 = "float8"
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix of a model, and the operations fused with it."""

    model: str
    name: str
    num_out: int
    num_in: int
    parts: int = 1
    is_normed: bool = False
    is_added: bool = False
    out_dtype: torch.dtype = DTYPE
    is_float8: bool = False
    packed: str = ""  # a format of PACKED

    @property
    def weight_width(self) -> int:
        """Bytes of one weight that is not packed."""
        return 1 if self.is_float8 else 2

    @property
    def weight_bytes(self) -> int:
        """Size of all its parts in bfloat16, float8 or packed."""
        count = self.parts * self.num_out * self.num_in
        if not self.packed:
            return count * self.weight_width
        bits, group, has_minimums = PACKED[self.packed]
        scales = count // group * SCALE_BYTES
        if self.packed in FACTORED:
            scales = count // group + count * bits // (UNITS * UNIT_BITS) * SCALE_BYTES
        return count * bits // 8 + scales * (1 + has_minimums)

    def blocks(self, rows: int, *, in_half: bool = False) -> Blocks | None:
        """Return the tile sizes that a model uses, of float8 also those for sums in float16."""
        if self.packed:
            block_in = UNITS * UNIT_BITS // PACKED[self.packed][0]
            return Blocks(OUTPUTS, block_in, FEW_ROWS_WARPS) if rows <= MAX_ROWS else None
        width = self.weight_width
        return blocks_for(
            self.num_out,
            self.num_in,
            rows,
            parts=self.parts,
            weight_bytes=width,
            in_half=in_half,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a published model."""

    name: str
    num_layers: int
    hidden: int
    heads: AttentionShape
    mlp: int
    vocabulary: int
    has_head_norm: bool = False

    def products_in(self, form: str) -> tuple[Product, ...]:
        """Return the products, with matrices of the layers in bfloat16 (""), float8 or packed."""
        *layer, head = self.products
        packed, is_float8 = form if form in PACKED else "", form == FLOAT8
        found = (replace(product, is_float8=is_float8, packed=packed) for product in layer)
        return (*found, replace(head, packed=HEADS.get(form, "")))

    @property
    def products(self) -> tuple[Product, ...]:
        """Return the products of a layer and of the head."""
        heads = self.heads
        own, all_heads = heads.num_heads, heads.num_heads + 2 * heads.num_kv_heads
        name, hidden, size = self.name, self.hidden, heads.head_dim
        return (
            Product(name, "qkv", all_heads * size, hidden, is_normed=True),
            Product(name, "output", hidden, own * size, is_added=True),
            Product(name, "gate-up", self.mlp, hidden, parts=2, is_normed=True),
            Product(name, "down", hidden, self.mlp, is_added=True),
            Product(name, "head", self.vocabulary, hidden, is_normed=True, out_dtype=torch.float32),
        )


MODELS = {
    model.name: model
    for model in (
        Model("llama-1b", 16, 2048, AttentionShape(32, 8, 64), 8192, 193_800),
        Model("llama-3b", 28, 3072, AttentionShape(24, 8, 128), 8192, 156_940),
        Model("qwen3-0.6b", 28, 1024, AttentionShape(16, 8, 128), 3072, 151_936, True),
    )
}


@dataclass(frozen=True, slots=True)
class ProductMethod:
    """A method to compute a product: the built-in kernel with these blocks, or cuBLAS."""

    blocks: Blocks | None = None

    def __str__(self) -> str:
        if self.blocks is None:
            return "cuBLAS"
        cut = self.blocks
        return f"{cut.block_out} × {cut.block_in}, {cut.num_warps} warps, {cut.programs} programs"


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers in bfloat16."""
    return torch.randn(*shape, device=DEVICE).mul_(scale).to(DTYPE)


class WeightsOfProduct:
    """Tensors of one product for a number of rows; enough matrices to exceed the cache."""

    def __init__(self, item: Product, rows: int, copies: int | None = None) -> None:
        self.item = item
        self._x, self._gain = normal(rows, item.num_in), normal(item.num_in)
        count = copies or max(2, min(32, -(-WORKING_SET // item.weight_bytes)))
        scale = item.num_in**-0.5
        shape = (item.parts * item.num_out, item.num_in)
        form = item.packed or (FLOAT8 if item.is_float8 else "")
        self._weights = [_matrix(*shape, scale=scale, form=form) for _ in range(count)]
        self._out = torch.zeros(rows, item.num_out, device=DEVICE, dtype=item.out_dtype)

    def call(self, method: ProductMethod, index: int = 0, level: int = 2) -> Tensor:
        """Compute the product once."""
        item, x, matrix, out = self.item, self._x, self._weights[index], self._out
        weight, scales = matrix.weight, matrix.scales if isinstance(matrix, Float8Linear) else None
        gain = self._gain if item.is_normed else None
        if method.blocks is None and (item.is_float8 or item.packed):
            return self._layers_product(matrix)
        if method.blocks is None and isinstance(weight, Tensor):
            if item.is_added:
                return torch.addmm(out, x, weight.t(), out=out)
            return F.linear(x, weight)
        assert method.blocks is not None
        if isinstance(weight, Words):
            return self._packed_product(weight, level)
        if item.parts == 2:
            return gated_product(
                x, weight, method.blocks, scales=scales, gain=gain, epsilon=EPSILON, level=level
            )
        product(
            x,
            weight,
            out,
            method.blocks,
            scales=scales,
            gain=gain,
            epsilon=EPSILON,
            adds=item.is_added,
            level=level,
        )
        return out

    def _packed_product(self, weight: Words, level: int) -> Tensor:
        """Compute the product of a few rows."""
        item, x, out, gain = self.item, self._x, self._out, self._gain
        if item.parts == 2:
            return packed_gated_product(x, weight, gain=gain, epsilon=EPSILON, level=level)
        normed: dict[str, Any] = {"gain": gain, "epsilon": EPSILON} if item.is_normed else {}
        packed_product(x, weight, out, adds=item.is_added, level=level, **normed)
        return out

    def _layers_product(self, matrix: Matrix) -> Tensor:
        """Compute the product as a layer does for many rows: with rounding and torch's BLAS, or
        packed.
        """
        if self.item.is_normed and isinstance(matrix, Float8Linear):
            return matrix(normalise_quantized(self._x, self._gain, EPSILON))
        found = matrix(self._x)
        return self._out.add_(found) if self.item.is_added else found

    def microseconds(self, method: ProductMethod) -> float:
        """Return the time of one product, the median of several replays."""

        def run() -> None:
            for index in range(len(self._weights)):
                self.call(method, index)

        return graph_microseconds(run) / len(self._weights)

    def error(self, method: ProductMethod) -> float:
        """Return the error relative to float32."""
        item, x = self.item, self._x.float()
        if item.is_normed:
            x = x * torch.rsqrt((x * x).sum(1, keepdim=True) + EPSILON) * self._gain.float()
        matrix = self._weights[0]
        weight = matrix.weight
        weight = weight.expand() if isinstance(weight, Words) else weight.float()
        if isinstance(matrix, Float8Linear):
            rows = quantize_rows(x)
            x = rows.values.float() * rows.scales[:, None]
            weight = weight * matrix.scales[:, None]
        expected = x @ weight.t()
        if item.parts == 2:
            gate, up = expected.chunk(2, 1)
            expected = F.silu(gate) * up
        self._out.fill_(0 if item.is_added else float("nan"))
        found = self.call(method).float().clone()
        self._out.zero_()
        return ((found - expected).norm() / expected.norm()).item()


def graph_microseconds(run: Callable[[], None]) -> float:
    """Return the median time of replays of the work that `run` queues."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


class NoAttention:
    """A cache that stores keys and values, and returns queries unchanged."""

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._pool = pool
        self._slots = slots

    @property
    def forward_batch(self) -> ForwardBatch:
        raise NotImplementedError

    def slots(self, layer: int) -> KVSlots:
        """See `KVCacheInputs`."""
        return KVSlots(self._pool.keys(layer), self._pool.values(layer), self._slots)

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """See `KVCacheInputs`."""
        self._pool.write(layer, self._slots, key_value)
        return query.flatten(1)

    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """See `KVCacheInputs`."""
        return query.flatten(1)

    def advanced(self, next_tokens: Tensor) -> NoAttention:
        """See `KVCacheInputs`."""
        return self


def _norm(model: Model) -> RMSNorm:
    return RMSNorm(normal(model.hidden), EPSILON)


def random_words(num_out: int, num_in: int, kind: str, scale: float) -> Words:
    """Return a packed matrix of random bits, whose weights have about this deviation."""
    bits, group, has_minimums = PACKED[kind]
    block = UNITS * UNIT_BITS // bits
    tiles, blocks = -(-num_out // OUTPUTS), -(-num_in // block)
    bounds, shape = (-(2**31), 2**31), (tiles, blocks, 2, 32, UNITS)
    values = torch.randint(*bounds, shape, dtype=torch.int32, device=DEVICE)
    groups = (tiles, blocks, 8, max(1, block // group), 2)
    scales = torch.rand(groups, device=DEVICE).add_(0.5).mul_(scale).div_(2**bits / 12**0.5)
    minimums = scales.mul(-(2 ** (bits - 1)))
    if kind in FACTORED:
        integers = torch.randint(192, 256, groups, device=DEVICE)
        scales, minimums = (joined(part.amax(3).div_(127), integers) for part in (scales, minimums))
    else:
        scales, minimums = scales.half(), minimums.half()
    return Words(values, scales, minimums if has_minimums else None, bits, (num_out, num_in))


def _matrix(num_out: int, num_in: int, *, scale: float, form: str) -> Matrix:
    if form in PACKED:
        return PackedLinear(random_words(num_out, num_in, form, scale))
    weight = LinearWeight(normal(num_out, num_in, scale=scale))
    return (Float8Linear if form == FLOAT8 else FloatLinear)(weight, DTYPE, DEVICE)


def _layers(model: Model, num_layers: int, form: str) -> Iterator[DecoderLayer]:
    def linear(num_out: int, num_in: int) -> Matrix:
        return _matrix(num_out, num_in, scale=num_in**-0.5, form=form)

    qkv, output, gate_up, down, _ = model.products
    heads = model.heads
    for index in range(num_layers):
        head_norm = None
        if model.has_head_norm:
            gains = torch.randn(heads.num_heads + heads.num_kv_heads, heads.head_dim)
            head_norm = HeadNorm(gains.to(DEVICE), EPSILON)
        weights = AttentionWeights(
            linear(qkv.num_out, qkv.num_in), linear(output.num_out, output.num_in), head_norm
        )
        mlp = GatedMLP(
            linear(2 * gate_up.num_out, gate_up.num_in),
            linear(down.num_out, down.num_in),
            NullGroup(),
        )
        attention = SelfAttention(index, heads, weights, NullGroup())
        yield DecoderLayer(_norm(model), attention, _norm(model), mlp)


def step_microseconds(
    name: str, rows: int, kernels: KernelSet, num_layers: int = 0, *, form: str = ""
) -> float:
    """Return the time of all layers and the head, without attention, for `rows` decode rows."""
    model = MODELS[name]
    num_layers = num_layers or model.num_layers
    hidden_size = model.hidden
    head = HEADS.get(form, "")
    weight = _matrix(model.vocabulary, hidden_size, scale=hidden_size**-0.5, form=head)
    layers = list(_layers(model, num_layers, form))
    stack = create_stack(layers, LogitsHead(_norm(model), weight), kernels)
    heads = model.heads
    pool = KVPool(num_layers, 1 + rows // 16, 16, heads.num_kv_heads, heads.head_dim, DTYPE, DEVICE)
    cache = NoAttention(pool, torch.arange(rows, device=DEVICE))
    rotary = Rotary(RotaryConfig(heads.head_dim), rows, DEVICE)
    rotations = rotary.at(torch.arange(rows, device=DEVICE))
    x = normal(rows, model.hidden)
    logits = torch.empty(rows, model.vocabulary, device=DEVICE)

    def run() -> None:
        hidden = x.clone()
        for layer in stack.layers:
            layer(hidden, rotations, cache)
        assert stack.head is not None
        stack.head(hidden, logits)

    return graph_microseconds(run)
