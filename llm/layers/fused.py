"""The layers of `llm.layers.decoder` on a CUDA device, with built-in kernels.

    reference                        few rows                    many rows
    attention_norm, qkv, rotate,     project_heads, or product   normalise, BLAS,
      store of keys and values         and rotate_heads            rotate_heads
    output, x.add_                   product (adds)              BLAS (adds)
    mlp_norm, gate_up, silu × up     gated_product               normalise, BLAS, gate
    down, x.add_                     product (adds)              BLAS (adds)

Of a packed matrix all products are those of `llm.kernels.packed`.

With a float8 matrix the kernels round x to float8: product and project_heads themselves, the others
by `llm.kernels.float8`, whose result is the input of the product. With scaled_product BLAS only
multiplies the rounded numbers: the next kernel applies their scales, and what is added to x is
added before the next norm.

With several ranks the products that are added to x are sums over ranks: few rows are summed in the
product's kernel or in one after it (`llm.kernels.peers`), where GPUs share memory.

Experts, and a matrix that is not plain (int8, or changed by an adapter), are computed by their own
layer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llm.batch import KVCacheInputs, KVSlots
from llm.kernels.blocks import Blocks
from llm.kernels.elementwise import gate, normalise
from llm.kernels.float8 import add_scaled, gate_quantized, normalise_quantized, quantize
from llm.kernels.heads import rotate_heads
from llm.kernels.invariant import ALIGNMENT, multiply_others, multiply_rows
from llm.kernels.packed import (
    is_few,
    multiply_packed,
    packed_gated_product,
    packed_heads,
    packed_product,
)
from llm.kernels.peers import add_parcels
from llm.kernels.products import add_summed_product, gated_product, product
from llm.kernels.projections import project_heads
from llm.kernels.registry import KernelSet
from llm.kernels.rounding import Float8Rows, ScaledProduct
from llm.kernels.tuning import BLAS_OUTPUTS, MANY_OUTPUTS, MAX_ROWS, MAX_WIDE_ROWS, blocks_for
from llm.kernels.words import OUTPUTS, Words
from llm.layers.decoder import MLP, DecoderLayer, GatedMLP, LogitsHead, RMSNorm
from llm.layers.linear import BiasedLinear, Float8Linear, FloatLinear, Linear, PackedLinear
from llm.layers.weight import LinearWeight
from llm.parallel.group import Group
from llm.request import IdRange


class Matrix(NamedTuple):
    """A linear layer without adapters, in floating point, float8 or packed. Its methods are the
    kernels for few rows, and return False or None for more.
    """

    weight: Tensor | Words  # [N, K]
    bias: Tensor | None = None  # [N]
    scales: Tensor | None = None  # [N] of a float8 weight
    in_half: bool = False  # its products are added in float16

    def blocks(self, num_rows: int, parts: int = 1) -> Blocks | None:
        """Return the tile sizes of a product that is not packed; None: BLAS is faster."""
        assert isinstance(self.weight, Tensor)
        num_out, num_in = self.weight.shape
        width = self.weight.dtype.itemsize
        return blocks_for(
            num_out // parts,
            num_in,
            num_rows,
            parts=parts,
            weight_bytes=width,
            in_half=self.in_half,
        )

    def multiply(
        self,
        x: Tensor,
        out: Tensor,
        norm: RMSNorm | None,
        level: int,
        *,
        adds: bool = False,
        needed: Tensor | None = None,
        first_id: int = 0,
    ) -> bool:
        """Compute out = norm(x) Wᵀ (+ bias), or add it to `out`. `needed`, `first_id`: see
        `launch_few_rows`; a packed product is whole.
        """
        given: dict[str, Any] = {"bias": self.bias, "adds": adds, "level": level}
        if norm is not None:
            given |= {"gain": norm.gain, "epsilon": norm.epsilon}
        if isinstance(self.weight, Words):
            if not is_few(self.weight, len(x)):
                return False
            packed_product(x, self.weight, out, **given)
            return True
        blocks = self.blocks(len(x))
        if blocks is not None:
            given |= {"needed": needed, "first_id": first_id}
            product(x, self.weight, out, blocks, scales=self.scales, **given)
        return blocks is not None

    def gated(self, x: Tensor, norm: RMSNorm, level: int) -> Tensor | None:
        """Return silu(gate (norm x)) × up (norm x) for a matrix of gate and up."""
        given: dict[str, Any] = {"gain": norm.gain, "epsilon": norm.epsilon, "level": level}
        if isinstance(self.weight, Words):
            if not is_few(self.weight, len(x), parts=2):
                return None
            return packed_gated_product(x, self.weight, **given)
        blocks = self.blocks(len(x), parts=2)
        if blocks is None:
            return None
        return gated_product(x, self.weight, blocks, scales=self.scales, **given)

    def project(
        self, x: Tensor, norm: RMSNorm, rotations: Tensor, target: KVSlots, **given: Any
    ) -> Tensor | None:
        """Return rotated queries, and store keys and values; `given` are `num_heads` and `level` of
        `project_heads`.
        """
        others: dict[str, Any] = {"gain": norm.gain, "epsilon": norm.epsilon, "bias": self.bias}
        if isinstance(self.weight, Words):
            if not is_few(self.weight, len(x)) or target.keys.dtype is not x.dtype:
                return None
            return packed_heads(x, self.weight, rotations, target, **others, **given)
        blocks = self.blocks(len(x))
        if blocks is None:
            return None
        return project_heads(
            x, self.weight, rotations, target, blocks, scales=self.scales, **others, **given
        )


def matrix_of(linear: Linear) -> Matrix | None:
    """Return the matrix of a layer; None when the layer computes something else."""
    product, bias = linear, None
    if isinstance(linear, BiasedLinear):
        product, bias = linear.product, linear.bias
    if isinstance(product, FloatLinear):
        return Matrix(product.weight, bias)
    if isinstance(product, PackedLinear) and not product.is_invariant:
        return Matrix(product.weight, bias)
    if isinstance(product, Float8Linear) and product.uses_blas:
        return Matrix(product.weight, bias, product.scales)
    return None


def plain_matrix(linear: Linear) -> Tensor | None:
    """Return the matrix [N, K] in floating point of a layer that only multiplies with it."""
    return linear.weight if isinstance(linear, FloatLinear) else None


def takes_float8(linear: Linear) -> bool:
    """Return whether the layer's input may be `Float8Rows`."""
    product = linear.product if isinstance(linear, BiasedLinear) else linear
    return isinstance(product, Float8Linear)


