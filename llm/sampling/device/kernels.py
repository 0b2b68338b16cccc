"""Triton kernels of sampling; `llm.sampling.device.reference` defines what they compute.

A row of up to `WHOLE_COLUMNS` is one program's, which finds cuts by bisection (`_whole`). The
columns of a longer row lie in tiles, which its programs share. The last of them to end a launch has
the results of all, and does what the row needs once:

    tops       largest logit by tile            a greedy row's token; deficits [lo, hi) that very
                                                likely contain the cut, and few others
    collect    histogram of [lo, hi), lists     the bin with the cut is the next [lo, hi); or, where
               of these deficits, and the       it is in no bin, the deficits on that side
               mass below lo, by tile
    narrow     histogram of [lo, hi), from      the same
    (twice)    the lists
    masses     kept mass and ties at the cut,   the tile, then the column, where the draw falls; the
               from the lists, by tile          history

A row's first histogram has wide bins, the next one a deficit in each bin; `top_k` and `top_p`
together need a third, and so does a cut that was not in the first. A row that has its cut skips the
others. Only `tops` and `collect` read whole rows, and `collect` no tiles below the cut of top_k. A
tile with more deficits in [lo, hi) than its list holds is read again, and where the cut is
elsewhere, the row is.

All sums that decide are of integers: the order and the number of programs never change a result.
Floats are only added, subtracted, multiplied and divided, never fused; but for the guess where the
cut is, which is checked.
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
    BY_COUNT,
    BY_MASS,
    COUNT,
    CUT,
    CUT_END,
    DEFICIT_END,
    DRAW,
    EVERYTHING,
    FIRST_HI,
    FLAGS,
    GROUP,
    HAS_CUT,
    HAS_MASK,
    HAS_PENALTIES,
    HAS_TOP_K,
    HAS_TOP_P,
    HI,
    INDEX,
    LISTED,
    LO,
    LOWEST,
    MASS,
    NO_COLUMN,
    NOTHING,
    NUM_BINS,
    NUM_SLICES,
    ONE_COUNT,
    RANDOM,
    SCALE,
    SHIFT,
    SLICES,
    SLOTS,
    SOUGHT,
    STATE_WORDS,
    STEP_LEFT,
    TIES,
    TOP_K,
    TOTAL,
    WIDTH,
    WORDS,
    SamplerWorkspace,
    SamplingInputs,
    State,
    adjusted,
    clear_bins,
    count_token,
    deficit_of,
    fallen,
    find_bin,
    guess,
    heaviest,
    id_of,
    largest_of,
    limit_of,
    limited,
    number_of,
    ranked,
    scaled_deficit,
    shift_for,
    smallest,
    unit_of,
    weight_of,
)

TILE_COLUMNS = 1024
NUM_WARPS = 4
MAX_REGISTERS = 64  # of a thread: what a row needs once must not keep tiles from being read at once
NUM_PROGRAMS = 2112  # of a launch, if rows are wide enough
WHOLE_COLUMNS = 4096  # a longer row has several programs
WHOLE_WARPS = 8
LANES = tl.constexpr(32 * NUM_WARPS)


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
        divided = 0 if self.is_whole else max_rows

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(divided, width, dtype=dtype, device=device)

        self.workspace = SamplerWorkspace(
            tops=empty(room, torch.float32),
            sums=empty(room, torch.float32),
            largest=empty(1, torch.float32),
            arrived=torch.zeros(divided, dtype=torch.int32, device=device),
            # Nothing is left for a row whose first launch is only compiled, see `compile_together`.
            states=torch.zeros(divided, len(State), dtype=torch.int64, device=device),
            bins=torch.zeros(divided, 2 * NUM_BINS, dtype=torch.int64, device=device),
            mass=empty(room, torch.int64),
            base=empty(room, torch.int64),
            listed=empty(room, torch.int32),
            lists=empty(self.num_tiles * SLOTS.value, torch.int32),
            num_tiles=self.num_tiles,
            ties=empty(room, torch.int32),
            tokens=torch.empty(max_rows, 1, dtype=torch.int32, device=device),
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
    scratch and valid until the next call. `level`: see `KernelSet`; the first launch over longer
    rows follows a product of torch and does not start early.
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
    options: dict[str, Any] = {"enable_fp_fusion": False, "level": level}
    if scratch.is_whole:
        options |= {"num_warps": WHOLE_WARPS, "launch_pdl": level > 0}
        columns = triton.next_power_of_2(logits.shape[1])
        _whole[(num_rows,)](inputs, tokens, columns=columns, **options)
        return tokens
    programs = min(scratch.num_tiles, -(-NUM_PROGRAMS // num_rows))
    workspace = scratch.workspace._replace(tokens=tokens)
    options |= {"tile": scratch.tile, "room": scratch.room}
    options |= {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS, "launch_pdl": False}
    for launch in (_tops, _collect, _narrow, _narrow, _masses):
        launch[programs, num_rows](inputs, workspace, programs, **options)
        options["launch_pdl"] = level > 0
    return tokens


@triton.jit
def _follow(level: tl.constexpr) -> None:
    """Wait for the launches before, and let the next one begin to wait."""
    if level > 0:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _whole_cut(
    inputs: SamplingInputs,
    row: tl.tensor,
    words: tl.tuple,
    deficits: tl.tensor,
    weights: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the cut of a row, as `_cut_of`, from its deficits and their weights. `words`: its
    flags, top_k and deficit_end.
    """
    flags, top_k, cut = words
    ties_kept = tl.zeros([], tl.int64)
    if (flags & HAS_CUT) != 0:
        found = tl.full([], EVERYTHING, tl.int32)
        ties = tl.zeros([], tl.int64)
        if (flags & HAS_TOP_K) != 0:
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
    """Process a row of up to `columns` columns.

    The words of its record are read before any is needed, so that memory is waited for once.
    """
    _follow(level)
    row = tl.program_id(0).to(tl.int64)
    record = inputs.records + row * WORDS
    flags, width = tl.load(record + FLAGS), tl.load(record + WIDTH)
    slices = tl.load(record + NUM_SLICES)
    shift, scale = tl.load(record + SLICES + 1), tl.load(record + SCALE)
    words = flags, tl.load(record + TOP_K), tl.load(record + DEFICIT_END)
    if (flags & ACTIVE) == 0:
        tl.store(tokens + row, 0)
        return
    places = tl.arange(0, columns)
    if (slices == 1) & ((flags & (HAS_PENALTIES | HAS_MASK)) == 0):
        logits = inputs.logits + row * inputs.logits_stride + shift + places
        values = limited(tl.load(logits, mask=places < width, other=0.0).to(tl.float32))
        values = tl.where(places < width, values, -float("inf"))
    else:
        values = adjusted(inputs, row, places)
    largest = tl.max(values, axis=0)
    if ((flags & RANDOM) != 0) & (largest != -float("inf")):
        top = tl.maximum(largest, LOWEST)
        deficits = scaled_deficit(scale.to(tl.float32, bitcast=True), top, values)
        weights = weight_of(deficits)
        cut, ties_kept = _whole_cut(inputs, row, words, deficits, weights)
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


