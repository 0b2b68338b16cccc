"""Training examples: crops of the teacher's takes, on the device.

An example is a source that is encoded, a target that is to come out, and a reference of the
target's timbre from elsewhere. Source and target say the same with the same pitch, each in one of
two timbres, so every other example asks for another voice than the one that is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoder.codecs.source_filter.config import SpeechCodecConfig
from training.kokoro.vocoder import SAMPLE_RATE

GRID = 600  # samples of the teacher's frames: crops begin on them
PITCH_GRID = 300
VOICED_HZ = 10.0
HELD_OUT = 48  # every so many sessions one is not learned from


class Examples(NamedTuple):
    """A batch. Samples are float32 in [-1, 1); labels are per frame of 20 ms."""

    source: Tensor  # [B, T * hop]
    target: Tensor  # the same shape
    reference: Tensor  # [B, R * hop]
    phones: Tensor  # int64 [B, F]
    pitch: Tensor  # float32 [B, F] in Hz, below 10 where there is no voice
    style: Tensor  # float32 [B, 256], of the target's timbre
    drive: Tensor  # float32 [B, P] in Hz at every spectrum's first sample and on, 0: no voice
    turns: Tensor  # float64 [B, P]: the phase of the teacher's source there
    crosses: Tensor  # bool [B]: source and target are of two voices


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a batch: examples, and codes of a crop and of a reference."""

    batch: int
    crop: int
    reference: int


def load_takes(paths: Sequence[Path], device: torch.device) -> dict[str, Tensor]:
    """All takes one after the other; sessions and their partners are numbered through."""
    parts: dict[str, list[Tensor]] = {}
    samples = sessions = 0
    for path in paths:
        with np.load(path) as stored:
            take = dict(stored)
        take["turns"] = phases(take["pitch"], take.pop("lines")[:, 1])
        shifts = {"start": samples, "end": samples, "partner": sessions}
        samples, sessions = samples + len(take["own"]), sessions + len(take["start"])
        for name, value in take.items():
            shifted = value + shifts[name] if name in shifts else value
            parts.setdefault(name, []).append(torch.from_numpy(shifted).to(device))
    return {name: torch.cat(values) for name, values in parts.items()}


def phases(pitch: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """The phase of the teacher's source in turns, float32 [S / 300], in the middle of every pitch
    value's samples; it begins again with every line (their first samples, [L])."""
    step = pitch.astype(np.float64) * (PITCH_GRID / SAMPLE_RATE)
    turns = step.cumsum()
    first = np.sort(lines) // PITCH_GRID
    line = np.searchsorted(first, np.arange(len(pitch)), side="right") - 1
    return ((turns - (turns - step)[first][line]) % 1).astype(np.float32)


class Crops:
    """Draws examples from all sessions that are long enough."""

    def __init__(self, takes: dict[str, Tensor], config: SpeechCodecConfig, sizes: Sizes) -> None:
        self.takes, self.config, self.sizes = takes, config, sizes
        length = takes["end"] - takes["start"]
        needed = max(sizes.crop, sizes.reference) * config.hop
        self._length = length
        long = (length > needed) & (length[takes["partner"]] > needed)
        order = torch.arange(len(length), device=length.device)
        self.training = order[long & (order % HELD_OUT != 0)]
        self.held_out = order[long & (order % HELD_OUT == 0)]
        if not len(self.training):
            raise ValueError(f"no session of {len(length)} is longer than {needed} samples")

    @property
    def hours(self) -> float:
        """Hours of speech in both timbres, held-out sessions included."""
        return 2 * len(self.takes["own"]) / self.config.sample_rate / 3600

    def style_size(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the style vectors, float32 [256] each."""
        style = self.takes["style"].float()
        return style.mean(0), style.std(0).clamp_min(1e-3)

    def draw(self, sessions: Tensor, generator: torch.Generator | None = None) -> Examples:
        """A batch from these sessions; longer ones come more often."""
        takes, hop, size = self.takes, self.config.hop, self.sizes.batch
        weights = self._length[sessions].float()
        picked = torch.multinomial(weights, size, replacement=True, generator=generator)
        session = sessions[picked]
        sides = torch.rand(2, size, device=session.device, generator=generator) < 0.5
        start = self._place(session, self.sizes.crop * hop, generator)
        span = torch.arange(self.sizes.crop * hop, device=session.device)
        owner = torch.where(sides[1], takes["partner"][session], session)
        from_start = self._place(owner, self.sizes.reference * hop, generator)
        reference = torch.arange(self.sizes.reference * hop, device=session.device)
        middle = torch.arange(span.numel() // self.config.frame, device=session.device) + 0.5
        frames = start[:, None] + (middle * self.config.frame).long()
        return Examples(
            self._samples(start[:, None] + span, sides[0]),
            self._samples(start[:, None] + span, sides[1]),
            self._samples(from_start[:, None] + reference, torch.zeros_like(sides[0])),
            takes["phones"][frames // GRID].long(),
            takes["pitch"][frames // PITCH_GRID].float(),
            takes["style"][owner].float(),
            *self._drive(session, start),
            sides[0] != sides[1],
        )

    def _drive(self, session: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Pitch and phase from `start` on, as the teacher's source had them: its frequency is a
        pitch value's from half of it before its samples to half of it before their end."""
        config, pitch = self.config, self.takes["pitch"]
        points = self.sizes.crop * config.hop // config.stft_hop + config.n_fft // config.stft_hop
        samples = start[:, None] + torch.arange(points, device=start.device) * config.stft_hop
        samples = samples.minimum(self.takes["end"][session, None] - 2 * PITCH_GRID)
        place, share = samples // PITCH_GRID, (samples % PITCH_GRID) / PITCH_GRID
        here, following = pitch[place].float(), pitch[place + 1].float()
        hz = torch.where(following > VOICED_HZ, here.lerp(following, share), here)
        middle = (samples - PITCH_GRID // 2).clamp_min(0)
        place, share = middle // PITCH_GRID, (middle % PITCH_GRID) / SAMPLE_RATE
        turns = self.takes["turns"][place].double() + pitch[place + 1].double() * share
        return torch.where(here > VOICED_HZ, hz, 0.0), turns % 1

    def _place(self, session: Tensor, size: int, generator: torch.Generator | None) -> Tensor:
        """A first sample in each session, with `size` samples after it."""
        room = (self._length[session] - size) // GRID + 1
        share = torch.rand(len(session), device=session.device, generator=generator)
        return self.takes["start"][session] + (share * room).long().clamp(max=room - 1) * GRID

    def _samples(self, index: Tensor, other: Tensor) -> Tensor:
        own, partner = self.takes["own"][index], self.takes["other"][index]
        return torch.where(other[:, None], partner, own).float() / 32768
