"""The decoder network of XCodec2 and NeuCodec for a GPU: the sums of `Xcodec2Network` in other
forms, in fewer kernels.

    codes ──▶ levels of 7 codes ──▶ one product: projections and first convolution are linear
    convolutions     products with matrices; the norm before one writes each column's neighbours
    attention        one product for queries, keys and values, one kernel for the rest
    residuals        products that add to them, in float32
    spectra          one kernel before the inverse transform, one behind it

Channels are the last dimension everywhere, so that nothing is transposed. The products of the
layers and blocks read float16 if nothing can exceed its range (`product_dtype`). Of numbers from
6e-5 on it has 10 bits of mantissa, as TF32 has; smaller ones are off by up to 3e-8.
"""

from __future__ import annotations

import math

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
from decoder.kernels.norm import group_norm_silu, rms_norm
from decoder.kernels.spectra import overlapped, spectra_of
from decoder.window_inputs import PaddedRows, Span

ALIGNMENT = 8  # numbers of columns of products are multiples, for their fastest kernels
MAX_HALF = 65_000.0  # of float16's 65,504, less what roundings add
MAX_COLUMNS = 2**16  # of a window


def product_dtype(network: Xcodec2Network) -> torch.dtype:
    """Return float16 if no value of a product of layers and blocks can exceed it, else float32.

    A normalised vector of N numbers has the length sqrt(N), which bounds each of them and, by the
    inequality of Cauchy and Schwarz, its products with weights; SiLU and attention add nothing.
    """
    bounds = []
    for block in (*network.before, *network.after):
        assert isinstance(block, ResidualBlock)
        for group, conv in ((block.norm_in, block.conv_in), (block.norm_out, block.conv_out)):
            length = math.sqrt(group.num_channels // group.num_groups * MAX_COLUMNS)
            bounds += [group.weight.abs() * length + group.bias.abs(), conv.weight.abs()]
    for layer in network.layers:
        assert isinstance(layer, Layer)
        bounds += [layer.attention_out.weight.abs(), layer.ff_out.weight.abs()]
        normed = (layer.attention_norm, (layer.query, layer.key, layer.value))
        for norm, products in (normed, (layer.ff_norm, (layer.ff_in,))):
            length = math.sqrt(len(norm.weight))
            bounds.append(norm.weight.abs() * length)
            for product in products:
                scaled = (product.weight * norm.weight).norm(dim=1)
                bounds += [product.weight.abs(), scaled * length]
    fits = all(float(bound.max()) < MAX_HALF for bound in bounds)
    return torch.float16 if fits else torch.float32


def _times(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a [B, T, K] times a weight [M, K] plus a bias [M] float32, in float32."""
    if a.dtype is torch.float32:
        return F.linear(a, weight, bias)
    lines = torch.mm(a.flatten(0, 1), weight.t(), out_dtype=torch.float32)
    if bias is not None:
        lines += bias
    return lines.view(*a.shape[:2], len(weight))


def _add_times(lines: Tensor, a: Tensor, weight: Tensor) -> None:
    """Add a [B, T, K] times a weight [M, K] to lines [B T, M] float32."""
    if a.dtype is torch.float32:
        lines.addmm_(a.flatten(0, 1), weight.t())
    else:
        product = (lines, a.flatten(0, 1), weight.t())
        torch.addmm(*product, out_dtype=torch.float32, out=lines)


class FusedBlock(nn.Module):
    """A `ResidualBlock`."""

    def __init__(self, block: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(block, ResidualBlock)
        self.dtype = dtype
        self.norm_in, self.norm_out = block.norm_in, block.norm_out
        self.conv_in, self.conv_out = (
            conv.weight.transpose(1, 2).flatten(1).to(dtype)
            for conv in (block.conv_in, block.conv_out)
        )
        self.bias_in, self.bias_out = block.conv_in.bias, block.conv_out.bias

    def forward(self, x: Tensor, own: Span | None) -> Tensor:
        """Apply to x [B, T, C]; its padding is undefined."""
        near = group_norm_silu(self.norm_in, x, own, self.dtype)
        y = _times(near, self.conv_in, self.bias_in)
        near = group_norm_silu(self.norm_out, y, own, self.dtype)
        return _times(near, self.conv_out, self.bias_out).add_(x)


class FusedLayer(nn.Module):
    """A `Layer`."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(layer, Layer)
        self.num_heads, self.dtype = layer.num_heads, dtype
        self.attention_norm, self.ff_norm = layer.attention_norm, layer.ff_norm
        qkv = torch.cat([part.weight for part in (layer.query, layer.key, layer.value)])
        weights = qkv, layer.attention_out.weight, layer.ff_in.weight, layer.ff_out.weight
        self.qkv, self.attention_out, self.ff_in, self.ff_out = (w.to(dtype) for w in weights)

    def forward(self, x: Tensor, rows: PaddedRows) -> None:
        """Add both branches to x [B, T, D], contiguous."""
        lines = x.flatten(0, 1)
        qkv = F.linear(rms_norm(self.attention_norm, x, self.dtype), self.qkv)
        _add_times(lines, attend(qkv, self.num_heads, rows), self.attention_out)
        inner = F.linear(rms_norm(self.ff_norm, x, self.dtype), self.ff_in)
        _add_times(lines, F.silu(inner, inplace=True), self.ff_out)


class FusedNetwork(nn.Module):
    """Decodes codes to samples, like the network from whose weights it is made.

    It stays on that network's device: what is made of the weights does not move with them.
    `dtype`: what products of layers and blocks read.
    """

    def __init__(self, network: Xcodec2Network, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = network.config
        self.codebook = network.codebook
        self.num_taps = network.embed.kernel_size[0]
        self.front, self.front_bias = _front(network), network.embed.bias
        self.before, self.after = (
            nn.ModuleList(FusedBlock(block, dtype) for block in blocks)
            for blocks in (network.before, network.after)
        )
        self.layers = nn.ModuleList(FusedLayer(layer, dtype) for layer in network.layers)
        self.norm, self.window = network.norm, network.window
        missing = -len(network.spectrum.weight) % ALIGNMENT
        self.spectrum = F.pad(network.spectrum.weight, (0, 0, 0, missing))
        self.spectrum_bias = F.pad(network.spectrum.bias, (0, missing))

    def forward(self, rows: PaddedRows) -> Tensor:
        """See Xcodec2Network.forward."""
        own, book = rows.own, self.codebook
        assert rows.codes.shape[1] <= MAX_COLUMNS
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
