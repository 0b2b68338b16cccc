"""What drives the decoder's filters: pulses of a pitch curve, and noise.

Curves have one value per spectrum's first sample, "points". Between points pitch and voicing are
linear. A window of F spectra has F + n_fft / hop points: that many pitches, minus one, span the
samples of all its spectra.
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
LOWEST_HZ, HIGHEST_HZ = MIDDLE_HZ / 2**RANGE, MIDDLE_HZ * 2**RANGE
NOISE_S = 4  # of the noise that repeats in use


class Drive(NamedTuple):
    """Pitch, voicing and phase at every point."""

    hz: Tensor  # float32 [B, P]
    voiced: Tensor  # float32 [B, P], 0 to 1
    turns: Tensor  # float64 [B, P], of the fundamental


class Curve(NamedTuple):
    """What a decoder says of the pitch at the last sample of each of its spectra."""

    octaves: Tensor  # float32 [B, F], from MIDDLE_HZ, within RANGE
    logits: Tensor  # float32 [B, F], of voicing

    @classmethod
    def of(cls, read: Tensor) -> Curve:
        """From the two outputs [B, F, 2] of a linear layer."""
        return cls(RANGE * torch.tanh(read[..., 0] / RANGE), read[..., 1])

    def drive(self, points: int, hop_s: float, known: int, turns: Tensor) -> Drive:
        """A drive of this pitch, with the phase `turns` float64 [B] at point `known`.

        There are `points` more points than spectra; the first ones have the first spectrum's pitch.
        """
        hz = MIDDLE_HZ * torch.exp2(self.octaves.detach())
        voiced = self.logits.detach().sigmoid()
        hz, voiced = (F.pad(part, (points, 0), mode="replicate") for part in (hz, voiced))
        steps = (hz[:, 1:] + hz[:, :-1]).double() * (hop_s / 2)
        passed = F.pad(steps.cumsum(1), (1, 0))
        return Drive(hz, voiced, (passed - passed[:, known, None] + turns[:, None]) % 1)

    def distance(self, pitch: Tensor) -> Tensor:
        """From the true pitch [B, F] in Hz, 0 where there is no voice: mean octaves where there is
        and one value to either side, and a tenth of the cross entropy of voicing."""
        voiced = (pitch > 0).float()
        near = F.max_pool1d(voiced[:, None], 3, 1, 1)[:, 0]
        octaves = (held(pitch).clamp(LOWEST_HZ, HIGHEST_HZ) / MIDDLE_HZ).log2()
        off = ((self.octaves - octaves).abs() * near).sum() / near.sum().clamp_min(1)
        return off + 0.1 * F.binary_cross_entropy_with_logits(self.logits, voiced)


def held(pitch: Tensor) -> Tensor:
    """pitch [B, P] in Hz, 0 where there is no voice, with values there as well: the next one right
    before a voice begins, otherwise the last one, so that no pitch glides to or from nothing."""
    place = torch.arange(pitch.shape[1], device=pitch.device)
    last = torch.where(pitch > 0, place, 0).cummax(1).values
    following = F.pad(pitch[:, 1:], (0, 1))
    kept = torch.where(following > 0, following, pitch.gather(1, last))
    return torch.where(pitch > 0, pitch, kept)


def true_drive(pitch: Tensor, turns: Tensor) -> Drive:
    """The drive of a known pitch [B, P], 0 where there is no voice, and its phase [B, P]."""
    hz = held(pitch).clamp(LOWEST_HZ, HIGHEST_HZ)
    return Drive(hz, (pitch > 0).float(), turns.double())


def pulses(drive: Drive, hop: int, rate: int) -> Tensor:
    """Pulses of equal harmonics up to half the rate, of power 1 where voiced: [B, (P - 1) * hop].

    A phase that is not the pitch's integral is reached by a constant shift between two points.
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
    """Sum of cos(2 pi k turns), k from 1 to `harmonics`, scaled to power 1; |turns| <= 1/2."""
    angle = math.pi * turns
    peak = angle.abs() < 1e-6
    ratio = torch.sin((2 * harmonics + 1) * angle) / torch.where(peak, 1.0, angle.sin())
    total = torch.where(peak, 2 * harmonics + 1, ratio) / 2 - 0.5
    return total * (2 / harmonics).sqrt()


def repeating_noise(rate: int) -> Tensor:
    """White noise of power 1, float32 [NOISE_S * rate], always the same."""
    return torch.randn(NOISE_S * rate, generator=torch.Generator().manual_seed(0))
