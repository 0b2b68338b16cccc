"""The way of one stream's audio out.

codec samples → steady loudness → trimmed silence → speaking rate → sample rate → gain → bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from decoder import (
    AudioEncoding,
    AudioFormat,
    HeaderPatch,
    LoudnessKeeper,
    Resampler,
    SilenceTrimmer,
    TimeStretcher,
    create_encoder,
    gain_factor,
)

MAX_PIECE_BYTES = 48 * 1024  # one message on the wire stays below 64 KiB
COSTLY_PIECE_S = 0.5  # compressing this much takes some 20 ms
PIECE_S = 4.0
SIXTEEN_BIT = (AudioEncoding.PCM_S16LE, AudioEncoding.WAV)
COMPRESSED = (AudioEncoding.FLAC, AudioEncoding.OGG_OPUS, AudioEncoding.MP3)


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """Bytes to send, and which samples went into the encoder for them."""

    data: bytes
    first_sample: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class AudioShape:
    """What is done to the samples on their way out."""

    speaking_rate: float = 1.0
    gain_db: float = 0.0
    trim_silence: bool = False  # at the ends of an utterance
    steady_loudness: bool = False  # later segments come to the level of the first


class AudioOutput:
    """Turns mono float32 at the codec's rate into the bytes a client asked for, as it comes.

    The methods give pieces one by one, each a short piece of work; pieces not asked for are not
    made. `flush` lets go of what is held back, so that an utterance is sent to its
    end; `drop` forgets it. Neither clicks between utterances: speech ends in silence.
    """

    def __init__(self, codec_rate: int, audio_format: AudioFormat, shape: AudioShape) -> None:
        self._codec_rate = codec_rate
        self._loudness = LoudnessKeeper(codec_rate) if shape.steady_loudness else None
        self._trimmer = SilenceTrimmer(codec_rate) if shape.trim_silence else None
        self._stretcher = TimeStretcher(shape.speaking_rate, codec_rate)
        self._resampler = Resampler(codec_rate, audio_format.sample_rate)
        self._gain = np.float32(gain_factor(shape.gain_db))
        self._encoder = create_encoder(audio_format)
        self._takes_s16 = (
            shape == AudioShape()
            and audio_format.sample_rate == codec_rate
            and audio_format.encoding in SIXTEEN_BIT
        )
        is_costly = audio_format.encoding in COMPRESSED or shape.speaking_rate != 1.0
        self._step = round((COSTLY_PIECE_S if is_costly else PIECE_S) * codec_rate)
        sample_bytes = 4 if audio_format.encoding is AudioEncoding.PCM_F32LE else 2
        self._max_piece = MAX_PIECE_BYTES // sample_bytes
        self._speaking_rate = shape.speaking_rate
        self._output_rate = audio_format.sample_rate
        self._num_unsent = 0  # samples in the encoder since it last gave bytes
        self._num_written = self._segment_start = 0  # at the codec's rate, since the last flush
        self._num_trimmed = 0  # until then
        self._flushed_s = 0.0  # of output until then
        self.num_samples = 0
        """Samples sent so far, at the output rate."""

    def heard_s(self, spoken_s: float) -> float:
        """When what is `spoken_s` into the segment is heard: seconds from the output's start."""
        start = self._segment_start + self._num_trimmed
        if self._trimmer is not None:
            start -= self._trimmer.num_dropped
        since_flush_s = max(0.0, start / self._codec_rate + spoken_s)
        return self._flushed_s + since_flush_s / self._speaking_rate

    @property
    def silent_s(self) -> float:
        """Silence at the end of what was written that is cut off if nothing follows, seconds."""
        return 0.0 if self._trimmer is None else self._trimmer.num_doubtful / self._codec_rate

    def begin_segment(self) -> None:
        """What is written now is another segment."""
        self._segment_start = self._num_written
        if self._loudness is not None:
            self._loudness.begin_segment()

    @property
    def takes_s16(self) -> bool:
        """Whether samples only have to be 16-bit: nothing else is done to them."""
        return self._takes_s16

    def write(self, samples: np.ndarray) -> Iterator[EncodedAudio]:
        """Send on float32 [S] at the codec's rate; what comes out may lag behind a little.

        int16 [S], as `to_s16` makes them, where the output takes that.
        """
        self._num_written += len(samples)
        is_s16 = samples.dtype == np.int16
        if is_s16 and not self._takes_s16:
            raise ValueError("this output does more to its samples than 16-bit ones allow")
        for start in range(0, len(samples), self._step):
            piece = samples[start : start + self._step]
            yield from self._encode(piece) if is_s16 else self._encode_floats(piece)

    def _shaped(self, samples: np.ndarray) -> np.ndarray:
        if self._loudness is not None:
            samples = self._loudness.process(samples)
        return samples if self._trimmer is None else self._trimmer.process(samples)

    def flush(self) -> Iterator[EncodedAudio]:
        """Send what trimming and rate conversion hold back. The stream goes on."""
        yield from self._encode_parts(self._tails())
        self._settle()

    def drop(self) -> None:
        """Forget what trimming and rate conversion hold back. The stream goes on."""
        if self._trimmer is not None:
            self._trimmer.drop()
        for _ in self._tails():
            pass
        self._settle()

    def _settle(self) -> None:
        """Nothing is held back any more: what is written next is heard next."""
        self._flushed_s = (self.num_samples + self._num_unsent) / self._output_rate
        self._num_written = self._segment_start = 0
        if self._trimmer is not None:
            self._num_trimmed = self._trimmer.num_dropped

    def finish(self) -> Iterator[EncodedAudio]:
        """Send the rest, and the container's end."""
        yield from self.flush()
        last = self._encoder.finish()
        if last or self._num_unsent:
            yield self._sent(last)

    @property
    def header_patches(self) -> tuple[HeaderPatch, ...]:
        """Header corrections for the finished output."""
        return self._encoder.patches

    def _tails(self) -> Iterator[np.ndarray]:
        if self._trimmer is not None:
            yield self._resampler.process(self._stretcher.process(self._trimmer.finish()))
        yield self._resampler.process(self._stretcher.finish())
        yield self._resampler.finish()

    def _encode_floats(self, samples: np.ndarray) -> Iterator[EncodedAudio]:
        stretched = self._stretcher.process(self._shaped(samples))
        return self._encode_parts([self._resampler.process(stretched)])

    def _encode_parts(self, parts: Iterable[np.ndarray]) -> Iterator[EncodedAudio]:
        samples = np.concatenate([np.zeros(0, dtype=np.float32), *parts])
        return self._encode(samples if self._gain == 1.0 else samples * self._gain)

    def _encode(self, samples: np.ndarray) -> Iterator[EncodedAudio]:
        for start in range(0, len(samples), self._max_piece):
            piece = samples[start : start + self._max_piece]
            self._num_unsent += len(piece)
            data = self._encoder.write(piece)
            if data:
                yield self._sent(data)

    def _sent(self, data: bytes) -> EncodedAudio:
        audio = EncodedAudio(data, self.num_samples, self._num_unsent)
        self.num_samples += self._num_unsent
        self._num_unsent = 0
        return audio
