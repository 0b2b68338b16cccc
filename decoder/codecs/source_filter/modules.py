"""The codec's networks, shared by serving and training.

    reference --log mel, 20 ms--> ConvNeXt --attention pooling--> FSQ --> voice tokens, a fixed row
    codes, voice tokens --20 ms--> causal ConvNeXt, norms conditioned on the voice
              --2 spectra each, pitch, and 2 filters each of pulses and of noise--> inverse STFT
              --> samples

The decoder sees `ahead` codes after a code in its first layer and none later. A spectrum's window
begins at the spectrum's own first sample, so a sample depends on no later spectrum. A spectrum's
pitch is that of its window's end, so pulses depend on no later one either. Voice tokens
have the codes' levels: a language model can read and write both with one vocabulary.

Sources: ConvNeXt, arXiv 2201.03545; inverse STFT from it, Vocos, arXiv 2306.00814; FSQ,
arXiv 2309.15505; fixed rows of tokens for the speaker, Spark-TTS, arXiv 2503.01710.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.source_filter.config import SpeechCodecConfig, voice_heads
from decoder.codecs.source_filter.excitation import (
    Curve,
    Drive,
    drive_of,
    pulses,
    repeating_noise,
)

LOUDEST = 6.0  # log magnitude
VOICED_LEVEL, NOISE_LEVEL = math.log(0.1), math.log(0.005)  # of untrained filters, at 0 Hz
TILT_HZ = 500.0  # above, untrained filters of pulses fall like 1 / frequency
FAINTEST = math.log(1e-3) / 4  # of what an encoder of voices hears, below the loudest: 60 dB
FREE_LEVEL = -3.0  # log magnitude next to an excitation, which carries the speech


class FiniteScalarQuantizer(nn.Module):
    """Bounds and rounds dimension d to `levels[d]` values; a code is the index of the
    combination.
    """

    levels: Tensor
    strides: Tensor

    def __init__(self, levels: tuple[int, ...]) -> None:
        super().__init__()
        strides = [1, *accumulate(levels[:-1], lambda a, b: a * b)]
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        self.register_buffer("strides", torch.tensor(strides), persistent=False)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantised values in [-1, 1] (straight-through gradient) and codes [...] of z [...,
        d].
        """
        top = self.levels.to(z.dtype) - 1
        bounded = (torch.tanh(z) + 1) / 2 * top
        index = torch.round(bounded)
        quantised = bounded + (index - bounded).detach()
        return quantised / top * 2 - 1, (index.long() * self.strides).sum(-1)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values in [-1, 1] of codes [...], float32 [..., d]."""
        index = (codes[..., None] // self.strides) % self.levels
        return index.float() / (self.levels.float() - 1) * 2 - 1


class LogMel(nn.Module):
    """Samples to log-mel frames of 20 ms, several spectra each."""

    filters: Tensor
    window: Tensor

    def __init__(self, config: SpeechCodecConfig) -> None:
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
        self.register_buffer("filters", filters.T.contiguous(), persistent=False)
        self.register_buffer("window", torch.hann_window(config.mel_n_fft), persistent=False)

    @property
    def width(self) -> int:
        """Values per frame."""
        return self.config.mel_bins * self.config.spectra_per_frame

    def forward(self, samples: Tensor) -> Tensor:
        """Map samples [B, F * frame] to [B, F, width], about within -2 and 2."""
        config = self.config
        count = samples.shape[-1] // config.stft_hop
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = torch.stft(
                samples.float(),
                config.mel_n_fft,
                config.stft_hop,
                window=self.window,
                return_complex=True,
            )
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
        """Map x [B, T, dim], with condition [B, C], to [B, T, dim]; zeros surround x."""
        y = self.mix(F.pad(x, (0, 0, *self.padding)).transpose(1, 2)).transpose(1, 2)
        return self.joined(x, y, condition)

    def joined(self, x: Tensor, y: Tensor, condition: Tensor | None = None) -> Tensor:
        """Map x and its convolution y [B, T, dim] to [B, T, dim]."""
        y = self.norm(y)
        if self.style is not None and condition is not None:
            y = styled(y, self.style(condition))
        return x + self.scale * self.ff_out(F.gelu(self.ff_in(y)))


def styled(x: Tensor, style: Tensor) -> Tensor:
    """Return x [B, T, D], scaled and shifted by style [B, 2 D]."""
    scale, shift = style[:, None].chunk(2, -1)
    return x * (1 + scale) + shift


class Even(nn.BatchNorm1d):
    """Latent values to a mean of 0 and a deviation of 1: of the batch, in use of the training.

    Without it the values of the first hundred steps, when the decoder makes nothing of them yet,
    gather in a corner of the codebook, where a bounded value has no gradient to come back by.
    """

    def __init__(self, values: int) -> None:
        super().__init__(values, affine=False, momentum=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, values] or [B, values] to float32 of the same shape."""
        return super().forward(x.float().flatten(0, -2)).view(x.shape)


