"""Sizes of the codec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from decoder.base import DecoderConfigError
from decoder.codec_config import must_be, scalar, sizes

# a larger number means a damaged file; checked before memory is allocated
MAX_BLOCKS, MAX_WEIGHTS, MAX_CODES = 256, 1 << 28, 1 << 20
RATES = 8_000, 192_000  # Hz
MAY_BE_ZERO = ("behind", "ahead")
NAME = "source_filter"
HEAD_DIM = 64


def voice_heads(dim: int) -> int:
    """Return the number of attention heads of a voice encoder."""
    return max(1, dim // HEAD_DIM)


@dataclass(frozen=True, slots=True)
class SpeechCodecConfig:
    """Sizes of one codec.

    Frames are the networks' unit of time (20 ms); a code is `frames_per_code` of them, and every
    frame of the decoder becomes `spectra_per_frame` spectra.
    """

    sample_rate: int = 24_000
    levels: tuple[int, ...] = (8, 8, 8, 8, 4)
    frames_per_code: int = 2
    spectra_per_frame: int = 2
    stft_hop: int = 240
    n_fft: int = 960
    mel_bins: int = 100
    mel_n_fft: int = 1024
    kernel: int = 7
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

    @property
    def hop(self) -> int:
        """Samples per code."""
        return self.frames_per_code * self.frame

    @property
    def frame(self) -> int:
        """Samples per frame."""
        return self.spectra_per_frame * self.stft_hop

    @property
    def spectra_per_code(self) -> int:
        return self.frames_per_code * self.spectra_per_frame

    @property
    def bins(self) -> int:
        """Number of bins of a spectrum."""
        return self.n_fft // 2 + 1

    @property
    def overlap(self) -> int:
        """Number of earlier spectra whose windows reach into a spectrum's first samples."""
        return self.n_fft // self.stft_hop - 1

    @property
    def codebook_size(self) -> int:
        return math.prod(self.levels)

    @property
    def receptive_field(self) -> int:
        """Number of earlier codes that can change a code's samples, at one phase of the pulses."""
        frames = self.decoder_blocks * (self.kernel - 1)
        # a spectrum filters pulses whose pitch is that of spectra up to a window's length before it
        reach = math.ceil((2 * self.n_fft - self.stft_hop) / self.hop)
        return self.behind + math.ceil(frames / self.frames_per_code) + reach

    @property
    def num_weights(self) -> int:
        """Approximate number of values of the networks and their tables."""
        pool = 2 * self.voice_ff + 4 * self.voice_dim + self.kernel
        voice = (self.voice_blocks + 4) * self.voice_dim * pool
        block = 2 * self.decoder_ff + self.kernel + 2 * self.condition_dim
        heads = self.spectra_per_frame * 5 * self.bins
        decoder = self.decoder_dim * (self.decoder_blocks * block + heads)
        width = (self.behind + 1 + self.ahead) * len(self.levels) * self.frames_per_code
        tables = self.mel_n_fft * self.mel_bins + self.sample_rate
        mel = self.mel_bins * self.spectra_per_frame * self.voice_dim
        tokens = self.voice_tokens * (self.voice_dim + 2 * len(self.levels) * self.condition_dim)
        return voice + decoder + width * self.decoder_dim + tables + mel + tokens

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeechCodecConfig:
        """Read a codec's config.json; keys that are not sizes are ignored.

        Raises DecoderConfigError naming an invalid size.
        """
        for key, only in (("codebooks", 1), ("excitation", True), ("free_spectrum", True)):
            must_be(values, NAME, key, only)
        own = cls()
        chosen: dict[str, Any] = {"levels": sizes(values, NAME, "levels", own.levels)}
        for field in fields(cls):
            if field.name in MAY_BE_ZERO and values.get(field.name) == 0:
                chosen[field.name] = 0
            elif field.name != "levels":
                default: int = getattr(own, field.name)
                chosen[field.name] = scalar(values, NAME, field.name, default)
        config = cls(**chosen)
        config.check()
        return config

    def check(self) -> None:
        """Raise DecoderConfigError for sizes that do not fit each other, or are too large."""
        low, high = RATES
        if not low <= self.sample_rate <= high:
            raise DecoderConfigError(f"{NAME} config: sample_rate must be in [{low}, {high}]")
        if min(self.levels) == 1 or self.codebook_size > MAX_CODES:
            raise DecoderConfigError(
                f"{NAME} config: levels must be 2 or more each, and at most {MAX_CODES} multiplied"
            )
        for name in ("hop", "n_fft", "mel_n_fft"):
            if getattr(self, name) > self.sample_rate:
                raise DecoderConfigError(
                    f"{NAME} config: {name} is {getattr(self, name)} samples, more than a second"
                )
        if self.n_fft % self.stft_hop or self.n_fft % 2:
            raise DecoderConfigError(
                f"{NAME} config: n_fft must be even and a multiple of stft_hop"
            )
        if self.voice_dim % voice_heads(self.voice_dim):
            raise DecoderConfigError(f"{NAME} config: voice_dim must be a multiple of its heads")
        blocks = max(self.voice_blocks, self.decoder_blocks)
        if blocks > MAX_BLOCKS or self.num_weights > MAX_WEIGHTS:
            raise DecoderConfigError(
                f"{NAME} config: the sizes are too large: {blocks} blocks of {MAX_BLOCKS}, about "
                f"{self.num_weights} weights of {MAX_WEIGHTS}"
            )