def kernel_matrix(linear: Linear, name: str, kernels: KernelSet) -> Matrix | None:
    """Return the matrix for a kernel for few rows; None when the layer computes the product."""
    matrix = matrix_of(linear) if name in kernels else None
    if matrix is None or isinstance(matrix.weight, Words):
        return matrix
    if matrix.scales is not None:
        return matrix._replace(in_half="scaled_product" in kernels)
    return matrix if matrix.weight.dtype.itemsize <= 2 else None


def normed_input(x: Tensor, norm: RMSNorm, level: int, *, is_float8: bool) -> Any:
    """Return the norm of x [T, K], rounded for a layer that takes float8."""
    function = normalise_quantized if is_float8 else normalise
    return function(x, norm.gain, norm.epsilon, level=level)


def scaling_layer(linear: Linear, kernels: KernelSet) -> Float8Linear | None:
    """Return a layer whose products of many rows are each a `ScaledProduct`; None: it is none."""
    if "scaled_product" in kernels and isinstance(linear, Float8Linear) and linear.uses_blas:
        return linear
    return None


class NormedProduct:
    """Computes linear(norm x)."""

    def __init__(
        self,
        norm: RMSNorm,
        linear: Linear,
        kernels: KernelSet,
        *,
        first_id: int | None = None,
    ) -> None:
        """`first_id`: the layer has a part of the outputs of one with `MANY_OUTPUTS`, from this one
        on; None: it has all of its own.
        """
        self._first_id = first_id or 0
        self.matrix = kernel_matrix(linear, "product", kernels)
        self.norm = norm
        self._linear = linear
        self._is_float8 = takes_float8(linear)
        self._scaling = scaling_layer(linear, kernels)
        # BLAS takes longer for many outputs of few rows in float32, and for a part of them.
        has_many = first_id is not None or linear.out_features >= MANY_OUTPUTS
        self.is_wide = "multiply_rows" in kernels and has_many
        self._level = kernels.launch_level

    def __call__(
        self, x: Tensor, out: Tensor | None = None, needed: Tensor | None = None
    ) -> Tensor:
        """Return [T, N] for x [T, K], in `out` if given, which may have another number format.

        Outputs outside of the range `needed` int32 [2] may be missing.
        """
        matrix, norm = self.matrix, self.norm
        if matrix is not None and len(x) <= MAX_ROWS:
            target = x.new_empty(len(x), matrix.weight.shape[0]) if out is None else out
            if matrix.multiply(
                x, target, norm, self._level, needed=needed, first_id=self._first_id
            ):
                return target
        if out is None:
            return self._linear(normed_input(x, norm, self._level, is_float8=self._is_float8))
        normed = normalise(x, norm.gain, norm.epsilon, level=self._level)
        if matrix is None or matrix.bias is not None:
            return out.copy_(self._linear(normed))
        if isinstance(matrix.weight, Words):
            multiply_packed(normed, matrix.weight, out)
            return out
        if not x.is_cuda:
            return out.copy_(self._linear(normed))
        return self.multiply_wide(normed, matrix.weight, out)

    def multiply_wide(self, normed: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Write the product in a wider format without rounding in between."""
        if self.is_wide and len(normed) <= MAX_WIDE_ROWS:
            multiply_rows(normed, weight, out)
            return out
        aligned = len(weight) - len(weight) % BLAS_OUTPUTS
        for start, end in pairwise(sorted({0, aligned, len(weight)})):
            torch.mm(normed, weight[start:end].t(), out_dtype=out.dtype, out=out[:, start:end])
        return out

    def multiply_others(self, x: Tensor, out: Tensor, common: IdRange, needed: Tensor) -> None:
        """Write the outputs outside of `common` if the range `needed` int32 [2] has any."""
        assert self.matrix is not None
        assert isinstance(self.matrix.weight, Tensor)
        normed = normalise(x, self.norm.gain, self.norm.epsilon, level=self._level)
        multiply_others(normed, self.matrix.weight, out, common, needed)

    def scaled(self, x: Tensor) -> Tensor | ScaledProduct:
        """Return the same, or a product whose scales its reader applies."""
        if self._scaling is None or (self.matrix is not None and len(x) <= MAX_ROWS):
            return self(x)
        return self._scaling.multiply(normed_input(x, self.norm, self._level, is_float8=True))


def add(x: Tensor, added: ScaledProduct | None, level: int) -> None:
    """Add to x [T, N] what is left to add."""
    if added is not None:
        add_scaled(x, added, level=level)


class GatedProduct:
    """Computes silu(gate (norm x)) × up (norm x)."""

    def __init__(
        self, norm: RMSNorm, gate_up: Linear, kernels: KernelSet, *, quantizes: bool
    ) -> None:
        """`quantizes`: the result of many rows is rounded for a layer that takes float8."""
        matrix = kernel_matrix(gate_up, "gated_product", kernels)
        self.matrix = None if matrix is None or matrix.bias is not None else matrix
        if isinstance(gate_up, PackedLinear) and gate_up.out_features % (2 * OUTPUTS):
            self.matrix = None
        self._norm = norm
        self._gate_up = gate_up
        self._is_float8 = takes_float8(gate_up)
        self._scaling = scaling_layer(gate_up, kernels) if quantizes else None
        self._gate = gate_quantized if quantizes else gate
        self._level = kernels.launch_level

    def __call__(self, x: Tensor, added: ScaledProduct | None = None) -> Tensor | Float8Rows:
        """Return [T, I] for x [T, K], after `added` is added to x."""
        matrix, norm, level = self.matrix, self._norm, self._level
        if added is not None and self._is_float8:
            normed = normalise_quantized(x, norm.gain, norm.epsilon, added=added, level=level)
            return self._gated(normed)
        add(x, added, level)
        found = None if matrix is None else matrix.gated(x, norm, level)
        if found is not None:
            return found
        return self._gated(normed_input(x, norm, level, is_float8=self._is_float8))

    def _gated(self, normed: Any) -> Tensor | Float8Rows:
        if self._scaling is not None:
            return gate_quantized(self._scaling.multiply(normed), level=self._level)
        return self._gate(self._gate_up(normed), level=self._level)


class AddedProduct:
    """Computes x += linear(y), the sum over ranks of their linear(y)."""

    def __init__(
        self, linear: Linear, group: Group, kernels: KernelSet, *, mailbox: int = 0
    ) -> None:
        """`mailbox`: the number of the one that its sums use, another one than the sums before."""
        self._mailbox = group.mailbox(mailbox)
        self._sums = group.size > 1
        self._plain = plain_matrix(linear)
        self.matrix: Matrix | None = None
        if not self._sums or self._mailbox is not None:
            self.matrix = kernel_matrix(linear, "product", kernels)
        if self._mailbox is not None and self.matrix is not None:
            has_room = MAX_ROWS * linear.out_features <= self._mailbox.capacity
            is_packed = isinstance(self.matrix.weight, Words)
            if self.matrix.bias is not None or not has_room or is_packed:
                self.matrix = None
        # One rank has the bias of a matrix whose inputs are split; all must exchange in one way.
        if self._mailbox is not None and not group.minimum(self.matrix is not None):
            self.matrix = None
        self._linear: Any = linear
        self._scaling = None if self._sums else scaling_layer(linear, kernels)
        self._is_float8 = takes_float8(linear)
        self._group = group
        self._level = kernels.launch_level

    def __call__(self, x: Tensor, y: Tensor | Float8Rows) -> None:
        """Add to x [T, N] the product of y [T, K]."""
        add(x, self.begin(x, y), self._level)

    def begin(self, x: Tensor, y: Tensor | Float8Rows) -> ScaledProduct | None:
        """Do the same, or return what still has to be added."""
        plain, matrix = self._plain, self.matrix
        is_few = matrix is not None and len(x) <= MAX_ROWS
        if self._is_float8 and not is_few and not isinstance(y, Float8Rows):
            y = quantize(y, level=self._level)
        if isinstance(y, Float8Rows) and self._scaling is not None:
            return self._scaling.multiply(y)
        if isinstance(y, Float8Rows):
            self._add(x, y)
        elif is_few and matrix is not None and self._add_few(x, y, matrix):
            return None
        elif plain is not None and not self._sums:
            torch.addmm(x, y, plain.t(), out=x)
        else:
            self._add(x, y)
        return None

    def _add_few(self, x: Tensor, y: Tensor, matrix: Matrix) -> bool:
        """Add with a kernel for few rows; False: there is none."""
        mailbox = self._mailbox
        if mailbox is None:
            return matrix.multiply(y, x, None, self._level, adds=True)
        blocks, weight = matrix.blocks(len(x)), matrix.weight
        if blocks is None or not isinstance(weight, Tensor):
            return False
        scales, level = matrix.scales, self._level
        add_summed_product(x, y, weight, blocks, mailbox, scales=scales, level=level)
        return True

    def _add(self, x: Tensor, y: Tensor | Float8Rows) -> None:
        """Add to x the sum of all ranks' products."""
        parcel = None if self._mailbox is None else self._mailbox.parcel_of(x)
        if self._mailbox is None or parcel is None:
            x.add_(self._group.all_reduce(self._linear(y)))
            return
        plain = self._plain
        if plain is not None and isinstance(y, Tensor):
            torch.mm(y, plain.t(), out=parcel)
        else:
            parcel.copy_(self._linear(y))
        add_parcels(x, self._mailbox, level=self._level)


class FusedMLP:
    """Computes x += mlp(norm x)."""

    def __init__(self, norm: RMSNorm, mlp: GatedMLP, kernels: KernelSet) -> None:
        quantizes = takes_float8(mlp.down)
        self._gate_up = GatedProduct(norm, mlp.gate_up, kernels, quantizes=quantizes)
        self._down = AddedProduct(mlp.down, mlp.group, kernels, mailbox=1)

    @property
    def num_kernel_products(self) -> int:
        """Number of its two matrices that built-in kernels multiply with."""
        return sum(part.matrix is not None for part in (self._gate_up, self._down))

    def __call__(self, x: Tensor, added: ScaledProduct | None) -> None:
        """Update x [T, hidden] in place, after `added` is added to it."""
        self._down(x, self._gate_up(x, added))


class NormedMLP:
    """The same for an MLP that is computed by its own layer."""

    num_kernel_products = 0

    def __init__(self, norm: RMSNorm, mlp: MLP, kernels: KernelSet) -> None:
        self._norm, self._mlp, self._level = norm, mlp, kernels.launch_level

    def __call__(self, x: Tensor, added: ScaledProduct | None) -> None:
        """Update x [T, hidden] in place, after `added` is added to it."""
        norm = self._norm
        add(x, added, self._level)
        x.add_(self._mlp(normalise(x, norm.gain, norm.epsilon, level=self._level)))


class FusedLayer:
    """Decoder layer with built-in kernels; see the module."""

    def __init__(self, reference: DecoderLayer, kernels: KernelSet) -> None:
        attention, norm, mlp = reference.attention, reference.mlp_norm, reference.mlp
        self._index, self._shape = attention.layer, attention.shape
        self._head_norm = attention.weights.norm
        self._qkv = NormedProduct(reference.attention_norm, attention.weights.qkv, kernels)
        self._output = AddedProduct(attention.weights.output, attention.group, kernels)
        self._mlp: FusedMLP | NormedMLP = (
            FusedMLP(norm, mlp, kernels)
            if isinstance(mlp, GatedMLP)
            else NormedMLP(norm, mlp, kernels)
        )
        # A head's norm needs all of its dimensions, which are more than one program computes.
        self._projects = "project_heads" in kernels and self._head_norm is None
        self._level = kernels.launch_level

    @property
    def num_kernel_products(self) -> int:
        """Number of its four matrices that built-in kernels multiply with."""
        own = sum(part.matrix is not None for part in (self._qkv, self._output))
        return own + self._mlp.num_kernel_products

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """See `Layer`."""
        self._mlp(x, self._output.begin(x, self._attend(x, rotations, cache)))

    def _attend(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> Tensor:
        """Return [T, H × D]."""
        target, shape, norm = cache.slots(self._index), self._shape, self._head_norm
        matrix = self._qkv.matrix
        if self._projects and matrix is not None and target is not None:
            query = matrix.project(
                x,
                self._qkv.norm,
                rotations,
                target,
                num_heads=shape.num_heads,
                level=self._level,
            )
            if query is not None:
                return cache.attend_stored(self._index, query)
        found, scales = self._qkv.scaled(x), None
        if isinstance(found, ScaledProduct):
            values, scales = found.values, (found.row_scales, found.scales)
        else:
            values = found
        projected = values.view(len(x), -1, shape.head_dim)
        rotate_heads(
            projected,
            rotations,
            target,
            num_heads=shape.num_heads,
            gain=None if norm is None else norm.gain,
            epsilon=0.0 if norm is None else norm.epsilon,
            scales=scales,
            level=self._level,
        )
        query = projected[:, : shape.num_heads]
        if target is not None:
            return cache.attend_stored(self._index, query)
        key_value = projected[:, shape.num_heads :]
        return cache.attend(
            self._index, query, key_value.view(len(x), 2, shape.num_kv_heads, shape.head_dim)
        )


class FusedHead:
    """The head of a model: the kernel writes float32 logits."""

    def __init__(self, reference: LogitsHead, kernels: KernelSet) -> None:
        self._reference, self._kernels = reference, kernels
        self._product = NormedProduct(reference.norm, reference.linear, kernels)
        self._vocab_size = reference.linear.out_features
        self._common: IdRange = (0, 0)  # rounded to whole tiles
        self._of_common: NormedProduct | None = None

    @property
    def num_kernel_products(self) -> int:
        """1 if a built-in kernel multiplies, else 0."""
        return int(self._product.matrix is not None)

    def limit(self, common: IdRange) -> bool:
        """See `Head`."""
        first = common[0] // ALIGNMENT * ALIGNMENT
        end = min(-(-common[1] // ALIGNMENT) * ALIGNMENT, self._vocab_size)
        weight = plain_matrix(self._reference.linear)
        if weight is None or weight.dtype.itemsize != 2 or not self._product.is_wide:
            return False
        if 2 * (end - first) > self._vocab_size:
            return False
        self._common = first, end
        part = FloatLinear(LinearWeight(weight[first:end]), weight.dtype, weight.device)
        norm, kernels = self._reference.norm, self._kernels
        self._of_common = NormedProduct(norm, part, kernels, first_id=first)
        return True

    def __call__(
        self, hidden: Tensor, out: Tensor | None = None, needed: Tensor | None = None
    ) -> Tensor:
        """See `Head`."""
        if out is None:
            out = hidden.new_empty(len(hidden), self._vocab_size, dtype=torch.float32)
        if needed is None or self._of_common is None:
            return self._product(hidden, out)
        first, end = self._common
        self._of_common(hidden, out[:, first:end], needed)
        self._product.multiply_others(hidden, out, self._common, needed)
        return out
