"""Rendering of streams block by block: every code is computed once.

A stream keeps the part of its past that its next block needs; nothing is computed twice:

    per layer     the last kernel - 1 frames that its convolution has read
    tones         pitch and voicing of the last spectra, which are those of the next windows' begins
    pieces        the last spectra's windows of samples, which reach into the next block
    turns         the phase of the pulses at the next block's first sample

Rows of a call are streams at any place, with blocks of any length: each begins with its first new
code and is padded on the right, where nothing that is kept or emitted depends on it.

    row 0   [behind | history | block          | ahead ]     the beginning of a continued stream
    row 1   [behind | block | ahead ] padding                a later block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.codecs.source_filter.excitation import Curve, Drive, drive_of
from decoder.codecs.source_filter.modules import (
    ConvNext,
    Decoder,
    FiniteScalarQuantizer,
    overlap_add,
)

ABSENT = -1  # a code outside its stream


class Past(NamedTuple):
    """The past of B streams; see the module."""

    frames: Tensor  # float32 [B, layers, kernel - 1, dim]
    tones: Tensor  # float32 [B, reach, 2]
    pieces: Tensor  # float32 [B, overlap, n_fft]
    turns: Tensor  # float64 [B]
    is_new: Tensor  # bool [B]: nothing is kept yet

    @classmethod
    def joined(cls, parts: Sequence[Past]) -> Past:
        """Return those of several calls, one after the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def row(self, index: int) -> Past:
        """Return that of one stream."""
        return Past(*(part[index : index + 1] for part in self))


class Rows(NamedTuple):
    """The codes of one call, on the device."""

    codes: Tensor  # int64 [B, behind + N + ahead]; ABSENT where there is none
    voice: Tensor  # int64 [B, voice tokens]
    length: Tensor  # int64 [B]: codes to compute, at most N
    skipped: Tensor  # int64 [B]: those of them that are not emitted
    sample: Tensor  # int64 [B]: first sample of the first of them in its stream
    pitch: Tensor  # float32 [B]: factor of the pitch that the codes have


class SourceFilterRenderer:
    """Streaming inference of a codec's `Decoder`, which is the reference in tests."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._config = decoder, decoder.config
        self._hop, self._reach = decoder.config.hop, decoder.reach
        self._overlap, self._spectra = decoder.config.overlap, decoder.config.spectra_per_code
        self._blocks = cast("list[ConvNext]", list(decoder.blocks))
        self._quantizer = FiniteScalarQuantizer(decoder.config.levels)
        self._quantizer.to(decoder.noise.device)
        # [kernel, dim] of each layer
        self._taps = [block.mix.weight[:, 0].T.contiguous() for block in self._blocks]
        self.beginning = self._create_beginning()
        """Past of one stream that begins."""

    def _create_beginning(self) -> Past:
        config, device = self._config, self._decoder.noise.device
        return Past(
            torch.zeros(
                (1, config.decoder_blocks, config.kernel - 1, config.decoder_dim), device=device
            ),
            torch.zeros((1, self._reach, 2), device=device),
            torch.zeros((1, self._overlap, config.n_fft), device=device),
            torch.zeros(1, dtype=torch.float64, device=device),
            torch.ones(1, dtype=torch.bool, device=device),
        )

    def render(self, rows: Rows, past: Past) -> tuple[Tensor, Past]:
        """Return samples [B, S] from each row's first emitted one on, and the new past.

        Samples beyond a row's codes are undefined.
        """
        config = self._config
        x, frames = self._features(rows, past)
        drive, kept = self._drive(self._decoder.curve(x), rows.pitch, past)
        noise = self._decoder.noise_from(rows.sample, (drive.hz.shape[1] - 1) * config.stft_hop)
        pieces = torch.cat((past.pieces, self._decoder.pieces(x, drive, noise)), 1)
        audio = overlap_add(pieces, config.stft_hop)[:, self._overlap * config.stft_hop :]
        spectra = rows.length * self._spectra
        following = Past(
            frames,
            taken(kept, spectra, self._reach),
            taken(pieces, spectra, self._overlap),
            taken(drive.turns[..., None], spectra, 1)[:, 0, 0],
            torch.zeros_like(past.is_new),
        )
        return self._emitted(audio, rows.skipped), following

    def _features(self, rows: Rows, past: Past) -> tuple[Tensor, Tensor]:
        """Return features [B, N * frames_per_code, dim], and the frames that layers keep."""
        decoder, config = self._decoder, self._config
        values = self._quantizer.values(rows.codes)
        values = values.masked_fill((rows.codes == ABSENT)[..., None], 0.0)
        condition = decoder.voice(self._quantizer.values(rows.voice).flatten(1))
        ends = rows.length * config.frames_per_code
        x, kept = self._first(values), []
        for layer, block in enumerate(self._blocks):
            seen = torch.cat((past.frames[:, layer], x), 1)
            kept.append(taken(seen, ends, config.kernel - 1))
            x = block.joined(x, convolved(seen, self._taps[layer], block.mix.bias), condition)
        return decoder.last(x, condition), torch.stack(kept, 1)

    def _first(self, values: Tensor) -> Tensor:
        """Return `Decoder.first` of values, as a product: convolutions of a GPU round to TF32."""
        layer = self._decoder.input
        seen = values.unfold(1, layer.weight.shape[-1], 1).flatten(2)
        x = F.linear(seen, layer.weight.flatten(1), layer.bias)
        return x.reshape(len(values), -1, self._config.decoder_dim)

    def _drive(self, curve: Curve, pitch: Tensor, past: Past) -> tuple[Drive, Tensor]:
        """Return the excitation of new codes, and pitch and voicing at all of its points."""
        config = self._config
        hz, voiced = curve.tones()
        new = torch.stack((hz * pitch[:, None], voiced), -1)
        first = torch.where(past.is_new[:, None, None], new[:, :1], past.tones)
        tones = torch.cat((first, new), 1)
        hop_s = config.stft_hop / config.sample_rate
        return drive_of(tones[..., 0], tones[..., 1], hop_s, past.turns), tones

    def _emitted(self, audio: Tensor, skipped: Tensor) -> Tensor:
        """Return each row from its first emitted sample on, filled up with its last one."""
        count = audio.shape[1]
        first = skipped[:, None] * self._hop
        index = first + torch.arange(count, device=audio.device)
        return audio.gather(1, index.clamp(max=count - 1))


def convolved(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Return the depthwise convolution of x [B, T + kernel - 1, D] with taps [kernel, D].

    Sums over shifted rows are faster than the convolution for few frames, and in float32 on every
    device.
    """
    count = x.shape[1] - len(taps) + 1
    total = x[:, :count] * taps[0]
    total = total if bias is None else total.add_(bias)
    for shift in range(1, len(taps)):
        total.addcmul_(x[:, shift : shift + count], taps[shift])
    return total


def taken(x: Tensor, first: Tensor, count: int) -> Tensor:
    """Return `count` columns of each row of x [B, T, D], from `first` [B] on."""
    index = first[:, None] + torch.arange(count, device=x.device)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
