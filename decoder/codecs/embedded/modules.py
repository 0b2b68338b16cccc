"""The embedded codec's networks: one FSQ codebook, log-mel
transformer encoder, inverse-STFT transformer decoder.

    samples --log mel--> [T codes x mel] --encoder--> z --FSQ--> code
    code --levels--> 2 frames of 20 ms --decoder--> 2 spectra each --inverse STFT--> samples

The synthesis window of a spectrum begins at the spectrum's own first sample and reaches forward
only, so that a sample never depends on a later block: the codec has no delay.

Sources: FSQ, arXiv 2309.15505; spectra as log magnitude and phase, Vocos, arXiv 2306.00814;
rotary positions, arXiv 2104.09864.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.base import DecoderConfigError
from decoder.codec_config import scalar, sizes
from decoder.codecs.mimi.modules import rotary_table, rotate
from decoder.codecs.source_filter.modules import FiniteScalarQuantizer, overlap_add

# a larger number means a damaged file; checked before memory is allocated
MAX_LAYERS, MAX_WEIGHTS = 256, 1 << 28
MAY_BE_ZERO = ("encoder_window", "left_window", "right_window")


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """Sizes of one codec. Windows are in codes, to each side, per attention layer."""

    sample_rate: int = 16_000
    levels: tuple[int, ...] = (8, 8, 8, 8, 4)
    frames_per_code: int = 2
    spectra_per_frame: int = 2
    stft_hop: int = 160
    n_fft: int = 640
    mel_bins: int = 80
    mel_n_fft: int = 1024
    encoder_dim: int = 256
    encoder_layers: int = 4
    encoder_heads: int = 4
    encoder_window: int = 12
    decoder_dim: int = 384
    decoder_layers: int = 6
    decoder_heads: int = 6
    decoder_ff: int = 1152
    left_window: int = 8
    right_window: int = 8

    @property
    def hop(self) -> int:
        """Samples per code."""
        return self.frames_per_code * self.spectra_per_frame * self.stft_hop

    @property
    def codebook_size(self) -> int:
        return math.prod(self.levels)

    @property
    def receptive_field(self) -> int:
        """Number of earlier codes that can change a code's samples."""
        overlap = math.ceil((self.n_fft - self.stft_hop) / self.hop)
        return self.decoder_layers * self.left_window + overlap

    @property
    def num_weights(self) -> int:
        """Approximate number of values of the networks and their tables."""
        encoder = self.encoder_layers * 12 * self.encoder_dim**2 + self.encoder_dim * self.mel_bins
        decoder = (
            self.decoder_layers * self.decoder_dim * (4 * self.decoder_dim + 2 * self.decoder_ff)
        )
        frames = self.decoder_dim * self.frames_per_code * (self.n_fft * self.spectra_per_frame + 8)
        return encoder + decoder + frames + self.mel_n_fft * self.mel_bins

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CodecConfig:
        """Read a codec's config.json; keys that are not sizes are ignored.

        Raises DecoderConfigError naming an invalid size.
        """
        own = cls()
        chosen: dict[str, Any] = {"levels": sizes(values, "codec", "levels", own.levels)}
        for field in fields(cls):
            if field.name in MAY_BE_ZERO and values.get(field.name) == 0:
                chosen[field.name] = 0
            elif field.name != "levels":
                default: int = getattr(own, field.name)
                chosen[field.name] = scalar(values, "codec", field.name, default)
        config = cls(**chosen)
        if config.n_fft % config.stft_hop:
            raise DecoderConfigError("codec config: n_fft must be a multiple of stft_hop")
        layers = max(config.encoder_layers, config.decoder_layers)
        if layers > MAX_LAYERS or config.num_weights > MAX_WEIGHTS:
            raise DecoderConfigError(
                f"codec config: the sizes are too large: {layers} layers of {MAX_LAYERS}, "
                f"about {config.num_weights} weights of {MAX_WEIGHTS}"
            )
        for part in ("encoder", "decoder"):
            if getattr(config, f"{part}_dim") % (2 * getattr(config, f"{part}_heads")):
                raise DecoderConfigError(
                    f"codec config: {part}_dim must be a multiple of twice {part}_heads"
                )
        return config


