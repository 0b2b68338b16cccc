"""Sizes of a codec, and the designs that are compared."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SpeechCodecConfig:
    """Frames are the networks' 20 ms; a code is `frames_per_code` of them; every frame of the
    decoder becomes `spectra_per_frame` spectra."""

    sample_rate: int = 24_000
    levels: tuple[int, ...] = (8, 8, 8, 8, 4)
    codebooks: int = 1
    frames_per_code: int = 2
    spectra_per_frame: int = 2
    stft_hop: int = 240
    n_fft: int = 960
    mel_bins: int = 100
    mel_n_fft: int = 1024
    kernel: int = 7
    encoder_dim: int = 384
    encoder_ff: int = 1152
    encoder_blocks: int = 4  # at the rate of frames, and as many at that of codes
    voice_dim: int = 256
    voice_ff: int = 768
    voice_blocks: int = 4
    voice_tokens: int = 32
    condition_dim: int = 128
    decoder_dim: int = 512
    decoder_ff: int = 1536
    decoder_blocks: int = 8
    behind: int = 2  # codes before and after a code that its first layer sees
    ahead: int = 2
    excitation: bool = False  # the decoder filters pulses of its own pitch, and noise
    free_spectrum: bool = True  # the decoder writes complex spectra

    def __post_init__(self) -> None:
        if not (self.excitation or self.free_spectrum):
            raise ValueError("a decoder without excitation and without free_spectrum is silent")

    @property
    def hop(self) -> int:
        """Samples per code."""
        return self.frames_per_code * self.frame

    @property
    def frame(self) -> int:
        """Samples per frame."""
        return self.spectra_per_frame * self.stft_hop

    @property
    def bins(self) -> int:
        """Number of bins of a spectrum that the decoder writes."""
        return self.n_fft // 2 + 1

    @property
    def codebook_size(self) -> int:
        return math.prod(self.levels)

    @property
    def values(self) -> int:
        """Numbers that the codes of one time stand for."""
        return self.codebooks * len(self.levels)

    @property
    def receptive_field(self) -> int:
        """How many earlier codes can change a code's samples, at one phase of the excitation."""
        frames = self.decoder_blocks * (self.kernel - 1)
        reach = 2 * self.n_fft if self.excitation else self.n_fft  # pitch is of a window's end
        overlap = math.ceil((reach - self.stft_hop) / self.hop)
        return self.behind + math.ceil(frames / self.frames_per_code) + overlap

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeechCodecConfig:
        """Read the values of a file that `save` wrote."""
        return cls(**values | {"levels": tuple(values["levels"])})

    def save(self, path: Path) -> None:
        """Write all fields as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


BASE = SpeechCodecConfig()
DESIGNS = {
    "one": BASE,  # 14 bits 25 times a second: what the service and its language model can take
    "two": replace(BASE, codebooks=2),  # 28 bits: does the decoder lack bits, or skill?
    "toy": SpeechCodecConfig(
        levels=(4, 4, 4), mel_bins=20, mel_n_fft=512, encoder_dim=16, encoder_ff=32,
        encoder_blocks=1, voice_dim=16, voice_ff=32, voice_blocks=1, voice_tokens=4,
        condition_dim=8, decoder_dim=16, decoder_ff=32, decoder_blocks=2,
    ),
}  # fmt: skip
DESIGNS["source"] = replace(BASE, excitation=True, free_spectrum=False)
DESIGNS["source_free"] = replace(BASE, excitation=True)
DESIGNS["toy_source"] = replace(DESIGNS["toy"], excitation=True, free_spectrum=False)
DESIGNS["toy_source_free"] = replace(DESIGNS["toy"], excitation=True)
DESIGNS["toy_two"] = replace(DESIGNS["toy"], codebooks=2)
