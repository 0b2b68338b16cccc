"""Sums over the ranks of several GPUs, in the kernel that computes the numbers.

    rank 0   number ─ (number, count) ─▶ inbox of rank 1     wait for rank 1's ─ add ─ x
    rank 1   number ─ (number, count) ─▶ inbox of rank 0     wait for rank 0's ─ add ─ x

A number is written to the other ranks' memory as it is computed, in one word of eight bytes with
the count of the sums at its place. The word is there when its count is: no rank waits for all
numbers of another one, and nothing is cleared. The ranks' numbers are added in the order of ranks,
in float32, so that all ranks get the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import level_for
from llm.parallel.peer_memory import Mailbox

BLOCK = 512


@triton.jit
def _receive(words: tl.tensor, count: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Wait until each word has the count, and return its float32 number."""
    word = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((mask & ((word >> 32).to(tl.int32) != count)).to(tl.int32), axis=0) > 0:
        word = tl.load(words, mask=mask, other=0, volatile=True)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _add_sums(
    numbers: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    values: tl.tuple,
    RANK: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Add to x the sums over ranks. `values`: x, counts, and the address of each rank's inbox."""
    count = tl.load(values[1] + places, mask=mask, other=0) + 1
    word = (count.to(tl.int64) << 32) | (
        numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    )
    for rank in tl.static_range(len(values) - 2):
        if rank != RANK:
            inbox = values[2 + rank].to(tl.pointer_type(tl.int64)) + RANK * CAPACITY
            tl.store(inbox + places, word, mask=mask, cache_modifier=".wt")
    x = tl.load(values[0] + places, mask=mask, other=0.0).to(tl.float32)
    inbox = values[2 + RANK].to(tl.pointer_type(tl.int64))
    total = numbers * 0.0
    for rank in tl.static_range(len(values) - 2):
        if rank == RANK:
            total += numbers
        else:
            total += _receive(inbox + rank * CAPACITY + places, count, mask)
    tl.debug_barrier()  # several threads have the same place: all of them have read its count
    tl.store(values[1] + places, count, mask=mask)
    tl.store(values[0] + places, x + total, mask=mask)


@triton.jit
def put_summed(
    products: tl.tuple,
    values: tl.tuple,
    tile: tl.tensor,
    t: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    BLOCK_OUT: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Add the sums of the ranks' products to x: the end of a product of few rows.

    `OPTIONS`: this rank, and the number of places of a mailbox.
    """
    columns = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask = (columns < num_out) & (t < num_rows)
    _add_sums(products[0], t * num_out + columns, mask, values, OPTIONS[0], OPTIONS[1])


@triton.jit
def _add_sums_kernel(
    numbers: tl.tensor,
    values: tl.tuple,
    size: tl.tensor,
    RANK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    if LEVEL == 2:
        gdc_launch_dependents()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    if LEVEL > 0:
        gdc_wait()
    partial = tl.load(numbers + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL == 1:
        gdc_launch_dependents()
    _add_sums(partial, places, mask, values, RANK, CAPACITY)


def add_sums(x: Tensor, partial: Tensor, mailbox: Mailbox, *, level: int = 0) -> None:
    """Add to x [T, N] the sum of all ranks' `partial` [T, N], which the mailbox has room for."""
    _add_sums_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        partial,
        (x, mailbox.counts, *mailbox.inboxes),
        x.numel(),
        RANK=mailbox.rank,
        CAPACITY=mailbox.capacity,
        BLOCK=BLOCK,
        LEVEL=level_for(level, len(x)),
        num_warps=4,
        launch_pdl=level > 0,
    )