class Block(nn.Module):
    """Pre-norm transformer block: masked rotary attention, then a GELU feed-forward."""

    def __init__(self, dim: int, heads: int, ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.ff_norm = nn.LayerNorm(dim)
        self.ff_in = nn.Linear(dim, ff)
        self.ff_out = nn.Linear(ff, dim)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply to x [B, T, D]; mask is bool broadcastable to [B, 1, T, T]."""
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.ff_out(F.gelu(self.ff_in(self.ff_norm(x))))


class Transformer(nn.Module):
    """A stack of blocks and a final norm."""

    def __init__(self, layers: int, dim: int, heads: int, ff: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads, ff) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head_dim = dim // heads

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Apply to x [B, T, D]; mask [T, T] or [B, T, T] bool, positions [T] or [B, T]."""
        cos, sin = rotary_table(positions, self.head_dim)
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        if mask.dim() == 3:
            mask = mask[:, None]
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return self.norm(x)


def window_mask(length: int, left: int, right: int, device: torch.device | None = None) -> Tensor:
    """Return bool [T, T]: row t attends to columns t - left … t + right."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    return (distance <= left) & (distance >= -right)


class CodecEncoder(nn.Module):
    """Encodes samples to latent values, one vector per code."""

    mel_filters: Tensor
    mel_window: Tensor

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        from torchaudio.functional import melscale_fbanks  # slow import, only needed for encoding

        self.config = config
        filters = melscale_fbanks(
            config.mel_n_fft // 2 + 1,
            0.0,
            config.sample_rate / 2,
            config.mel_bins,
            config.sample_rate,
            norm="slaney",
        )
        self.register_buffer("mel_filters", filters.T.contiguous(), persistent=False)
        self.register_buffer("mel_window", torch.hann_window(config.mel_n_fft), persistent=False)
        stacked = config.mel_bins * config.hop // config.stft_hop
        dim = config.encoder_dim
        self.input = nn.Linear(stacked, dim)
        self.body = Transformer(config.encoder_layers, dim, config.encoder_heads, 4 * dim)
        self.output = nn.Linear(dim, len(config.levels))

    def log_mel(self, samples: Tensor) -> Tensor:
        """Return log-mel frames [B, T, mel * n], stacked per code, of float32 samples [B, T *
        hop].
        """
        config = self.config
        frames = samples.shape[-1] // config.stft_hop
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = torch.stft(
                samples.float(),
                config.mel_n_fft,
                config.stft_hop,
                window=self.mel_window,
                return_complex=True,
            )
            mel = (self.mel_filters @ spectrum.abs()[..., :frames]).clamp_min(1e-7).log()
        return mel.transpose(1, 2).reshape(len(samples), samples.shape[-1] // config.hop, -1)

    def forward(self, samples: Tensor) -> Tensor:
        """Return latent values float32 [B, T, d] before quantisation of samples [B, T * hop]."""
        features = self.log_mel(samples) / 4 + 2
        length, window = features.shape[1], self.config.encoder_window
        mask = window_mask(length, window, window, features.device)
        positions = torch.arange(length, device=features.device)
        return self.output(self.body(self.input(features), mask, positions)).float()


class CodecDecoder(nn.Module):
    """Decodes quantised values to samples."""

    stft_window: Tensor

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        dim, bins = config.decoder_dim, config.n_fft // 2 + 1
        self.input = nn.Linear(len(config.levels), dim * config.frames_per_code)
        self.body = Transformer(config.decoder_layers, dim, config.decoder_heads, config.decoder_ff)
        self.spectra = nn.Linear(dim, config.spectra_per_frame * 2 * bins)
        # The squared periodic Hann windows sum to 3/8 * n_fft / hop at full overlap.
        window = torch.hann_window(config.n_fft)
        self.register_buffer("stft_window", window, persistent=False)
        self.overlap_gain = 1 / (0.375 * config.n_fft / config.stft_hop)

    def forward(
        self, values: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Decode values [B, T, d]; mask bool [T, T] or [B, T, T] over codes; positions [T] or [B,
        T].

        The mask is restricted to the attention window here; None means no other restriction.
        Returns float32 samples [B, T * hop].
        """
        config = self.config
        batch, length, _ = values.shape
        if positions is None:
            positions = torch.arange(length, device=values.device)
        distance = positions[..., :, None] - positions[..., None, :]
        near = (distance <= config.left_window) & (distance >= -config.right_window)
        mask = near if mask is None else near & mask
        n = config.frames_per_code
        mask = mask.repeat_interleave(n, -1).repeat_interleave(n, -2)
        offsets = torch.arange(n, device=values.device)
        frame_positions = (positions[..., None] * n + offsets).flatten(-2)
        x = self.input(values).view(batch, length * n, -1)
        x = self.body(x, mask, frame_positions)
        with torch.autocast(x.device.type, enabled=False):
            return self.synthesize(
                F.linear(x.float(), self.spectra.weight.float(), self.spectra.bias.float())
            )

    def synthesize(self, spectra: Tensor) -> Tensor:
        """Return samples [B, S] of log magnitude and phase [B, F, spectra_per_frame * 2 * bins]."""
        config = self.config
        log_magnitude, phase = spectra.view(len(spectra), -1, 2, config.n_fft // 2 + 1).unbind(2)
        spectrum = torch.polar(log_magnitude.clamp(max=6.0).exp(), phase)
        pieces = torch.fft.irfft(spectrum, n=config.n_fft) * (self.stft_window * self.overlap_gain)
        return overlap_add(pieces, config.stft_hop)


class EmbeddedCodec(nn.Module):
    """Encoder, quantiser and decoder of one checkpoint."""

    def __init__(self, config: CodecConfig, *, with_encoder: bool = True) -> None:
        super().__init__()
        self.config = config
        self.quantizer = FiniteScalarQuantizer(config.levels)
        self.encoder = CodecEncoder(config) if with_encoder else None
        self.decoder = CodecDecoder(config)

    def encode(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantised values [B, T, d] and codes int64 [B, T] of samples [B, T * hop]."""
        if self.encoder is None:
            raise DecoderConfigError("this codec was built without its encoder")
        values, codes = self.quantizer(self.encoder(samples))
        return values, codes

    def decode(
        self, codes: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Return float32 samples [B, T * hop] of codes [B, T]; mask and positions as in
        CodecDecoder.
        """
        values = self.quantizer.values(codes).to(self.decoder.input.weight.dtype)
        return self.decoder(values, mask, positions)
