"""Windows of different lengths in one decode call: rows of one shape, in frames.

    shape    [          left           |           right           ]
    row 0         [ prompt and history | block         | look-ahead ]
    row 1                    [ history | block ]
    row 2                              [ block | look-ahead ]
                                       ^ here every row begins to be emitted

A row is padded on both sides. A codec keeps the padding out of everything that a frame could hear:
convolutions see zeros there, as they do beyond the ends of a window, and attention and norms over
time leave it out. So a row sounds like its window alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.base import CodecSpec, DecodeWindow
from decoder.batching import tail_size
from decoder.streaming import PROMPT_BLOCK, check_codes, check_frames
from decoder.window_inputs import WindowInputs, WindowNetwork

HEADER = 3  # numbers of a row before its codes: first and last own frame, position of frame 0
ALL = 2**40
"""Above every rank: a code that sees all codes."""

PADDING = 2**41
"""The rank of what nobody sees."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The shape of one decode call's rows. Exact: every row fills it."""

    left: int  # frames before the first emitted one
    right: int  # frames from there on: block and look-ahead
    num_samples: int  # that are rendered from there on
    is_masked: bool = False  # not every code sees every other one
    is_exact: bool = False

    @property
    def num_frames(self) -> int:
        return self.left + self.right

    def holds(self, other: CallShape) -> bool:
        """Whether rows of that shape can be rows of this one."""
        return (
            other.left <= self.left
            and other.right <= self.right
            and other.num_samples <= self.num_samples
            and other.is_masked <= self.is_masked
        )


def joined(shapes: Iterable[CallShape]) -> CallShape:
    """The smallest shape that holds all of them."""
    distinct = set(shapes)
    if len(distinct) == 1:
        return distinct.pop()
    return CallShape(
        left=max(shape.left for shape in distinct),
        right=max(shape.right for shape in distinct),
        num_samples=max(shape.num_samples for shape in distinct),
        is_masked=any(shape.is_masked for shape in distinct),
    )


