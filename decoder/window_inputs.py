"""`WindowNetwork`: a codec that prepares host values first, then calls one function of tensors.

    windows ──inputs──▶ WindowInputs (host) ──to──▶ WindowInputs (device) ──run──▶ emitted [B, S]

`run` only reads its inputs, so that a device can capture it once per shape and replay it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.base import AudioDecoder, DecoderConfigError, DecodeWindow
from decoder.streaming import check_codes, check_frames


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


def check_windows(decoder: AudioDecoder, windows: Sequence[DecodeWindow]) -> None:
    """Raise CodeRangeError or DecoderConfigError for windows that cannot be rendered in one
    call.
    """
    spec = decoder.spec
    for window in windows:
        check_codes(window.codes, spec.codebook_size, "speech")
        check_frames(len(window.codes), spec, "number of codes in a window")
    if len({decoder.batch_key(window) for window in windows}) != 1:
        raise DecoderConfigError("windows of one decode call must have one batch key")
