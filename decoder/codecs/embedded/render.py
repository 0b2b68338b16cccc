"""Optimised inference of the embedded codec's decoder network, for serving.

Same mathematics and weights as `CodecDecoder.forward` (the reference in tests), but
- rotary tables are made once,
- frames that no emitted sample depends on are left out: the last layer needs the emitted codes and
  the overlap before them, each layer below `left_window` codes more to the left:

      emitted codes       . . . . . . . . . x x x x
      layer 6 computes    . . . . . . . . o x x x x     (overlap 1)
      layer 5 computes    . . . . o o o o o x x x x     (left_window 4)

Positions are counted from the first emitted frame of a row: with rotary
attention a shift of all positions changes nothing, and small angles stay exact in streams of
any length.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.codecs.embedded.modules import (
    Block,
    CodecConfig,
    EmbeddedCodec,
    window_mask,
)
from decoder.codecs.mimi.modules import rotary_table
from decoder.codecs.source_filter.modules import overlap_add
from decoder.window_inputs import CallShape, PaddedRows

TABLE_CODES = 1024  # to each side; longer rows are one-shot renderings, whose tables are not reused


class Rotary(NamedTuple):
    """Table of cos and signed sin [T, 1, head_dim] of the positions [first, first + T)."""

    cos: Tensor
    sin: Tensor
    first: int

    def covers(self, first: int, last: int) -> bool:
        """Whether the table has the positions [first, last)."""
        return first >= self.first and last <= self.first + len(self.cos)

    def part(self, first: int, last: int) -> Rotary:
        """Return the table of the positions [first, last)."""
        own = slice(first - self.first, last - self.first)
        return Rotary(self.cos[own], self.sin[own], first)


class EmbeddedRenderer:
    """Renders codes of windows to samples of their blocks."""

    def __init__(self, codec: EmbeddedCodec) -> None:
        weight = codec.decoder.input.weight
        self._codec = codec
        self._config = codec.config
        self._blocks = cast("list[Block]", list(codec.decoder.body.blocks))
        self._dtype, self._device = weight.dtype, weight.device
        self._synthesis_window = codec.decoder.stft_window * codec.decoder.overlap_gain
        frames = TABLE_CODES * codec.config.frames_per_code
        self._rotary = self._make_rotary(-frames, frames)

    @torch.inference_mode()
    def render(self, rows: PaddedRows) -> Tensor:
        """See PaddedNetwork.render."""
        decoder, shape, config = self._codec.decoder, rows.shape, self._config
        num_frames = shape.num_frames * config.frames_per_code
        x = decoder.input(self._codec.quantizer.values(rows.codes[..., 0]).to(self._dtype))
        x = x.view(len(rows.codes), num_frames, -1)
        x = self._attend(x, self._allowed(rows), shape)
        audio = self._synthesize(decoder.body.norm(x).float(), rows)
        return audio[:, -shape.right * config.hop :][:, : shape.num_samples]

    def _attend(self, x: Tensor, allowed: Tensor, shape: CallShape) -> Tensor:
        """Apply the layers to all frames [B, F, D]; return the frames that the last layer
        writes.
        """
        rate = self._config.frames_per_code
        first, last = -shape.left * rate, shape.right * rate
        rotary = self._rotary
        if not rotary.covers(first, last):
            rotary = self._make_rotary(first, last)
        sizes = [count * rate for count in codes_per_layer(self._config, shape)]
        former, bias = (0, 0), allowed
        for block, (num_in, num_out) in zip(self._blocks, pairwise(sizes), strict=True):
            if former != (num_in, num_out):
                former = num_in, num_out
                bias = self._bias(allowed[..., -num_out:, -num_in:])
            x = _run_block(block, x[:, -num_in:], rotary.part(last - num_in, last), bias)
        return x

    def _allowed(self, rows: PaddedRows) -> Tensor:
        """Return bool [F, F] or [B, 1, F, F]: whether a frame attends to another.

        Padding attends to everything: its result is not used, but must be finite.
        """
        config, count = self._config, rows.shape.num_frames
        allowed = window_mask(count, config.left_window, config.right_window, self._device)
        seen = rows.visible()
        if seen is not None:
            allowed = allowed & seen
            if rows.own is not None:
                allowed = allowed | ~rows.own.mask(count).transpose(1, 2)
            allowed = allowed[:, None]
        rate = config.frames_per_code
        return allowed.repeat_interleave(rate, -2).repeat_interleave(rate, -1)

    def _bias(self, allowed: Tensor) -> Tensor:
        """Return the bias before the softmax: 0 or -inf. Row strides are multiples of 8, as kernels
        require.
        """
        width = allowed.shape[-1]
        forbidden = F.pad(~allowed, (0, -width % 8))
        bias = torch.zeros(forbidden.shape, dtype=self._dtype, device=self._device)
        return bias.masked_fill_(forbidden, -math.inf)[..., :width]

    def _synthesize(self, x: Tensor, rows: PaddedRows) -> Tensor:
        """Return samples [B, S] of a row's last frames [B, F, D].

        Like CodecDecoder.synthesize with fewer passes over memory. Spectra of padding are silent.
        """
        head, config = self._codec.decoder.spectra, self._config
        spectra = F.linear(x, head.weight.float(), head.bias.float())
        log_magnitude, phase = spectra.view(len(x), -1, 2, config.n_fft // 2 + 1).unbind(2)
        magnitude = log_magnitude.clamp(max=6.0).exp_()
        parts = torch.stack((magnitude * phase.cos(), magnitude * phase.sin()), dim=-1)
        pieces = torch.fft.irfft(torch.view_as_complex(parts), n=config.n_fft)
        pieces.mul_(self._synthesis_window)
        if rows.own is not None:
            count, rate = pieces.shape[1], config.hop // config.stft_hop
            own = rows.own.raised(rate).beginning(rows.shape.num_frames * rate - count)
            pieces.mul_(own.mask(count).transpose(1, 2))
        return overlap_add(pieces, config.stft_hop)

    def _make_rotary(self, first: int, last: int) -> Rotary:
        config = self._config
        positions = torch.arange(first, last, device=self._device)
        cos, sin = rotary_table(positions, config.decoder_dim // config.decoder_heads)
        return Rotary(
            torch.cat((cos, cos), -1)[:, None].to(self._dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self._dtype),
            first,
        )


def codes_per_layer(config: CodecConfig, shape: CallShape) -> list[int]:
    """Return the number of a row's last codes that each layer reads, and the last one writes: L + 1
    values.
    """
    overlap = math.ceil((config.n_fft - config.stft_hop) / config.hop)
    needed = shape.right + overlap
    layers = range(config.decoder_layers, -1, -1)
    return [min(needed + config.left_window * layer, shape.num_frames) for layer in layers]


def _run_block(block: Block, x: Tensor, rotary: Rotary, bias: Tensor) -> Tensor:
    """Map x [B, num_in, D] to [B, num_out, D]; bias is [..., num_out, num_in]."""
    batch, _, dim = x.shape
    num_out = bias.shape[-2]
    normed = block.attention_norm(x)
    weight, head_dim = block.qkv.weight, dim // block.heads
    q = F.linear(normed[:, -num_out:], weight[:dim]).view(batch, -1, block.heads, head_dim)
    kv = F.linear(normed, weight[dim:]).view(batch, -1, 2, block.heads, head_dim)
    query = _rotate(q, rotary.cos[-num_out:], rotary.sin[-num_out:])
    key = _rotate(kv[:, :, 0], rotary.cos, rotary.sin)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        kv[:, :, 1].transpose(1, 2),
        attn_mask=bias,
    )
    mixed = mixed.transpose(1, 2).reshape(batch, -1, dim)
    x = block.attention_out(mixed).add_(x[:, -num_out:])
    return block.ff_out(F.gelu(block.ff_in(block.ff_norm(x)))).add_(x)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [B, T, H, D] with full-width tables [T, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1).mul_(signed_sin).addcmul_(x, cos)
