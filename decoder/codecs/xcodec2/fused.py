"""The decoder network of XCodec2 and NeuCodec for a GPU: the sums of `Xcodec2Network` in other
forms, in fewer kernels.

    codes ──▶ levels of 7 codes ──▶ one product: projections and first convolution are linear
    convolutions     products with matrices; the norm before one writes each column's neighbours
    attention        one product for queries, keys and values, one kernel for the rest
    residuals        products that add to them
    spectra          one kernel before the inverse transform, one behind it

Channels are the last dimension everywhere, so that nothing is transposed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.xcodec2.modules import (
    MAX_MAGNITUDE,
    OVERLAP,
    Layer,
    ResidualBlock,
    Xcodec2Network,
    frames_of,
)
from decoder.kernels.attention import attend
from decoder.kernels.levels import levels_of
from decoder.kernels.norm import group_norm_silu
from decoder.kernels.spectra import overlapped, spectra_of
from decoder.window_inputs import PaddedRows, Span

ALIGNMENT = 8  # numbers of columns of products are multiples, for their fastest kernels


class FusedBlock(nn.Module):
    """A `ResidualBlock`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        assert isinstance(block, ResidualBlock)
        self.norm_in, self.norm_out = block.norm_in, block.norm_out
        self.conv_in, self.conv_out = (
            conv.weight.transpose(1, 2).flatten(1) for conv in (block.conv_in, block.conv_out)
        )
        self.bias_in, self.bias_out = block.conv_in.bias, block.conv_out.bias

    def forward(self, x: Tensor, own: Span | None) -> Tensor:
        """Apply to x [B, T, C]; its padding is undefined."""
        y = F.linear(group_norm_silu(self.norm_in, x, own), self.conv_in, self.bias_in)
        y = F.linear(group_norm_silu(self.norm_out, y, own), self.conv_out, self.bias_out)
        return y.add_(x)


class FusedLayer(nn.Module):
    """A `Layer`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, Layer)
        self.num_heads = layer.num_heads
        self.attention_norm, self.ff_norm = layer.attention_norm, layer.ff_norm
        self.qkv = torch.cat([part.weight for part in (layer.query, layer.key, layer.value)])
        self.attention_out = layer.attention_out.weight
        self.ff_in, self.ff_out = layer.ff_in.weight, layer.ff_out.weight

    def forward(self, x: Tensor, rows: PaddedRows) -> None:
        """Add both branches to x [B, T, D], contiguous."""
        lines = x.flatten(0, 1)
        qkv = F.linear(self.attention_norm(x), self.qkv)
        lines.addmm_(attend(qkv, self.num_heads, rows).flatten(0, 1), self.attention_out.t())
        inner = F.silu(F.linear(self.ff_norm(x), self.ff_in), inplace=True)
        lines.addmm_(inner.flatten(0, 1), self.ff_out.t())


class FusedNetwork(nn.Module):
    """Decodes codes to samples, like the network from whose weights it is made.

    It stays on that network's device: what is made of the weights does not move with them.
    """

    def __init__(self, network: Xcodec2Network) -> None:
        super().__init__()
        self.config = network.config
        self.codebook = network.codebook
        self.num_taps = network.embed.kernel_size[0]
        self.front, self.front_bias = _front(network), network.embed.bias
        self.before, self.after = (
            nn.ModuleList(map(FusedBlock, blocks)) for blocks in (network.before, network.after)
        )
        self.layers = nn.ModuleList(map(FusedLayer, network.layers))
        self.norm, self.window = network.norm, network.window
        missing = -len(network.spectrum.weight) % ALIGNMENT
        self.spectrum = F.pad(network.spectrum.weight, (0, 0, 0, missing))
        self.spectrum_bias = F.pad(network.spectrum.bias, (0, missing))

    def forward(self, rows: PaddedRows) -> Tensor:
        """See Xcodec2Network.forward."""
        own, book = rows.own, self.codebook
        width = self.front.shape[1]
        codes, taps = rows.codes[..., 0], self.num_taps
        near = levels_of(codes, book.levels, book.strides, taps, width, own)
        x = F.linear(near, self.front, self.front_bias)
        for block in self.before:
            x = block(x, own)
        for layer in self.layers:
            layer(x, rows)
        for block in self.after:
            x = block(x, own)
        return self._samples(x, rows)

    def _samples(self, x: Tensor, rows: PaddedRows) -> Tensor:
        """Return the samples of frames x [B, T, D]."""
        hop, shape = self.config.hop, rows.shape
        first, last = frames_of(shape, hop)
        polar = F.linear(self.norm(x[:, first:last]), self.spectrum, self.spectrum_bias)
        n_fft = OVERLAP * hop
        spectra = spectra_of(polar, n_fft // 2 + 1, MAX_MAGNITUDE)
        pieces = torch.fft.irfft(spectra, n=n_fft, norm="forward")
        start = (shape.left - first) * hop + (n_fft - hop) // 2
        own = rows.own.beginning(first) if rows.own else None
        return overlapped(pieces, self.window, OVERLAP, start, shape.num_samples, own)


def _front(network: Xcodec2Network) -> Tensor:
    """Return the matrix [D, K] from the levels of 7 codes, each with a 1 for the biases, to the
    output of the first convolution. Its last columns are padding.
    """
    first, second = network.codebook.projection, network.input
    joined = torch.cat((first.weight, first.bias[:, None]), dim=1).double()
    joined = second.weight.double() @ joined
    joined[:, -1] += second.bias
    front = torch.einsum("oct,ci->oti", network.embed.weight.double(), joined).flatten(1)
    return F.pad(front, (0, -front.shape[1] % ALIGNMENT)).float()
