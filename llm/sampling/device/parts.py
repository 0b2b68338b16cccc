"""Triton functions on the columns of one row, used by the kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from llm.sampling.device import reference
from llm.sampling.device.history import MAX_COUNT
from llm.sampling.device.records import END_OCTAVE, FRACTION_BITS, RECORD_WORDS, Flag, word_of
from llm.sampling.rng import DROPPED_BITS, FACTOR_1, FACTOR_2, GOLDEN

BIN_BITS = 12  # each half of a deficit is a bin number
NUM_BINS = 2**BIN_BITS
COUNT_SHIFT = 44  # shift of a bin's count, above its mass
SEARCH_WORDS = 4  # bin, count and mass before it, target

FLAGS = tl.constexpr(word_of("flags"))
WIDTH = tl.constexpr(word_of("width"))
TOP_K = tl.constexpr(word_of("top_k"))
DEFICIT_END = tl.constexpr(word_of("deficit_end"))
CUT_END = tl.constexpr(word_of("cut_end"))
LIKELY_END = tl.constexpr(word_of("likely_end"))
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

ACTIVE = tl.constexpr(int(Flag.ACTIVE))
RANDOM = tl.constexpr(int(Flag.RANDOM))
HAS_TOP_K = tl.constexpr(int(Flag.TOP_K))
HAS_TOP_P = tl.constexpr(int(Flag.TOP_P))
HAS_CUT = tl.constexpr(int(Flag.TOP_K | Flag.TOP_P))
HAS_PENALTIES = tl.constexpr(int(Flag.PENALTIES))
HAS_MASK = tl.constexpr(int(Flag.MASK))

LOWEST = tl.constexpr(reference.LOWEST)
HIGHEST = tl.constexpr(reference.HIGHEST)
MAX_OCTAVES = tl.constexpr(reference.MAX_OCTAVES)
FRACTION = tl.constexpr(FRACTION_BITS)
VALUE_END = tl.constexpr(reference.VALUE_BITS + 1)
OCTAVE = tl.constexpr(2.0**FRACTION_BITS)  # octave, in deficits
FRACTION_MASK = tl.constexpr(2**FRACTION_BITS - 1)
FRACTION_UNIT = tl.constexpr(2.0**-FRACTION_BITS)
LARGEST_VALUE = tl.constexpr(2.0**reference.VALUE_BITS)
PLAIN_OCTAVES = tl.constexpr(reference.PLAIN_OCTAVES)
C5, C4, C3, C2, C1, C0 = map(tl.constexpr, reference.COEFFICIENTS)
LARGEST_COUNT = tl.constexpr(MAX_COUNT)

EVERYTHING = tl.constexpr(END_OCTAVE << FRACTION_BITS)  # deficit from which weights are 0
NO_COLUMN = tl.constexpr(2**31 - 1)
BINS = tl.constexpr(NUM_BINS)
CHUNK = tl.constexpr(1024)  # bins read at once
HALF = tl.constexpr(BIN_BITS)
BIN_OCTAVE = tl.constexpr(FRACTION_BITS - BIN_BITS)  # octaves of a bin, as a shift
COUNTS_FROM = tl.constexpr(COUNT_SHIFT)
ONE_COUNT = tl.constexpr(2**COUNT_SHIFT)
MASS_MASK = tl.constexpr(2**COUNT_SHIFT - 1)
SEARCH = tl.constexpr(SEARCH_WORDS)

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
    """Intermediate results of the launches. `room` is the number of tiles per row."""

    tops: Tensor  # float32 [B, room] the largest logit of each tile
    bins: Tensor  # int64 [B, bins]
    first: Tensor  # int32 [B, bins]
    second: Tensor  # int32 [B, bins]
    searches: Tensor  # int64 [B, 2 × 4]
    cut: Tensor  # int64 [B, 2] deficit, and how many equal to it are kept
    mass: Tensor  # int64 [B, room] by program, then by tile
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
    values = tl.where(values == values, values, LOWEST)  # noqa: PLR0124 - not NaN
    values = tl.minimum(tl.maximum(values, LOWEST), HIGHEST)
    if (flags & HAS_MASK) != 0:
        ids = id_of(record, columns)
        words = inputs.masks + tl.load(record + MASK).to(tl.int64) * inputs.mask_stride
        word = tl.load(words + ids // 32, mask=is_there, other=0)
        values = tl.where(((word >> (ids & 31)) & 1) != 0, values, -float("inf"))
    return tl.where(is_there, values, -float("inf"))


@triton.jit
def tops_of(
    workspace: SamplerWorkspace,
    row: tl.tensor,
    width: tl.tensor,
    tile: tl.constexpr,
    room: tl.constexpr,
) -> tl.tensor:
    """Return the largest logits [room] of a row's tiles; −∞ behind them."""
    tiles = tl.arange(0, room)
    found = workspace.tops + row * room + tiles
    return tl.load(found, mask=tiles * tile < width, other=-float("inf"))


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
    octaves = (largest - values) * scale
    return (tl.minimum(octaves, MAX_OCTAVES) * OCTAVE).to(tl.int32)


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
    """Return what `smallest` does, in the fewer steps the further apart the values are."""
    found, end = tl.zeros([], tl.int32), tl.full([], 1 << 24, tl.int32)
    while end - found > 1:
        middle = (found + end) // 2
        count = tl.sum((values < middle).to(tl.int32), axis=0)
        if count == rank:
            found = tl.max(tl.where(values < middle, values, 0), axis=0)
            end = found + 1
        else:
            found = tl.where(count < rank, middle, found)
            end = tl.where(count < rank, end, middle)
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
def value_of(deficits: tl.tensor) -> tl.tensor:
    """Return int32 weights in units of 2 to the `unit_of` their octave."""
    octave = deficits >> FRACTION
    fraction = (deficits & FRACTION_MASK).to(tl.float32) * FRACTION_UNIT
    power = fraction * C5 + C4
    power = power * fraction + C3
    power = power * fraction + C2
    power = power * fraction + C1
    power = power * fraction + C0
    value = (power * LARGEST_VALUE).to(tl.int32)
    return value >> tl.minimum(tl.maximum(octave - PLAIN_OCTAVES, 0), VALUE_END)