@triton.jit
def _is_last(workspace: SamplerWorkspace, row: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Whether all other programs of the row have come here, and stored their results before."""
    tl.debug_barrier()  # all threads have stored
    is_last = tl.atomic_add(workspace.arrived + row, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.store(workspace.arrived + row, 0)
    return is_last


@triton.jit(do_not_specialize=["programs"])
def _tops(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
    level: tl.constexpr,
) -> None:
    _follow(level)
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & ACTIVE) == 0:
        if program == 0:
            tl.store(workspace.tokens + row, 0)
            tl.store(workspace.states + row * STATE_WORDS + STEP_LEFT, NOTHING)
        return
    width = tl.load(record + WIDTH)
    scale = tl.load(record + SCALE).to(tl.float32, bitcast=True)
    has_guess = (flags & HAS_CUT) == HAS_TOP_P
    for start in range(program * tile, width, programs * tile):
        values = adjusted(inputs, row, start + tl.arange(0, tile))
        top = tl.max(values, axis=0)
        place = row * room + start // tile
        tl.store(workspace.tops + place, top)
        if has_guess:
            masses = tl.exp2((values - tl.maximum(top, LOWEST)) * scale)
            tl.store(workspace.sums + place, tl.sum(masses, axis=0))
    if _is_last(workspace, row, programs):
        tiles = tl.arange(0, room)
        is_there = tiles * tile < width
        tops = tl.load(workspace.tops + row * room + tiles, mask=is_there, other=-float("inf"))
        largest = tl.max(tops, axis=0)
        if ((flags & RANDOM) != 0) & (largest != -float("inf")):
            _start(inputs, workspace, row, tops, tile, room)
        else:
            first = tl.min(tl.where(tops == largest, tiles, room), axis=0)
            columns = first * tile + tl.arange(0, tile)
            is_best = adjusted(inputs, row, columns) == largest
            column = tl.min(tl.where(is_best, columns, NO_COLUMN), axis=0)
            tl.store(workspace.states + row * STATE_WORDS + STEP_LEFT, NOTHING)
            _finish(inputs, workspace.tokens, row, column)


@triton.jit
def _start(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    row: tl.tensor,
    tops: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> None:
    """Write the first state of a random row with these largest logits of its tiles."""
    record = inputs.records + row * WORDS
    flags, width = tl.load(record + FLAGS), tl.load(record + WIDTH)
    largest = largest_of(tops)
    tl.store(workspace.largest + row, largest)
    lo, hi = tl.zeros([], tl.int32), tl.load(record + CUT_END)
    step, sought = tl.full([], DRAW, tl.int32), tl.zeros([], tl.int64)
    if (flags & HAS_TOP_K) != 0:
        step = tl.full([], BY_COUNT, tl.int32)
        top_k = tl.load(record + TOP_K)
        sought = top_k.to(tl.int64)
        if top_k * tile <= width:  # so many tiles have a maximum that is not below the last of them
            last = smallest(deficit_of(inputs, row, largest, tops), top_k)
            hi = tl.minimum(hi, last + 1)
    elif (flags & HAS_TOP_P) != 0:
        step = tl.full([], BY_MASS, tl.int32)
        tiles = tl.arange(0, room)
        sums = workspace.sums + row * room + tiles
        masses = tl.load(sums, mask=tiles * tile < width, other=0.0)
        scale = tl.load(record + SCALE).to(tl.float32, bitcast=True)
        masses *= tl.exp2((tops - largest) * scale)
        lo, hi = guess(inputs, row, largest, tl.sum(masses, axis=0))
    state = workspace.states + row * STATE_WORDS
    tl.store(state + STEP_LEFT, step.to(tl.int64))
    tl.store(state + LO, lo.to(tl.int64))
    tl.store(state + HI, hi.to(tl.int64))
    tl.store(state + SHIFT, shift_for(hi - lo).to(tl.int64))
    tl.store(state + COUNT, tl.zeros([], tl.int64))
    tl.store(state + MASS, tl.zeros([], tl.int64))
    tl.store(state + SOUGHT, sought)
    tl.store(state + FIRST_HI, hi.to(tl.int64))
    tl.store(state + TOTAL, tl.zeros([], tl.int64))
    tl.store(state + CUT, tl.load(record + DEFICIT_END).to(tl.int64))
    tl.store(state + TIES, tl.zeros([], tl.int64))
    tl.store(state + LISTED, (step >= BY_MASS).to(tl.int64))


@triton.jit
def _top_deficit(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    row: tl.tensor,
    largest: tl.tensor,
    place: tl.tensor,
) -> tl.tensor:
    """Return the smallest deficit of the tile at a position among all rows' tiles."""
    return deficit_of(inputs, row, largest, tl.load(workspace.tops + place))


@triton.jit
def _deficits(
    inputs: SamplingInputs, row: tl.tensor, largest: tl.tensor, start: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Return the deficits of a tile."""
    return deficit_of(inputs, row, largest, adjusted(inputs, row, start + tl.arange(0, tile)))


@triton.jit
def _count(
    bins: tl.tensor,
    deficits: tl.tensor,
    weights: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    shift: tl.tensor,
) -> None:
    """Add the deficits in [lo, hi) to a histogram."""
    entries = (weights >> unit_of(deficits)) + ONE_COUNT
    targets = bins + ((deficits >> shift) - (lo >> shift))
    tl.atomic_add(targets, entries, mask=(deficits >= lo) & (deficits < hi), sem="relaxed")


@triton.jit(do_not_specialize=["programs"])
def _collect(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
    level: tl.constexpr,
) -> None:
    _follow(level)
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state = workspace.states + row * STATE_WORDS
    step = tl.load(state + STEP_LEFT)
    if step < BY_MASS:
        return
    lo, hi = tl.load(state + LO).to(tl.int32), tl.load(state + HI).to(tl.int32)
    shift = tl.load(state + SHIFT).to(tl.int32)
    bins = _bins_of(workspace, row, shift)
    largest = tl.load(workspace.largest + row)
    width = tl.load(inputs.records + row * WORDS + WIDTH)
    needed = tl.where(step == BY_MASS, EVERYTHING, hi)  # for the mass of all
    lanes: tl.constexpr = LANES if tile > LANES else tile
    total, below = tl.zeros([lanes], tl.int64), tl.zeros([], tl.int64)
    for start in range(program * tile, width, programs * tile):
        place = row * room + start // tile
        mass, num_listed = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
        if _top_deficit(inputs, workspace, row, largest, place) < needed:
            deficits = _deficits(inputs, row, largest, start, tile)
            weights = weight_of(deficits)
            _count(bins, deficits, weights, lo, hi, shift)
            # A thread has the columns of a lane: sums over them need no other thread.
            total += tl.sum(tl.reshape(weights, [tile // lanes, lanes]), axis=0)
            lower = tl.reshape(tl.where(deficits < lo, weights, 0), [tile // lanes, lanes])
            mass = tl.sum(tl.sum(lower, axis=0), axis=0)
            is_listed = (deficits >= lo) & (deficits < hi)
            ones = tl.reshape(is_listed.to(tl.int32), [tile // lanes, lanes])
            by_lane = tl.sum(ones, axis=0)
            before = tl.cumsum(by_lane, axis=0) - by_lane
            slots = tl.reshape(before[None, :] + tl.cumsum(ones, axis=0) - 1, [tile])
            targets = _list_of(workspace, row, start // tile) + slots
            tl.store(targets, deficits, mask=is_listed & (slots < SLOTS))
            num_listed = tl.sum(by_lane, axis=0)
        below += mass
        tl.store(workspace.base + place, mass)
        tl.store(workspace.listed + place, num_listed)
    tl.atomic_add(state + TOTAL, tl.sum(total, axis=0), sem="relaxed")
    tl.atomic_add(state + MASS, below, sem="relaxed")
    if _is_last(workspace, row, programs):
        _decide(inputs, workspace, row, (lo, hi, shift), True)


@triton.jit(do_not_specialize=["programs"])
def _narrow(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
    level: tl.constexpr,
) -> None:
    _follow(level)
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state = workspace.states + row * STATE_WORDS
    if tl.load(state + STEP_LEFT) < BY_MASS:
        return
    lo, hi = tl.load(state + LO).to(tl.int32), tl.load(state + HI).to(tl.int32)
    shift = tl.load(state + SHIFT).to(tl.int32)
    bins = _bins_of(workspace, row, shift)
    largest = tl.load(workspace.largest + row)
    width = tl.load(inputs.records + row * WORDS + WIDTH)
    if tl.load(state + LISTED) != 0:
        for first in range(program * GROUP, tl.cdiv(width, tile), programs * GROUP):
            deficits, listed = _listed(workspace, row, first, width, tile, room)
            _count(bins, deficits, weight_of(deficits), lo, hi, shift)
            if tl.max(listed, axis=0) > SLOTS:
                for other in range(first, first + GROUP):
                    if _is_long(workspace, row, other, width, tile, room):
                        every = _deficits(inputs, row, largest, other * tile, tile)
                        _count(bins, every, weight_of(every), lo, hi, shift)
    else:
        for start in range(program * tile, width, programs * tile):
            place = row * room + start // tile
            if _top_deficit(inputs, workspace, row, largest, place) < hi:
                every = _deficits(inputs, row, largest, start, tile)
                _count(bins, every, weight_of(every), lo, hi, shift)
    if _is_last(workspace, row, programs):
        _decide(inputs, workspace, row, (lo, hi, shift), False)


@triton.jit
def _list_of(workspace: SamplerWorkspace, row: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Return the list of a row's tile."""
    return workspace.lists + (row * workspace.num_tiles + place) * SLOTS


@triton.jit
def _listed(
    workspace: SamplerWorkspace,
    row: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the listed deficits [GROUP, SLOTS] of a group of tiles from `first` on, `EVERYTHING`
    where there is none, and how many each tile has.
    """
    tiles = first + tl.arange(0, GROUP)
    listed = tl.load(workspace.listed + row * room + tiles, mask=tiles * tile < width, other=0)
    slots = tl.arange(0, SLOTS)[None, :]
    is_there = (slots < listed[:, None]) & (listed[:, None] <= SLOTS)
    lists = _list_of(workspace, row, tiles[:, None]) + slots
    return tl.load(lists, mask=is_there, other=EVERYTHING), listed


@triton.jit
def _is_long(
    workspace: SamplerWorkspace,
    row: tl.tensor,
    place: tl.tensor,
    width: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> tl.tensor:
    """Whether a tile has more deficits than its list."""
    listed = workspace.listed + row * room + place
    return tl.load(listed, mask=place * tile < width, other=0) > SLOTS


@triton.jit
def _bins_of(workspace: SamplerWorkspace, row: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Return a row's histogram for bins of this width."""
    return workspace.bins + row * (2 * BINS) + tl.where(shift == 0, BINS, 0)


@triton.jit
def _decide(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    row: tl.tensor,
    span: tl.tuple,
    is_first: tl.constexpr,
) -> None:
    """Write the state of a row after the histogram of a span, its lo, hi and shift."""
    state = workspace.states + row * STATE_WORDS
    record = inputs.records + row * WORDS
    has_both = (tl.load(record + FLAGS) & HAS_CUT) == HAS_CUT
    by_count = tl.load(state + STEP_LEFT) == BY_COUNT
    count, mass, sought = tl.load(state + COUNT), tl.load(state + MASS), tl.load(state + SOUGHT)
    if is_first & (by_count == 0):
        sought = limit_of(tl.load(state + TOTAL), inputs, row)
    is_less = (by_count == 0) & (mass >= sought)
    bins = _bins_of(workspace, row, span[2])
    cut, count, mass = find_bin(bins, span, by_count, count, mass, sought)
    is_found = (cut < span[1]) & (is_less == 0)
    if (is_first & by_count & has_both) == 0:
        clear_bins(bins, span)
    ties, kept = _ties_of(cut, by_count, count, mass, sought)
    is_over = (is_found & (span[2] == 0)) | (
        (cut >= span[1]) & (span[1] == tl.load(record + CUT_END))
    )
    if is_over & by_count & has_both:  # now for the cut of top_p, in the first histogram
        by_count = by_count & (by_count == 0)
        sought = limit_of(kept, inputs, row)
        hi = tl.load(state + FIRST_HI).to(tl.int32)
        span = (hi * 0, hi, shift_for(hi))
        bins = _bins_of(workspace, row, span[2])
        zero = tl.zeros([], tl.int64)
        cut, count, mass = find_bin(bins, span, by_count, zero, zero, sought)
        clear_bins(bins, span)
        ties, _ = _ties_of(cut, by_count, count, mass, sought)
        is_found = cut < hi
        is_over = span[2] == 0
    tl.debug_barrier()  # all threads must have read
    if is_over:
        end = tl.load(record + DEFICIT_END)
        is_cut = is_found & (cut < end)
        tl.store(state + STEP_LEFT, DRAW)
        tl.store(state + CUT, tl.where(is_cut, cut, end).to(tl.int64))
        tl.store(state + TIES, tl.where(is_cut, ties, 0))
        if is_cut == 0:
            tl.store(state + LISTED, 0)
    else:
        tl.store(state + STEP_LEFT, tl.where(by_count, BY_COUNT, BY_MASS).to(tl.int64))
        tl.store(state + COUNT, tl.where(is_less, 0, count))
        tl.store(state + MASS, tl.where(is_less, 0, mass))
        tl.store(state + SOUGHT, sought)
        _search_next(state, record, span, cut, is_found, is_less)


@triton.jit
def _search_next(
    state: tl.tensor,
    record: tl.tensor,
    span: tl.tuple,
    cut: tl.tensor,
    is_found: tl.tensor,
    is_less: tl.tensor,
) -> None:
    """Write the next span: the bin from `cut` on, or the deficits before or behind this span."""
    lo, hi, shift = span
    after = tl.where(is_found, ((cut >> shift) + 1) << shift, tl.load(record + CUT_END))
    first = tl.where(is_found, cut, tl.where(is_less, 0, hi))
    last = tl.where(is_found, tl.minimum(hi, after), tl.where(is_less, lo, after))
    tl.store(state + LO, first.to(tl.int64))
    tl.store(state + HI, last.to(tl.int64))
    tl.store(state + SHIFT, tl.where(is_found, 0, shift_for(last - first)).to(tl.int64))
    if is_found == 0:
        tl.store(state + LISTED, 0)


@triton.jit
def _ties_of(
    cut: tl.tensor, by_count: tl.tensor, count: tl.tensor, mass: tl.tensor, sought: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many deficits equal to the cut are kept, and the kept mass, for the count and the
    mass below the cut.
    """
    weight = weight_of(tl.minimum(cut, EVERYTHING))
    by_mass = (sought - mass + weight - 1) // tl.maximum(weight, 1)
    ties = tl.where(by_count, sought - count, by_mass)
    return ties, mass + ties * weight


@triton.jit(do_not_specialize=["programs"])
def _masses(
    inputs: SamplingInputs,
    workspace: SamplerWorkspace,
    programs: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
    level: tl.constexpr,
) -> None:
    _follow(level)
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state = workspace.states + row * STATE_WORDS
    if tl.load(state + STEP_LEFT) == NOTHING:
        return
    cut = tl.load(state + CUT).to(tl.int32)
    largest = tl.load(workspace.largest + row)
    width = tl.load(inputs.records + row * WORDS + WIDTH)
    begin = row * room
    if tl.load(state + LISTED) != 0:
        for first in range(program * GROUP, tl.cdiv(width, tile), programs * GROUP):
            deficits, listed = _listed(workspace, row, first, width, tile, room)
            tiles = first + tl.arange(0, GROUP)
            is_whole = (tiles * tile < width) & (listed <= SLOTS)
            mass = tl.load(workspace.base + begin + tiles, mask=is_whole, other=0)
            mass += tl.sum(tl.where(deficits < cut, weight_of(deficits), 0), axis=1)
            ties = tl.sum((deficits == cut).to(tl.int32), axis=1)
            tl.store(workspace.mass + begin + tiles, mass, mask=is_whole)
            tl.store(workspace.ties + begin + tiles, ties, mask=is_whole)
            if tl.max(listed, axis=0) > SLOTS:
                for other in range(first, first + GROUP):
                    if _is_long(workspace, row, other, width, tile, room):
                        every = _deficits(inputs, row, largest, other * tile, tile)
                        _keep(workspace, begin + other, every, cut)
    else:
        for start in range(program * tile, width, programs * tile):
            place = begin + start // tile
            if _top_deficit(inputs, workspace, row, largest, place) <= cut:
                every = _deficits(inputs, row, largest, start, tile)
                _keep(workspace, place, every, cut)
            else:
                tl.store(workspace.mass + place, tl.zeros([], tl.int64))
                tl.store(workspace.ties + place, tl.zeros([], tl.int32))
    if _is_last(workspace, row, programs):
        column = _drawn(inputs, workspace, row, largest, tile, room)
        _finish(inputs, workspace.tokens, row, column)


@triton.jit
def _keep(
    workspace: SamplerWorkspace, place: tl.tensor, deficits: tl.tensor, cut: tl.tensor
) -> None:
    """Store the mass before the cut, and the ties at it, of a whole tile."""
    mass = tl.sum(tl.where(deficits < cut, weight_of(deficits), 0), axis=0)
    tl.store(workspace.mass + place, mass)
    tl.store(workspace.ties + place, tl.sum((deficits == cut).to(tl.int32), axis=0))


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
    state = workspace.states + row * STATE_WORDS
    cut, ties_kept = tl.load(state + CUT).to(tl.int32), tl.load(state + TIES)
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
