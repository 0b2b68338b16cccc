"""Results of the Python API: speech as float32 samples, whole or part by part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decoder import (
    AudioEncoding,
    AudioFormat,
    apply_patches,
    create_encoder,
    nearest_rate,
    resample,
)
from llm import FinishReason
from tts.api.suffixes import SUFFIXES
from tts.errors import InvalidRequestError
from tts.speech.types import MarkTime, SegmentTime, WordTime
from tts.text.lexicon.entries import Pronunciation


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """One text, spoken."""

    samples: np.ndarray
    """float32 [N] in [-1, 1], mono."""
    sample_rate: int
    """Samples per second, in Hz."""
    seed: int
    """Seed of the random choices; the same seed gives the same speech again."""
    finish_reason: FinishReason
    """`STOP`; `LENGTH` when a limit ended the speech; `CANCELLED` when the voice was closed."""
    warnings: tuple[str, ...] = ()
    """Notes on what was left out or cut short, one sentence each."""
    words: tuple[WordTime, ...] = ()
    """When each word is spoken, with `timestamps="word"`."""
    segments: tuple[SegmentTime, ...] = ()
    """When each segment of the text is spoken, with `timestamps="segment"`."""
    marks: tuple[MarkTime, ...] = ()
    """When each mark, sentence and turn begins, of markup and dialogues."""
    pronunciations: tuple[Pronunciation, ...] = ()
    """Entries of the request, the voice and the lexicons that were applied, as the model read them:
    in letters or in IPA."""
    num_retried_segments: int = 0
    """Segments that were spoken again, as they had failed the check."""

    @property
    def duration_s(self) -> float:
        """Length of the audio in seconds."""
        return len(self.samples) / self.sample_rate

    def save(self, path: str | Path, encoding: str = "") -> Path:
        """Write an audio file and return its path.

        `encoding` is one of wav, flac, opus, mp3, s16le, f32le, mulaw and alaw; by default it
        follows from the suffix. Opus and MP3 have few sample rates: the samples are converted to
        the nearest one. Raises `InvalidRequestError` for an unknown suffix or encoding, and
        `OSError` when the file cannot be written.
        """
        path = Path(path)
        path.write_bytes(encoded(self.samples, self.sample_rate, _encoding(path, encoding)))
        return path


@dataclass(frozen=True, slots=True, eq=False)
class SpeechPart:
    """The next piece of a stream of speech, in order and without gaps."""

    samples: np.ndarray
    """float32 [N] in [-1, 1], mono; empty where a part carries timings only."""
    sample_rate: int
    """Samples per second, in Hz."""
    sample_offset: int
    """Number of samples before this part."""
    text_start: int
    """Where the spoken segment begins in the text, in Unicode code points."""
    text_end: int
    """Where it ends."""
    words: tuple[WordTime, ...] = ()
    """Words spoken since the part before, with `timestamps="word"`."""
    segments: tuple[SegmentTime, ...] = ()
    """Segments ended since the part before, with `timestamps="segment"`."""
    marks: tuple[MarkTime, ...] = ()
    """Marks, sentences and turns since the part before, of markup and dialogues."""
    warnings: tuple[str, ...] = ()
    """Notes on what was left out or cut short, with the last part."""
    pronunciations: tuple[Pronunciation, ...] = ()
    """Entries of the request, the voice and the lexicons that were applied, with the last part."""


def encoded(samples: np.ndarray, sample_rate: int, encoding: AudioEncoding) -> bytes:
    """An audio file of mono float32 samples [N]."""
    rate = nearest_rate(encoding, sample_rate)
    encoder = create_encoder(AudioFormat(encoding, rate))
    data = encoder.write(resample(samples, sample_rate, rate)) + encoder.finish()
    return apply_patches(data, encoder.patches)


def _encoding(path: Path, name: str) -> AudioEncoding:
    found = name or SUFFIXES.get(path.suffix.lower(), "")
    try:
        return AudioEncoding(found)
    except ValueError:
        known = ", ".join(encoding.value for encoding in AudioEncoding)
        text = (
            f"'{name or path.name}' names no audio format; use a suffix of {' '.join(SUFFIXES)}, "
            f"or encoding= with one of {known}"
        )
        raise InvalidRequestError.of("encoding", text) from None