def _stack(count: int, dim: int, ff: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(*(ConvNext(dim, ff, kernel, causal=False) for _ in range(count)))


class Pooling(nn.Module):
    """A fixed row of queries attends to all frames, then is transformed."""

    def __init__(self, dim: int, ff: int) -> None:
        super().__init__()
        self.heads = voice_heads(dim)
        self.query_norm, self.ff_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.mixed = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.seen = nn.Linear(dim, 2 * dim)
        self.ff_in, self.ff_out = nn.Linear(dim, ff), nn.Linear(ff, dim)

    def forward(self, row: Tensor, frames: Tensor) -> Tensor:
        """Map row [B, K, D] and frames [B, T, D] to [B, K, D]."""
        query = self._split(self.query(self.query_norm(row)))
        key, value = (self._split(part) for part in self.seen(frames).chunk(2, -1))
        found = F.scaled_dot_product_attention(query, key, value)
        row = row + self.mixed(found.transpose(1, 2).flatten(2))
        return row + self.ff_out(F.gelu(self.ff_in(self.ff_norm(row))))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class VoiceEncoder(nn.Module):
    """Log-mel frames of a reference to latent values, one vector per voice token.

    What is fainter than `FAINTEST` counts as that: otherwise frequencies that a file cannot have
    (a rate of 8 or 16 kHz, a small codec) would have values like none that the training had.
    """

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
        """Map mel [B, F, width] to float32 [B, K, levels]."""
        mel = mel.maximum(mel.amax((1, 2), keepdim=True) + FAINTEST)
        frames = self.norm(self.frames(self.input(mel)))
        row = self.queries.expand(len(mel), -1, -1)
        for pool in self.pools:
            row = pool(row, frames)
        latent = self.output(self.row_norm(row))
        return self.even(latent.flatten(1)).view(latent.shape)


class Decoder(nn.Module):
    """Values of codes and of voice tokens to samples."""

    window: Tensor
    noise: Tensor

    def __init__(self, config: SpeechCodecConfig) -> None:
        super().__init__()
        self.config = config
        dim, condition, levels = config.decoder_dim, config.condition_dim, len(config.levels)
        width = config.behind + 1 + config.ahead
        self.input = nn.Conv1d(levels, dim * config.frames_per_code, width)
        self.voice = nn.Sequential(
            nn.Linear(config.voice_tokens * levels, 2 * condition),
            nn.SiLU(),
            nn.Linear(2 * condition, condition),
        )
        self.blocks = nn.ModuleList(
            ConvNext(dim, config.decoder_ff, config.kernel, causal=True, condition=condition)
            for _ in range(config.decoder_blocks)
        )
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.style = nn.Linear(condition, 2 * dim)
        self.spectra = nn.Linear(dim, config.spectra_per_frame * 2 * config.bins)
        self.pitch = nn.Linear(dim, config.spectra_per_frame * 2)
        self.filters = nn.Linear(dim, config.spectra_per_frame * 3 * config.bins)
        self._even_filters()
        self.register_buffer("noise", repeating_noise(config.sample_rate), persistent=False)
        # a periodic Hann window's squares sum to 3/8 * n_fft / hop at full overlap
        self.gain = 1 / (0.375 * config.n_fft / config.stft_hop)
        self.register_buffer("window", torch.hann_window(config.n_fft), persistent=False)

    @torch.no_grad()
    def _even_filters(self) -> None:
        """Start with about the level and tilt of speech, and small phases."""
        config = self.config
        hz = torch.linspace(0, config.sample_rate / 2, config.bins)
        levels = (VOICED_LEVEL - (1 + hz / TILT_HZ).log(), 0 * hz, NOISE_LEVEL + 0 * hz)
        self.filters.bias.copy_(torch.stack(levels).repeat(config.spectra_per_frame, 1).flatten())
        parts = self.filters.weight.view(config.spectra_per_frame, 3, config.bins, -1)
        parts[:, 1] *= 0.1

    @property
    def reach(self) -> int:
        """Number of points that the window of a spectrum reaches over, beyond its own."""
        return self.config.n_fft // self.config.stft_hop

    def forward(self, values: Tensor, voice: Tensor) -> Tensor:
        """Map values [B, T, levels], voice [B, K, levels] to samples float32 [B, T * hop].

        The phase of the pulses begins with 0.
        """
        x = self.features(values, voice)
        turns = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        drive = self.drive(self.curve(x), turns)
        return self.synthesise(x, drive, self.noise_under(drive))

    def features(self, values: Tensor, voice: Tensor) -> Tensor:
        """Map values [B, T, levels], voice [B, K, levels] to [B, T * frames_per_code, dim]."""
        config = self.config
        condition = self.voice(voice.flatten(1))
        x = self.first(F.pad(values, (0, 0, config.behind, config.ahead)))
        for block in self.blocks:
            x = block(x, condition)
        return self.last(x, condition)

    def first(self, values: Tensor) -> Tensor:
        """Map values [B, behind + T + ahead, levels] to the blocks' input [B, frames, dim]."""
        x = self.input(values.transpose(1, 2)).transpose(1, 2)
        return x.reshape(len(values), -1, self.config.decoder_dim)

    def last(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map the blocks' output [B, frames, dim] to features of the same shape."""
        return styled(self.norm(x), self.style(condition))

    def curve(self, x: Tensor) -> Curve:
        """Map features [B, N, dim] to the pitch at the end of every spectrum's window."""
        return Curve.of(self._read(self.pitch, x, 2)[..., 0])

    def drive(self, curve: Curve, turns: Tensor) -> Drive:
        """Return the excitation's curves at every point of an utterance.

        Its first points have the first spectrum's pitch; `turns` float64 [B] is the first phase.
        """
        hz, voiced = (F.pad(part, (self.reach, 0), mode="replicate") for part in curve.tones())
        return drive_of(hz, voiced, self.config.stft_hop / self.config.sample_rate, turns)

    def noise_from(self, sample: Tensor, count: int) -> Tensor:
        """Return the noise of `count` samples from each sample of a stream [B] on, [B, count]."""
        place = sample[:, None] + torch.arange(count, device=sample.device)
        return self.noise[place % len(self.noise)]

    def noise_under(self, drive: Drive) -> Tensor:
        """Return the noise of a drive from the beginning of a stream, [1, S]."""
        beginning = torch.zeros(1, dtype=torch.long, device=drive.hz.device)
        return self.noise_from(beginning, (drive.hz.shape[1] - 1) * self.config.stft_hop)

    def synthesise(self, x: Tensor, drive: Drive, noise: Tensor | None = None) -> Tensor:
        """Map features [B, N, dim] to samples float32 [B, N * frame]; see `pieces`."""
        return overlap_add(self.pieces(x, drive, noise), self.config.stft_hop)

    def pieces(self, x: Tensor, drive: Drive, noise: Tensor | None = None) -> Tensor:
        """Map features [B, N, dim] to the windows of their spectra, float32 [B, spectra, n_fft].

        `noise` [B or 1, samples between the drive's points]; None: random, for training.
        """
        with torch.autocast(x.device.type, enabled=False):
            magnitude, phase = self._read(self.spectra, x, 2).unbind(2)
            free = polar((magnitude + FREE_LEVEL).clamp(max=LOUDEST), phase)
            spectrum = free + self._filtered(x, drive, noise)
            return torch.fft.irfft(spectrum, n=self.config.n_fft) * (self.window * self.gain)

    def _read(self, layer: nn.Linear, x: Tensor, parts: int) -> Tensor:
        """Map features [B, N, dim] to float32 [B, spectra, parts, bins]."""
        with torch.autocast(x.device.type, enabled=False):
            read = F.linear(x.float(), layer.weight, layer.bias)
        count = x.shape[1] * self.config.spectra_per_frame
        return read.view(len(x), count, parts, -1)

    def _filtered(self, x: Tensor, drive: Drive, noise: Tensor | None) -> Tensor:
        """Return spectra of pulses and of noise, each filtered, complex [B, spectra, bins]."""
        magnitude, phase, breath = self._read(self.filters, x, 3).unbind(2)
        with torch.no_grad():
            source = pulses(drive, self.config.stft_hop, self.config.sample_rate)
            noise = torch.randn_like(source) if noise is None else noise.expand_as(source)
            pulse_spectra, noise_spectra = self.analyse(source), self.analyse(noise)
        filters = polar(magnitude.clamp(max=LOUDEST), phase)
        return filters * pulse_spectra + breath.clamp(max=LOUDEST).exp() * noise_spectra

    def analyse(self, samples: Tensor) -> Tensor:
        """Map samples [B, S] to the spectra [B, N, bins] of all windows in them."""
        windows = samples.unfold(1, self.config.n_fft, self.config.stft_hop)
        return torch.fft.rfft(windows * self.window)


def overlap_add(pieces: Tensor, hop: int) -> Tensor:
    """Add pieces [B, N, n_fft] that start `hop` apart; the tail past N * hop is dropped."""
    batch, count, size = pieces.shape
    parts = pieces.view(batch, count, size // hop, hop)
    total = parts[:, :, 0].clone()
    for shift in range(1, min(size // hop, count)):
        total[:, shift:] += parts[:, :-shift, shift]
    return total.reshape(batch, count * hop)


def polar(log_magnitude: Tensor, phase: Tensor) -> Tensor:
    """Return complex numbers of the arguments' shape."""
    magnitude = log_magnitude.exp()
    return torch.complex(magnitude * phase.cos(), magnitude * phase.sin())


class SpeechCodec(nn.Module):
    """The encoder of voices, the quantiser and the decoder."""

    def __init__(self, config: SpeechCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.mel = LogMel(config)
        self.quantizer = FiniteScalarQuantizer(config.levels)
        self.voice_encoder = VoiceEncoder(config, self.mel.width)
        self.decoder = Decoder(config)

    def voice(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Map a reference [B, F * frame] to quantised values [B, K, levels] and tokens [B, K]."""
        values, tokens = self.quantizer(self.voice_encoder(self.mel(samples)))
        return values, tokens

    def decode(self, codes: Tensor, tokens: Tensor) -> Tensor:
        """Map codes [B, T] and voice tokens [B, K] to samples [B, T * hop]."""
        samples: Tensor = self.decoder(self.quantizer.values(codes), self.quantizer.values(tokens))
        return samples
