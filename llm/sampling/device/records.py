"""Records: sampling parameters of one row as 54 words that the device reads.

The record of a request is created once (once for each of its candidate sets, if they change with
the position) and kept in a table; a step only copies rows of the table and sets the fields that
change.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llm.batch import RowColumns
from llm.request import IdRange, SamplingParams
from llm.sampling.logits import Method, candidates
from llm.sampling.rng import stream_start
from llm.sampling.sampler import has_penalties, method_of

MAX_SLICES = 16  # slices of the vocabulary; a row with more gets a bitmask
FRACTION_BITS = 18  # deficits are counted in 2⁻¹⁸ octaves
NO_ID = 2**31 - 1  # above those of every vocabulary
MIN_SCALE = 1e-30  # with this scale an infinite difference of logits is still infinite octaves
END_OCTAVE = 44  # weights below 2⁻⁴⁴ times the largest are 0

RECORD = np.dtype(
    [
        ("flags", "<i4"),
        ("width", "<i4"),  # number of candidates
        ("top_k", "<i4"),
        ("deficit_end", "<i4"),  # min_p: deficits from here on are dropped
        ("cut_end", "<i4"),  # top_k and top_p never cut at deficits from here on
        ("scale", "<f4"),  # octaves per unit of a logit: log2(e) / temperature
        ("slot", "<i4"),  # slot of the history
        ("window", "<i4"),  # penalty window; 0: all tokens
        ("stream", "<u8"),  # start of the seed's random numbers
        ("top_p", "<u8"),  # × 2⁶⁴
        ("index", "<i8"),  # index of the next token; sampling advances it
        ("repetition", "<f4"),
        ("frequency", "<f4"),
        ("presence", "<f4"),
        ("num_slices", "<i4"),
        ("mask", "<i4"),  # row of the bitmasks
        ("left_out", "<f4"),  # about 1 − top_p
        ("first_id", "<i4"),  # range from the first candidate to the last; kernels ignore it
        ("end_id", "<i4"),
        ("slices", "<i4", (MAX_SLICES, 2)),  # first column, and id − column from there on
    ]
)
RECORD_WORDS = RECORD.itemsize // 4


def word_of(name: str) -> int:
    """Return the offset of a field in 32-bit words."""
    assert RECORD.fields is not None
    return RECORD.fields[name][1] // 4


_FIRST_ID, _END_ID = word_of("first_id"), word_of("end_id")


class Flag:
    """Operations for a row; 0: the row is padding, and its token is 0.

    Plain numbers: `IntFlag` takes microseconds to join two.
    """

    ACTIVE = 1
    RANDOM = 2  # otherwise argmax
    TOP_K = 4
    TOP_P = 8
    PENALTIES = 16
    MASK = 32


@dataclass(slots=True)
class _PackedParameters:
    """The table rows of one request, by phase."""

    sampling: SamplingParams
    phases: dict[int, int] = field(default_factory=dict)
    place: int = 0  # for the tokens [first, end)
    first: int = 0
    end: int = 0


class RecordTable:
    """Records of live requests, and bitmasks of those with too many slices."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._records = np.zeros(64, RECORD)
        self._free = list(range(len(self._records)))
        self._known: dict[str, _PackedParameters] = {}
        self._words: dict[int, np.ndarray] = {}  # int32 [⌈V / 32⌉] by table row

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._known)

    def places(self, rows: RowColumns, indices: Sequence[int]) -> list[int]:
        """Return the table rows for generated token `indices[i]` of each request."""
        known_of = self._known.get
        return [  # runs for all rows of all steps
            known.place
            if (known := known_of(name)) is not None
            and known.first <= index < known.end
            and known.sampling is sampling
            else self._place(name, sampling, index)
            for name, sampling, index in zip(rows.request_id, rows.sampling, indices, strict=True)
        ]

    def _place(self, request_id: str, sampling: SamplingParams, index: int) -> int:
        known = self._known.get(request_id)
        if known is None or known.sampling is not sampling:
            self.release(request_id)
            known = self._known[request_id] = _PackedParameters(sampling)
        may_end = index >= sampling.min_tokens
        phase = int(may_end)
        if sampling.allowed_cycle:
            phase += 2 * (index % len(sampling.allowed_cycle))
        place = known.phases.get(phase)
        if place is None:
            place = known.phases[phase] = self._add(sampling, index)
        if not sampling.allowed_cycle:
            known.place = place
            known.first = sampling.min_tokens if may_end else 0
            known.end = sys.maxsize if may_end else sampling.min_tokens
        return place

    def take(self, places: Sequence[int]) -> np.ndarray:
        """Return a copy of these rows."""
        # int32 copies in half the time
        words = self._records.view(np.int32).reshape(-1, RECORD_WORDS)
        return words.take(np.array(places, dtype=np.intp), axis=0).view(RECORD)[:, 0]

    def words(self, places: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the bitmasks, by index in `places`, of rows with too many slices for a record."""
        if not self._words:
            return {}
        return {n: self._words[place] for n, place in enumerate(places) if place in self._words}

    def release(self, request_id: str) -> None:
        """Remove a request; no effect for unknown ids."""
        known = self._known.pop(request_id, None)
        for place in known.phases.values() if known else ():
            self._words.pop(place, None)
            self._free.append(place)

    def _add(self, sampling: SamplingParams, index: int) -> int:
        if not self._free:
            size = len(self._records)
            self._records = np.concatenate([self._records, np.zeros(size, RECORD)])
            self._free = list(range(size, 2 * size))
        place = self._free.pop()
        ranges = candidates(sampling, index, self._vocab_size).ranges
        if len(ranges) > MAX_SLICES:
            self._words[place] = _words(ranges, self._vocab_size)
            ranges = ((0, self._vocab_size),)
        _fill(self._records[place : place + 1], sampling, ranges)
        return place


def needed_ids(records: np.ndarray) -> IdRange:
    """Return the range of ids that holds the candidates of all records int32 [B, words]."""
    first, end = records[:, _FIRST_ID], records[:, _END_ID]
    return int(first.min(initial=NO_ID)), int(end.max(initial=0))


def effective_window(sampling: SamplingParams) -> int:
    """Return the penalty window; 0 if no output can outgrow it."""
    return sampling.penalty_window if sampling.penalty_window < sampling.max_tokens else 0


def _fill(record: np.ndarray, sampling: SamplingParams, ranges: Sequence[tuple[int, int]]) -> None:
    """Write a record [1]; fields that change from step to step are set when it is copied."""
    record.view(np.int32)[:] = 0  # by fields it takes ten times as long
    width = sum(end - start for start, end in ranges)
    record["width"], record["num_slices"] = width, len(ranges)
    record["first_id"], record["end_id"] = ranges[0][0], ranges[-1][1]
    column = 0
    for place, (start, end) in enumerate(ranges):
        record["slices"][0, place] = column, start - column
        column += end - start
    flags = Flag.ACTIVE
    if has_penalties(sampling):
        flags |= Flag.PENALTIES
    record["repetition"] = sampling.repetition_penalty
    record["frequency"] = sampling.frequency_penalty
    record["presence"] = sampling.presence_penalty
    record["window"] = effective_window(sampling)
    record["stream"] = stream_start(sampling.seed)
    if method_of(sampling)[0] is not Method.GREEDY:
        flags |= Flag.RANDOM | _fill_cuts(record, sampling, width)
    record["flags"] = flags


def _fill_cuts(record: np.ndarray, sampling: SamplingParams, width: int) -> int:
    """Write how the tail of a distribution over `width` candidates is cut; return the flags."""
    flags = 0
    record["scale"] = max(math.log2(math.e) / sampling.temperature, MIN_SCALE)
    end = cut_end = END_OCTAVE << FRACTION_BITS
    if sampling.min_p > 0:
        end = min(end, 1 + math.floor(-math.log2(sampling.min_p) * 2**FRACTION_BITS))
        cut_end = end
    if 0 < sampling.top_k < width:
        flags |= Flag.TOP_K
        record["top_k"] = sampling.top_k
    if sampling.top_p < 1:
        flags |= Flag.TOP_P
        record["top_p"] = min(int(sampling.top_p * 2**64), 2**64 - 1)
        record["left_out"] = 1 - sampling.top_p
        cut_end = END_OCTAVE << FRACTION_BITS
        if not flags & Flag.TOP_K:
            # Everything beyond weighs less than half of what top_p leaves out.
            octaves = math.ceil(math.log2(2 * width / (1 - sampling.top_p)))
            cut_end = min(end, octaves << FRACTION_BITS)
    record["deficit_end"], record["cut_end"] = end, cut_end
    return flags


def _words(ranges: Sequence[tuple[int, int]], vocab_size: int) -> np.ndarray:
    """Return int32 [⌈V / 32⌉] with a bit for each id in the ranges, lowest first."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    for start, end in ranges:
        allowed[start:end] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)
