"""Triton kernels of sampling; `llm.sampling.device.reference` defines what they compute.

A row of up to `WHOLE_COLUMNS` is one program's, which finds cuts by bisection (`_whole`). The
columns of a longer row lie in tiles, which its programs share; a row without a cut skips three
launches, and tiles with nothing above a cut are read once.

    tops       largest logit                                         by tile
    bins       histogram of deficits: 64 bins for each octave        count and mass in one word
    first      within the bin where top_k (else top_p) cuts          counts by deficit
               or, where top_p does not cut in the likely bins, the others
    second     within the bin where top_p cuts after all             counts by deficit
    masses     kept mass and ties at the cut                         by tile
    pick       the tile, then the column, where the draw falls; the history

A later launch reads the results of earlier ones, and each of its programs derives the cut from
them independently. All sums are of integers: the order and the number of programs never
change a result. Floats are only added, subtracted, multiplied and divided, never fused.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.sampling.device.history import PenaltyHistory
from llm.sampling.device.parts import (
    ACTIVE,
    BINS,
    CUT_END,
    DEFICIT_END,
    EVERYTHING,
    FLAGS,
    HALF,
    HAS_CUT,
    HAS_PENALTIES,
    HAS_TOP_K,
    HAS_TOP_P,
    INDEX,
    LIKELY_END,
    NO_COLUMN,
    NUM_BINS,
    ONE_COUNT,
    RANDOM,
    SEARCH,
    SEARCH_WORDS,
    TOP_K,
    WIDTH,
    WORDS,
    SamplerWorkspace,
    SamplingInputs,
    adjusted,
    count_token,
    deficit_of,
    fallen,
    find_bin,
    find_cut,
    heaviest,
    id_of,
    is_second,
    largest_of,
    limit_of,
    number_of,
    ranked,
    smallest,
    tops_of,
    value_of,
    weight_of,
)

TILE_COLUMNS = 1024
NUM_WARPS = 4
NUM_PROGRAMS = 2112  # of a launch, if rows are wide enough
WHOLE_COLUMNS = 4096  # a longer row has several programs
WHOLE_WARPS = 8


class Scratch:
    """Memory passed between the launches of one `sample`, for up to `max_rows` rows."""

    def __init__(
        self, vocab_size: int, device: torch.device, max_rows: int, tile: int | None = None
    ) -> None:
        """`tile`: columns of a tile; None: `TILE_COLUMNS`, or a short row is not divided."""
        self.is_whole = tile is None and vocab_size <= WHOLE_COLUMNS
        self.tile = tile = TILE_COLUMNS if tile is None else tile
        self.num_tiles = -(-vocab_size // tile)
        self.room = room = triton.next_power_of_2(self.num_tiles)

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_rows, width, dtype=dtype, device=device)

        self.workspace = SamplerWorkspace(
            tops=empty(room, torch.float32),
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
    logits: Tensor,
    records: Tensor,
    masks: Tensor,
    history: PenaltyHistory,
    scratch: Scratch,
    out: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """See `sample_reference`. The tokens int32 [B] are in `out`; without it they are owned by the
    scratch and valid until the next call. `level`: see `KernelSet`; for short rows.
    """
    num_rows = len(logits)
    tokens = scratch.workspace.tokens[:num_rows, 0] if out is None else out
    if num_rows == 0:
        return tokens
    if logits.stride(1) != 1:
        raise ValueError("a row's logits must lie side by side")
    inputs = SamplingInputs(
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
    options: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    if scratch.is_whole:
        columns = triton.next_power_of_2(logits.shape[1])
        options |= {"num_warps": WHOLE_WARPS, "level": level, "launch_pdl": level > 0}
        _whole[(num_rows,)](inputs, tokens, columns=columns, **options)
        return tokens
    programs = min(scratch.num_tiles, -(-NUM_PROGRAMS // num_rows))
    workspace = scratch.workspace._replace(tokens=tokens)
    options |= {"tile": scratch.tile, "room": scratch.room}
    for launch in (_tops, _bins, _first, _second, _masses):
        launch[programs, num_rows](inputs, workspace, programs, **options)
    _pick[(num_rows,)](inputs, workspace, programs, **options)
    return tokens


@triton.jit
def _whole_cut(
    inputs: SamplingInputs, row: tl.tensor, deficits: tl.tensor, weights: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the cut of a row, as `_cut_of`, from its deficits and their weights."""
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS)
    cut = tl.load(record + DEFICIT_END)
    ties_kept = tl.zeros([], tl.int64)
    if (flags & HAS_CUT) != 0:
        found = tl.full([], EVERYTHING, tl.int32)
        ties = tl.zeros([], tl.int64)
        if (flags & HAS_TOP_K) != 0:
            top_k = tl.load(record + TOP_K)
            found = ranked(deficits, top_k)
            ties = (top_k - tl.sum((deficits < found).to(tl.int32), axis=0)).to(tl.int64)
        if (flags & HAS_TOP_P) != 0:
            mass = tl.sum(tl.where(deficits < found, weights, 0), axis=0)
            sought = limit_of(mass + ties * weight_of(found), inputs, row)
            found = heaviest(deficits, weights, sought)
            weight = weight_of(found)
            less = tl.sum(tl.where(deficits < found, weights, 0), axis=0)
            ties = (sought - less + weight - 1) // tl.maximum(weight, 1)
        ties_kept = tl.where(found < cut, ties, ties_kept)
        cut = tl.minimum(found, cut)
    return cut, ties_kept


