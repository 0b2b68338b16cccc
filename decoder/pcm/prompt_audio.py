"""Reader of untrusted reference clips: everything is checked before it is decoded.

Order: size, container by its first bytes, header (codec, channels, rate, stated length), then block
by block up to the maximum duration, so that neither a forged header nor a clip that decompresses to
hours of audio takes much memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from decoder.base import AudioFormatError
from decoder.pcm.formats import BYTES_PER_SAMPLE, AudioFormat, decode_samples
from decoder.pcm.resampling import resample

if TYPE_CHECKING:
    import soundfile

BLOCK_FRAMES = 1 << 15
UNKNOWN_FRAMES = (1 << 63) - 1  # libsndfile's SF_COUNT_MAX: the header states no length
SILENCE_PEAK = 1e-4

SUBTYPES = {
    "WAV": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "WAVEX": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "FLAC": {"PCM_S8", "PCM_16", "PCM_24"},
    "OGG": {"VORBIS", "OPUS"},
}


@dataclass(frozen=True, slots=True)
class PromptAudioLimits:
    """Limits of a reference clip."""

    max_bytes: int = 10 * 1024 * 1024
    min_s: float = 1.0
    max_s: float = 30.0
    min_rate: int = 8_000
    max_rate: int = 192_000
    max_channels: int = 2


def read_prompt_audio(
    data: bytes,
    target_rate: int,
    audio_format: AudioFormat | None = None,
    limits: PromptAudioLimits | None = None,
) -> np.ndarray:
    """Return a reference clip as mono float32 [S] at the codec's rate.

    `audio_format` describes headerless samples; None (or a container's encoding) means that the
    container is detected: WAV, FLAC or Ogg. Raises AudioFormatError.
    """
    limits = limits or PromptAudioLimits()
    if not data:
        raise AudioFormatError("the clip is empty")
    if len(data) > limits.max_bytes:
        raise AudioFormatError(f"{len(data)} bytes; a clip may have {limits.max_bytes}")
    if audio_format is not None and audio_format.encoding.is_raw:
        samples, rate = _read_raw(data, audio_format, limits), audio_format.sample_rate
    else:
        samples, rate = _read_container(data, limits)
    _check_sound(samples)
    mono = samples.mean(axis=1, dtype=np.float64).astype(np.float32)  # the sum of two may overflow
    mono /= max(1.0, float(np.abs(mono).max()))
    return resample(mono, rate, target_rate)


def _read_raw(data: bytes, audio_format: AudioFormat, limits: PromptAudioLimits) -> np.ndarray:
    """Return float32 [S, channels]."""
    channels, rate = audio_format.channels, audio_format.sample_rate
    _check_header(channels, rate, limits)
    frame_bytes = BYTES_PER_SAMPLE[audio_format.encoding] * channels
    if len(data) % frame_bytes:
        raise AudioFormatError(
            f"{len(data)} bytes are not whole {audio_format.encoding.value} samples "
            f"of {channels} channel(s)"
        )
    _check_duration(len(data) // frame_bytes, rate, limits)
    return decode_samples(data, audio_format.encoding).reshape(-1, channels)


def _read_container(data: bytes, limits: PromptAudioLimits) -> tuple[np.ndarray, int]:
    """Return float32 [S, channels] and the rate."""
    container = _container_of(data)
    with _opened(data, container) as file:
        rate = file.samplerate
        if file.subtype not in SUBTYPES.get(file.format, ()):
            raise AudioFormatError(f"{file.format} with {file.subtype} samples is not accepted")
        _check_header(file.channels, rate, limits)
        stated = None if file.frames == UNKNOWN_FRAMES else file.frames
        if stated is not None:
            _check_duration(stated, rate, limits)
        samples = _read_blocks(file, limits)
    if stated is not None and len(samples) < stated:
        raise AudioFormatError(
            f"the header states {stated} samples, but only {len(samples)} are there"
        )
    _check_duration(len(samples), rate, limits)
    return samples, rate


def _container_of(data: bytes) -> str:
    """Return WAV, FLAC or OGG by the first bytes: no other input reaches libsndfile."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "OGG"
    raise AudioFormatError("not a WAV, FLAC or Ogg file; for headerless samples give their format")


@contextmanager
def _opened(data: bytes, container: str) -> Iterator[soundfile.SoundFile]:
    """Open the clip; libsndfile's errors become AudioFormatError."""
    import soundfile

    class ForwardOnly(soundfile.SoundFile):
        """File without seeking: python-soundfile seeks after every block, which fails for FLAC of
        unknown length.
        """

        def seekable(self) -> bool:
            return False

    try:
        with ForwardOnly(BytesIO(data)) as file:
            yield file
    except soundfile.LibsndfileError as error:
        reason = error.error_string.rstrip(".")
        raise AudioFormatError(f"the {container} file cannot be read: {reason}") from error


def _read_blocks(file: soundfile.SoundFile, limits: PromptAudioLimits) -> np.ndarray:
    """Decode up to the maximum length; float32 [S, channels]."""
    most = round(limits.max_s * file.samplerate)
    blocks: list[np.ndarray] = []
    held = 0
    while held <= most:
        block = file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)
        if not len(block):
            break
        blocks.append(block)
        held += len(block)
    return np.concatenate([np.zeros((0, file.channels), dtype=np.float32), *blocks])


def _check_header(channels: int, rate: int, limits: PromptAudioLimits) -> None:
    if not 1 <= channels <= limits.max_channels:
        raise AudioFormatError(f"{channels} channels; a clip may have {limits.max_channels}")
    if not limits.min_rate <= rate <= limits.max_rate:
        raise AudioFormatError(
            f"sample rate {rate} Hz is outside {limits.min_rate}..{limits.max_rate} Hz"
        )


def _check_duration(frames: int, rate: int, limits: PromptAudioLimits) -> None:
    seconds = frames / rate
    if frames == 0:
        raise AudioFormatError("the clip has no samples")
    if seconds < limits.min_s:
        raise AudioFormatError(f"the clip lasts {seconds:.2f} s; at least {limits.min_s:g} s")
    if seconds > limits.max_s:
        raise AudioFormatError(
            f"the clip lasts more than {limits.max_s:g} s; cut it to its best part"
        )


def _check_sound(samples: np.ndarray) -> None:
    if not np.isfinite(samples).all():
        raise AudioFormatError("the clip has samples that are not finite numbers")
    if np.abs(samples).max() < SILENCE_PEAK:
        raise AudioFormatError("the clip is silent")
