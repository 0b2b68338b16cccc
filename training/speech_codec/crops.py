"""Training examples: crops of the teacher's takes, on the device.

An example is codes of a piece of a line, the voice that is to say them, and how the teacher said
them in that voice. Every line is there in two timbres, so half of the examples ask for another
voice than the one that the line's pitch was made for.
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
from training.speech_codec.coder import Coder, points_of
from training.speech_codec.plans import CURVE_GRID, VOICED_HZ, Plan, plan_at
from training.speech_codec.tokenise import codes_of_lines

HELD_OUT = 48  # every so many sessions one is not learned from


class Examples(NamedTuple):
    """A batch. Samples are float32 in [-1, 1)."""

    codes: Tensor  # int64 [B, T]
    target: Tensor  # [B, T * hop]
    style: Tensor  # float32 [B, 256], of the target's timbre
    drive: Tensor  # float32 [B, P] in Hz at every spectrum's first sample and on, 0: no voice
    turns: Tensor  # float64 [B, P]: the phase of the teacher's source there
    crosses: Tensor  # bool [B]: the timbre is not that of the line's own voice
    plan: Plan  # of all points in the codes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a batch: examples, and codes of a crop."""

    batch: int
    crop: int


def load_takes(paths: Sequence[Path], device: torch.device) -> dict[str, Tensor]:
    """All takes one after the other; sessions and their partners are numbered through."""
    parts: dict[str, list[Tensor]] = {}
    samples = sessions = 0
    for path in paths:
        with np.load(path) as stored:
            take = dict(stored)
        session, first = take.pop("lines").T
        take |= {"session": session, "first": first}
        take["turns"] = phases(take["pitch"], take["start"])
        shifts = {
            "start": samples, "end": samples, "first": samples, "partner": sessions,
            "session": sessions,
        }  # fmt: skip
        samples, sessions = samples + len(take["own"]), sessions + len(take["start"])
        for name, value in take.items():
            shifted = value + shifts[name] if name in shifts else value
            parts.setdefault(name, []).append(torch.from_numpy(shifted))
    return {name: torch.cat(values).to(device) for name, values in parts.items()}


def phases(pitch: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The phase of the teacher's source in turns, float32 [S / 300], in the middle of every pitch
    value's samples; it begins again with every session (their first samples, [N])."""
    step = pitch.astype(np.float64) * (CURVE_GRID / SAMPLE_RATE)
    turns = step.cumsum()
    first = np.sort(first) // CURVE_GRID
    session = np.searchsorted(first, np.arange(len(pitch)), side="right") - 1
    return ((turns - (turns - step)[first][session]) % 1).astype(np.float32)


class Crops:
    """Draws examples from all lines that are long enough."""

    def __init__(
        self, takes: dict[str, Tensor], coder: Coder, config: SpeechCodecConfig, sizes: Sizes
    ) -> None:
        """Raises ValueError where every line is shorter than a crop."""
        self.takes, self.config, self.sizes = takes, config, sizes
        first = takes["first"]
        total = torch.tensor([len(takes["own"])], device=first.device)
        self._ends = torch.cat((first[1:], total))
        self._whole = (self._ends - first) // config.hop  # codes
        self._coder_sizes = coder.sizes
        self._codes, self._at = codes_of_lines(coder, takes, first)
        order = torch.arange(len(first), device=first.device)
        long, held_out = self._whole >= sizes.crop, takes["session"] % HELD_OUT == 0
        self.training, self.held_out = order[long & ~held_out], order[long & held_out]
        if not len(self.training):
            raise ValueError(f"no line of {len(first)} has {sizes.crop} codes")

    @property
    def hours(self) -> float:
        """Hours of speech in both timbres, held-out sessions included."""
        return 2 * len(self.takes["own"]) / self.config.sample_rate / 3600

    def draw(self, lines: Tensor, generator: torch.Generator | None = None) -> Examples:
        """A batch from these lines; longer ones come more often."""
        takes = self.takes
        line, code = self._places(lines, self.sizes.batch, generator)
        session = takes["session"][line]
        crosses = torch.rand(len(line), device=line.device, generator=generator) < 0.5
        start = takes["first"][line] + code * self.config.hop
        span = torch.arange(self.sizes.crop * self.config.hop, device=line.device)
        owner = torch.where(crosses, takes["partner"][session], session)
        return Examples(
            self._codes_at(line, code),
            self._samples(start[:, None] + span, crosses),
            takes["style"][owner].float(),
            *self._drive(session, start),
            crosses & (owner != session),
            self._plan_at(line, start),
        )

    def _places(
        self, lines: Tensor, count: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw lines [count], and the first code of a crop in each."""
        weights = self._whole[lines].float()
        line = lines[torch.multinomial(weights, count, replacement=True, generator=generator)]
        share = torch.rand(count, device=lines.device, generator=generator)
        room = self._whole[line] - self.sizes.crop + 1
        return line, (share * room).long().minimum(room - 1)

    def _codes_at(self, line: Tensor, code: Tensor) -> Tensor:
        span = torch.arange(self.sizes.crop, device=line.device)
        return self._codes[(self._at[line] + code)[:, None] + span]

    def _plan_at(self, line: Tensor, start: Tensor) -> Plan:
        """Return the plan of crops of lines, from samples `start` on."""
        points = points_of(start, self.sizes.crop, self._coder_sizes)
        first, end = self.takes["first"][line, None], self._ends[line, None]
        return plan_at(self.takes, points, first, end)

    def _drive(self, session: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Pitch and phase from `start` on, as the teacher's source had them: its frequency is a
        pitch value's from half of it before its samples to half of it before their end."""
        config, pitch = self.config, self.takes["pitch"]
        points = self.sizes.crop * config.hop // config.stft_hop + config.n_fft // config.stft_hop
        samples = start[:, None] + torch.arange(points, device=start.device) * config.stft_hop
        samples = samples.minimum(self.takes["end"][session, None] - 2 * CURVE_GRID)
        place, share = samples // CURVE_GRID, (samples % CURVE_GRID) / CURVE_GRID
        here, following = pitch[place].float(), pitch[place + 1].float()
        hz = torch.where(following > VOICED_HZ, here.lerp(following, share), here)
        middle = (samples - CURVE_GRID // 2).clamp_min(0)
        place, share = middle // CURVE_GRID, (middle % CURVE_GRID) / SAMPLE_RATE
        turns = self.takes["turns"][place].double() + pitch[place + 1].double() * share
        return torch.where(here > VOICED_HZ, hz, 0.0), turns % 1

    def _samples(self, index: Tensor, other: Tensor) -> Tensor:
        own, partner = self.takes["own"][index], self.takes["other"][index]
        return torch.where(other[:, None], partner, own).float() / 32768
