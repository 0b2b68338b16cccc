"""Excitation of the decoder's filters: pulses of a pitch curve, and noise.

Curves have one value per spectrum's first sample, "points". Between points pitch and voicing are
linear. The windows of F spectra reach over F + n_fft / hop points: that many pitches, minus one,
span the samples of all of them.

Sources: sine source and filters, NSF, arXiv 1904.12088; filtered noise, DDSP, arXiv 2001.04643.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MIDDLE_HZ = 200.0
RANGE = 2.0  # octaves to either side: 50 to 800 Hz
NOISE_S = 4  # seconds after which the noise repeats


class Drive(NamedTuple):
    """Pitch, voicing and phase at every point."""

    hz: Tensor  # float32 [B, P]
    voiced: Tensor  # float32 [B, P], 0 to 1
    turns: Tensor  # float64 [B, P], of the fundamental


class Curve(NamedTuple):
    """Pitch and voicing at the last sample of each of a decoder's spectra."""

    octaves: Tensor  # float32 [B, F], from MIDDLE_HZ, within RANGE
    logits: Tensor  # float32 [B, F], of voicing

    @classmethod
    def of(cls, read: Tensor) -> Curve:
        """Create it from the two outputs [B, F, 2] of a linear layer."""
        return cls(RANGE * torch.tanh(read[..., 0] / RANGE), read[..., 1])

    def tones(self) -> tuple[Tensor, Tensor]:
        """Return pitch in Hz and voicing from 0 to 1, without gradients, float32 [B, F] each."""
        return MIDDLE_HZ * torch.exp2(self.octaves.detach()), self.logits.detach().sigmoid()


def drive_of(hz: Tensor, voiced: Tensor, hop_s: float, turns: Tensor) -> Drive:
    """Return a drive of pitch and voicing [B, P] at points `hop_s` apart.

    `turns` float64 [B] is the phase at the first point.
    """
    steps = (hz[:, 1:] + hz[:, :-1]).double() * (hop_s / 2)
    passed = F.pad(steps.cumsum(1), (1, 0))
    return Drive(hz, voiced, (passed + turns[:, None]) % 1)


def pulses(drive: Drive, hop: int, rate: int) -> Tensor:
    """Return pulses of equal harmonics up to half the rate, of power 1 where voiced.

    They span the samples between the points, [B, (P - 1) * hop]. A phase that is not the pitch's
    integral is reached by a constant shift between two points.
    """
    j = torch.arange(hop, device=drive.hz.device, dtype=torch.float32)
    hz, rise = drive.hz[:, :-1, None], drive.hz.diff(dim=1)[..., None]
    # float64 at the points alone: between two of them a phase passes few turns
    step = (drive.hz[:, 1:] + drive.hz[:, :-1]).double() * (hop / rate / 2)
    left = drive.turns.diff(dim=1) - step
    shift = (left - left.round()).float()[..., None]
    begin = (drive.turns[:, :-1] % 1).float()[..., None]
    turns = begin + (hz * j + rise * j.square() / (2 * hop)) / rate + shift * (j / hop)
    voiced = drive.voiced[:, :-1, None] + drive.voiced.diff(dim=1)[..., None] * (j / hop)
    harmonics = (rate / 2 / (hz + rise * (j / hop))).floor()
    return (_cosines(turns - turns.round(), harmonics) * voiced).flatten(1)


def _cosines(turns: Tensor, harmonics: Tensor) -> Tensor:
    """Return the sum of cos(2 pi k turns), k from 1 to `harmonics`, scaled to power 1.

    |turns| must not exceed 1/2.
    """
    angle = math.pi * turns
    peak = angle.abs() < 1e-6
    ratio = torch.sin((2 * harmonics + 1) * angle) / angle.sin().masked_fill(peak, 1.0)
    total = torch.where(peak, 2 * harmonics + 1, ratio) / 2 - 0.5
    return total * (2 / harmonics).sqrt()


def repeating_noise(rate: int) -> Tensor:
    """Return white noise of power 1, float32 [NOISE_S * rate], always the same."""
    return torch.randn(NOISE_S * rate, generator=torch.Generator().manual_seed(0))
