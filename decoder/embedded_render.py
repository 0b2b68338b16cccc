"""The lean way through the embedded codec's decoder network, for serving.

Same mathematics and weights as `CodecDecoder.forward` (its slow twin in tests), but
- rotary tables and masks are made once per window shape,
- rows that no emitted sample depends on are left out: the last layer needs the emitted codes and
  the overlap before them, each layer below `left_window` codes more to the left:

      emitted codes       . . . . . . . . . x x x x
      layer 6 computes    . . . . . . . . o x x x x     (overlap 1)
      layer 5 computes    . . . . o o o o o x x x x     (left_window 4)

Positions are counted from the window's first code: with rotary attention alone a shift of all
positions changes nothing, and small angles stay exact in streams of any length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.base import AttentionKind, DecoderConfigError, DecodeWindow
from decoder.embedded_modules import (
    Block,
    CodecConfig,
    EmbeddedCodec,
    overlap_add,
    rotary_table,
    window_mask,
)
from decoder.streaming import attention_mask
from decoder.window_inputs import WindowInputs

CACHED_SHAPES = 64
CACHED_CODES = 128  # longer windows are one-shot renderings of a whole sentence: seldom alike


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's rows: the last `num_out` are computed from the last `num_in`.

    cos and sin [num_in, 1, head_dim]; additive mask [num_out, num_in] or [B, 1, num_out, num_in].
    """

    num_in: int
    num_out: int
    cos: Tensor
    sin: Tensor
    mask: Tensor
    skip_samples: int  # of the window


