"""Text to speech with a trained language model and codec, one text at a time, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from training.speech_codec.checkpoint import load
from training.speech_codec.render import heard_voice
from training.speech_lm.writer import Writer, prompt_of


class Speaker:
    """A language model, a codec and the named voices."""

    def __init__(
        self, weights: Path, codec: Path, config: Path, voice_encoder: Path | None = None
    ) -> None:
        """`weights`: lm.safetensors, voices.json next to it; `codec`, `config`: of the codec;
        `voice_encoder`: weights, to follow clips."""
        self._writer = Writer(weights)
        self.model, self.voices = self._writer.model, self._writer.voices
        self.codec, self._hears = load(codec, config, voice_encoder), voice_encoder is not None

    def voice_of(self, samples: np.ndarray) -> list[int]:
        """Return the voice tokens of a reference, float32 [S] at the codec's rate.

        Raises ValueError without an encoder of voices.
        """
        if not self._hears:
            raise ValueError("a clip's voice needs the weights of the encoder of voices")
        return heard_voice(self.codec, samples)

    def codes(self, voice: Sequence[int], text: Sequence[int], seed: int = 0) -> list[int]:
        """Codes of a text's tokens; another seed draws others."""
        return self._writer.codes([prompt_of(voice, text)], seed)[0]

    @torch.inference_mode()
    def say(self, voice: Sequence[int], text: Sequence[int], seed: int = 0) -> np.ndarray:
        """Samples float32 [S] of a text's tokens; none where nothing is said."""
        codes = self.codes(voice, text, seed)
        if not codes:
            return np.zeros(0, np.float32)
        tokens = torch.tensor([voice])
        return self.codec.decode(torch.tensor(codes)[None], tokens)[0].clamp(-1, 1).numpy()
