"""What must be heard in the codes and in the voice tokens, by the teacher's own account.

Phones and pitch of every frame are read from the codes' quantised values, the style vector from
those of the voice tokens. The networks that read them are thrown away after training.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.source_filter.config import SpeechCodecConfig
from training.kokoro.text import NUM_SYMBOLS
from training.speech_codec.crops import VOICED_HZ, Examples

STYLE = 256
WIDTH = 256
MIDDLE_HZ = 150.0  # pitch is heard in octaves from here


class Heard(NamedTuple):
    """Losses, and the share of frames whose phone is right."""

    phone: Tensor
    pitch: Tensor
    style: Tensor
    right: Tensor


class Listener(nn.Module):
    """Reads what the codes and the voice tokens are to say."""

    style_mean: Tensor
    style_size: Tensor

    def __init__(self, config: SpeechCodecConfig, mean: Tensor, size: Tensor) -> None:
        super().__init__()
        self.frames = config.frames_per_code
        self.layers = nn.Sequential(
            nn.Conv1d(len(config.levels), WIDTH, 5, padding=2), nn.GELU(),
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2), nn.GELU(),
            nn.Conv1d(WIDTH, self.frames * (NUM_SYMBOLS + 2), 3, padding=1),
        )  # fmt: skip
        self.voice = nn.Sequential(
            nn.Linear(config.voice_tokens * len(config.levels), WIDTH), nn.SiLU(),
            nn.Linear(WIDTH, STYLE),
        )  # fmt: skip
        self.register_buffer("style_mean", mean, persistent=False)
        self.register_buffer("style_size", size, persistent=False)

    def forward(self, values: Tensor, voice: Tensor, wanted: Examples) -> Heard:
        """values [B, T, levels] and voice [B, K, levels], quantised, against the teacher's."""
        read = self.layers(values.transpose(1, 2)).float().transpose(1, 2)
        read = read.reshape(len(values), -1, NUM_SYMBOLS + 2)
        logits, voiced, octaves = read[..., :-2], read[..., -2], read[..., -1]
        sounding = (wanted.pitch > VOICED_HZ).float()
        octave = (wanted.pitch.clamp_min(30) / MIDDLE_HZ).log2()
        off = ((octaves - octave).abs() * sounding).sum() / sounding.sum().clamp_min(1)
        style = (wanted.style - self.style_mean) / self.style_size
        return Heard(
            F.cross_entropy(logits.flatten(0, 1), wanted.phones.flatten()),
            off + 0.1 * F.binary_cross_entropy_with_logits(voiced, sounding),
            (self.voice(voice.flatten(1)).float() - style).square().mean(),
            (logits.detach().argmax(-1) == wanted.phones).float().mean(),
        )
