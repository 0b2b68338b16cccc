"""Sample formats: float32 in [-1, 1] to s16le, f32le, mu-law and A-law bytes and back, and gain.

Companding follows ITU-T G.711 through tables over all 16-bit values (G.191's arithmetic), so that a
sample costs one look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np

from decoder.base import AudioFormatError

S16_SCALE = 32767.0
MULAW_BIAS = 0x84
MULAW_CLIP = 32635


class AudioEncoding(Enum):
    """Encoding of samples as bytes. The first four have no header."""

    PCM_S16LE = "s16le"
    PCM_F32LE = "f32le"
    MULAW = "mulaw"
    ALAW = "alaw"
    WAV = "wav"
    FLAC = "flac"
    OGG_OPUS = "opus"
    MP3 = "mp3"

    @property
    def is_raw(self) -> bool:
        """Whether the encoding has no header: every byte belongs to a sample."""
        return self in BYTES_PER_SAMPLE


BYTES_PER_SAMPLE = {
    AudioEncoding.PCM_S16LE: 2,
    AudioEncoding.PCM_F32LE: 4,
    AudioEncoding.MULAW: 1,
    AudioEncoding.ALAW: 1,
}


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """An encoding at a sample rate in Hz. Output is always mono."""

    encoding: AudioEncoding
    sample_rate: int
    channels: int = 1


def gain_factor(gain_db: float) -> float:
    """Return the amplitude factor of a gain in dB; exactly 1.0 for 0 dB."""
    return float(10.0 ** (gain_db / 20.0))


def to_s16(samples: np.ndarray) -> np.ndarray:
    """Convert float32 [S] to int16 [S]: clamp to [-1, 1], x 32767, round half to even; NaN is
    silence.

    int16 samples are unchanged.
    """
    if samples.dtype == np.int16:
        return samples
    clamped = np.minimum(np.maximum(samples, np.float32(-1.0)), np.float32(1.0))
    if np.isnan(clamped.sum()):
        clamped = np.nan_to_num(clamped)
    return np.rint(clamped * np.float32(S16_SCALE)).astype("<i2")


def encode_samples(samples: np.ndarray, encoding: AudioEncoding) -> bytes:
    """Encode float32 [S], or int16 for a 16-bit encoding, in one headerless encoding."""
    if encoding is AudioEncoding.PCM_F32LE:
        return np.ascontiguousarray(samples, dtype="<f4").tobytes()
    pcm = to_s16(samples)
    if encoding is AudioEncoding.PCM_S16LE:
        return pcm.tobytes()
    return _companding_table(encoding)[pcm.view(np.uint16)].tobytes()


def decode_samples(data: bytes, encoding: AudioEncoding) -> np.ndarray:
    """Decode bytes of one headerless encoding to float32 [S]; raises for a part of a sample."""
    if not encoding.is_raw:
        raise AudioFormatError(f"{encoding.value} is a container, not headerless samples")
    if len(data) % BYTES_PER_SAMPLE[encoding]:
        raise AudioFormatError(
            f"{len(data)} bytes are not a whole number of {encoding.value} samples"
        )
    if encoding is AudioEncoding.PCM_F32LE:
        return np.frombuffer(data, dtype="<f4").astype(np.float32)
    if encoding is AudioEncoding.PCM_S16LE:
        pcm = np.frombuffer(data, dtype="<i2")
    else:
        pcm = _expanding_table(encoding)[np.frombuffer(data, dtype=np.uint8)]
    return pcm.astype(np.float32) / np.float32(32768.0)


@cache
def _companding_table(encoding: AudioEncoding) -> np.ndarray:
    """Return uint8 [65536], indexed by the 16-bit sample's bit pattern."""
    pcm = np.arange(65536, dtype=np.uint16).view(np.int16).astype(np.int32)
    compand = _mulaw_bytes if encoding is AudioEncoding.MULAW else _alaw_bytes
    return compand(pcm).astype(np.uint8)


@cache
def _expanding_table(encoding: AudioEncoding) -> np.ndarray:
    """Return int16 [256], indexed by the code byte."""
    codes = np.arange(256, dtype=np.int32)
    expand = _mulaw_values if encoding is AudioEncoding.MULAW else _alaw_values
    return expand(codes).astype(np.int16)


def _mulaw_bytes(pcm: np.ndarray) -> np.ndarray:
    magnitude = np.minimum(np.abs(pcm), MULAW_CLIP) + MULAW_BIAS
    exponent = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    mantissa = (magnitude >> (exponent + 3)) & 0x0F
    sign = np.where(pcm < 0, 0x80, 0)
    return ~(sign | (exponent << 4) | mantissa) & 0xFF


def _mulaw_values(codes: np.ndarray) -> np.ndarray:
    bits = ~codes & 0xFF
    magnitude = (((bits & 0x0F) << 3) + MULAW_BIAS << ((bits >> 4) & 7)) - MULAW_BIAS
    return np.where(bits & 0x80, -magnitude, magnitude)


def _alaw_bytes(pcm: np.ndarray) -> np.ndarray:
    # Negative values use the one's complement, so that -1 falls into the first interval below 0.
    magnitude = np.where(pcm < 0, ~pcm, pcm) >> 4
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 3, 1)
    segment = np.where(magnitude < 16, 0, exponent)
    mantissa = np.where(segment == 0, magnitude, magnitude >> np.maximum(segment - 1, 0)) & 0x0F
    sign = np.where(pcm < 0, 0, 0x80)
    return (sign | (segment << 4) | mantissa) ^ 0x55


def _alaw_values(codes: np.ndarray) -> np.ndarray:
    bits = codes ^ 0x55
    segment, mantissa = (bits >> 4) & 7, bits & 0x0F
    linear = (mantissa << 4) + 8
    magnitude = np.where(segment == 0, linear, (linear + 0x100) << np.maximum(segment - 1, 0))
    return np.where(bits & 0x80, magnitude, -magnitude)