class EmbeddedRenderer:
    """Codes of equally shaped windows to samples of their current blocks."""

    def __init__(self, codec: EmbeddedCodec) -> None:
        weight = codec.decoder.input.weight
        self._codec = codec
        self._config = codec.config
        self._blocks = cast("list[Block]", list(codec.decoder.body.blocks))
        self._dtype, self._device = weight.dtype, weight.device
        self._synthesis_window = codec.decoder.stft_window * codec.decoder.overlap_gain
        self._cached_plan = lru_cache(CACHED_SHAPES)(self._make_plan)

    def inputs(self, windows: Sequence[DecodeWindow]) -> WindowInputs:
        """Codes [B, T], and the layers' plan on the device."""
        keys = tuple(map(_shape_key, windows))
        plans = [self._plan(key) for key in keys]
        joined = plans[0] if all(plan is plans[0] for plan in plans) else tuple(map(_join, *plans))
        codes = torch.tensor([window.codes for window in windows])
        return WindowInputs((codes,), (keys[0] if joined is plans[0] else keys), joined)

    @torch.inference_mode()
    def run(self, inputs: WindowInputs) -> Tensor:
        """As WindowNetwork.run."""
        decoder, (codes,), plan = self._codec.decoder, inputs.tensors, inputs.plan
        x = decoder.input(self._codec.quantizer.values(codes).to(self._dtype))
        x = x.view(len(codes), codes.shape[1] * self._config.frames_per_code, -1)
        x = x[:, -plan[0].num_in :]
        for block, layer in zip(self._blocks, plan, strict=True):
            x = _run_block(block, x, layer)
        audio = self._synthesize(decoder.body.norm(x).float())
        num_emitted = codes.shape[1] * self._config.hop - plan[0].skip_samples
        return audio[:, -num_emitted:]

    def render(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """Both halves."""
        return self.run(self.inputs(windows).to(str(self._device)))

    def _synthesize(self, x: Tensor) -> Tensor:
        """Frames [B, F, D] to samples [B, S], as CodecDecoder.synthesize with fewer passes."""
        head, config = self._codec.decoder.spectra, self._config
        spectra = F.linear(x, head.weight.float(), head.bias.float())
        log_magnitude, phase = spectra.view(len(x), -1, 2, config.n_fft // 2 + 1).unbind(2)
        magnitude = log_magnitude.clamp(max=6.0).exp_()
        parts = torch.stack((magnitude * phase.cos(), magnitude * phase.sin()), dim=-1)
        pieces = torch.fft.irfft(torch.view_as_complex(parts), n=config.n_fft)
        return overlap_add(pieces.mul_(self._synthesis_window), config.stft_hop)

    def _plan(self, key: DecodeWindow) -> tuple[LayerPlan, ...]:
        make = self._cached_plan if len(key.codes) <= CACHED_CODES else self._make_plan
        return make(key)

    def _make_plan(self, key: DecodeWindow) -> tuple[LayerPlan, ...]:
        config, num_codes = self._config, len(key.codes)
        near = window_mask(num_codes, config.left_window, config.right_window)
        allowed = near & torch.from_numpy(attention_mask(key, AttentionKind.BIDIRECTIONAL))
        frames = config.frames_per_code
        allowed = allowed.repeat_interleave(frames, 0).repeat_interleave(frames, 1)
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -math.inf)
        mask = mask.to(self._device, self._dtype)
        positions = torch.arange(num_codes * frames)
        cos, sin = rotary_table(positions, config.decoder_dim // config.decoder_heads)
        cos = torch.cat((cos, cos), -1)[:, None].to(self._device, self._dtype)
        sin = torch.cat((-sin, sin), -1)[:, None].to(self._device, self._dtype)
        rows = [n * frames for n in codes_per_layer(config, key)]
        return tuple(
            LayerPlan(
                num_in=num_in,
                num_out=num_out,
                cos=cos[-num_in:],
                sin=sin[-num_in:],
                mask=mask[-num_out:, -num_in:],
                skip_samples=key.skip_samples,
            )
            for num_in, num_out in pairwise(rows)
        )


def codes_per_layer(config: CodecConfig, window: DecodeWindow) -> list[int]:
    """How many of a window's last codes each layer reads, and the last one writes: L + 1 counts."""
    num_codes = len(window.codes)
    overlap = math.ceil((config.n_fft - config.stft_hop) / config.hop)
    needed = num_codes - window.skip_samples // config.hop + overlap
    layers = range(config.decoder_layers, -1, -1)
    return [min(needed + config.left_window * layer, num_codes) for layer in layers]


def _shape_key(window: DecodeWindow) -> DecodeWindow:
    """The window without what cannot change its plan, so that like windows share one."""
    first, num_codes = window.positions[0], len(window.codes)
    if window.positions != tuple(range(first, first + num_codes)):
        raise DecoderConfigError("positions of a window must follow each other")
    own = window.block_ids[window.prompt_len :]
    depth = 0 if window.masks.buffer_sees_current else 1
    return replace(
        window,
        codes=(0,) * num_codes,
        positions=tuple(range(num_codes)),
        block_ids=(0,) * window.prompt_len + tuple((block - own[0]) * depth for block in own),
        first_sample=0,
    )


def _join(*plans: LayerPlan) -> LayerPlan:
    """One plan for rows whose masks differ."""
    first = plans[0]
    return replace(first, mask=torch.stack([plan.mask for plan in plans])[:, None])


def _run_block(block: Block, x: Tensor, plan: LayerPlan) -> Tensor:
    """x [B, num_in, D] to [B, num_out, D]."""
    batch, _, dim = x.shape
    normed = block.attention_norm(x)
    weight, head_dim = block.qkv.weight, dim // block.heads
    q = F.linear(normed[:, -plan.num_out :], weight[:dim]).view(batch, -1, block.heads, head_dim)
    kv = F.linear(normed, weight[dim:]).view(batch, -1, 2, block.heads, head_dim)
    query = _rotate(q, plan.cos[-plan.num_out :], plan.sin[-plan.num_out :])
    key = _rotate(kv[:, :, 0], plan.cos, plan.sin)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        kv[:, :, 1].transpose(1, 2),
        attn_mask=plan.mask,
    )
    mixed = mixed.transpose(1, 2).reshape(batch, -1, dim)
    x = block.attention_out(mixed).add_(x[:, -plan.num_out :])
    return block.ff_out(F.gelu(block.ff_in(block.ff_norm(x)))).add_(x)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, H, D] with full-width tables [T, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1).mul_(signed_sin).addcmul_(x, cos)
