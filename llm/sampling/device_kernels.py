"""Triton kernels of the device's sampling; what they compute is said in `device_reference`.

A row's columns lie in tiles, which its programs share; a row without a cut skips three launches.

    largest    largest logit and its first column                    by program
    bins       histogram of deficits: 64 bins for each octave        count and mass in one word
    first      within the bin where top_k (else top_p) cuts          counts by deficit
    second     within the bin where top_p cuts what top_k left       counts by deficit
    masses     kept mass and ties at the cut                         by tile
    pick       the tile, then the column, where the draw falls; the history

A later launch reads what earlier ones left, and every one of its programs derives from that, by
itself, where the cut is. All sums are of integers: no order of programs, and no number of them,
changes a result. Floats are only added, subtracted, multiplied and divided, never fused.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm.sampling.device_history import PenaltyHistory
from llm.sampling.device_parts import (
    ACTIVE,
    BINS,
    CUT_END,
    DEFICIT_END,
    FLAGS,
    FRACTION,
    HALF,
    HAS_CUT,
    HAS_PENALTIES,
    HAS_TOP_K,
    HAS_TOP_P,
    INDEX,
    NUM_BINS,
    ONE_COUNT,
    RANDOM,
    SEARCH,
    SEARCH_WORDS,
    TOP_K,
    WIDTH,
    WORDS,
    Between,
    Given,
    adjusted,
    count_token,
    deficits_of,
    find_bin,
    find_cut,
    id_of,
    largest_of,
    limit_of,
    number_of,
    unit_of,
    value_of,
    weight_of,
)

TILE_COLUMNS = 2048
NUM_WARPS = 8
NUM_PROGRAMS = 1024  # of a launch, where rows are wide enough


class Scratch:
    """What the launches of one `sample` hand on, for up to `max_rows` rows."""

    def __init__(
        self, vocab_size: int, device: torch.device, max_rows: int, tile: int = TILE_COLUMNS
    ) -> None:
        self.tile = tile
        self.num_tiles = -(-vocab_size // tile)
        self.room = room = triton.next_power_of_2(self.num_tiles)

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_rows, width, dtype=dtype, device=device)

        self.between = Between(
            best=empty(room, torch.float32),
            best_column=empty(room, torch.int32),
            bins=empty(NUM_BINS, torch.int64),
            first=empty(NUM_BINS, torch.int32),
            second=empty(NUM_BINS, torch.int32),
            searches=empty(2 * SEARCH_WORDS, torch.int64),
            cut=empty(2, torch.int64),
            mass=empty(room, torch.int64),
            ties=empty(room, torch.int32),
            tokens=empty(1, torch.int32),
        )


def sample_with_kernels(
    logits: Tensor, records: Tensor, masks: Tensor, history: PenaltyHistory, scratch: Scratch
) -> Tensor:
    """See `sample_reference`. The tokens int32 [B] are the scratch's, until the next call."""
    num_rows, tokens = len(logits), scratch.between.tokens
    if num_rows == 0:
        return tokens[:0, 0]
    if logits.stride(1) != 1:
        raise ValueError("a row's logits must lie side by side")
    given = Given(
        logits,
        logits.stride(0),
        records,
        records.view(torch.int64),
        masks,
        masks.stride(0),
        history.counts,
        history.counts.stride(0),
        history.latest,
        history.latest.stride(0),
    )
    programs = min(scratch.num_tiles, -(-NUM_PROGRAMS // num_rows))
    options: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    options |= {"tile": scratch.tile, "room": scratch.room}
    for launch in (_largest, _bins, _first, _second, _masses):
        launch[programs, num_rows](given, scratch.between, programs, **options)
    _pick[(num_rows,)](given, scratch.between, programs, **options)
    return tokens[:num_rows, 0]


@triton.jit(do_not_specialize=["programs"])
def _largest(
    given: Given, between: Between, programs: tl.tensor, tile: tl.constexpr, room: tl.constexpr
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = given.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & ACTIVE) == 0:
        return
    if (flags & HAS_CUT) != 0:
        for start in range(program * tile, BINS, programs * tile):
            places = start + tl.arange(0, tile)
            is_there = places < BINS
            places += row * BINS
            tl.store(between.bins + places, tl.zeros([tile], tl.int64), mask=is_there)
            tl.store(between.first + places, tl.zeros([tile], tl.int32), mask=is_there)
            tl.store(between.second + places, tl.zeros([tile], tl.int32), mask=is_there)
    width = tl.load(record + WIDTH)
    largest = tl.full([tile], -float("inf"), tl.float32)
    found = tl.zeros([tile], tl.int32) + width
    for start in range(program * tile, width, programs * tile):
        columns = start + tl.arange(0, tile)
        values = adjusted(given, row, columns)
        found = tl.where(values > largest, columns, found)
        largest = tl.maximum(largest, values)
    top = tl.max(largest, axis=0)
    tl.store(between.best + row * room + program, top)
    column = tl.min(tl.where(largest == top, found, width), axis=0)
    tl.store(between.best_column + row * room + program, column)


@triton.jit(do_not_specialize=["programs"])
def _bins(
    given: Given, between: Between, programs: tl.tensor, tile: tl.constexpr, room: tl.constexpr
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = given.records + row * WORDS
    if (tl.load(record + FLAGS) & HAS_CUT) == 0:
        return
    largest = largest_of(between, row, programs, room)
    end = tl.load(record + CUT_END)
    total = tl.zeros([tile], tl.int64)
    for start in range(program * tile, tl.load(record + WIDTH), programs * tile):
        deficits = deficits_of(given, row, largest, start + tl.arange(0, tile))
        value = value_of(deficits).to(tl.int64)
        total += value << unit_of(deficits >> FRACTION)
        entry = value + ONE_COUNT
        place = between.bins + row * BINS + (deficits >> HALF)
        tl.atomic_add(place, entry, mask=deficits < end, sem="relaxed")
    tl.store(between.mass + row * room + program, tl.sum(total, axis=0))


@triton.jit
def _count_within(
    given: Given,
    counts: tl.tensor,
    place: tl.tensor,
    row: tl.tensor,
    largest: tl.tensor,
    columns: tl.tensor,
) -> None:
    """Count the deficits of one bin."""
    deficits = deficits_of(given, row, largest, columns)
    target = counts + row * BINS + (deficits & (BINS - 1))
    tl.atomic_add(target, 1, mask=(deficits >> HALF) == place, sem="relaxed")


@triton.jit(do_not_specialize=["programs"])
def _first(
    given: Given, between: Between, programs: tl.tensor, tile: tl.constexpr, room: tl.constexpr
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = given.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & HAS_CUT) == 0:
        return
    by_count = (flags & HAS_TOP_K) != 0
    places = tl.arange(0, room)
    masses = tl.load(between.mass + row * room + places, mask=places < programs, other=0)
    limit = limit_of(tl.sum(masses, axis=0), given, row)
    sought = tl.where(by_count, tl.load(record + TOP_K).to(tl.int64), limit)
    search = between.searches + row * (2 * SEARCH)
    place = find_bin(between.bins + row * BINS, search, sought, by_count, program == 0)
    largest = largest_of(between, row, programs, room)
    for start in range(program * tile, tl.load(record + WIDTH), programs * tile):
        columns = start + tl.arange(0, tile)
        _count_within(given, between.first, place, row, largest, columns)


@triton.jit(do_not_specialize=["programs"])
def _second(
    given: Given, between: Between, programs: tl.tensor, tile: tl.constexpr, room: tl.constexpr
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = given.records + row * WORDS
    if (tl.load(record + FLAGS) & HAS_CUT) != HAS_CUT:
        return
    search = between.searches + row * (2 * SEARCH)
    _, _, kept_mass = find_cut(search, between.first + row * BINS, True)
    sought = limit_of(kept_mass, given, row)
    place = find_bin(between.bins + row * BINS, search + SEARCH, sought, False, program == 0)
    largest = largest_of(between, row, programs, room)
    for start in range(program * tile, tl.load(record + WIDTH), programs * tile):
        columns = start + tl.arange(0, tile)
        _count_within(given, between.second, place, row, largest, columns)


@triton.jit(do_not_specialize=["programs"])
def _masses(
    given: Given, between: Between, programs: tl.tensor, tile: tl.constexpr, room: tl.constexpr
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = given.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & RANDOM) == 0:
        return
    cut = tl.load(record + DEFICIT_END)
    ties_kept = tl.zeros([], tl.int64)
    if (flags & HAS_CUT) != 0:
        search = between.searches + row * (2 * SEARCH)
        within = between.first + row * BINS
        if (flags & HAS_CUT) == HAS_CUT:
            search += SEARCH
            within = between.second + row * BINS
        found, ties, _ = find_cut(search, within, (flags & HAS_TOP_P) == 0)
        ties_kept = tl.where(found < cut, ties, ties_kept)
        cut = tl.minimum(found, cut)
    if program == 0:
        tl.store(between.cut + 2 * row, cut.to(tl.int64))
        tl.store(between.cut + 2 * row + 1, ties_kept)
    largest = largest_of(between, row, programs, room)
    for start in range(program * tile, tl.load(record + WIDTH), programs * tile):
        deficits = deficits_of(given, row, largest, start + tl.arange(0, tile))
        weights = tl.where(deficits < cut, weight_of(deficits), 0)
        place = row * room + start // tile
        tl.store(between.mass + place, tl.sum(weights, axis=0))
        tl.store(between.ties + place, tl.sum((deficits == cut).to(tl.int32), axis=0))


@triton.jit
def _drawn(
    given: Given,
    between: Between,
    row: tl.tensor,
    largest: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> tl.tensor:
    """The column where the row's random number falls."""
    cut = tl.load(between.cut + 2 * row).to(tl.int32)
    ties_kept = tl.load(between.cut + 2 * row + 1)
    tiles = tl.arange(0, room)
    is_there = tiles * tile < tl.load(given.records + row * WORDS + WIDTH)
    ties = tl.load(between.ties + row * room + tiles, mask=is_there, other=0).to(tl.int64)
    before = tl.cumsum(ties, axis=0) - ties
    kept = tl.minimum(tl.maximum(ties_kept - before, 0), ties)
    masses = tl.load(between.mass + row * room + tiles, mask=is_there, other=0)
    masses += kept * weight_of(cut)
    total = tl.sum(masses, axis=0).to(tl.uint64)
    target = tl.umulhi(number_of(given.longs + row * (WORDS // 2)), total).to(tl.int64)
    is_before = tl.cumsum(masses, axis=0) <= target
    chosen = tl.sum(is_before.to(tl.int32), axis=0)
    target -= tl.sum(tl.where(is_before, masses, 0), axis=0)
    ties_kept = tl.sum(tl.where(tiles == chosen, kept, 0), axis=0)
    deficits = deficits_of(given, row, largest, chosen * tile + tl.arange(0, tile))
    is_tie = deficits == cut
    is_kept = (deficits < cut) | (is_tie & (tl.cumsum(is_tie.to(tl.int64), axis=0) <= ties_kept))
    passed = tl.cumsum(tl.where(is_kept, weight_of(deficits), 0), axis=0) <= target
    return chosen * tile + tl.sum(passed.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["programs"])
def _pick(
    given: Given, between: Between, programs: tl.tensor, tile: tl.constexpr, room: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    record, long = given.records + row * WORDS, given.longs + row * (WORDS // 2)
    flags = tl.load(record + FLAGS)
    if (flags & ACTIVE) == 0:
        tl.store(between.tokens + row, 0)
        return
    places = tl.arange(0, room)
    found = between.best + row * room + places
    values = tl.load(found, mask=places < programs, other=-float("inf"))
    largest = tl.max(values, axis=0)
    firsts = between.best_column + row * room + places
    is_best = (places < programs) & (values == largest)
    column = tl.min(tl.load(firsts, mask=is_best, other=2**31 - 1), axis=0)
    if largest == -float("inf"):
        column = tl.zeros_like(column)
    elif (flags & RANDOM) != 0:
        column = _drawn(given, between, row, largest, tile, room)
    token = id_of(record, column)
    tl.store(between.tokens + row, token)
    index = tl.load(long + INDEX)
    if (flags & HAS_PENALTIES) != 0:
        count_token(given, record, index, token)
    tl.debug_barrier()
    tl.store(long + INDEX, index + 1)
