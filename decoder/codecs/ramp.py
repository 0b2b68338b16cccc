"""A codec without weights whose samples follow from a formula: for tests and the test mode.

Sample k of a code at an absolute position is a point of a sawtooth,

    (97 * code + 31 * position + k + noise(position)) mod 2048, scaled to [-1, 1)

which reveals any wrong code, position, offset or order of samples, at any (also rational) rate. All
values are multiples of 1 / 1024: exact in float32 and in every sample format of 11 bits or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from decoder.base import (
    AttentionKind,
    AudioDecoder,
    CodecSpec,
    DecoderConfigError,
    DecoderOptions,
    DecodeWindow,
    StreamingOptions,
)
from decoder.registry import CodecSource
from decoder.streaming import check_codes, sample_index

PERIOD = 2048
DEFAULTS = {"sample_rate": 16_000, "token_rate_hz": 25, "codebook_size": 4096}


class RampDecoder(AudioDecoder):
    """Closed-form samples per code and absolute position; codes are independent of each other.

    Attention masks therefore have no effect, and all streaming flags are supported.
    """

    supported_options = frozenset({"token_rate_hz", "max_batch", "pcm_format", "noise_seed"})

    def __init__(self, spec: CodecSpec, options: DecoderOptions | None = None) -> None:
        self.spec = spec
        self.options = options or DecoderOptions()

    @classmethod
    def create(cls, source: CodecSource) -> RampDecoder:
        """Create from a source: `config` may have sample_rate, token_rate_hz and codebook_size."""
        if source.weights is not None:
            raise DecoderConfigError("codec 'ramp' has no weights: leave them out")
        return cls(ramp_spec(source.config, source.options.token_rate_hz), source.options)

    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        """See AudioDecoder.decode; everything to the window's end is rendered."""
        rows = [self._row(window)[window.skip_samples :] for window in windows]
        size = max(map(len, rows), default=0)
        return torch.from_numpy(np.stack([np.pad(row, (0, size - len(row))) for row in rows]))

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """Return one code per started code length: its first sample's level, scaled to the
        codebook.
        """
        size = self.spec.codebook_size
        count = -(-len(samples) // self.spec.samples_per_code)
        starts = [sample_index(t, self.spec.samples_per_code) for t in range(count)]
        levels = (np.asarray(samples, dtype=np.float64)[starts] + 1) / 2 * size
        return tuple(int(level) for level in np.clip(levels, 0, size - 1))

    def _row(self, window: DecodeWindow) -> np.ndarray:
        codes = check_codes(window.codes, self.spec.codebook_size, "speech")
        pairs = zip(codes, window.positions, strict=True)
        return np.concatenate([self._code(code, position) for code, position in pairs])

    def _code(self, code: int, position: int) -> np.ndarray:
        start, end = (sample_index(p, self.spec.samples_per_code) for p in (position, position + 1))
        steps = np.arange(end - start) + 97 * code + 31 * position + self._noise(position)
        return ((steps % PERIOD) / (PERIOD // 2) - 1).astype(np.float32)

    def _noise(self, position: int) -> int:
        """Return an offset keyed by (seed, absolute position), as in decoders with noise."""
        seed = self.options.noise_seed
        if seed is None:
            return 0
        return int(np.random.Philox(key=seed, counter=position % 2**64).random_raw() % PERIOD)


def ramp_spec(config: Mapping[str, Any], token_rate_hz: float | None = None) -> CodecSpec:
    """Return the spec of a ramp codec; rates may be rational (44,100 Hz at 86 codes per second)."""
    values = {**DEFAULTS, **{key: config[key] for key in DEFAULTS if key in config}}
    rate = Fraction(token_rate_hz or values["token_rate_hz"]).limit_denominator(10_000)
    return CodecSpec(
        name="ramp",
        sample_rate=int(values["sample_rate"]),
        samples_per_code=Fraction(int(values["sample_rate"])) / rate,
        codebook_size=int(values["codebook_size"]),
        receptive_field=0,
        attention=AttentionKind.CAUSAL,
        can_encode=True,
        recommended=StreamingOptions(chunk_sizes=(6, 12, 25)),
    )
