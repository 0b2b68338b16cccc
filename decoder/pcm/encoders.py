"""Streaming encoders behind one interface: float32 samples in, bytes out, nothing seekable.

    write(samples) -> bytes ready now     finish() -> the rest     patches: what a seekable copy
                                                                   may overwrite afterwards

Concatenated output is a valid stream for players. Containers that state their length up front
(WAV, FLAC, MP3's Info frame) can only state it afterwards: `patches` holds those corrections for
callers that have the whole output; `finalize_header` does the same for a file on disk.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO

import numpy as np

from decoder.base import AudioFormatError
from decoder.pcm.formats import BYTES_PER_SAMPLE, AudioEncoding, AudioFormat, encode_samples, to_s16

OUTPUT_RATES = (8_000, 192_000)
OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)
MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)

RATES = {AudioEncoding.OGG_OPUS: OPUS_RATES, AudioEncoding.MP3: MP3_RATES}

WAV_HEADER_BYTES = 44
UNKNOWN_SIZE = 0xFFFFFFFF
FLAC_TOTAL_AT = 18  # of the 8 bytes whose low 36 bits are STREAMINFO's number of samples
FLAC_TOTAL_BITS = 36


@dataclass(frozen=True, slots=True)
class HeaderPatch:
    """Bytes that belong at an offset of the finished output."""

    offset: int
    data: bytes


class AudioEncoder(ABC):
    """Encoder of one stream. The decoded samples do not depend on the division into chunks."""

    @abstractmethod
    def write(self, samples: np.ndarray) -> bytes:
        """Encode mono float32 [S]; return the bytes that are ready, possibly none."""

    @abstractmethod
    def finish(self) -> bytes:
        """Return the last bytes. Nothing can be written afterwards."""

    @property
    def patches(self) -> tuple[HeaderPatch, ...]:
        """Header corrections, known after `finish`."""
        return ()


class RawEncoder(AudioEncoder):
    """Headerless samples."""

    def __init__(self, encoding: AudioEncoding) -> None:
        self._encoding = encoding

    def write(self, samples: np.ndarray) -> bytes:
        return encode_samples(samples, self._encoding)

    def finish(self) -> bytes:
        return b""


class WavEncoder(AudioEncoder):
    """RIFF WAVE, 16-bit mono: the header is part of the first output, sizes "unknown"."""

    def __init__(self, sample_rate: int) -> None:
        self._header = wav_header(sample_rate)
        self._num_bytes = 0

    def write(self, samples: np.ndarray) -> bytes:
        header, self._header = self._header, b""
        data = to_s16(samples).tobytes()
        self._num_bytes += len(data)
        return header + data

    def finish(self) -> bytes:
        header, self._header = self._header, b""
        return header

    @property
    def patches(self) -> tuple[HeaderPatch, ...]:
        return wav_size_patches(self._num_bytes)


class SoundFileEncoder(AudioEncoder):
    """FLAC, Ogg Opus or MP3 by libsndfile, which writes into memory.

    These formats require samples: a stream without samples gets a single silent one.
    """

    def __init__(self, encoding: AudioEncoding, sample_rate: int) -> None:
        import soundfile

        self._sink = _DrainedSink()
        self._is_integer = encoding is AudioEncoding.FLAC
        self._is_empty = True
        container, subtype = CONTAINERS[encoding]
        try:
            self._file = soundfile.SoundFile(
                self._sink,
                "w",
                samplerate=sample_rate,
                channels=1,
                format=container,
                subtype=subtype,
                **_WRITER_OPTIONS[encoding],
            )
        except soundfile.LibsndfileError as error:
            raise AudioFormatError(
                f"{encoding.value} cannot be written at {sample_rate} Hz: {error.error_string}"
            ) from error
        if encoding is AudioEncoding.OGG_OPUS:
            _set_page_latency(soundfile, self._file)

    def write(self, samples: np.ndarray) -> bytes:
        self._is_empty = self._is_empty and not len(samples)
        # FLAC gets exactly the 16-bit samples of the other encodings, not libsndfile's rounding.
        if self._is_integer:
            self._file.write(to_s16(samples))
        else:
            self._file.write(np.clip(np.nan_to_num(samples), -1.0, 1.0).astype(np.float32))
        return self._sink.drain()

    def finish(self) -> bytes:
        head = self.write(np.zeros(1, dtype=np.float32)) if self._is_empty else b""
        self._file.close()
        return head + self._sink.drain()

    @property
    def patches(self) -> tuple[HeaderPatch, ...]:
        return tuple(self._sink.patches) if self._file.closed else ()


CONTAINERS = {
    AudioEncoding.FLAC: ("FLAC", "PCM_16"),
    AudioEncoding.OGG_OPUS: ("OGG", "OPUS"),
    AudioEncoding.MP3: ("MP3", "MPEG_LAYER_III"),
}

_WRITER_OPTIONS: dict[AudioEncoding, dict[str, float | str]] = {
    # Levels up to 2 of 8 use short blocks (1,152 samples), so the first bytes leave early.
    AudioEncoding.FLAC: {"compression_level": 0.25},
    AudioEncoding.OGG_OPUS: {},
    # A stream has no Info frame with its length; players can only compute it from a constant bit
    # rate.
    AudioEncoding.MP3: {"compression_level": 0.5, "bitrate_mode": "CONSTANT"},
}

_SFC_SET_OGG_PAGE_LATENCY_MS = 0x1302
OPUS_PAGE_MS = 100.0


def _set_page_latency(soundfile: object, file: object) -> None:
    """Set Ogg pages of 100 ms instead of a second, if this soundfile gives access to libsndfile.

    There is no public call for the command (libsndfile's SFC_SET_OGG_PAGE_LATENCY_MS); without it
    the stream is valid, but its first bytes are available later.
    """
    ffi, library = getattr(soundfile, "_ffi", None), getattr(soundfile, "_snd", None)
    handle = getattr(file, "_file", None)
    if ffi is None or library is None or handle is None:
        return
    value = ffi.new("double[1]", [OPUS_PAGE_MS])
    library.sf_command(handle, _SFC_SET_OGG_PAGE_LATENCY_MS, value, ffi.sizeof(value))


class _DrainedSink:
    """A file object whose bytes are removed as they are written.

    Seeking back and writing there, as encoders do when they close, becomes a patch.
    """

    def __init__(self) -> None:
        self.patches: list[HeaderPatch] = []
        self._new = bytearray()
        self._length = self._position = 0

    def drain(self) -> bytes:
        """Return the bytes that were appended since the last call."""
        taken = bytes(self._new)
        self._new.clear()
        return taken

    def write(self, data: bytes) -> int:
        if self._position == self._length:
            self._new += data
            self._length += len(data)
        else:
            self.patches.append(HeaderPatch(self._position, bytes(data)))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._length)[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        return b""

    def flush(self) -> None:
        pass


@cache
def supported_encodings() -> tuple[AudioEncoding, ...]:
    """Return the encodings of this build: containers depend on how libsndfile was built."""
    import soundfile

    return tuple(
        encoding
        for encoding in AudioEncoding
        if encoding not in CONTAINERS or soundfile.check_format(*CONTAINERS[encoding])
    )


def check_output_format(audio_format: AudioFormat) -> None:
    """Raise AudioFormatError, with the supported values, when the format cannot be written."""
    encoding, rate = audio_format.encoding, audio_format.sample_rate
    if encoding not in supported_encodings():
        raise AudioFormatError(f"this build cannot write {encoding.value}")
    if audio_format.channels != 1:
        raise AudioFormatError(f"output is mono, not {audio_format.channels} channels")
    low, high = OUTPUT_RATES
    if not low <= rate <= high:
        raise AudioFormatError(f"sample rate {rate} Hz is outside {low}..{high} Hz")
    rates = RATES.get(encoding)
    if rates and rate not in rates:
        listed = ", ".join(map(str, rates))
        raise AudioFormatError(f"{encoding.value} has no {rate} Hz; choose one of {listed}")


def nearest_rate(encoding: AudioEncoding, rate: int) -> int:
    """Return the rate itself if the encoding supports it, else the next higher one (or the
    highest).
    """
    rates = RATES.get(encoding, (rate,))
    return min((r for r in rates if r >= rate), default=rates[-1])


def create_encoder(audio_format: AudioFormat) -> AudioEncoder:
    """Return the encoder of a format; raises AudioFormatError as `check_output_format` does."""
    check_output_format(audio_format)
    encoding = audio_format.encoding
    if encoding in BYTES_PER_SAMPLE:
        return RawEncoder(encoding)
    if encoding is AudioEncoding.WAV:
        return WavEncoder(audio_format.sample_rate)
    return SoundFileEncoder(encoding, audio_format.sample_rate)


def wav_header(sample_rate: int, num_bytes: int = UNKNOWN_SIZE) -> bytes:
    """Return the 44 bytes before 16-bit mono samples; sizes of 0xFFFFFFFF mean "until the end"."""
    riff_size = min(num_bytes + WAV_HEADER_BYTES - 8, UNKNOWN_SIZE)
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    data = struct.pack("<4sI", b"data", min(num_bytes, UNKNOWN_SIZE))
    return struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE") + fmt + data


def wav_size_patches(num_bytes: int) -> tuple[HeaderPatch, ...]:
    """Return the two sizes of a WAV file with this many bytes of samples."""
    header = wav_header(8_000, num_bytes)
    return HeaderPatch(4, header[4:8]), HeaderPatch(40, header[40:44])


def apply_patches(output: bytes, patches: Iterable[HeaderPatch]) -> bytes:
    """Return the whole output of an encoder with its header corrected."""
    patched = bytearray(output)
    for patch in patches:
        patched[patch.offset : patch.offset + len(patch.data)] = patch.data
    return bytes(patched)


def finalize_wav_header(file: BinaryIO) -> None:
    """Write the true sizes into a streamed WAV file (open for reading and writing)."""
    _check_magic(file, b"RIFF")
    end = file.seek(0, 2)
    _patch_file(file, wav_size_patches(max(0, end - WAV_HEADER_BYTES)))


def finalize_header(file: BinaryIO, num_samples: int) -> None:
    """Write the length into the header of a streamed audio file on disk, for any container.

    `num_samples` is the number of its samples. Files of formats without a length are unchanged.
    """
    file.seek(0)
    magic = file.read(4)
    if magic == b"RIFF":
        finalize_wav_header(file)
    elif magic == b"fLaC" and num_samples < 1 << FLAC_TOTAL_BITS:
        file.seek(FLAC_TOTAL_AT)
        fields = int.from_bytes(file.read(8), "big") >> FLAC_TOTAL_BITS << FLAC_TOTAL_BITS
        total = (fields | num_samples).to_bytes(8, "big")
        _patch_file(file, (HeaderPatch(FLAC_TOTAL_AT, total),))


def _check_magic(file: BinaryIO, magic: bytes) -> None:
    file.seek(0)
    if file.read(len(magic)) != magic:
        raise AudioFormatError(f"not a {magic.decode()} file")


def _patch_file(file: BinaryIO, patches: Iterable[HeaderPatch]) -> None:
    for patch in patches:
        file.seek(patch.offset)
        file.write(patch.data)
    file.seek(0, 2)
