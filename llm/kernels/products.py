"""Products of a few rows with a matrix, y = x Wᵀ, fused with the operations before and after.

    program    load a tile of W ─ wait ─ load x (normalise) ─ multiply ─ end
                                  └─ for the kernel that this one depends on

The time of a decode step with few rows is that of reading its weights. So a program loads its first
tile before anything else, even before it waits for its predecessor (launch level 2), and
repeats the small work that all programs need rather than launching another kernel for it. The
products are passed to `END`, a Triton function that the kernel is compiled with.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.blocks import Blocks
from llm.kernels.peers import put_summed
from llm.kernels.tiles import load_factors, load_rows, load_tiles, multiply
from llm.parallel.peer_memory import Mailbox


@triton.jit
def _few_rows_kernel(
    x: tl.tensor,
    gain: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    values: tl.tuple,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    epsilon: tl.tensor,
    needed: tl.tensor,
    first_id: tl.tensor,
    END: tl.constexpr,
    OPTIONS: tl.constexpr,
    PARTS: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    LOOPS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    IN_HALF: tl.constexpr,
    IS_LIMITED: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Multiply. `END` gets the products [BLOCK_OUT] of every part of the matrix with row t of x."""
    if LEVEL == 2:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    if IS_LIMITED:
        # The first program always has an output: the next kernel waits for this one alone, and so
        # one of its programs has to wait for its predecessor.
        first = tl.minimum(tl.maximum(tl.load(needed) - first_id, 0), num_out - 1)
        num_out = tl.minimum(tl.maximum(tl.load(needed + 1) - first_id, first + 1), num_out)
        tile += first // BLOCK_OUT
        if tile * BLOCK_OUT >= num_out:
            return
    tiles = load_tiles(weight, tile, num_out, PARTS, IN, BLOCK_OUT, BLOCK_IN)
    factors = load_factors(weight_scales, tile, num_out, PARTS, BLOCK_OUT, IS_FLOAT8)
    if LEVEL > 0:
        gdc_wait()
    rows, scales = load_rows(
        x, gain, epsilon, num_rows, IN, BLOCK_IN, ROWS, HAS_GAIN, IS_FLOAT8, IN_HALF
    )
    if LEVEL == 1:
        gdc_launch_dependents()
    if LOOPS:
        while tile * BLOCK_OUT < num_out:
            following = tile + tl.num_programs(0)
            factors = load_factors(weight_scales, tile, num_out, PARTS, BLOCK_OUT, IS_FLOAT8)
            next_tiles = load_tiles(weight, following, num_out, PARTS, IN, BLOCK_OUT, BLOCK_IN)
            for t in tl.static_range(ROWS):
                products = multiply(tiles, factors, rows[t], scales[t])
                END(products, values, tile, t, num_rows, num_out, BLOCK_OUT, OPTIONS)
            tiles = next_tiles
            tile = following
    else:
        for t in tl.static_range(ROWS):
            products = multiply(tiles, factors, rows[t], scales[t])
            END(products, values, tile, t, num_rows, num_out, BLOCK_OUT, OPTIONS)


