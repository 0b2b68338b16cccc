"""Pitch that drives a voice's source: the teacher's plan, and what our decoder makes of its codes.

Neither needs the sound, where voices that creak mislead a pitch tracker. Both curves glide to and
from nothing next to a pause, so that their ends are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from decoder.codecs.source_filter.modules import SpeechCodec
from training.evaluate.systems import Teacher, VoicedLine
from training.kokoro.studio import PITCH_GRID
from training.kokoro.vocoder import SAMPLE_RATE
from training.rises import steady
from training.speech_codec.checkpoint import load
from tts.config.defaults import embedded_folder

PLANNED_HOP_S = PITCH_GRID / SAMPLE_RATE
VOICED = 0.5  # voicing, from 0 to 1


def planned_pitch(teacher: Teacher, lines: Sequence[VoicedLine]) -> list[np.ndarray]:
    """Return the teacher's plan for each text in its voice: Hz [T], one value in every
    `PLANNED_HOP_S`, NaN where there is no voice."""
    plan = teacher.plan([(teacher.phonemes(*line), line[1]) for line in lines])
    ends = zip(plan["start"] // PITCH_GRID, plan["end"] // PITCH_GRID, strict=True)
    return [steady(plan["pitch"][start:end], PLANNED_HOP_S) for start, end in ends]


class DecoderPitch:
    """Reads what our codec's decoder makes of codes."""

    def __init__(self, codec: SpeechCodec) -> None:
        self._codec = codec
        self.hop_s = codec.config.stft_hop / codec.config.sample_rate

    @classmethod
    def load(cls, model: str) -> DecoderPitch:
        """Load the codec of a checkpoint folder; without one, of the built-in voice."""
        folder = (Path(model) if model else embedded_folder()) / "codec"
        return cls(load(folder / "model.safetensors", folder / "config.json"))

    @torch.inference_mode()
    def of(self, codes: Sequence[int], voice: Sequence[int]) -> np.ndarray:
        """Return the pitch of codes in the voice of a row of codes: Hz [T], one value in every
        `hop_s` from the end of the first window on, NaN where there is no voice."""
        if not codes:
            return np.zeros(0)
        decoder, values = self._codec.decoder, self._codec.quantizer.values
        read = decoder.features(values(torch.tensor([codes])), values(torch.tensor([voice])))
        hz, voiced = (part[0].numpy() for part in decoder.curve(read).tones())
        spoken = np.where(voiced > VOICED, hz, 0.0)[: -decoder.reach]  # later windows end after it
        return steady(spoken, self.hop_s)
