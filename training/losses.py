"""Reconstruction losses: multi-scale mel distance, mean envelope of the voice, and two families of
discriminators.

Sources: multi-scale mel L1, DAC, arXiv 2306.06546; multi-period discriminator, HiFi-GAN, arXiv
2010.05646; multi-resolution spectral discriminator, UnivNet, arXiv 2106.07889.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchaudio.functional import melscale_fbanks

SCALES = ((64, 10), (128, 20), (256, 40), (512, 64), (1024, 100), (2048, 160))  # n_fft, mels
TIMBRE_SCALE = 1024


class MelLoss(nn.Module):
    """Mean L1 between log-mel and mel spectra at six resolutions, and between mean envelopes."""

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        for n_fft, mels in SCALES:
            filters = melscale_fbanks(
                n_fft // 2 + 1, 0.0, sample_rate / 2, mels, sample_rate, norm="slaney"
            )
            # scaled so that a filter's weights sum to about the number of bins that it covers
            self.register_buffer(f"filters_{n_fft}", filters.T * (sample_rate / n_fft))
            self.register_buffer(f"window_{n_fft}", torch.hann_window(n_fft))

    def _mel(self, samples: Tensor, n_fft: int) -> Tensor:
        window = getattr(self, f"window_{n_fft}")
        spectrum = torch.stft(samples, n_fft, n_fft // 4, window=window, return_complex=True)
        return getattr(self, f"filters_{n_fft}") @ spectrum.abs()

    def forward(self, got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance of got and wanted [B, S] float32, and that of the two mean
        envelopes.
        """
        total, timbre = got.new_zeros(()), got.new_zeros(())
        for n_fft, _ in SCALES:
            a, b = self._mel(got, n_fft), self._mel(wanted, n_fft)
            log_wanted = b.clamp_min(1e-4).log10()
            difference = a.clamp_min(1e-4).log10() - log_wanted
            total = total + difference.abs().mean() + 0.5 * (a - b).abs().mean()
            if n_fft == TIMBRE_SCALE:
                timbre = timbre_distance(difference, log_wanted)
        return total, timbre


def timbre_distance(difference: Tensor, log_wanted: Tensor) -> Tensor:
    """Return the mean square difference of the mean envelopes of the louder frames, [B, mels,
    frames] in log10.

    Errors of single frames that cancel do not count; the remaining ones are perceived as another
    voice.
    """
    level = log_wanted.mean(1, keepdim=True)
    loud = (level > level.mean(-1, keepdim=True)).float()
    return ((difference * loud).sum(-1) / loud.sum(-1).clamp_min(1)).square().mean()


class PhoneListener(nn.Module):
    """Maps log-mel frames to phone logits, with context.

    It is trained on real speech only. It scores the decoder's output, so that the codec uses its
    bits for distinguishing phones; the mel distance alone does not ensure that.
    """

    def __init__(self, num_mels: int, num_labels: int, width: int) -> None:
        super().__init__()
        sizes = (num_mels, *(width,) * 4)
        dilations = (1, 1, 2, 4)
        self.layers = nn.ModuleList(
            nn.Conv1d(a, b, 5, padding=2 * d, dilation=d)
            for (a, b), d in zip(pairwise(sizes), dilations, strict=True)
        )
        self.output = nn.Conv1d(width, num_labels, 1)

    def features(self, mel: Tensor) -> list[Tensor]:
        """Return what each layer makes of mel [B, F, num_mels]: [B, width, F]."""
        x, found = mel.transpose(1, 2), []
        for number, layer in enumerate(self.layers):
            y = F.gelu(layer(x))
            x = y if number == 0 else x + y
            found.append(x)
        return found

    def logits(self, features: list[Tensor]) -> Tensor:
        """Return the logits [B, F, num_labels] of all layers' features."""
        return self.output(features[-1]).transpose(1, 2)


class PeriodDiscriminator(nn.Module):
    """Discriminator on every p-th sample."""

    def __init__(self, period: int, width: int) -> None:
        super().__init__()
        self.period = period
        widths = (1, width, 3 * width, 6 * width, 8 * width, 8 * width)
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(a, b, (5, 1), (3 if i < 4 else 1, 1), (2, 0)))
            for i, (a, b) in enumerate(pairwise(widths))
        )
        self.last = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), 1, (1, 0)))

    def forward(self, samples: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = F.pad(samples, (0, -samples.shape[-1] % self.period))
        x = x.view(len(samples), 1, -1, self.period)
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return self.last(x), features


class SpectralDiscriminator(nn.Module):
    """Discriminator on a complex spectrum of one resolution."""

    def __init__(self, n_fft: int, width: int) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(a, width, kernel, stride, padding))
            for a, kernel, stride, padding in (
                (2, (3, 9), (1, 1), (1, 4)),
                (width, (3, 9), (1, 2), (1, 4)),
                (width, (3, 9), (1, 2), (1, 4)),
                (width, (3, 9), (1, 2), (1, 4)),
                (width, (3, 3), (1, 1), (1, 1)),
            )
        )
        self.last = weight_norm(nn.Conv2d(width, 1, (3, 3), 1, (1, 1)))

    def forward(self, samples: Tensor) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = torch.stft(
                samples.float(), self.n_fft, self.n_fft // 4, window=self.window,
                return_complex=True,
            )  # fmt: skip
            x = torch.view_as_real(spectrum).permute(0, 3, 2, 1)
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return self.last(x), features


class Discriminators(nn.Module):
    """All discriminators; each returns its scores and its features."""

    def __init__(self, width: int, resolutions: tuple[int, ...] = (256, 512, 1024)) -> None:
        super().__init__()
        self.judges = nn.ModuleList(
            [PeriodDiscriminator(p, width) for p in (2, 3, 5, 7, 11)]
            + [SpectralDiscriminator(n, width) for n in resolutions]
        )

    def forward(self, samples: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        return [judge(samples) for judge in self.judges]


def discriminator_loss(real: list, fake: list) -> Tensor:
    """Return the least-squares loss: real to 1, fake to 0."""
    pairs = zip(real, fake, strict=True)
    return sum(((1 - r[0].float()) ** 2).mean() + (f[0].float() ** 2).mean() for r, f in pairs)


def generator_losses(real: list, fake: list) -> tuple[Tensor, Tensor]:
    """Return the adversarial loss, and feature matching relative to the real features' size."""
    adversarial = sum(((1 - f[0].float()) ** 2).mean() for f in fake)
    pairs = zip(fake, real, strict=True)
    return adversarial, sum(feature_distance(f[1], r[1]) for f, r in pairs) / 5


def feature_distance(got: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Return the sum over layers of the mean L1 relative to the wanted features' size."""
    return sum(
        (u.float() - v.float()).abs().mean() / (v.float().abs().mean() + 1e-4)
        for u, v in zip(got, wanted, strict=True)
    )
