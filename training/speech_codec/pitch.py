"""The teacher's pitch: what drives the decoder in training, and what its own is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.codecs.source_filter.excitation import MIDDLE_HZ, RANGE, Curve, Drive

LOWEST_HZ, HIGHEST_HZ = MIDDLE_HZ / 2**RANGE, MIDDLE_HZ * 2**RANGE


def pitch_loss(curve: Curve, pitch: Tensor) -> Tensor:
    """Distance of a curve from the true pitch [B, F] in Hz, 0 where there is no voice: mean octaves
    where there is and one value to either side, and a tenth of the cross entropy of voicing."""
    voiced = (pitch > 0).float()
    near = F.max_pool1d(voiced[:, None], 3, 1, 1)[:, 0]
    octaves = (held(pitch).clamp(LOWEST_HZ, HIGHEST_HZ) / MIDDLE_HZ).log2()
    off = ((curve.octaves - octaves).abs() * near).sum() / near.sum().clamp_min(1)
    return off + 0.1 * F.binary_cross_entropy_with_logits(curve.logits, voiced)


def held(pitch: Tensor) -> Tensor:
    """pitch [B, P] in Hz, 0 where there is no voice, with values there as well: the next one right
    before a voice begins, otherwise the last one, so that no pitch glides to or from nothing."""
    place = torch.arange(pitch.shape[1], device=pitch.device)
    last = (place * (pitch > 0)).cummax(1).values
    following = F.pad(pitch[:, 1:], (0, 1))
    kept = torch.where(following > 0, following, pitch.gather(1, last))
    return torch.where(pitch > 0, pitch, kept)


def true_drive(pitch: Tensor, turns: Tensor) -> Drive:
    """The drive of a known pitch [B, P], 0 where there is no voice, and its phase [B, P]."""
    hz = held(pitch).clamp(LOWEST_HZ, HIGHEST_HZ)
    return Drive(hz, (pitch > 0).float(), turns.double())
