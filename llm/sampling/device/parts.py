"""Triton functions on the columns of one row, used by the kernels."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from llm.sampling.device import reference
from llm.sampling.device.history import MAX_COUNT
from llm.sampling.device.records import END_OCTAVE, FRACTION_BITS, RECORD_WORDS, Flag, word_of
from llm.sampling.rng import DROPPED_BITS, FACTOR_1, FACTOR_2, GOLDEN

NUM_BINS = 2**12  # at most: twice as many bits are a deficit
COUNT_SHIFT = 44  # shift of a bin's count, above its mass
NUM_SAMPLED = 2048  # logits from which the place of a cut is guessed
RUN_COLUMNS = 4  # so many of them lie side by side
GUESS_BINS = 256
NUM_SLOTS = 128  # deficits of a tile's list
GROUP_TILES = 8  # whose lists are read at once


class State(IntEnum):
    """Words of a row's state, which one launch leaves to the next."""

    STEP = 0  # a `Step`
    LO = 1  # the deficits [LO, HI) are being searched for a cut
    HI = 2
    SHIFT = 3  # 2 to this are the deficits of a bin
    COUNT = 4  # of the deficits below LO
    MASS = 5  # of the deficits below LO
    SOUGHT = 6  # the count or the mass at the cut
    FIRST_HI = 7  # HI of the first search
    TOTAL = 8  # mass of all
    CUT = 9  # the first deficit that is not kept, but for ties
    TIES = 10  # how many equal to CUT are kept
    LISTED = 11  # whether the tiles' lists contain the deficits [LO, HI), or the cut


class Step(IntEnum):
    """Work that is left for a row."""

    NOTHING = 0
    DRAW = 1
    BY_MASS = 2  # search the cut of top_p
    BY_COUNT = 3  # search the cut of top_k