@triton.jit
def _whole(
    inputs: SamplingInputs, tokens: tl.tensor, columns: tl.constexpr, level: tl.constexpr
) -> None:
    """Process a row of up to `columns` columns."""
    if level > 0:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    flags = tl.load(inputs.records + row * WORDS + FLAGS)
    if (flags & ACTIVE) == 0:
        tl.store(tokens + row, 0)
        return
    places = tl.arange(0, columns)
    values = adjusted(inputs, row, places)
    largest = tl.max(values, axis=0)
    if ((flags & RANDOM) != 0) & (largest != -float("inf")):
        deficits = deficit_of(inputs, row, largest_of(values), values)
        weights = weight_of(deficits)
        cut, ties_kept = _whole_cut(inputs, row, deficits, weights)
        long = inputs.longs + row * (WORDS // 2)
        column = fallen(long, deficits, weights, cut, ties_kept)
    else:
        column = tl.min(tl.where(values == largest, places, NO_COLUMN), axis=0)
    _finish(inputs, tokens, row, column)


@triton.jit
def _finish(inputs: SamplingInputs, tokens: tl.tensor, row: tl.tensor, column: tl.tensor) -> None:
    """Store the token of a column, count it, and advance the row."""
    record, long = inputs.records + row * WORDS, inputs.longs + row * (WORDS // 2)
    token = id_of(record, column)
    tl.store(tokens + row, token)
    index = tl.load(long + INDEX)
    if (tl.load(record + FLAGS) & HAS_PENALTIES) != 0:
        count_token(inputs, record, index, token)
    tl.debug_barrier()
    tl.store(long + INDEX, index + 1)


@triton.jit(do_not_specialize=["programs"])
def _tops(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & ACTIVE) == 0:
        return
    if (flags & HAS_CUT) != 0:
        for start in range(program * tile, BINS, programs * tile):
            places = start + tl.arange(0, tile)
            is_there = places < BINS
            places += row * BINS
            tl.store(workspace.bins + places, tl.zeros([tile], tl.int64), mask=is_there)
            tl.store(workspace.first + places, tl.zeros([tile], tl.int32), mask=is_there)
            tl.store(workspace.second + places, tl.zeros([tile], tl.int32), mask=is_there)
    for start in range(program * tile, tl.load(record + WIDTH), programs * tile):
        values = adjusted(inputs, row, start + tl.arange(0, tile))
        tl.store(workspace.tops + row * room + start // tile, tl.max(values, axis=0))


@triton.jit
def _tile_deficit(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    row: tl.tensor,
    largest: tl.tensor,
    place: tl.tensor,
) -> tl.tensor:
    """Return the smallest deficit of the tile at a position among all rows' tiles."""
    return deficit_of(inputs, row, largest, tl.load(workspace.tops + place))


@triton.jit
def _add(
    workspace: SamplerWorkspace, row: tl.tensor, deficits: tl.tensor, chosen: tl.tensor
) -> None:
    """Add the chosen deficits to the row's histogram."""
    entries = value_of(deficits).to(tl.int64) + ONE_COUNT
    places = workspace.bins + row * BINS + (deficits >> HALF)
    tl.atomic_add(places, entries, mask=chosen, sem="relaxed")


@triton.jit(do_not_specialize=["programs"])
def _bins(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & HAS_CUT) == 0:
        return
    width = tl.load(record + WIDTH)
    tops = tops_of(workspace, row, width, tile, room)
    largest = largest_of(tops)
    end = tl.load(record + LIKELY_END)
    needed = tl.full([], EVERYTHING, tl.int32)  # without top_k all mass counts
    if (flags & HAS_TOP_K) != 0:
        top_k = tl.load(record + TOP_K)
        if top_k * tile <= width:  # so many tiles have a maximum that is not below the last of them
            last = smallest(deficit_of(inputs, row, largest, tops), top_k)
            end = tl.minimum(end, last + 1)
        needed = end
    total = tl.zeros([tile], tl.int64)
    for start in range(program * tile, width, programs * tile):
        if _tile_deficit(inputs, workspace, row, largest, row * room + start // tile) < needed:
            values = adjusted(inputs, row, start + tl.arange(0, tile))
            deficits = deficit_of(inputs, row, largest, values)
            total += weight_of(deficits)
            _add(workspace, row, deficits, deficits < end)
    tl.store(workspace.mass + row * room + program, tl.sum(total, axis=0))


@triton.jit
def _count_within(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    counts: tl.tensor,
    place: tl.tensor,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    """Count the deficits of one bin."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    width = tl.load(inputs.records + row * WORDS + WIDTH)
    largest = largest_of(tops_of(workspace, row, width, tile, room))
    for start in range(program * tile, width, programs * tile):
        top = _tile_deficit(inputs, workspace, row, largest, row * room + start // tile)
        if (top >> HALF) <= place:
            values = adjusted(inputs, row, start + tl.arange(0, tile))
            deficits = deficit_of(inputs, row, largest, values)
            target = counts + row * BINS + (deficits & (BINS - 1))
            tl.atomic_add(target, 1, mask=(deficits >> HALF) == place, sem="relaxed")


@triton.jit
def _add_unlikely(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    """Complete the row's histogram; the previous launch skipped deficits where top_p is unlikely to
    cut.
    """
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = inputs.records + row * WORDS
    width, start_deficit = tl.load(record + WIDTH), tl.load(record + LIKELY_END)
    end = tl.load(record + CUT_END)
    largest = largest_of(tops_of(workspace, row, width, tile, room))
    for start in range(program * tile, width, programs * tile):
        values = adjusted(inputs, row, start + tl.arange(0, tile))
        deficits = deficit_of(inputs, row, largest, values)
        _add(workspace, row, deficits, (deficits >= start_deficit) & (deficits < end))


@triton.jit(do_not_specialize=["programs"])
def _first(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & HAS_CUT) == 0:
        return
    by_count = (flags & HAS_TOP_K) != 0
    places = tl.arange(0, room)
    masses = tl.load(workspace.mass + row * room + places, mask=places < programs, other=0)
    limit = limit_of(tl.sum(masses, axis=0), inputs, row)
    sought = tl.where(by_count, tl.load(record + TOP_K).to(tl.int64), limit)
    search = workspace.searches + row * (2 * SEARCH)
    likely = tl.load(record + LIKELY_END)  # other programs may be adding deficits from here on
    end = (likely + BINS - 1) >> HALF
    bins = workspace.bins + row * BINS
    place = find_bin(bins, search, sought, by_count, program == 0, end)
    if (place < BINS) | (likely == tl.load(record + CUT_END)):
        _count_within(inputs, workspace, workspace.first, place, programs, tile, room)
    else:
        _add_unlikely(inputs, workspace, programs, tile, room)


@triton.jit(do_not_specialize=["programs"])
def _second(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS) & HAS_CUT
    if flags == 0:
        return
    search = workspace.searches + row * (2 * SEARCH)
    if is_second(record, search):
        sought = tl.load(search + 3)
        if flags == HAS_CUT:
            _, _, kept_mass = find_cut(search, workspace.first + row * BINS, True)
            sought = limit_of(kept_mass, inputs, row)
        bins = workspace.bins + row * BINS
        place = find_bin(bins, search + SEARCH, sought, False, program == 0, BINS)
        _count_within(inputs, workspace, workspace.second, place, programs, tile, room)


@triton.jit
def _cut_of(
    record: tl.tensor, workspace: SamplerWorkspace, row: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the cut of a row: the first deficit that is not kept, and how many equal to it are
    kept.
    """
    flags = tl.load(record + FLAGS) & HAS_CUT
    cut = tl.load(record + DEFICIT_END)
    ties_kept = tl.zeros([], tl.int64)
    if flags != 0:
        search = workspace.searches + row * (2 * SEARCH)
        within = workspace.first + row * BINS
        if is_second(record, search):
            search += SEARCH
            within = workspace.second + row * BINS
        found, ties, _ = find_cut(search, within, (flags & HAS_TOP_P) == 0)
        ties_kept = tl.where(found < cut, ties, ties_kept)
        cut = tl.minimum(found, cut)
    return cut, ties_kept


@triton.jit(do_not_specialize=["programs"])
def _masses(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = inputs.records + row * WORDS
    if (tl.load(record + FLAGS) & RANDOM) == 0:
        return
    cut, ties_kept = _cut_of(record, workspace, row)
    if program == 0:
        tl.store(workspace.cut + 2 * row, cut.to(tl.int64))
        tl.store(workspace.cut + 2 * row + 1, ties_kept)
    width = tl.load(record + WIDTH)
    largest = largest_of(tops_of(workspace, row, width, tile, room))
    for start in range(program * tile, width, programs * tile):
        place = row * room + start // tile
        mass, ties = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
        if _tile_deficit(inputs, workspace, row, largest, place) <= cut:
            values = adjusted(inputs, row, start + tl.arange(0, tile))
            deficits = deficit_of(inputs, row, largest, values)
            mass = tl.sum(tl.where(deficits < cut, weight_of(deficits), 0), axis=0)
            ties = tl.sum((deficits == cut).to(tl.int32), axis=0)
        tl.store(workspace.mass + place, mass)
        tl.store(workspace.ties + place, ties)


@triton.jit
def _drawn(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    row: tl.tensor,
    largest: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> tl.tensor:
    """Return the column that the row's random number selects."""
    cut = tl.load(workspace.cut + 2 * row).to(tl.int32)
    ties_kept = tl.load(workspace.cut + 2 * row + 1)
    tiles = tl.arange(0, room)
    is_there = tiles * tile < tl.load(inputs.records + row * WORDS + WIDTH)
    ties = tl.load(workspace.ties + row * room + tiles, mask=is_there, other=0).to(tl.int64)
    before = tl.cumsum(ties, axis=0) - ties
    kept = tl.minimum(tl.maximum(ties_kept - before, 0), ties)
    masses = tl.load(workspace.mass + row * room + tiles, mask=is_there, other=0)
    masses += kept * weight_of(cut)
    total = tl.sum(masses, axis=0).to(tl.uint64)
    target = tl.umulhi(number_of(inputs.longs + row * (WORDS // 2)), total).to(tl.int64)
    is_before = tl.cumsum(masses, axis=0) <= target
    chosen = tl.sum(is_before.to(tl.int32), axis=0)
    target -= tl.sum(tl.where(is_before, masses, 0), axis=0)
    ties_kept = tl.sum(tl.where(tiles == chosen, kept, 0), axis=0)
    values = adjusted(inputs, row, chosen * tile + tl.arange(0, tile))
    deficits = deficit_of(inputs, row, largest, values)
    is_tie = deficits == cut
    is_kept = (deficits < cut) | (is_tie & (tl.cumsum(is_tie.to(tl.int64), axis=0) <= ties_kept))
    passed = tl.cumsum(tl.where(is_kept, weight_of(deficits), 0), axis=0) <= target
    return chosen * tile + tl.sum(passed.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["programs"])
def _pick(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & ACTIVE) == 0:
        tl.store(workspace.tokens + row, 0)
        return
    tops = tops_of(workspace, row, tl.load(record + WIDTH), tile, room)
    largest = tl.max(tops, axis=0)
    if ((flags & RANDOM) != 0) & (largest != -float("inf")):
        column = _drawn(inputs, workspace, row, largest, tile, room)
    else:
        first = tl.min(tl.where(tops == largest, tl.arange(0, room), room), axis=0)
        columns = first * tile + tl.arange(0, tile)
        is_best = adjusted(inputs, row, columns) == largest
        column = tl.min(tl.where(is_best, columns, NO_COLUMN), axis=0)
    _finish(inputs, workspace.tokens, row, column)
