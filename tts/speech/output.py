"""Audio output of one stream: post-processing, encoding, and times in what was encoded.

codec samples → loudness → silence trimming → levels of voices → speaking rate → sample rate →
gain → watermark → bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import numpy as np

from decoder import (
    AudioEncoding,
    AudioFormat,
    HeaderPatch,
    LevelMatcher,
    LoudnessNormalizer,
    Resampler,
    SilenceTrimmer,
    StreamMarker,
    TimeStretcher,
    Watermark,
    create_encoder,
    gain_factor,
)

MAX_PIECE_BYTES = 48 * 1024  # one message on the wire stays below 64 KiB
COSTLY_PIECE_S = 0.5  # compressing this much takes some 20 ms
PIECE_S = 4.0
NO_SAMPLES = np.zeros(0, dtype=np.float32)
SIXTEEN_BIT = (AudioEncoding.PCM_S16LE, AudioEncoding.WAV)
COMPRESSED = (AudioEncoding.FLAC, AudioEncoding.OGG_OPUS, AudioEncoding.MP3)


class Loudness(Enum):
    """Change of the loudness of segments after the first."""

    UNCHANGED = "unchanged"
    STEADY = "steady"  # moves towards the level of the first
    MATCHED = "matched"  # is the level of the first from the start, for several voices


class AudioOutput:
    """Incremental converter of mono float32 at the codec's rate to the requested encoding.

    The methods yield bytes lazily; `num_samples` counts the samples of the pieces yielded so far.
    `flush` sends buffered samples, `drop` discards them; neither clicks between utterances, as
    speech ends in silence.
    """

    def __init__(
        self,
        codec_rate: int,
        audio_format: AudioFormat,
        *,
        speaking_rate: float = 1.0,
        gain_db: float = 0.0,
        trim_silence: bool = False,
        loudness: Loudness = Loudness.UNCHANGED,
        watermark: Watermark | None = None,
    ) -> None:
        """Create an output.

        `trim_silence` removes silence at the ends of an utterance; `watermark` marks what is
        encoded.
        """
        self._codec_rate = codec_rate
        is_steady, is_matched = loudness is Loudness.STEADY, loudness is Loudness.MATCHED
        self._loudness = LoudnessNormalizer(codec_rate) if is_steady else None
        self._levels = LevelMatcher(codec_rate) if is_matched else None
        self._trimmer = SilenceTrimmer(codec_rate) if trim_silence else None
        self._resampler = (
            Resampler(codec_rate, audio_format.sample_rate)
            if audio_format.sample_rate != codec_rate
            else None
        )
        self._encoding = audio_format.encoding
        self._encoder = create_encoder(audio_format)
        self._marker = StreamMarker(watermark, audio_format.sample_rate) if watermark else None
        self._shape(speaking_rate, gain_db)
        sample_bytes = 4 if audio_format.encoding is AudioEncoding.PCM_F32LE else 2
        self._max_piece = MAX_PIECE_BYTES // sample_bytes
        if self._marker is not None:
            piece = round(COSTLY_PIECE_S * audio_format.sample_rate)
            self._max_piece = min(self._max_piece, piece)
        self._output_rate = audio_format.sample_rate
        self._num_unsent = 0  # samples in the encoder since its last bytes
        self._num_written = self._segment_start = 0  # at the codec's rate, since the flush
        self._num_trimmed = 0  # samples trimmed until then
        self._flushed_s = 0.0  # seconds of output until then
        self.num_samples = 0
        """Number of samples sent so far, at the output rate."""

    def _shape(self, speaking_rate: float, gain_db: float) -> None:
        """Set up the stages between the codec's samples and the encoder."""
        is_stretched = speaking_rate != 1.0
        stretcher = TimeStretcher(speaking_rate, self._codec_rate) if is_stretched else None
        stages = self._trimmer, self._levels, stretcher, self._resampler
        self._stages = [stage for stage in stages if stage is not None]
        self._gain, self._speaking_rate = np.float32(gain_factor(gain_db)), speaking_rate
        is_shaped = bool(self._stages) or self._loudness is not None
        is_plain = not is_shaped and gain_db == 0.0 and self._marker is None
        self.takes_s16 = is_plain and self._encoding in SIXTEEN_BIT
        """Whether the output accepts 16-bit samples: conversion to 16 bits is the only stage."""
        is_costly = self._encoding in COMPRESSED or is_stretched
        self._step = round((COSTLY_PIECE_S if is_costly else PIECE_S) * self._codec_rate)

    def change(self, speaking_rate: float, gain_db: float) -> Iterator[bytes]:
        """Yield what the stages buffer; later samples have another rate and gain."""
        yield from self.flush()
        self._shape(speaking_rate, gain_db)

    def pause(self, seconds: float) -> Iterator[bytes]:
        """Yield what the stages buffer, and silence, which is neither trimmed nor stretched."""
        yield from self.flush()
        yield from self._encode(np.zeros(round(seconds * self._output_rate), dtype=np.float32))
        self._settle()

    def output_time_s(self, spoken_s: float) -> float:
        """Return the time in the output, in seconds, of the time `spoken_s` in the segment."""
        return self._time_s(self._segment_start / self._codec_rate + spoken_s)

    @property
    def end_s(self) -> float:
        """Time in the output, in seconds, of the next sample of speech."""
        return self._time_s(self._num_written / self._codec_rate)

    def _time_s(self, written_s: float) -> float:
        """Return the time in the output of a time since the flush at the codec's rate."""
        num_dropped = 0 if self._trimmer is None else self._trimmer.num_dropped
        kept_s = written_s + (self._num_trimmed - num_dropped) / self._codec_rate
        return self._flushed_s + max(0.0, kept_s) / self._speaking_rate

    @property
    def silent_s(self) -> float:
        """Seconds of trailing silence that will be trimmed if no speech follows."""
        return 0.0 if self._trimmer is None else self._trimmer.num_held_silence / self._codec_rate

    def begin_segment(self) -> None:
        """Begin another segment with the next `write`."""
        self._segment_start = self._num_written
        if self._loudness is not None:
            self._loudness.begin_segment()
        if self._levels is not None:
            self._levels.begin_segment()

    def write(self, samples: np.ndarray) -> Iterator[bytes]:
        """Process float32 [S] at the codec's rate; yield the available bytes.

        The stages may buffer samples. int16 [S], as from `to_s16`, is accepted if `takes_s16`.
        """
        self._num_written += len(samples)
        if samples.dtype == np.int16 and not self.takes_s16:
            raise ValueError("this output requires float samples, not 16-bit ones")
        for start in range(0, len(samples), self._step):
            piece = samples[start : start + self._step]
            loudness = self._loudness
            if loudness is None or loudness.only_measures:
                yield from self._encode(self._shaped(piece) if self._stages else piece)
                if loudness is not None:
                    loudness.process(piece)  # the sound is not late for that
            else:
                yield from self._encode(self._shaped(loudness.process(piece)))

    def _shaped(self, samples: np.ndarray) -> np.ndarray:
        for stage in self._stages:
            samples = stage.process(samples)
        return samples

    def flush(self) -> Iterator[bytes]:
        """Yield the samples that trimming and rate conversion buffer. The stream continues."""
        yield from self._encode(np.concatenate([NO_SAMPLES, *self._tails()]))
        self._settle()

    def drop(self) -> None:
        """Discard the samples that trimming and rate conversion buffer. The stream continues."""
        if self._trimmer is not None:
            self._trimmer.drop()
        for _ in self._tails():
            pass
        self._settle()

    def _settle(self) -> None:
        """Reset the time mapping: no samples are buffered."""
        self._flushed_s = (self.num_samples + self._num_unsent) / self._output_rate
        self._num_written = self._segment_start = 0
        if self._trimmer is not None:
            self._num_trimmed = self._trimmer.num_dropped

    def finish(self) -> Iterator[bytes]:
        """Yield the rest and the container's end."""
        yield from self.flush()
        last = self._encoder.finish()
        if last or self._num_unsent:
            self.num_samples, self._num_unsent = self.num_samples + self._num_unsent, 0
            yield last

    @property
    def header_patches(self) -> tuple[HeaderPatch, ...]:
        """Header corrections for the finished output."""
        return self._encoder.patches

    def _tails(self) -> Iterator[np.ndarray]:
        """Yield the buffered samples of each stage, processed by the later stages."""
        for index, stage in enumerate(self._stages, start=1):
            samples = stage.finish()
            for later in self._stages[index:]:
                samples = later.process(samples)
            yield samples

    def _encode(self, samples: np.ndarray) -> Iterator[bytes]:
        if self._gain != 1.0:
            samples = samples * self._gain
        for start in range(0, len(samples), self._max_piece):
            piece = samples[start : start + self._max_piece]
            self._num_unsent += len(piece)
            if self._marker is not None:
                piece = self._marker.process(piece)
            data = self._encoder.write(piece)
            if data:
                self.num_samples, self._num_unsent = self.num_samples + self._num_unsent, 0
                yield data
