"""`WindowNetwork`: a codec whose decode call is host values first, then one function of tensors.

    windows ──inputs──▶ WindowInputs (host) ──to──▶ WindowInputs (device) ──run──▶ emitted [B, S]

`run` reads nothing but its inputs, so a device can record it once for a shape and repeat it.
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
    """What B windows of one `batch_key` are rendered from.

    `tensors` have B rows each; `key`, hashable, is all else that the computation depends on: with
    equal keys and shapes the same kernels run.
    """

    tensors: tuple[Tensor, ...]
    key: Any

    def to(self, device: str) -> WindowInputs:
        """The same on a device. The host waits for nothing."""
        if device == "cpu":
            return self
        moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in self.tensors)
        return replace(self, tensors=tuple(moved))


class WindowNetwork(AudioDecoder):
    """An `AudioDecoder` in two halves."""

    @abstractmethod
    def inputs(self, windows: Sequence[DecodeWindow]) -> WindowInputs:
        """Of windows of one `batch_key`, on the host."""

    @abstractmethod
    def run(self, inputs: WindowInputs) -> Tensor:
        """As `decode`, from inputs on the device; nothing of it waits for the device."""

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """As AudioDecoder.decode.

        On a CPU each row is rendered alone: convolutions gain little from a batch there, and a
        kernel chosen by the number of rows would change last bits.
        """
        check_windows(self, windows)
        with torch.inference_mode():
            if self.device != "cpu":
                return self.run(self.inputs(windows).to(self.device))
            return stacked([self.run(self.inputs([window])) for window in windows])


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows [1, S] of different lengths below each other; zeros where one is shorter."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([F.pad(row, (0, longest - row.shape[1])) for row in rows])


@contextmanager
def tensor_float32() -> Iterator[None]:
    """Lets matrix products of float32 use tensor cores: TF32 has 10 bits of mantissa, and
    convolutions have it anyway.

    Of the whole process: only for what is recorded before anybody is served. Later a language
    model of float32 and the encoding of recordings would see it, too, from time to time.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_windows(decoder: AudioDecoder, windows: Sequence[DecodeWindow]) -> None:
    """Raise CodeRangeError or DecoderConfigError for windows that no one call can render."""
    spec = decoder.spec
    for window in windows:
        check_codes(window.codes, spec.codebook_size, "speech")
        check_frames(len(window.codes), spec, "number of codes in a window")
    if len({decoder.batch_key(window) for window in windows}) != 1:
        raise DecoderConfigError("windows of one decode call must have one batch key")
