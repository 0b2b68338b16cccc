"""A depthwise decoder for a GPU, whose kernels keep the channels of a time together.

    codes ──▶ sum of projected vectors, from a table ──▶ entry convolutions
    stage:  x [B, T, C] ──▶ snake, zeros around ──▶ transposed convolution, as one product
            ──▶ x + noise * (x @ weights) ──▶ 3 times: unit's convolution, product added to x

Products read 16-bit floats and add in float32. Of numbers from 6e-5 on these have 10 bits of
mantissa, as TF32 has; smaller ones are off by up to 3e-8.
The reference is `SnakeDecoder`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.snake.decoder import (
    Codebook,
    ResidualUnit,
    SnakeConfig,
    SnakeDecoder,
    Stage,
    StageNoise,
    crop,
)
from decoder.kernels import rows
from decoder.window_inputs import Span


class RowDecoder(SnakeDecoder):
    """A `SnakeDecoder` of depthwise convolutions on a GPU. Neither its weights nor its
    device change after the first call.
    """

    def __init__(self, config: SnakeConfig, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(config)
        self._dtype = dtype
        self._rows: list[RowStage] = []
        self._ends: RowEnds | None = None

    def _enter(
        self, codes: Sequence[Tensor], own: Span | None, span: tuple[int, int]
    ) -> tuple[Tensor, int]:
        self._ends = self._ends or RowEnds(self, self._dtype)
        return self._ends.enter(codes, own, span)

    def _stage(
        self, index: int, x: Tensor, start: int, own: Span | None, noise: StageNoise | None
    ) -> tuple[Tensor, Span | None]:
        if not self._rows:
            self._rows = [RowStage(cast("Stage", stage), self._dtype) for stage in self.stages]
        return self._rows[index](x, start, own, noise)

    def _end(self, x: Tensor, own: Span | None) -> Tensor:
        assert self._ends is not None
        return self._ends.leave(x, own)


class RowEnds:
    """The layers before and behind the stages, with their weights in the kernels' layout."""

    def __init__(self, network: SnakeDecoder, dtype: torch.dtype) -> None:
        config = network.config
        assert config.is_bounded
        assert config.depthwise
        self._strides = config.vq_strides
        books = [cast("Codebook", book) for book in network.codebooks]
        projected = [book.projection(book.vectors.weight.T) for book in books]
        self._latents = torch.cat(projected, dim=1).T.contiguous()  # of all codebooks
        firsts = config.codebook_size * torch.arange(len(books))
        self._firsts = firsts.to(self._latents.device)
        depthwise, mix = (cast("nn.Conv1d", layer) for layer in network.entry)
        self._entry = rows.pack_unit(depthwise)
        self._exit = rows.pack_unit(network.exit, network.exit_snake.alpha)
        self._mix, self._bias = _weights(mix, dtype), mix.bias

    def enter(
        self, codes: Sequence[Tensor], own: Span | None, span: tuple[int, int]
    ) -> tuple[Tensor, int]:
        """See `SnakeDecoder._enter`."""
        pairs = zip(codes, self._strides, strict=True)
        places = torch.stack([part.repeat_interleave(step, -1) for part, step in pairs], dim=-1)
        x = F.embedding(places + self._firsts, self._latents).sum(2)
        x, start = crop(x.mT, 0, span)
        own = own and own.beginning(start)
        inner = rows.unit_rows(x.mT, self._entry, 1, self._mix.dtype, own)
        return rows.product(inner, self._mix, self._bias).mT, start

    def leave(self, x: Tensor, own: Span | None) -> Tensor:
        """See `SnakeDecoder._end`."""
        return rows.exit_rows(x.mT, self._exit, own)


class RowUnit:
    """One `ResidualUnit`, with its weights in the kernels' layout."""

    def __init__(self, unit: ResidualUnit, dtype: torch.dtype) -> None:
        self._table = rows.pack_unit(unit.dilated, unit.snake_in.alpha, unit.snake_out.alpha)
        self._dilation = unit.dilated.dilation[0]
        self._mix, self._bias = _weights(unit.mix, dtype), unit.mix.bias

    def add_to(self, x: Tensor, own: Span | None) -> None:
        """Add the unit's branch to x [B, T, C]."""
        inner = rows.unit_rows(x, self._table, self._dilation, self._mix.dtype, own)
        rows.product(inner, self._mix, self._bias, onto=x)


class RowStage:
    """One `Stage`, with its weights in the kernels' layout."""

    def __init__(self, stage: Stage, dtype: torch.dtype) -> None:
        self._rate = stage.rate
        self._table = rows.pack_snake(stage.snake.alpha)
        # Output p of an input is the sum of it by weight p and of the one before by p + rate.
        phases = stage.up.weight.detach().transpose(1, 2)  # [C, 2 rate, C / 2]
        both = torch.cat((phases[:, stage.rate :], phases[:, : stage.rate]))
        self._weights = both.flatten(1).to(dtype).contiguous()
        assert stage.up.bias is not None
        self._biases = stage.up.bias.detach().repeat(stage.rate)
        self._noise = None if stage.noise is None else _weights(stage.noise, dtype)
        self._units = [RowUnit(cast("ResidualUnit", unit), dtype) for unit in stage.units]

    def __call__(
        self, x: Tensor, start: int, own: Span | None, noise: StageNoise | None
    ) -> tuple[Tensor, Span | None]:
        """See `Stage.forward`; in memory, the channels of a time are together in x and result."""
        x = self._raised(x.mT, own and own.beginning(start))
        start *= self._rate
        if self._noise is not None and noise is not None:
            x = rows.product(x, self._noise, None, scales=noise(start, x.shape[1])[:, 0])
        x = x.contiguous()  # as it is already if noise was added
        own = own and own.raised(self._rate)
        for unit in self._units:
            unit.add_to(x, own and own.beginning(start))
        return x.mT, own

    def _raised(self, x: Tensor, own: Span | None) -> Tensor:
        """Apply snake and transposed convolution to x [B, T, C]."""
        count, length, channels = x.shape
        snaked = rows.snake_rows(x, self._table, 1, self._weights.dtype, own)
        # a row is a time of the input with the one before
        pairs = snaked.as_strided((count, length + 1, 2 * channels), (*snaked.stride()[:2], 1))
        phases = rows.product(pairs, self._weights, self._biases)
        x = phases.view(count, -1, channels // 2)
        first = math.ceil(self._rate / 2)
        return x[:, first : first + length * self._rate]


def _weights(layer: nn.Conv1d, dtype: torch.dtype) -> Tensor:
    """Return the weights of a convolution of one tap as a matrix [in, out]."""
    return layer.weight.detach()[..., 0].T.to(dtype).contiguous()
