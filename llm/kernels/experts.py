"""Triton kernels of sparse MLPs: the choice of experts, and products of rows by expert.

    logits ─ choose_experts ─ experts and shares [T, K] ─ sort_pairs ─ pairs by expert, and starts
    x ─ multiply_by_expert ─ gate ─ multiply_by_expert ─ a row for each pair ─ add_pairs

A pair is a token and one of its K experts; its number is token × K + place. The shapes depend on
the number of tokens alone and the host waits for nothing, so that a CUDA graph can contain all of
it: products have as many programs as the least favourable choice needs, and those beyond the last
tile of rows end at once.

A rank that has some of the experts computes their pairs; the others count as zeros. The order of a
row's sums is that of `llm.kernels.invariant`, whatever other rows choose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm.kernels.invariant import FLOAT8_INPUTS, blocks_for
from llm.kernels.rounding import FLOAT8

SORT_BLOCK = 2048  # pairs that a program reads at once
ADD_BLOCK = 1024  # values of a row that a program adds


@triton.jit
def _choose_kernel(
    logits: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    num_experts: tl.tensor,
    CHOSEN: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALIZES: tl.constexpr,
) -> None:
    """Process one token."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    places = tl.arange(0, PLACES)
    mask = numbers < num_experts
    values = tl.load(logits + token * num_experts + numbers, mask=mask, other=-float("inf"))
    powers = tl.exp(values.to(tl.float32) - tl.max(values.to(tl.float32), axis=0))
    left = tl.where(mask, powers / tl.sum(powers, axis=0), -1.0)
    found = tl.zeros([PLACES], tl.int32)
    parts = tl.zeros([PLACES], tl.float32)
    for place in tl.static_range(CHOSEN):
        number = tl.argmax(left, axis=0)
        found = tl.where(places == place, number, found)
        parts = tl.where(places == place, tl.max(left, axis=0), parts)
        left = tl.where(numbers == number, -1.0, left)
    if NORMALIZES:
        parts = parts / tl.sum(parts, axis=0)
    is_place = places < CHOSEN
    tl.store(chosen + token * CHOSEN + places, found, mask=is_place)
    tl.store(shares + token * CHOSEN + places, parts, mask=is_place)