@triton.jit
def unit_of(octave: tl.tensor) -> tl.tensor:
    """Return the int64 exponent of the unit; see `value_of`."""
    return tl.maximum(PLAIN_OCTAVES - octave, 0).to(tl.int64)


@triton.jit
def weight_of(deficits: tl.tensor) -> tl.tensor:
    """Return int64 weights."""
    return value_of(deficits).to(tl.int64) << unit_of(deficits >> FRACTION)


@triton.jit
def limit_of(mass: tl.tensor, inputs: SamplingInputs, row: tl.tensor) -> tl.tensor:
    """Return the part of a mass that the row's top_p requires."""
    share = tl.load(inputs.longs + row * (WORDS // 2) + TOP_P).to(tl.uint64, bitcast=True)
    return tl.umulhi(mass.to(tl.uint64), share).to(tl.int64) + 1


@triton.jit
def find_bin(
    bins: tl.tensor,
    search: tl.tensor,
    sought: tl.tensor,
    by_count: tl.tensor,
    stores: tl.tensor,
    end: tl.tensor,
) -> tl.tensor:
    """Return the bin before `end` where the count or mass reaches `sought` (`BINS`: none).

    `stores`: write the state of the search to `search`.
    """
    place = tl.zeros([], tl.int32)
    count, mass = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for start in range(0, BINS, CHUNK):
        if place == start:  # not reached before this chunk
            places = start + tl.arange(0, CHUNK)
            entries = tl.load(bins + places, mask=places < end, other=0)
            counts = entries >> COUNTS_FROM
            masses = (entries & MASS_MASK) << unit_of(places >> BIN_OCTAVE)
            amounts = tl.where(by_count, counts, masses)
            reached = tl.where(by_count, count, mass) + tl.cumsum(amounts, axis=0)
            place += tl.sum((reached < sought).to(tl.int32), axis=0)
            count += tl.sum(tl.where(reached < sought, counts, 0), axis=0)
            mass += tl.sum(tl.where(reached < sought, masses, 0), axis=0)
    if stores:
        tl.store(search, place.to(tl.int64))
        tl.store(search + 1, count)
        tl.store(search + 2, mass)
        tl.store(search + 3, sought)
    return place


@triton.jit
def is_second(record: tl.tensor, search: tl.tensor) -> tl.tensor:
    """Whether the row has a second search: top_p after top_k, or where it is unlikely to cut."""
    is_found = tl.load(search) < BINS
    is_whole = tl.load(record + LIKELY_END) == tl.load(record + CUT_END)
    has_both = (tl.load(record + FLAGS) & HAS_CUT) == HAS_CUT
    return has_both | ((is_found | is_whole) == 0)


@triton.jit
def find_cut(
    search: tl.tensor, within: tl.tensor, by_count: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Finish a search: deficit at the cut, how many equal to it are kept, and the kept mass."""
    place = tl.load(search).to(tl.int32)
    count, mass, sought = tl.load(search + 1), tl.load(search + 2), tl.load(search + 3)
    offset = tl.zeros([], tl.int32)
    for start in range(0, BINS, CHUNK):
        if offset == start:
            places = start + tl.arange(0, CHUNK)
            counts = tl.load(within + places).to(tl.int64)
            masses = counts * weight_of((place << HALF) + places)
            amounts = tl.where(by_count, counts, masses)
            reached = tl.where(by_count, count, mass) + tl.cumsum(amounts, axis=0)
            offset += tl.sum((reached < sought).to(tl.int32), axis=0)
            count += tl.sum(tl.where(reached < sought, counts, 0), axis=0)
            mass += tl.sum(tl.where(reached < sought, masses, 0), axis=0)
    cut = (place << HALF) + offset
    weight = weight_of(cut)
    by_mass = (sought - mass + weight - 1) // tl.maximum(weight, 1)
    ties = tl.where(by_count, sought - count, by_mass)
    ties = tl.where(place < BINS, ties, 0)  # otherwise nothing is cut
    return cut, ties, mass + ties * weight


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
