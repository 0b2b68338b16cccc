"""Sums and logits of several GPUs, in kernels that read and write the other ranks' memory.

    few rows    number ─ (number, count) ─▶ inbox of the others     wait for theirs ─ add ─ x
    more rows   parcel ─ (0, count) ──────▶ inbox of the others     wait for theirs ─ read their
                                                                    parcels ─ add ─ x
    logits      shelf ─ (0, count) ───────▶ inbox of the others     wait for theirs ─ read their
                                                                    shelves ─ write all

A word of eight bytes has a count of the exchanges at its place, by which the reader knows that it
is there: nothing is cleared, and no rank waits for all of another one's kernel. Of few rows each
number is sent by the program that computes it. More rows are computed by BLAS into a parcel, from
which each block of numbers is read. Ranks' numbers are added in the order of ranks, in float32, so
that all ranks get the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import level_for
from llm.parallel.peer_memory import SHELF_BLOCK, Mailbox, Shelf

BLOCK = 1024  # numbers of one program: 16 bytes for each thread in bfloat16


@triton.jit
def _receive(words: tl.tensor, count: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Wait until each word has the count, and return its float32 number."""
    word = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((mask & ((word >> 32).to(tl.int32) != count)).to(tl.int32), axis=0) > 0:
        word = tl.load(words, mask=mask, other=0, volatile=True)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _add_numbers(
    numbers: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    values: tl.tuple,
    RANK: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Send numbers, and add to x the sums over ranks. `values`: x, counts, and the address of each
    rank's inbox.
    """
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
    _add_numbers(products[0], t * num_out + columns, mask, values, OPTIONS[0], OPTIONS[1])


@triton.jit
def _announce(
    values: tl.tuple, place: tl.tensor, RANK: tl.constexpr, CAPACITY: tl.constexpr
) -> tl.tensor:
    """Send a place's count to the other ranks: the numbers that it stands for are ready. Return the
    count. `values`: a result, counts, and the addresses of all ranks' inboxes, then of their
    numbers.
    """
    count = tl.load(values[1] + place) + 1
    for rank in tl.static_range((len(values) - 2) // 2):
        if rank != RANK:
            inbox = values[2 + rank].to(tl.pointer_type(tl.int64)) + RANK * CAPACITY
            tl.atomic_xchg(inbox + place, count.to(tl.int64) << 32, sem="release", scope="sys")
    return count


@triton.jit
def _await(
    inbox: tl.tensor,
    place: tl.tensor,
    count: tl.tensor,
    rank: tl.constexpr,
    RANK: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Wait until a rank has sent the same count for a place."""
    if rank != RANK:
        word = inbox.to(tl.pointer_type(tl.int64)) + rank * CAPACITY + place
        while (tl.atomic_add(word, 0, sem="acquire", scope="sys") >> 32).to(tl.int32) != count:
            pass


@triton.jit
def _add_parcels_kernel(
    values: tl.tuple,
    size: tl.tensor,
    RANK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Add to x the parcels. `values`: x, then as in `_announce`."""
    if LEVEL == 2:
        gdc_launch_dependents()
    RANKS: tl.constexpr = (len(values) - 2) // 2
    block = tl.program_id(0)
    places = block * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    if LEVEL > 0:
        gdc_wait()
    count = _announce(values, block, RANK, CAPACITY)
    x = tl.load(values[0] + places, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(RANKS):
        _await(values[2 + RANK], block, count, rank, RANK, CAPACITY)
    if LEVEL == 1:
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        parcel = tl.multiple_of(values[2 + RANKS + rank].to(values[0].dtype), 16)
        total += tl.load(parcel + places, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.debug_barrier()  # all threads have read the count
    tl.store(values[1] + block, count)
    tl.store(values[0] + places, x + total, mask=mask)


def add_parcels(x: Tensor, mailbox: Mailbox, *, level: int = 0) -> None:
    """Add to x [T, N] the sum of the ranks' parcels, of which this rank's is ready."""
    _add_parcels_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        (x, mailbox.counts, *mailbox.inboxes, *mailbox.parcels),
        x.numel(),
        RANK=mailbox.rank,
        CAPACITY=mailbox.capacity,
        BLOCK=BLOCK,
        LEVEL=level_for(level, len(x)),
        num_warps=4,
        launch_pdl=level > 0,
    )


@triton.jit
def _gather_kernel(
    values: tl.tuple,
    num_columns: tl.tensor,
    RANK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write all ranks' columns of a block of a row. `values`: out, then as in `_announce`."""
    RANKS: tl.constexpr = (len(values) - 2) // 2
    row, part = tl.program_id(0), tl.program_id(1)
    block = row * tl.num_programs(1) + part
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    source = row.to(tl.int64) * num_columns + columns
    count = _announce(values, block, RANK, CAPACITY)
    for rank in tl.static_range(RANKS):
        _await(values[2 + RANK], block, count, rank, RANK, CAPACITY)
        shelf = tl.multiple_of(values[2 + RANKS + rank].to(values[0].dtype), 16)
        found = tl.load(shelf + source, mask=mask, cache_modifier=".cg")
        place = row.to(tl.int64) * (RANKS * num_columns) + rank * num_columns
        tl.store(values[0] + place + columns, found, mask=mask)
    tl.debug_barrier()  # all threads have read the count
    tl.store(values[1] + block, count)


def gather_shelves(out: Tensor, shelf: Shelf) -> None:
    """Write to out [R, ranks × N] the ranks' shelves [R, N], of which this rank's is ready."""
    num_rows, num_columns = shelf.rows.shape
    _gather_kernel[(num_rows, shelf.num_parts)](
        (out, shelf.mailbox.counts, *shelf.mailbox.inboxes, *shelf.shelves),
        num_columns,
        RANK=shelf.mailbox.rank,
        CAPACITY=shelf.mailbox.capacity,
        BLOCK=SHELF_BLOCK,
        num_warps=8,
    )
