"""The codec's networks.

    samples   --log mel, 20 ms--> ConvNeXt --pairs--> ConvNeXt --FSQ--> codes, 25 a second
    reference --log mel, 20 ms--> ConvNeXt --attention pooling--> FSQ --> voice tokens, a fixed row
    codes, voice tokens --20 ms--> causal ConvNeXt, norms conditioned on the voice
              --2 spectra each--> inverse STFT --> samples
              --pitch, 2 filters each--> of pulses and noise, added to or instead of the spectra

The decoder sees `ahead` codes after a code in its first layer and none later. A spectrum's window
begins at the spectrum's own first sample, so a sample depends on no later spectrum. A spectrum's
pitch is that of its window's end, so pulses depend on no later one either. Voice tokens
have the codes' levels: a language model can read and write both with one vocabulary.
Sources: ConvNeXt, arXiv 2201.03545; inverse STFT from it, Vocos, arXiv 2306.00814; FSQ,
arXiv 2309.15505; fixed rows of tokens for the speaker, Spark-TTS, arXiv 2503.01710.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchaudio.functional import melscale_fbanks

from decoder.codecs.embedded.modules import FiniteScalarQuantizer, overlap_add
from training.speech_codec.config import SpeechCodecConfig
from training.speech_codec.excitation import Curve, Drive, pulses, repeating_noise

HEAD_DIM = 64
LOUDEST = 6.0  # log magnitude
VOICED_LEVEL, NOISE_LEVEL = math.log(0.1), math.log(0.005)  # of untrained filters, at 0 Hz
TILT_HZ = 500.0  # above, untrained filters of pulses fall like 1 / frequency
FREE_LEVEL = -3.0  # log magnitude next to an excitation, which carries the speech


class LogMel(nn.Module):
    """Samples to log-mel frames of 20 ms, several spectra each."""

    filters: Tensor
    window: Tensor

    def __init__(self, config: SpeechCodecConfig) -> None:
        super().__init__()
        self.config = config
        filters = melscale_fbanks(
            config.mel_n_fft // 2 + 1, 0.0, config.sample_rate / 2, config.mel_bins,
            config.sample_rate, norm="slaney",
        )  # fmt: skip
        self.register_buffer("filters", filters.T.contiguous(), persistent=False)
        self.register_buffer("window", torch.hann_window(config.mel_n_fft), persistent=False)

    @property
    def width(self) -> int:
        """Values per frame."""
        return self.config.mel_bins * self.config.spectra_per_frame

    def forward(self, samples: Tensor) -> Tensor:
        """samples [B, F * frame] to [B, F, width], about within -2 and 2."""
        config = self.config
        count = samples.shape[-1] // config.stft_hop
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = torch.stft(
                samples.float(), config.mel_n_fft, config.stft_hop, window=self.window,
                return_complex=True,
            )  # fmt: skip
            mel = (self.filters @ spectrum.abs()[..., :count]).clamp_min(1e-7).log()
        return (mel / 4 + 2).transpose(1, 2).reshape(len(samples), -1, self.width)


class ConvNext(nn.Module):
    """Depthwise convolution, norm, two products; a voice may set the norm's scale and shift."""

    def __init__(self, dim: int, ff: int, kernel: int, *, causal: bool, condition: int = 0) -> None:
        super().__init__()
        self.padding = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        self.mix = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=not condition)
        self.style = nn.Linear(condition, 2 * dim) if condition else None
        self.ff_in, self.ff_out = nn.Linear(dim, ff), nn.Linear(ff, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """x [B, T, dim], condition [B, C], to [B, T, dim]."""
        y = self.mix(F.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)
        y = self.norm(y)
        if self.style is not None and condition is not None:
            y = styled(y, self.style(condition))
        return x + self.scale * self.ff_out(F.gelu(self.ff_in(y)))


def styled(x: Tensor, style: Tensor) -> Tensor:
    """x [B, T, D] scaled and shifted by style [B, 2 D]."""
    scale, shift = style[:, None].chunk(2, -1)
    return x * (1 + scale) + shift


class Even(nn.BatchNorm1d):
    """Latent values to a mean of 0 and a deviation of 1 over the batch (in use: over the training).

    Without it the values of the first hundred steps, when the decoder makes nothing of them yet,
    gather in a corner of the codebook, where a bounded value has no gradient to come back by.
    """

    def __init__(self, values: int) -> None:
        super().__init__(values, affine=False, momentum=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, values] or [B, values] to float32 of the same shape."""
        return super().forward(x.float().flatten(0, -2)).view(x.shape)


class ContentEncoder(nn.Module):
    """Log-mel frames to latent values, one vector per time of a code."""

    def __init__(self, config: SpeechCodecConfig, inputs: int) -> None:
        super().__init__()
        dim, ff, kernel = config.encoder_dim, config.encoder_ff, config.kernel
        self.input = nn.Linear(inputs, dim)
        self.frames = _stack(config.encoder_blocks, dim, ff, kernel)
        self.join = nn.Linear(dim * config.frames_per_code, dim)
        self.codes = _stack(config.encoder_blocks, dim, ff, kernel)
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, config.values)
        self.even = Even(config.values)

    def forward(self, mel: Tensor) -> Tensor:
        """mel [B, T * frames_per_code, width] to float32 [B, T, values]."""
        x = self.frames(self.input(mel))
        x = self.join(x.reshape(len(x), -1, self.join.in_features))
        return self.even(self.output(self.norm(self.codes(x))))


def _stack(count: int, dim: int, ff: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(*(ConvNext(dim, ff, kernel, causal=False) for _ in range(count)))


class Pooling(nn.Module):
    """A fixed row of queries attends to all frames, then is transformed."""

    def __init__(self, dim: int, ff: int) -> None:
        super().__init__()
        self.heads = max(1, dim // HEAD_DIM)
        self.query_norm, self.ff_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.mixed = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.seen = nn.Linear(dim, 2 * dim)
        self.ff_in, self.ff_out = nn.Linear(dim, ff), nn.Linear(ff, dim)

    def forward(self, row: Tensor, frames: Tensor) -> Tensor:
        """row [B, K, D], frames [B, T, D], to [B, K, D]."""
        query = self._split(self.query(self.query_norm(row)))
        key, value = (self._split(part) for part in self.seen(frames).chunk(2, -1))
        found = F.scaled_dot_product_attention(query, key, value)
        row = row + self.mixed(found.transpose(1, 2).flatten(2))
        return row + self.ff_out(F.gelu(self.ff_in(self.ff_norm(row))))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class VoiceEncoder(nn.Module):
    """Log-mel frames of a reference to latent values, one vector per voice token."""

    def __init__(self, config: SpeechCodecConfig, inputs: int) -> None:
        super().__init__()
        dim, ff = config.voice_dim, config.voice_ff
        self.input = nn.Linear(inputs, dim)
        self.frames = _stack(config.voice_blocks, dim, ff, config.kernel)
        self.norm = nn.LayerNorm(dim)
        self.queries = nn.Parameter(torch.randn(config.voice_tokens, dim) * 0.5)
        self.pools = nn.ModuleList(Pooling(dim, ff) for _ in range(2))
        self.row_norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, len(config.levels))
        self.even = Even(config.voice_tokens * len(config.levels))  # of each token by itself

    def forward(self, mel: Tensor) -> Tensor:
        """mel [B, F, width] to float32 [B, K, levels]."""
        frames = self.norm(self.frames(self.input(mel)))
        row = self.queries.expand(len(mel), -1, -1)
        for pool in self.pools:
            row = pool(row, frames)
        latent = self.output(self.row_norm(row))
        return self.even(latent.flatten(1)).view(latent.shape)


class Place(NamedTuple):
    """Where a window begins, and the phase that is carried to it."""

    sample: int  # of the utterance
    spectrum: int  # of the window, whose first sample has the phase
    turns: Tensor  # float64 [B]


class Decoder(nn.Module):
    """Values of codes and of voice tokens to samples."""

    window: Tensor
    noise: Tensor

    def __init__(self, config: SpeechCodecConfig) -> None:
        super().__init__()
        self.config = config
        dim, condition = config.decoder_dim, config.condition_dim
        width = config.behind + 1 + config.ahead
        self.input = nn.Conv1d(config.values, dim * config.frames_per_code, width)
        self.voice = nn.Sequential(
            nn.Linear(config.voice_tokens * len(config.levels), 2 * condition),
            nn.SiLU(),
            nn.Linear(2 * condition, condition),
        )
        self.blocks = nn.ModuleList(
            ConvNext(dim, config.decoder_ff, config.kernel, causal=True, condition=condition)
            for _ in range(config.decoder_blocks)
        )
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.style = nn.Linear(condition, 2 * dim)
        if config.free_spectrum:
            self.spectra = nn.Linear(dim, config.spectra_per_frame * 2 * config.bins)
        if config.excitation:
            self.pitch = nn.Linear(dim, config.spectra_per_frame * 2)
            self.filters = nn.Linear(dim, config.spectra_per_frame * 3 * config.bins)
            self._even_filters()
            self.register_buffer("noise", repeating_noise(config.sample_rate), persistent=False)
        self.register_buffer("window", torch.hann_window(config.n_fft), persistent=False)
        # a periodic Hann window's squares sum to 3/8 * n_fft / hop at full overlap
        self.gain = 1 / (0.375 * config.n_fft / config.stft_hop)

    @torch.no_grad()
    def _even_filters(self) -> None:
        """About the level and tilt of speech, with small phases."""
        config = self.config
        hz = torch.linspace(0, config.sample_rate / 2, config.bins)
        levels = (VOICED_LEVEL - (1 + hz / TILT_HZ).log(), 0 * hz, NOISE_LEVEL + 0 * hz)
        self.filters.bias.copy_(torch.stack(levels).repeat(config.spectra_per_frame, 1).flatten())
        parts = self.filters.weight.view(config.spectra_per_frame, 3, config.bins, -1)
        parts[:, 1] *= 0.1

    @property
    def hearing(self) -> int:
        """How many points of an excitation there are more than spectra."""
        return self.config.n_fft // self.config.stft_hop

    def forward(self, values: Tensor, voice: Tensor) -> Tensor:
        """values [B, T, values], voice [B, K, levels] to samples float32 [B, T * hop]."""
        if not self.config.excitation:
            return self.synthesise(self.features(values, voice))
        turns = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        return self.part(values, voice, Place(0, 0, turns))[0]

    def part(self, values: Tensor, voice: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """A window of an utterance with its excitation, as `forward`, and the phase float64
        [B, T * spectra] at the first sample of each of its spectra: the next window's."""
        x = self.features(values, voice)
        drive = self.drive(self.curve(x), place)
        return self.synthesise(x, drive, place.sample), drive.turns[:, : -self.hearing]

    def features(self, values: Tensor, voice: Tensor) -> Tensor:
        """values [B, T, values], voice [B, K, levels] to [B, T * frames, dim]."""
        config = self.config
        condition = self.voice(voice.flatten(1))
        x = self.input(F.pad(values.transpose(1, 2), (config.behind, config.ahead)))
        x = x.transpose(1, 2).reshape(len(values), -1, config.decoder_dim)
        for block in self.blocks:
            x = block(x, condition)
        return styled(self.norm(x), self.style(condition))

    def curve(self, x: Tensor) -> Curve:
        """Features [B, N, dim] to the pitch at the end of every spectrum's window."""
        return Curve.of(self._read(self.pitch, x, 2)[..., 0])

    def drive(self, curve: Curve, place: Place) -> Drive:
        """The excitation's curves at every point of a window."""
        hop_s = self.config.stft_hop / self.config.sample_rate
        return curve.drive(self.hearing, hop_s, place.spectrum, place.turns)

    def synthesise(self, x: Tensor, drive: Drive | None = None, sample: int = 0) -> Tensor:
        """Features [B, N, dim] to samples float32 [B, N * frame], from `sample` of the utterance on
        (which selects the noise; noise is drawn in training)."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            spectrum: Tensor | None = None
            if drive is not None:
                spectrum = self._filtered(x, drive, sample)
            if config.free_spectrum:
                magnitude, phase = self._read(self.spectra, x, 2).unbind(2)
                level = FREE_LEVEL if config.excitation else 0.0
                free = polar((magnitude + level).clamp(max=LOUDEST), phase)
                spectrum = free if spectrum is None else spectrum + free
            pieces = torch.fft.irfft(spectrum, n=config.n_fft) * (self.window * self.gain)
            return overlap_add(pieces, config.stft_hop)

    def _read(self, layer: nn.Linear, x: Tensor, parts: int) -> Tensor:
        """Float32 [B, spectra, parts, bins] of features [B, N, dim]."""
        with torch.autocast(x.device.type, enabled=False):
            read = F.linear(x.float(), layer.weight, layer.bias)
        count = x.shape[1] * self.config.spectra_per_frame
        return read.view(len(x), count, parts, -1)

    def _filtered(self, x: Tensor, drive: Drive, sample: int) -> Tensor:
        """Spectra of pulses and of noise, each through its filter, complex [B, spectra, bins]."""
        magnitude, phase, breath = self._read(self.filters, x, 3).unbind(2)
        with torch.no_grad():
            source = pulses(drive, self.config.stft_hop, self.config.sample_rate)
            if self.training:
                noise = torch.randn_like(source)
            else:
                place = torch.arange(sample, sample + source.shape[1], device=x.device)
                noise = self.noise[place % len(self.noise)].expand_as(source)
            pulse_spectra, noise_spectra = self.analyse(source), self.analyse(noise)
        filters = polar(magnitude.clamp(max=LOUDEST), phase)
        return filters * pulse_spectra + breath.clamp(max=LOUDEST).exp() * noise_spectra

    def analyse(self, samples: Tensor) -> Tensor:
        """Samples [B, S] to the spectra [B, N, bins] of all windows in them."""
        return torch.fft.rfft(
            samples.unfold(1, self.config.n_fft, self.config.stft_hop) * self.window
        )


def polar(log_magnitude: Tensor, phase: Tensor) -> Tensor:
    """Complex numbers of the arguments' shape."""
    magnitude = log_magnitude.exp()
    return torch.complex(magnitude * phase.cos(), magnitude * phase.sin())


class SpeechCodec(nn.Module):
    """Both encoders, the quantiser and the decoder."""

    def __init__(self, config: SpeechCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.mel = LogMel(config)
        self.quantizer = FiniteScalarQuantizer(config.levels)
        self.encoder = ContentEncoder(config, self.mel.width)
        self.voice_encoder = VoiceEncoder(config, self.mel.width)
        self.decoder = Decoder(config)

    def encode(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """samples [B, T * hop] to quantised values [B, T, values] and codes [B, T, codebooks]."""
        latent = self.encoder(self.mel(samples))
        values, codes = self.quantizer(latent.unflatten(-1, (self.config.codebooks, -1)))
        return values.flatten(2), codes

    def voice(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """A reference [B, F * frame] to quantised values [B, K, levels] and tokens [B, K]."""
        values, tokens = self.quantizer(self.voice_encoder(self.mel(samples)))
        return values, tokens

    def decode(self, codes: Tensor, tokens: Tensor) -> Tensor:
        """codes [B, T, codebooks] and voice tokens [B, K] to samples [B, T * hop]."""
        values = self.quantizer.values(codes).flatten(2)
        return self.decoder(values, self.quantizer.values(tokens))
