"""The teacher's decisions before it speaks, as the codes' encoder reads them.

A plan has a phone, a pitch and an energy for every point of 10 ms. They say everything that is
heard of a sentence but the voice, so codes of them hold nothing of the voice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

POINT = 240  # samples
PHONE_GRID = 600  # samples of the teacher's phones, and of its pitch and energy
CURVE_GRID = 300
VOICED_HZ = 10.0
LOWEST_HZ, MIDDLE_HZ = 40.0, 150.0  # octaves count from the latter
ENERGY_MEAN, ENERGY_SIZE = 2.7, 5.9  # of the teacher's energy, about
SILENCE, SILENT = 0, -2.0  # id of the symbol around a line, and its energy


class Plan(NamedTuple):
    """Points of a batch of places, [B, P] each."""

    phones: Tensor  # int64
    octaves: Tensor  # float32 from MIDDLE_HZ; 0 where there is no voice
    voiced: Tensor  # float32, 0 or 1
    energy: Tensor  # float32, about a mean of 0 and a deviation of 1


def plan_at(takes: dict[str, Tensor], points: Tensor, low: Tensor, high: Tensor) -> Plan:
    """Read points (samples of their middles, int64 [B, P]) within `low` to `high` [B, 1].

    Beyond a place's bounds is the silence around a line: no voice, no energy.
    """
    inside = (points >= low) & (points < high)
    at = points.clamp(low, high - 1)
    phones = takes["phones"][at // PHONE_GRID].long().where(inside, SILENCE)
    place, last = at // CURVE_GRID, (high - 1) // CURVE_GRID
    share = (at % CURVE_GRID) / CURVE_GRID
    here, following = place, (place + 1).minimum(last)
    pitch, after = takes["pitch"][here].float(), takes["pitch"][following].float()
    pitch = torch.where((pitch > VOICED_HZ) & (after > VOICED_HZ), pitch.lerp(after, share), pitch)
    voiced = (pitch > VOICED_HZ) & inside
    octaves = (pitch.clamp_min(LOWEST_HZ) / MIDDLE_HZ).log2().where(voiced, 0.0)
    energy = takes["energy"][here].float().lerp(takes["energy"][following].float(), share)
    energy = (energy - ENERGY_MEAN) / ENERGY_SIZE
    return Plan(phones, octaves, voiced.float(), energy.where(inside, SILENT))
