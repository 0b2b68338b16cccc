"""Files of a book: audio that is joined piece by piece, their names, and the playlist.

float32 samples, silence ─▶ trimming ─▶ sample rate ─▶ encoder ─▶ temporary file ─▶ its place
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from decoder import (
    AudioEncoding,
    AudioFormat,
    AudioFormatError,
    Resampler,
    SilenceTrimmer,
    check_output_format,
    create_encoder,
    nearest_rate,
)
from tts.api.suffixes import SUFFIXES
from tts.cli.book.chapters import Book, Piece
from tts.cli.book.work_folder import WorkFolder
from tts.cli.options import SayOptions, UsageError
from tts.cli.timestamps import SegmentTimes, write_timestamps

S16_SCALE = np.float32(32767.0)  # rounding restores the 16-bit samples exactly
QUOTED = 30  # characters of a piece in a warning
NAME_BYTES = 120  # of a chapter's title in its file's name
MAX_FILES = 1000
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]+')  # in file names of one system or another
SUFFIX_OF = {encoding: suffix for suffix, encoding in SUFFIXES.items()}


@dataclass(frozen=True, slots=True)
class BookFile:
    """An audio file to write, and the pieces that it holds, by their numbers in the book."""

    path: Path
    title: str
    pieces: tuple[tuple[int, Piece], ...]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that is complete, its length, and warnings about its pieces."""

    file: BookFile
    seconds: float
    warnings: tuple[str, ...]


def files_of(book: Book, options: SayOptions) -> tuple[BookFile, ...]:
    """Return one file, or one for each chapter in a folder. Raises UsageError for too many."""
    numbered = tuple(enumerate(book.pieces))
    target = Path(options.output).resolve()
    if not options.is_folder:
        return (BookFile(target, "", numbered),)
    if len(book.chapters) > MAX_FILES:
        raise UsageError(
            f"the text has {len(book.chapters)} chapters, and a folder at most {MAX_FILES} files; "
            "use -o FILE"
        )
    files, start = [], 0
    digits = max(2, len(str(len(book.chapters))))
    for number, chapter in enumerate(book.chapters, start=1):
        end = start + len(chapter.pieces)
        name = f"{number:0{digits}} {safe_name(chapter.title)}".strip()
        path = target / f"{name}{SUFFIX_OF[options.encoding]}"
        files.append(BookFile(path, chapter.title, numbered[start:end]))
        start = end
    return tuple(files)


def safe_name(title: str) -> str:
    """Return a title as part of a file name on any system."""
    name = " ".join(_FORBIDDEN.sub(" ", title).split())
    return name.encode()[:NAME_BYTES].decode(errors="ignore").rstrip(". ")


def write_playlist(folder: Path, written: Sequence[WrittenFile]) -> None:
    """Write a playlist of the files in a folder, named as the folder."""
    path = folder / f"{safe_name(folder.name) or 'book'}.m3u8"
    lines = ["#EXTM3U"]
    for one in written:
        lines += [f"#EXTINF:{round(one.seconds)},{one.file.title}", one.file.path.name]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def check_format(options: SayOptions) -> None:
    """Raise UsageError for a sample rate that the format does not have."""
    if not options.sample_rate:
        return
    try:
        check_output_format(AudioFormat(AudioEncoding(options.encoding), options.sample_rate))
    except AudioFormatError as error:
        raise UsageError(f"--format, --sample-rate: {error}") from error