def choose_experts(logits: Tensor, num_chosen: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers int32 [T, K] of the largest logits [T, experts] of each token, the largest
    first, and their shares float32 [T, K] in the softmax, divided by their sum if `normalizes`.
    """
    num_tokens, num_experts = logits.shape
    chosen = logits.new_empty(num_tokens, num_chosen, dtype=torch.int32)
    shares = logits.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    _choose_kernel[(num_tokens,)](
        logits,
        chosen,
        shares,
        num_experts,
        CHOSEN=num_chosen,
        PLACES=triton.next_power_of_2(num_chosen),
        BLOCK=triton.next_power_of_2(num_experts),
        NORMALIZES=normalizes,
        num_warps=1,
    )
    return chosen, shares


class Pairs(NamedTuple):
    """The pairs of some experts, in the order of the experts; of one expert in that of tokens."""

    order: Tensor  # int32 [T × K] numbers of pairs; only those before the last start are set
    starts: Tensor  # int32 [experts + 1] start of each expert's pairs in `order`, and their end


@triton.jit
def _sort_kernel(
    chosen: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the pairs of one expert, behind those of the experts before it."""
    expert = tl.program_id(0)
    number = first + expert
    inner = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        found = tl.load(chosen + begin + inner, mask=begin + inner < num_pairs, other=-1)
        before += ((found >= first) & (found < number)).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(starts + expert, place)
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + inner
        found = tl.load(chosen + pairs, mask=pairs < num_pairs, other=-1)
        is_own = found == number
        ranks = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(order + place + ranks - 1, pairs, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, place)


def sort_pairs(chosen: Tensor, first: int, num_experts: int) -> Pairs:
    """Return the pairs of chosen [T, K] whose expert is one of `num_experts` from `first` on."""
    num_pairs = chosen.numel()
    order, starts = chosen.new_empty(num_pairs), chosen.new_empty(num_experts + 1)
    block = min(SORT_BLOCK, max(32, triton.next_power_of_2(num_pairs)))
    _sort_kernel[(num_experts,)](
        chosen, order, starts, num_pairs, first, BLOCK=block, num_warps=max(1, block // 256)
    )
    return Pairs(order, starts)


class Grouped(NamedTuple):
    """Arguments of a product: out = x × weight[expert]ᵀ for the pairs of each expert."""

    x: Tensor
    weight: Tensor  # [experts, N, K]
    out: Tensor
    order: Tensor
    starts: Tensor
    num_experts: int
    num_out: int
    num_in: int
    num_chosen: int
    row_scales: Tensor  # [rows of x] and [experts, N] float32, of float8 operands
    out_scales: Tensor


@triton.jit
def _multiply_by_expert(
    given: Grouped,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATHERS: tl.constexpr,
    is_float8: tl.constexpr,
) -> None:
    """Multiply a tile of an expert's rows with a tile of its matrix."""
    tile = tl.program_id(1)
    numbers = tl.arange(0, EXPERTS)
    is_expert = numbers < given.num_experts
    starts = tl.load(given.starts + numbers, mask=is_expert, other=0)
    ends = tl.load(given.starts + numbers + 1, mask=is_expert, other=0)
    tiles = (ends - starts + block_rows - 1) // block_rows
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    if expert < given.num_experts:
        own = tile - tl.sum(tl.where(numbers < expert, tiles, 0), axis=0)
        start = tl.load(given.starts + expert) + own * block_rows
        places = start + tl.arange(0, block_rows)
        is_row = places < tl.load(given.starts + expert + 1)
        pairs = tl.load(given.order + places, mask=is_row, other=0)
        rows = pairs // given.num_chosen if GATHERS else places
        outs = tl.program_id(0) * block_out + tl.arange(0, block_out)
        num_in, num_out = given.num_in, given.num_out
        is_out = outs < num_out
        lines = expert.to(tl.int64) * num_out + outs
        matrix = given.weight + lines[:, None] * num_in
        tokens = given.x + rows.to(tl.int64)[:, None] * num_in
        sums = tl.zeros([block_out, block_rows], tl.float32)
        for first in range(0, num_in, block_in):
            inputs = first + tl.arange(0, block_in)
            is_in = (inputs < num_in)[None, :]
            left = tl.load(matrix + inputs[None, :], mask=is_out[:, None] & is_in, other=0.0)
            right = tl.load(tokens + inputs[None, :], mask=is_row[:, None] & is_in, other=0.0)
            if is_float8:
                sums = tl.dot(left, tl.trans(right), sums, max_num_imprecise_acc=block_in)
            else:
                sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        if is_float8:
            out_scales = tl.load(given.out_scales + lines, mask=is_out, other=0.0)
            row_scales = tl.load(given.row_scales + rows, mask=is_row, other=0.0)
            sums = sums * out_scales[:, None] * row_scales[None, :]
        targets = places if GATHERS else pairs
        results = targets.to(tl.int64)[:, None] * num_out + outs[None, :]
        tl.store(given.out + results, tl.trans(sums), mask=is_row[:, None] & is_out[None, :])


def multiply_by_expert(
    x: Tensor,
    weight: Tensor,
    pairs: Pairs,
    num_chosen: int,
    *,
    gathers: bool,
    dtype: torch.dtype,
    row_scales: Tensor | None = None,
    out_scales: Tensor | None = None,
) -> Tensor:
    """Return [T × K, N] products of rows with their expert's matrix in weight [experts, N, in].

    With `gathers` x [T, in] has the tokens, and results are in the order of `pairs`. Otherwise
    x [T × K, in] is in that order, and results are in that of the pairs' numbers. Rows of pairs
    that are not among `pairs` are not set. Float8 operands have scales, [rows of x] and
    [experts, N].
    """
    num_experts, num_out, num_in = weight.shape
    num_pairs, is_float8 = len(pairs.order), weight.dtype is FLOAT8
    out = x.new_empty(num_pairs, num_out, dtype=dtype)
    # Twice the average: most experts have one tile, and their matrix is read once.
    blocks = blocks_for(triton.cdiv(2 * num_pairs, num_experts), num_out * num_experts)
    if is_float8:
        blocks["block_in"] = FLOAT8_INPUTS
    most_used = min(num_experts, num_pairs)
    block_rows = blocks["block_rows"]
    tiles = (num_pairs + most_used * (block_rows - 1)) // block_rows
    scales = (x if row_scales is None else row_scales, x if out_scales is None else out_scales)
    given = Grouped(
        x.contiguous(), weight, out, *pairs, num_experts, num_out, num_in, num_chosen, *scales
    )
    _multiply_by_expert[(triton.cdiv(num_out, blocks["block_out"]), tiles)](
        given,
        EXPERTS=triton.next_power_of_2(num_experts),
        GATHERS=gathers,
        is_float8=is_float8,
        **blocks,
    )
    return out


@triton.jit
def _add_kernel(
    products: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    num_experts: tl.tensor,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add a part of one token's rows, in the order of their places."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        number = tl.load(chosen + pair) - first
        is_own = (number >= 0) & (number < num_experts)
        row = tl.load(products + pair * SIZE + columns, mask=mask & is_own, other=0.0)
        share = tl.load(shares + pair)
        total += row.to(tl.float32) * share
    tl.store(out + token * SIZE + columns, total, mask=mask)


def add_pairs(
    products: Tensor, chosen: Tensor, shares: Tensor, first: int, num_experts: int
) -> Tensor:
    """Return [T, N]: the sum of each token's rows of products [T × K, N] times their shares [T, K].

    Rows whose expert in chosen [T, K] is none of `num_experts` from `first` on are left out.
    """
    (num_tokens, num_chosen), size = chosen.shape, products.shape[1]
    out = products.new_empty(num_tokens, size)
    block = min(ADD_BLOCK, triton.next_power_of_2(size))
    _add_kernel[(num_tokens, triton.cdiv(size, block))](
        products,
        chosen,
        shares,
        out,
        first,
        num_experts,
        SIZE=size,
        CHOSEN=num_chosen,
        BLOCK=block,
        num_warps=4,
    )
    return out
