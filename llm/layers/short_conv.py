"""Layers with a short convolution in place of attention (LFM2), and a state in place of keys.

    x ─ norm ─ in ─┬ b ─ × ─ convolution over K tokens ─ × ─ out ─ add ─ norm ─ MLP ─ add
                   ├ c ──│───────────────────────────────┘
                   └ v ──┘

The state of a sequence is the K - 1 last inputs of the convolution. A token's result is a sum of K
products in one order, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.kv_cache.state_pool import StateRows
from llm.layers.decoder import MLP, RMSNorm
from llm.layers.linear import Linear
from llm.memory.transfer import to_device


@dataclass(frozen=True, slots=True)
class ConvWindows:
    """Where each token of a ragged batch finds the K inputs of its convolution.

    Places are rows of the B × (K - 1) states followed by the T inputs of the fed tokens.
    """

    inputs: Tensor  # int64 [K, T], the oldest first
    last: Tensor  # int64 [B × (K - 1)] inputs that are the rows' states after the forward

    @classmethod
    def of(cls, lengths: tuple[int, ...], width: int, device: torch.device) -> ConvWindows:
        """Find them for rows of these lengths and a convolution over `width` tokens."""
        kept, num_rows = width - 1, len(lengths)
        row = np.repeat(np.arange(num_rows), lengths)
        counts = np.array(lengths)
        first = np.cumsum(counts) - counts
        within = np.arange(len(row)) - first[row]
        steps = np.arange(-kept, 1)[:, None]
        inputs = _places(row, within + steps, first, kept)
        last = _places(np.arange(num_rows), counts + steps[:-1], first, kept)
        numbers = np.concatenate([inputs.reshape(-1), last.T.reshape(-1)])
        sent = to_device(torch.from_numpy(numbers), device)
        return cls(sent[: inputs.size].view(inputs.shape), sent[inputs.size :])


def _places(row: np.ndarray, within: np.ndarray, first: np.ndarray, kept: int) -> np.ndarray:
    """Return the places of token `within` of each row; negative numbers are in the row's state."""
    num_stored = len(first) * kept
    return np.where(within < 0, (row + 1) * kept + within, num_stored + first[row] + within)


class ShortConv:
    """A causal convolution of each channel over K tokens."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [hidden, K], the oldest token first; `bias` [hidden]."""
        self.taps = weight.float().t().contiguous()  # [K, hidden]
        self.bias = None if bias is None else bias.float()

    @property
    def width(self) -> int:
        """Number K of tokens that a result depends on."""
        return len(self.taps)

    def convolve(
        self, inputs: Tensor, states: Tensor, rows: StateRows, windows: ConvWindows | None
    ) -> Tensor:
        """Return the results [T, hidden] for inputs [T, hidden], and update the rows' states.

        `states` are all of the layer, [states, K - 1, hidden]. `windows` None: one token per row.
        """
        before = states.index_select(0, rows.read)
        if windows is None:
            tokens = [*before.unbind(1), inputs]
            after = torch.stack(tokens[1:], dim=1) if len(tokens) > 1 else before
        else:
            both = torch.cat([before.flatten(0, 1), inputs])
            tokens = [both.index_select(0, places) for places in windows.inputs]
            after = both.index_select(0, windows.last).view(before.shape)
        states.index_copy_(0, rows.written, after)
        return self._sum(tokens).to(inputs.dtype)

    def _sum(self, tokens: list[Tensor]) -> Tensor:
        # Separate products and sums: a fused operation rounds once, and not in every kernel.
        total = tokens[0] * self.taps[0]
        for token, tap in zip(tokens[1:], self.taps[1:], strict=True):
            total.add_(token * tap)
        return total if self.bias is None else total.add_(self.bias)


class ShortConvLayer:
    """Computes x + conv(norm x), then x + mlp(norm x)."""

    def __init__(
        self, layer: int, norm: RMSNorm, mixer: ConvMixer, mlp_norm: RMSNorm, mlp: MLP
    ) -> None:
        """`layer`: number among the layers with states."""
        self.layer = layer
        self.norm = norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, states: Tensor, rows: StateRows, windows: ConvWindows | None
    ) -> None:
        """Update x [T, hidden] in place, and the rows' states of this layer."""
        x.add_(self.mixer(self.norm(x), states, rows, windows))
        x.add_(self.mlp(self.mlp_norm(x)))


@dataclass(frozen=True, slots=True)
class ConvMixer:
    """A convolution between two gates."""

    project: Linear  # hidden -> 3 × hidden: gate before, gate after, values
    conv: ShortConv
    output: Linear

    def __call__(
        self, x: Tensor, states: Tensor, rows: StateRows, windows: ConvWindows | None
    ) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        before, after, values = self.project(x).chunk(3, dim=1)
        mixed = self.conv.convolve(before * values, states, rows, windows)
        return self.output(after * mixed)