class AudioWriter:
    """Writes one audio file. Its samples do not depend on where they were cut."""

    def __init__(
        self, file: BinaryIO, encoding: str, sample_rate: int, *, trim_silence: bool
    ) -> None:
        """Begin a file; `sample_rate` in Hz is that of the samples."""
        self._file, self.sample_rate = file, sample_rate
        kind = AudioEncoding(encoding)
        rate = nearest_rate(kind, sample_rate)
        self._trimmer = SilenceTrimmer(sample_rate) if trim_silence else None
        self._resampler = Resampler(sample_rate, rate)
        self._encoder = create_encoder(AudioFormat(kind, rate))
        self._num_samples = 0

    @property
    def seconds(self) -> float:
        """Seconds written so far, before anything is trimmed."""
        return self._num_samples / self.sample_rate

    @property
    def trimmed_s(self) -> float:
        """Seconds of silence that were left out, at the beginning until `finish`."""
        return 0.0 if self._trimmer is None else self._trimmer.num_dropped / self.sample_rate

    def write(self, samples: np.ndarray) -> None:
        """Append float32 [S]."""
        self._num_samples += len(samples)
        kept = samples if self._trimmer is None else self._trimmer.process(samples)
        self._encode(self._resampler.process(kept))

    def pause(self, seconds: float) -> None:
        """Append exact silence."""
        self.write(np.zeros(round(seconds * self.sample_rate), dtype=np.float32))

    def finish(self) -> float:
        """Write the rest; return the seconds that are in the file."""
        if self._trimmer is not None:
            self._encode(self._resampler.process(self._trimmer.finish()))
        self._encode(self._resampler.finish())
        self._file.write(self._encoder.finish())
        for patch in self._encoder.patches:
            self._file.seek(patch.offset)
            self._file.write(patch.data)
        return self.seconds - self.trimmed_s

    def _encode(self, samples: np.ndarray) -> None:
        self._file.write(self._encoder.write(samples))


class Joiner:
    """Joins pieces of the work folder into an audio file and its times. Used by one thread."""

    def __init__(self, file: BookFile, text: str, options: SayOptions, work: WorkFolder) -> None:
        self._target, self._text, self._options, self._work = file, text, options, work
        self._temporary = work.output(file.path.suffix)
        self._file = self._temporary.open("w+b")
        self._writer: AudioWriter | None = None
        self._times = SegmentTimes()
        self._warnings: list[str] = []

    def append(self, index: int, piece: Piece, key: str) -> None:
        """Append a stored piece and the silence after it. Raises UsageError if it is gone."""
        options, found = self._options, self._work.load(index, key)
        if found is None:
            raise UsageError(f"piece {index} in {self._work.path} has changed; use --resume again")
        record, data = found
        if self._writer is None:
            self._writer = AudioWriter(
                self._file, options.encoding, record.sample_rate, trim_silence=options.trim_silence
            )
        if record.sample_rate != self._writer.sample_rate:
            raise UsageError(
                f"{self._work.path} has pieces at {self._writer.sample_rate} and at "
                f"{record.sample_rate} Hz: the model has changed; begin again with --restart"
            )
        self._times.extend(record.segments, record.words, self._writer.seconds, piece.start)
        self._writer.write(samples_of(data, options.encoding))
        self._writer.pause(piece.pause_s)
        start = " ".join(self._text[piece.start : piece.end].split())[:QUOTED]
        self._warnings += (f'"{start}…": {warning}' for warning in record.warnings)

    def finish(self) -> WrittenFile:
        """Complete the audio, move it to its place, and write its times."""
        assert self._writer is not None
        moved = SegmentTimes()
        moved.extend(self._times.segments(), self._times.words(), -self._writer.trimmed_s, 0)
        seconds = self._writer.finish()
        self._file.close()
        path, times = self._target.path, self._options.timestamps
        os.replace(self._temporary, path)
        if times is not None:
            if self._options.is_folder:
                times = path.with_suffix(times.suffix)
            write_timestamps(times, moved, self._text, by_word=self._options.word_timestamps)
        return WrittenFile(self._target, seconds, tuple(self._warnings))

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()


def samples_of(data: bytes, encoding: str) -> np.ndarray:
    """Return the samples of a piece as float32 [S]: those of f32le, else those of s16le."""
    if encoding == AudioEncoding.PCM_F32LE.value:
        return np.frombuffer(data, dtype="<f4")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / S16_SCALE


def raw_encoding(encoding: str) -> str:
    """Return the encoding of the pieces for an output in this encoding."""
    return encoding if encoding == AudioEncoding.PCM_F32LE.value else AudioEncoding.PCM_S16LE.value