FLAGS = tl.constexpr(word_of("flags"))
WIDTH = tl.constexpr(word_of("width"))
TOP_K = tl.constexpr(word_of("top_k"))
DEFICIT_END = tl.constexpr(word_of("deficit_end"))
CUT_END = tl.constexpr(word_of("cut_end"))
LEFT_OUT = tl.constexpr(word_of("left_out"))
SCALE = tl.constexpr(word_of("scale"))
SLOT = tl.constexpr(word_of("slot"))
WINDOW = tl.constexpr(word_of("window"))
STREAM = tl.constexpr(word_of("stream") // 2)
TOP_P = tl.constexpr(word_of("top_p") // 2)
INDEX = tl.constexpr(word_of("index") // 2)
REPETITION = tl.constexpr(word_of("repetition"))
FREQUENCY = tl.constexpr(word_of("frequency"))
PRESENCE = tl.constexpr(word_of("presence"))
NUM_SLICES = tl.constexpr(word_of("num_slices"))
MASK = tl.constexpr(word_of("mask"))
SLICES = tl.constexpr(word_of("slices"))
WORDS = tl.constexpr(RECORD_WORDS)

ACTIVE = tl.constexpr(Flag.ACTIVE)
RANDOM = tl.constexpr(Flag.RANDOM)
HAS_TOP_K = tl.constexpr(Flag.TOP_K)
HAS_TOP_P = tl.constexpr(Flag.TOP_P)
HAS_CUT = tl.constexpr(Flag.TOP_K | Flag.TOP_P)
HAS_PENALTIES = tl.constexpr(Flag.PENALTIES)
HAS_MASK = tl.constexpr(Flag.MASK)

LOWEST = tl.constexpr(reference.LOWEST)
HIGHEST = tl.constexpr(reference.HIGHEST)
FRACTION = tl.constexpr(FRACTION_BITS)
OCTAVE = tl.constexpr(2.0**FRACTION_BITS)  # octave, in deficits
LARGEST_DEFICIT = tl.constexpr(reference.MAX_OCTAVES * 2.0**FRACTION_BITS)
FRACTION_MASK = tl.constexpr(2**FRACTION_BITS - 1)
FRACTION_UNIT = tl.constexpr(2.0**-FRACTION_BITS)
PLAIN_OCTAVES = tl.constexpr(reference.PLAIN_OCTAVES)
# For fractions in deficits and results of VALUE_BITS: powers of two do not change the rounding.
C5, C4, C3, C2, C1, C0 = (
    tl.constexpr(factor * 2.0 ** (reference.VALUE_BITS - FRACTION_BITS * (5 - place)))
    for place, factor in enumerate(reference.COEFFICIENTS)
)
LARGEST_COUNT = tl.constexpr(MAX_COUNT)

EVERYTHING = tl.constexpr(END_OCTAVE << FRACTION_BITS)  # deficit from which weights are 0
NO_COLUMN = tl.constexpr(2**31 - 1)
BINS = tl.constexpr(NUM_BINS)
CHUNK = tl.constexpr(512)  # bins read at once
COUNTS_FROM = tl.constexpr(COUNT_SHIFT)
ONE_COUNT = tl.constexpr(2**COUNT_SHIFT)
MASS_MASK = tl.constexpr(2**COUNT_SHIFT - 1)
SAMPLED = tl.constexpr(NUM_SAMPLED)
RUN = tl.constexpr(RUN_COLUMNS)
GUESSES = tl.constexpr(GUESS_BINS)
SLOTS = tl.constexpr(NUM_SLOTS)
GROUP = tl.constexpr(GROUP_TILES)

STATE_WORDS = tl.constexpr(len(State))
STEP_LEFT, LO, HI, SHIFT, COUNT, MASS, SOUGHT, FIRST_HI, TOTAL, CUT, TIES, LISTED = (
    tl.constexpr(int(word)) for word in State
)
NOTHING, DRAW, BY_MASS, BY_COUNT = (tl.constexpr(int(step)) for step in Step)

STEP = tl.constexpr(GOLDEN)
MIX_1 = tl.constexpr(FACTOR_1)
MIX_2 = tl.constexpr(FACTOR_2)
DROPPED = tl.constexpr(DROPPED_BITS)


class SamplingInputs(NamedTuple):
    """Inputs of sampling; strides are those of rows."""

    logits: Tensor
    logits_stride: int
    records: Tensor  # int32
    longs: Tensor  # the records again, as int64
    masks: Tensor
    mask_stride: int
    counts: Tensor
    counts_stride: int
    latest: Tensor
    latest_stride: int


class SamplerWorkspace(NamedTuple):
    """Intermediate results of the launches. `room`: tiles of a row, up to a power of two."""

    tops: Tensor  # float32 [B, room] the largest logit of each tile
    sums: Tensor  # float32 [B, room] about the mass of each tile, 1 for its largest logit
    largest: Tensor  # float32 [B]
    arrived: Tensor  # int32 [B] programs that have ended; 0 between launches
    states: Tensor  # int64 [B, words of `State`]
    bins: Tensor  # int64 [B, 2, bins] of many deficits, and of one each; 0 after the search
    mass: Tensor  # int64 [B, room] kept by tile
    base: Tensor  # int64 [B, room] mass below the first LO by tile
    listed: Tensor  # int32 [B, room] deficits of the first [LO, HI) by tile
    lists: Tensor  # int32 [B, num_tiles, slots] these deficits, of tiles with at most `slots`
    num_tiles: int
    ties: Tensor  # int32 [B, room] by tile
    tokens: Tensor  # int32 [B]


@triton.jit
def id_of(record: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Return the ids of columns of a row's candidates."""
    ids = columns
    for place in range(tl.load(record + NUM_SLICES)):
        first = tl.load(record + SLICES + 2 * place)
        shift = tl.load(record + SLICES + 2 * place + 1)
        ids = tl.where(columns >= first, columns + shift, ids)
    return ids


@triton.jit
def penalised(
    inputs: SamplingInputs,
    record: tl.tensor,
    ids: tl.tensor,
    is_there: tl.tensor,
    values: tl.tensor,
) -> tl.tensor:
    """Return values after penalties for ids in the row's history."""
    slot = tl.load(record + SLOT).to(tl.int64)
    count = tl.load(inputs.counts + slot * inputs.counts_stride + ids, mask=is_there, other=0)
    count = count.to(tl.float32)
    repetition = tl.load(record + REPETITION).to(tl.float32, bitcast=True)
    frequency = tl.load(record + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(record + PRESENCE).to(tl.float32, bitcast=True)
    divisor = tl.zeros_like(values) + repetition
    less = tl.where(values > 0, tl.div_rn(values, divisor), values * repetition)
    return tl.where(count > 0, less - frequency * count - presence, values)


@triton.jit
def raw(
    inputs: SamplingInputs, row: tl.tensor, columns: tl.tensor, is_there: tl.tensor
) -> tl.tensor:
    """Return float32 logits of the candidates' columns."""
    record = inputs.records + row * WORDS
    logits = inputs.logits + row * inputs.logits_stride
    if tl.load(record + NUM_SLICES) == 1:
        shift = tl.load(record + SLICES + 1)
        values = tl.load(logits + shift + columns, mask=is_there, other=0.0).to(tl.float32)
    else:
        ids = id_of(record, columns)
        values = tl.load(logits + ids, mask=is_there, other=0.0).to(tl.float32)
    return values


@triton.jit
def adjusted(inputs: SamplingInputs, row: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Return logits of columns after penalties and bitmask; −∞ outside of the candidates."""
    record = inputs.records + row * WORDS
    flags = tl.load(record + FLAGS)
    is_there = columns < tl.load(record + WIDTH)
    values = raw(inputs, row, columns, is_there)
    if (flags & HAS_PENALTIES) != 0:
        values = penalised(inputs, record, id_of(record, columns), is_there, values)
    values = limited(values)
    if (flags & HAS_MASK) != 0:
        ids = id_of(record, columns)
        words = inputs.masks + tl.load(record + MASK).to(tl.int64) * inputs.mask_stride
        word = tl.load(words + ids // 32, mask=is_there, other=0)
        values = tl.where(((word >> (ids & 31)) & 1) != 0, values, -float("inf"))
    return tl.where(is_there, values, -float("inf"))


@triton.jit
def limited(values: tl.tensor) -> tl.tensor:
    """Return finite logits, also for NaN."""
    return tl.minimum(tl.where(values > LOWEST, values, LOWEST), HIGHEST)


@triton.jit
def largest_of(tops: tl.tensor) -> tl.tensor:
    """Return the largest logit; a finite number also without candidates."""
    return tl.maximum(tl.max(tops, axis=0), LOWEST)


@triton.jit
def deficit_of(
    inputs: SamplingInputs, row: tl.tensor, largest: tl.tensor, values: tl.tensor
) -> tl.tensor:
    """Return the differences to the largest logit as int32 deficits."""
    scale = tl.load(inputs.records + row * WORDS + SCALE).to(tl.float32, bitcast=True)
    return scaled_deficit(scale, largest, values)


@triton.jit
def scaled_deficit(scale: tl.tensor, largest: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Return the same for the row's octaves per unit of a logit."""
    scale *= OCTAVE
    return (tl.minimum(largest - values, LARGEST_DEFICIT / scale) * scale).to(tl.int32)


@triton.jit
def smallest(values: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return the value (non-negative, below 2²⁴) with rank `rank`, ascending."""
    found = tl.zeros([], tl.int32)
    for step in range(24):
        larger = found + (1 << (23 - step))
        found = tl.where(tl.sum((values < larger).to(tl.int32), axis=0) < rank, larger, found)
    return found


@triton.jit
def ranked(values: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return what `smallest` does, for fewer than 2¹⁵ values. A step counts those below one third
    and below two thirds of a span in one sum; the further apart the values are, the fewer steps
    there are.
    """
    tl.static_assert(values.shape[0] < 1 << 15)
    found, end = tl.zeros([], tl.int32), tl.full([], 1 << 24, tl.int32)
    while end - found > 1:
        span = end - found
        lower, upper = found + tl.maximum(span // 3, 1), found + (2 * span + 2) // 3
        below = (values < lower).to(tl.int32) + ((values < upper).to(tl.int32) << 16)
        counts = tl.sum(below, axis=0)
        few, many = counts & 0xFFFF, counts >> 16
        if (few == rank) | (many == rank):
            place = tl.where(few == rank, lower, upper)
            found = tl.max(tl.where(values < place, values, 0), axis=0)
            end = found + 1
        else:
            end = tl.where(few >= rank, lower, tl.where(many >= rank, upper, end))
            found = tl.where(many < rank, upper, tl.where(few < rank, lower, found))
    return found


@triton.jit
def heaviest(values: tl.tensor, weights: tl.tensor, sought: tl.tensor) -> tl.tensor:
    """Return the value (non-negative, below 2²⁴) where the weights, ascending by value, reach
    `sought`.
    """
    found = tl.zeros([], tl.int32)
    for step in range(24):
        larger = found + (1 << (23 - step))
        mass = tl.sum(tl.where(values < larger, weights, 0), axis=0)
        found = tl.where(mass < sought, larger, found)
    return found


@triton.jit
def weight_of(deficits: tl.tensor) -> tl.tensor:
    """Return int64 weights."""
    fraction = (deficits & FRACTION_MASK).to(tl.float32)
    power = fraction * C5 + C4
    power = power * fraction + C3
    power = power * fraction + C2
    power = power * fraction + C1
    power = power * fraction + C0
    octave = (deficits >> FRACTION).to(tl.int64)
    return (power.to(tl.int32).to(tl.int64) << PLAIN_OCTAVES) >> octave


@triton.jit
def unit_of(deficits: tl.tensor) -> tl.tensor:
    """Return the int64 exponent of the power of two that divides the weights of an octave."""
    return tl.maximum(PLAIN_OCTAVES - (deficits >> FRACTION), 0).to(tl.int64)


@triton.jit
def limit_of(mass: tl.tensor, inputs: SamplingInputs, row: tl.tensor) -> tl.tensor:
    """Return the part of a mass that the row's top_p requires."""
    share = tl.load(inputs.longs + row * (WORDS // 2) + TOP_P).to(tl.uint64, bitcast=True)
    return tl.umulhi(mass.to(tl.uint64), share).to(tl.int64) + 1


@triton.jit
def shift_for(width: tl.tensor) -> tl.tensor:
    """Return the shift with which so many deficits are few bins, and a bin has few deficits."""
    shift = tl.zeros([], tl.int32)
    while ((width - 1) >> shift) >= tl.maximum(CHUNK, 1 << shift):
        shift += 1
    return shift


@triton.jit
def find_bin(
    bins: tl.tensor,
    span: tl.tuple,
    by_count: tl.tensor,
    count: tl.tensor,
    mass: tl.tensor,
    sought: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return where the count or the mass reaches `sought` in the histogram of a span, the deficits
    [lo, hi) by 2 to the shift: the first deficit of that bin (from `hi` on: nowhere), and the count
    and the mass below it. Those below `lo` are `count` and `mass`.
    """
    lo, hi, shift = span
    first = lo >> shift
    used = ((hi - 1) >> shift) - first + 1
    place = tl.zeros([], tl.int32)
    for start in range(0, BINS, CHUNK):
        if (place == start) & (start < used):  # not reached before this chunk
            places = start + tl.arange(0, CHUNK)
            is_used = places < used
            entries = tl.load(bins + places, mask=is_used, other=0)
            counts = entries >> COUNTS_FROM
            masses = (entries & MASS_MASK) << unit_of((first + places) << shift)
            amounts = tl.where(by_count, counts, masses)
            reached = tl.where(by_count, count, mass) + tl.cumsum(amounts, axis=0)
            is_before = is_used & (reached < sought)
            place += tl.sum(is_before.to(tl.int32), axis=0)
            count += tl.sum(tl.where(is_before, counts, 0), axis=0)
            mass += tl.sum(tl.where(is_before, masses, 0), axis=0)
    return tl.maximum((first + place) << shift, lo), count, mass


@triton.jit
def clear_bins(bins: tl.tensor, span: tl.tuple) -> None:
    """Set the histogram of a span to 0."""
    tl.debug_barrier()  # all threads must have read
    lo, hi, shift = span
    used = ((hi - 1) >> shift) - (lo >> shift) + 1
    for start in range(0, BINS, CHUNK):
        places = start + tl.arange(0, CHUNK)
        tl.store(bins + places, tl.zeros([CHUNK], tl.int64), mask=places < used)


@triton.jit
def guess(
    inputs: SamplingInputs, row: tl.tensor, largest: tl.tensor, mass: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return deficits [lo, hi) that very likely contain the cut of top_p, and few others.

    The cut is where the tail, whose tokens are many, weighs what top_p leaves out of `mass` (1 for
    the largest logit). A sample of the row shows that.
    """
    record = inputs.records + row * WORDS
    width = tl.load(record + WIDTH)
    end = tl.load(record + CUT_END)
    places = tl.arange(0, SAMPLED)
    columns = (places // RUN) * width // (SAMPLED // RUN) + places % RUN
    deficits = deficit_of(inputs, row, largest, adjusted(inputs, row, columns))
    is_near = deficits < end
    farthest = tl.max(tl.where(is_near, deficits, 0), axis=0)
    shift = tl.zeros([], tl.int32)
    while (farthest >> shift) >= GUESSES:
        shift += 1
    counts = tl.histogram(tl.where(is_near, deficits >> shift, 0), GUESSES, mask=is_near)
    bins = tl.arange(0, GUESSES)
    octaves = (bins * 2 + 1).to(tl.float32) * (FRACTION_UNIT / 2) * (1 << shift).to(tl.float32)
    masses = counts.to(tl.float32) * tl.exp2(-octaves)
    tails = tl.sum(masses, axis=0) - tl.cumsum(masses, axis=0) + masses
    sought = tl.load(record + LEFT_OUT).to(tl.float32, bitcast=True) * mass
    sought *= SAMPLED / width.to(tl.float32)
    center = tl.maximum(tl.sum((tails >= sought).to(tl.int32), axis=0) - 1, 0)
    until = tl.cumsum(counts, axis=0)
    rank = tl.sum(tl.where(bins < center, counts, 0), axis=0)
    at_center = tl.sum(tl.where(bins == center, counts, 0), axis=0)
    margin = 16 + (1.5 * tl.sqrt(rank.to(tl.float32))).to(tl.int32)  # some standard deviations
    first = tl.sum((until < rank - margin).to(tl.int32), axis=0)
    last = tl.sum((until - counts < rank + at_center + margin).to(tl.int32), axis=0)
    hi = tl.where(last < GUESSES, tl.minimum(last << shift, end), end)
    lo = tl.minimum(first << shift, hi - 1)
    return lo, hi


@triton.jit
def mixed(bits: tl.tensor) -> tl.tensor:
    """Mix a 64-bit number; see `rng.mix`."""
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def number_of(long: tl.tensor) -> tl.tensor:
    """Return the row's random number × 2⁶⁴."""
    stream = tl.load(long + STREAM).to(tl.uint64, bitcast=True)
    index = tl.load(long + INDEX).to(tl.uint64, bitcast=True)
    return (mixed(stream + (index + 1) * STEP) >> DROPPED) << DROPPED


@triton.jit
def fallen(
    long: tl.tensor,
    deficits: tl.tensor,
    weights: tl.tensor,
    cut: tl.tensor,
    ties_kept: tl.tensor,
) -> tl.tensor:
    """Return the column of a whole row that its random number selects."""
    is_tie = deficits == cut
    is_kept = (deficits < cut) | (is_tie & (ties_kept > 0))
    if tl.sum(is_tie.to(tl.int32), axis=0) > ties_kept:  # the first of them
        is_kept = is_kept & ((deficits < cut) | (tl.cumsum(is_tie.to(tl.int32), 0) <= ties_kept))
    masses = tl.where(is_kept, weights, 0)
    total = tl.sum(masses, axis=0).to(tl.uint64)
    target = tl.umulhi(number_of(long), total).to(tl.int64)
    return tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)


@triton.jit
def count_token(
    inputs: SamplingInputs, record: tl.tensor, index: tl.tensor, token: tl.tensor
) -> None:
    """Count a drawn token, and remove the one that leaves the window."""
    slot = tl.load(record + SLOT).to(tl.int64)
    window = tl.load(record + WINDOW)
    own = inputs.counts + slot * inputs.counts_stride
    latest = inputs.latest + slot * inputs.latest_stride
    leaves = (window > 0) & (window <= index)
    last = tl.load(latest + (index - window) % inputs.latest_stride, mask=leaves, other=-1)
    count = tl.minimum(tl.load(own + token).to(tl.int32) + 1, LARGEST_COUNT)
    last_count = tl.load(own + last, mask=leaves, other=0).to(tl.int32) - 1
    tl.debug_barrier()  # all threads must have read before the first writes
    count = tl.where(last == token, count - 1, count)
    tl.store(own + token, count.to(tl.int16))
    tl.store(own + last, last_count.to(tl.int16), mask=leaves & (last != token))
    tl.store(latest + index % inputs.latest_stride, token)
