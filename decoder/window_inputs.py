"""`WindowNetwork`: a codec that prepares host values first, then calls one function of tensors.

    windows ──inputs──▶ WindowInputs (host) ──to──▶ WindowInputs (device) ──run──▶ emitted [B, S]

`run` only reads its inputs, so that a device can capture it once per shape and replay it. The
windows of a call have equal shapes, or (`PaddedNetwork`) any shapes, padded to one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.base import AudioDecoder, DecodeWindow
from decoder.streaming import PROMPT_BLOCK, check_codes, check_frames, check_windows, tail_size

HEADER = 3  # numbers of a row before its codes: first and last own frame, position of frame 0
ALL = 2**40
"""Above every rank: a code that attends to all codes."""

PADDING = 2**41
"""The rank of padding, which no code attends to."""


@dataclass(frozen=True, slots=True)
class WindowInputs:
    """Inputs of B windows of one `batch_key`.

    `tensors` have B rows each; `key`, hashable, is everything else that the computation depends on:
    with equal keys and shapes the same kernels run.
    """

    tensors: tuple[Tensor, ...]
    key: Any

    def to(self, device: str) -> WindowInputs:
        """Copy the inputs to a device without waiting."""
        if device == "cpu":
            return self
        moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in self.tensors)
        return replace(self, tensors=tuple(moved))


class WindowNetwork(AudioDecoder):
    """An `AudioDecoder` in two parts: inputs on the host, then a function of tensors."""

    @abstractmethod
    def inputs(self, windows: Sequence[DecodeWindow]) -> WindowInputs:
        """Return the inputs of windows of one `batch_key`, on the host."""

    @abstractmethod
    def run(self, inputs: WindowInputs) -> Tensor:
        """Decode inputs on the device, without waiting for it."""

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """See AudioDecoder.decode.

        On a CPU each row is rendered alone: convolutions gain little from a batch there, and a
        kernel chosen by the number of rows would change the last bits.
        """
        check_windows(self, windows)
        with torch.inference_mode():
            if self.device != "cpu":
                return self.run(self.inputs(windows).to(self.device))
            rows = [self.run(self.inputs([window])) for window in windows]
            return rows[0] if len(rows) == 1 else stacked(rows)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows [1, S] of different lengths; shorter rows are filled with zeros."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([F.pad(row, (0, longest - row.shape[1])) for row in rows])


@contextmanager
def tensor_float32() -> Iterator[None]:
    """Let matrix products of float32 use tensor cores: TF32 has 10 bits of mantissa, like
    convolutions.

    It applies to the whole process, so use it only for captures before requests are served:
    otherwise it would also affect language models in float32 and the encoding of recordings.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, slots=True)
class CallShape:
    """Shape of one decode call's rows. Exact: no row has padding."""

    left: int  # frames before the first emitted one
    right: int  # frames from there on: block and look-ahead
    num_samples: int  # number of rendered samples from there on
    is_masked: bool = False  # whether some codes do not attend to others
    is_exact: bool = False

    @property
    def num_frames(self) -> int:
        return self.left + self.right

    def holds(self, other: CallShape) -> bool:
        """Whether rows of that shape fit rows of this one."""
        return (
            other.left <= self.left
            and other.right <= self.right
            and other.num_samples <= self.num_samples
            and other.is_masked <= self.is_masked
        )


