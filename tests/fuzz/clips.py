"""Damaged recordings for the function that reads them (`rpcs` sends some over the wire)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
import soundfile

from decoder import AudioEncoding, AudioFormat, AudioFormatError, read_prompt_audio
from tests.fuzz.base import Case, InvariantError, Target
from tests.fuzz.mutation import mutated
from tests.tts.serving import hum

RATE = 16_000
HEADER_BYTES = 100
KINDS = (
    *(("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "ULAW")),
    *(("WAVEX", "DOUBLE"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS")),
    *(("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("CAF", "PCM_16")),
)


@cache
def valid_clips(seconds: float) -> tuple[bytes, ...]:
    """Return the same sound in every container, with one channel or two."""
    mono = hum(seconds, RATE)
    stereo = np.stack([mono, mono], axis=1)
    return tuple(_written(samples, *kind) for kind in KINDS for samples in (mono, stereo))


def _written(samples: np.ndarray, container: str, subtype: str) -> bytes:
    file = BytesIO()
    soundfile.write(file, samples, RATE, format=container, subtype=subtype)
    return file.getvalue()


def _damaged(chance: Random, clips: tuple[bytes, ...]) -> bytes:
    """Damage a clip, mostly in the header, which has the sizes."""
    clip = chance.choice(clips)
    kind = chance.random()
    if kind < 0.6:
        return mutated(clip[:HEADER_BYTES], chance, clips) + clip[HEADER_BYTES:]
    return mutated(clip, chance, clips) if kind < 0.97 else chance.randbytes(500)


def _try_one(chance: Random) -> None:
    data = _damaged(chance, valid_clips(1.2))
    try:
        samples = read_prompt_audio(data, chance.choice((8_000, 16_000, 24_000)), _format(chance))
    except AudioFormatError:
        return
    if samples.ndim != 1 or samples.dtype != np.float32 or not np.isfinite(samples).all():
        raise InvariantError(f"read as {samples.dtype} {samples.shape}")


def _format(chance: Random) -> AudioFormat | None:
    """Return a format, mostly None: the container is detected."""
    if chance.random() < 0.8:
        return None
    rates = (0, 8_000, 16_000, 191_999, 2**31 - 1, -1)
    encoding = chance.choice(tuple(AudioEncoding))
    return AudioFormat(encoding, chance.choice(rates), chance.choice((1, 1, 2)))


@contextmanager
def _opened(_: Path) -> Iterator[Case]:
    yield _try_one


CLIPS = Target("clips", _opened)