def launch_few_rows(
    x: Tensor,
    weight: Tensor,
    blocks: Blocks,
    end: Any,
    values: tuple[Any, ...],
    options: tuple[int, ...],
    *,
    parts: int = 1,
    scales: Tensor | None = None,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    needed: Tensor | None = None,
    first_id: int = 0,
    level: int = 0,
) -> None:
    """Multiply x [T, K] with `parts` matrices [N, K] that are stacked in `weight`.

    With a gain [K], x is normalised first: x / √(Σx² + epsilon) × gain. A float8 matrix has
    `scales` [parts × N], and rows of x are rounded to float8.

    Of a single matrix, only outputs in the range `needed` int32 [2] are computed, those in front
    of it in the same tile, and at least one; ids are counted from `first_id`. The kernel reads
    `needed` before it waits for its predecessor, so only a copy that precedes the whole graph may
    write it.
    """
    assert needed is None or parts == 1
    num_out = len(weight) // parts
    _few_rows_kernel[(blocks.grid(num_out),)](
        x,
        x if gain is None else gain,
        weight,
        x if scales is None else scales,
        values,
        len(x),
        num_out,
        epsilon,
        x if needed is None else needed,
        first_id,
        END=end,
        OPTIONS=options,
        PARTS=parts,
        IN=weight.shape[1],
        ROWS=1 << (len(x) - 1).bit_length(),
        BLOCK_OUT=blocks.block_out,
        BLOCK_IN=blocks.block_in,
        LOOPS=blocks.programs > 0,
        HAS_GAIN=gain is not None,
        IS_FLOAT8=scales is not None,
        IN_HALF=blocks.in_half,
        IS_LIMITED=needed is not None,
        LEVEL=level,
        num_warps=blocks.num_warps,
        maxnreg=blocks.registers,
        launch_pdl=level > 0,
    )


@triton.jit
def _put(
    products: tl.tuple,
    values: tl.tuple,
    tile: tl.tensor,
    t: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    BLOCK_OUT: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Store the products. `values`: out, bias, the distance of rows of out. `OPTIONS`: whether
    there is a bias, whether to add to out.
    """
    columns = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_column = columns < num_out
    y = products[0]
    if OPTIONS[0]:
        y += tl.load(values[1] + columns, mask=is_column, other=0.0).to(tl.float32)
    places = values[0] + t * values[2] + columns
    mask = is_column & (t < num_rows)
    if OPTIONS[1]:
        y += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, y, mask=mask)


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    blocks: Blocks,
    *,
    scales: Tensor | None = None,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    adds: bool = False,
    needed: Tensor | None = None,
    first_id: int = 0,
    level: int = 0,
) -> None:
    """Compute out [T, N] = x [T, K] × weight [N, K]ᵀ (+ bias), or add it to `out`.

    x may be normalised, both be float8, and the outputs be limited, as in `launch_few_rows`.
    """
    values = (out, x if bias is None else bias, out.stride(0))
    options = (int(bias is not None), int(adds))
    launch_few_rows(
        x,
        weight,
        blocks,
        _put,
        values,
        options,
        scales=scales,
        gain=gain,
        epsilon=epsilon,
        needed=needed,
        first_id=first_id,
        level=level,
    )


def add_summed_product(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    blocks: Blocks,
    mailbox: Mailbox,
    *,
    scales: Tensor | None = None,
    level: int = 0,
) -> None:
    """Add to x [T, N] the sum of all ranks' y [T, K] × weight [N, K]ᵀ."""
    launch_few_rows(
        y,
        weight,
        blocks,
        put_summed,
        (x, mailbox.counts, *mailbox.inboxes),
        (mailbox.rank, mailbox.capacity),
        scales=scales,
        level=level,
    )


@triton.jit
def _put_gated(
    products: tl.tuple,
    values: tl.tuple,
    tile: tl.tensor,
    t: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    BLOCK_OUT: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Store the gated products. `values`: out."""
    columns = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    gate = products[0]
    y = gate / (1.0 + tl.exp(-gate)) * products[1]
    mask = (columns < num_out) & (t < num_rows)
    tl.store(values[0] + t * num_out + columns, y, mask=mask)


def gated_product(
    x: Tensor,
    weight: Tensor,
    blocks: Blocks,
    *,
    scales: Tensor | None = None,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    level: int = 0,
) -> Tensor:
    """Return silu(x gateᵀ) × (x upᵀ) [T, N] for a weight [2 × N, K] of gate and up.

    x may be normalised, and both be float8, as in `launch_few_rows`.
    """
    out = x.new_empty(len(x), len(weight) // 2)
    launch_few_rows(
        x,
        weight,
        blocks,
        _put_gated,
        (out,),
        (),
        parts=2,
        scales=scales,
        gain=gain,
        epsilon=epsilon,
        level=level,
    )
    return out