def joined(shapes: Iterable[CallShape]) -> CallShape:
    """Return the smallest shape that holds all of them."""
    distinct = set(shapes)
    if len(distinct) == 1:
        return distinct.pop()
    return CallShape(
        left=max(shape.left for shape in distinct),
        right=max(shape.right for shape in distinct),
        num_samples=max(shape.num_samples for shape in distinct),
        is_masked=any(shape.is_masked for shape in distinct),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """The valid columns [first, last) of each row of a padded tensor [B, C, T].

    first = scale * bounds[b, 0] - start, last = scale * bounds[b, 1] - missing - start.
    """

    bounds: Tensor  # int64 [B, 2], in frames
    scale: int = 1
    missing: int = 0
    start: int = 0

    def mask(self, length: int) -> Tensor:
        """Return bool [B, 1, T]: a row's own columns."""
        ends = self.bounds * self.scale - self.start
        column = torch.arange(length, device=ends.device)
        own = (column >= ends[:, :1]) & (column < ends[:, 1:] - self.missing)
        return own[:, None]

    def raised(self, rate: int, missing: int = 0) -> Span:
        """Return the span after a layer that upsamples by `rate` and drops the last `missing`
        columns.
        """
        return replace(self, scale=self.scale * rate, missing=self.missing * rate + missing)

    def beginning(self, start: int) -> Span:
        """Return the span of a tensor whose first column has this index."""
        return replace(self, start=start)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The rows of one call, on the device."""

    shape: CallShape
    codes: Tensor  # int64 [B, F, codes per frame]; padding is code 0
    positions: Tensor  # int64 [B, 1]: position in the stream of column 0, may be negative
    own: Span | None  # None: no padding
    sees: Tensor | None = None  # int64 [B, F] and
    ranks: Tensor | None = None  # int64 [B, F]: code i attends to code j if sees[i] >= ranks[j]

    def visible(self) -> Tensor | None:
        """Return bool [B, F, F] or [B, 1, F]: whether a code attends to another; None: all attend
        to all.
        """
        if self.ranks is not None and self.sees is not None:
            return self.sees[:, :, None] >= self.ranks[:, None, :]
        return None if self.own is None else self.own.mask(self.shape.num_frames)

    def attention_bias(self) -> Tensor | None:
        """Return float32 [B, 1, F, F], -inf for masked pairs, to be added before the softmax.

        Row strides are multiples of 8, as kernels require. None: all attend to all.
        """
        seen, count = self.visible(), self.shape.num_frames
        if seen is None:
            return None
        unseen = F.pad(~seen, (0, -count % 8), value=True)
        bias = torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, -math.inf)
        return bias.expand(-1, count, -1)[:, None, :, :count]


class PaddedNetwork(WindowNetwork):
    """A `WindowNetwork` that renders windows of any lengths together, as rows of one shape.

        shape    [          left           |           right           ]
        row 0         [ prompt and history | block         | look-ahead ]
        row 1                    [ history | block ]
        row 2                              [ block | look-ahead ]
                                           ^ first emitted frame of every row

    A row is padded on both sides. A codec excludes the padding from every computation:
    convolutions read zeros there, as beyond the ends of a window, and attention and norms over
    time leave it out. Therefore a row equals its window alone.

    A row of its input is one line of int64: the header, the codes, and, with masks, `sees` and
    `ranks`.
    """

    fade: int = 0
    """Number of samples that are rendered past a block's end, if there is a look-ahead."""

    @abstractmethod
    def render(self, rows: PaddedRows) -> Tensor:
        """Return float32 [B, shape.num_samples]; undefined past a row's own samples."""

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """See AudioDecoder.batch_key: any windows can be combined."""
        return None

    def shape_of(self, window: DecodeWindow) -> CallShape:
        """Return the shape of a call for this window alone, with `fade` samples after its block."""
        per_frame, context = self.spec.codes_per_frame, window.prompt_len + window.history_len
        return CallShape(
            left=context // per_frame,
            right=(len(window.codes) - context) // per_frame,
            num_samples=window.num_samples + tail_size(self.spec, window, self.fade),
            is_masked=window.masks.is_masked,
            is_exact=True,
        )

    def width(self, shape: CallShape) -> int:
        """Return the number of int64 numbers of a row."""
        return HEADER + shape.num_frames * self.spec.codes_per_frame * (3 if shape.is_masked else 1)

    def fill(self, rows: np.ndarray, windows: Sequence[DecodeWindow], shape: CallShape) -> None:
        """Write the windows into int64 [B, width].

        Raises CodeRangeError or DecoderConfigError for codes that are invalid for this codec.
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
        """See WindowNetwork.inputs; windows may differ in shape."""
        shape = joined(map(self.shape_of, windows))
        rows = np.empty((len(windows), self.width(shape)), dtype=np.int64)
        self.fill(rows, windows, shape)
        return WindowInputs((torch.from_numpy(rows),), shape)

    def run(self, inputs: WindowInputs) -> Tensor:
        """See WindowNetwork.run."""
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
    """Return the ranks of a decoder with full attention: mask[i, j] = sees[i] >= ranks[j].

    The mask is that of `attention_mask`.
    """
    prompt = window.prompt_len
    ranks = np.asarray(window.block_ids, dtype=np.int64) - PROMPT_BLOCK
    ranks[:prompt] = 0
    sees = ranks.copy()
    if not window.masks.prepend_prompt_speech_tokens_causal:
        sees[:prompt] = ALL
    if not window.masks.block_causal:
        sees[prompt:] = ALL
    return sees, ranks