def window_shape(spec: CodecSpec, window: DecodeWindow, fade: int) -> CallShape:
    """The shape of a call for this window alone; `fade` samples after its block are wanted too."""
    per_frame, context = spec.codes_per_frame, window.prompt_len + window.history_len
    masks, ahead = window.masks, tail_size(spec, window, fade)
    return CallShape(
        left=context // per_frame,
        right=(len(window.codes) - context) // per_frame,
        num_samples=window.num_samples + ahead,
        is_masked=not (masks.buffer_sees_current and masks.prompt_sees_current),
        is_exact=True,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """The columns [first, last) that each row of a padded tensor [B, C, T] has of its own.

    first = scale * bounds[b, 0] - start, last = scale * bounds[b, 1] - missing - start.
    """

    bounds: Tensor  # int64 [B, 2], in frames
    scale: int = 1
    missing: int = 0
    start: int = 0

    def mask(self, length: int) -> Tensor:
        """bool [B, 1, T]: a row's own columns."""
        ends = self.bounds * self.scale - self.start
        column = torch.arange(length, device=ends.device)
        own = (column >= ends[:, :1]) & (column < ends[:, 1:] - self.missing)
        return own[:, None]

    def raised(self, rate: int, missing: int = 0) -> Span:
        """After a layer that makes `rate` columns of one, and leaves the last `missing` out."""
        return replace(self, scale=self.scale * rate, missing=self.missing * rate + missing)

    def beginning(self, start: int) -> Span:
        """Of a tensor whose first column is that of this index."""
        return replace(self, start=start)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The rows of one call, on the device."""

    shape: CallShape
    codes: Tensor  # int64 [B, F, codes per frame]; padding is code 0
    positions: Tensor  # int64 [B, 1]: which frame of its stream column 0 is, may be negative
    own: Span | None  # None: nothing is padded
    sees: Tensor | None = None  # int64 [B, F] and
    ranks: Tensor | None = None  # int64 [B, F]: code i sees code j where sees[i] >= ranks[j]

    def visible(self) -> Tensor | None:
        """bool [B, F, F] or [B, 1, F]: which code sees which; nobody sees padding. None: all see
        all.
        """
        if self.ranks is not None and self.sees is not None:
            return self.sees[:, :, None] >= self.ranks[:, None, :]
        return None if self.own is None else self.own.mask(self.shape.num_frames)

    def attention_bias(self) -> Tensor | None:
        """float32 [B, 1, F, F], -inf where a code must not look, to be added before the softmax.

        Its lines lie a multiple of 8 apart, as kernels ask. None: all see all.
        """
        seen, count = self.visible(), self.shape.num_frames
        if seen is None:
            return None
        unseen = F.pad(~seen, (0, -count % 8), value=True)
        bias = torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, -math.inf)
        return bias.expand(-1, count, -1)[:, None, :, :count]


class PaddedNetwork(WindowNetwork):
    """A `WindowNetwork` that renders windows of any lengths together.

    A row of its input is one line of int64: the header, the codes, and where codes do not all see
    each other `sees` and `ranks`.
    """

    fade: int = 0
    """Samples that are rendered past a block's end, where there is a look-ahead."""

    @abstractmethod
    def render(self, rows: PaddedRows) -> Tensor:
        """float32 [B, shape.num_samples]; what lies past a row's own samples may be anything."""

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """As AudioDecoder.batch_key: any window goes with any other one."""
        return None

    def shape_of(self, window: DecodeWindow) -> CallShape:
        """Of a call for this window alone."""
        return window_shape(self.spec, window, self.fade)

    def width(self, shape: CallShape) -> int:
        """Numbers of a row."""
        return HEADER + shape.num_frames * self.spec.codes_per_frame * (3 if shape.is_masked else 1)

    def fill(self, rows: np.ndarray, windows: Sequence[DecodeWindow], shape: CallShape) -> None:
        """Write the windows into int64 [B, width].

        Raises CodeRangeError or DecoderConfigError for codes that cannot be this codec's.
        """
        spec, rows[:] = self.spec, 0
        per_frame = spec.codes_per_frame
        count = shape.num_frames * per_frame
        codes, sees, ranks = (rows[:, HEADER + i * count :][:, :count] for i in range(3))
        numbers = []  # of all headers, in codes
        for row, window in enumerate(windows):
            size = len(window.codes)
            if size % per_frame:
                check_frames(size, spec, "number of codes in a window")
            first = shape.left * per_frame - window.prompt_len - window.history_len
            end = first + size
            codes[row, first:end] = window.codes
            numbers.append((first, end, window.positions[0] - first))
            if shape.is_masked:
                ranks[row], sees[row] = PADDING, ALL
                sees[row, first:end], ranks[row, first:end] = attention_ranks(window)
        rows[:, :HEADER] = numbers
        rows[:, :HEADER] //= per_frame
        if codes.min() < 0 or codes.max() >= spec.codebook_size:
            for window in windows:
                check_codes(window.codes, spec.codebook_size, "speech")

    def inputs(self, windows: Sequence[DecodeWindow]) -> WindowInputs:
        """As WindowNetwork.inputs, of any windows."""
        shape = joined(map(self.shape_of, windows))
        rows = np.empty((len(windows), self.width(shape)), dtype=np.int64)
        self.fill(rows, windows, shape)
        return WindowInputs((torch.from_numpy(rows),), shape)

    def run(self, inputs: WindowInputs) -> Tensor:
        """As WindowNetwork.run."""
        (lines,), shape = inputs.tensors, inputs.key
        per_frame = self.spec.codes_per_frame
        count = shape.num_frames * per_frame
        codes, sees, ranks = (lines[:, HEADER + i * count :][:, :count] for i in range(3))
        rows = PaddedRows(
            shape,
            codes.unflatten(1, (-1, per_frame)),
            lines[:, 2:3],
            None if shape.is_exact else Span(lines[:, :2].contiguous()),
        )
        if shape.is_masked:
            rows = replace(rows, sees=sees, ranks=ranks)
        return self.render(rows)


def attention_ranks(window: DecodeWindow) -> tuple[np.ndarray, np.ndarray]:
    """`attention_mask` of a decoder in which all see all: mask[i, j] = sees[i] >= ranks[j]."""
    prompt = window.prompt_len
    ranks = np.asarray(window.block_ids, dtype=np.int64) - PROMPT_BLOCK
    ranks[:prompt] = 0
    sees = ranks.copy()
    if window.masks.prompt_sees_current:
        sees[:prompt] = ALL
    if window.masks.buffer_sees_current:
        sees[prompt:] = ALL
    return sees, ranks
