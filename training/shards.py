"""Speech on disk while it is being synthesised: raw int16 samples and one index line per clip.

    NNN.pcm   int16 little-endian, clips one after another, each a whole number of codes long
    NNN.tsv   offset <TAB> samples <TAB> line number <TAB> voice <TAB> sounds of the text
    NNN.phone, NNN.letter   uint8, a label for every 160 samples (see `training.labels`)

    FAILED               the writer has failed: no more will come

Writers append and flush; readers read complete clips.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.labels import FRAME, letter_labels, phone_labels
from training.teacher import SAMPLE_RATE, Utterance

FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Clip:
    """One line spoken by one voice; offset and length in samples within its shard."""

    offset: int
    length: int
    line: int
    voice: int
    sounds: str  # in file format; "": unknown


class ShardWriter:
    """Appends clips, padded to whole codes of `hop` samples."""

    def __init__(self, folder: Path, index: int, hop: int) -> None:
        self.hop, self.offset, self.count = hop, 0, 0
        names = ("pcm", "phone", "letter", "tsv")
        self._files = {name: (folder / f"{index:03d}.{name}").open("wb") for name in names}

    def add(self, spoken: Utterance, line: int, voice: int, sounds: bytes = b"") -> None:
        """Append one clip; `sounds`: of its line (see `training.sounds`)."""
        samples = np.pad(spoken.samples, (0, -len(spoken.samples) % self.hop))
        num_frames = len(samples) // FRAME
        index = f"{self.offset}\t{len(samples)}\t{line}\t{voice}\t{sounds.decode()}\n"
        self._files["pcm"].write(samples.tobytes())
        self._files["phone"].write(phone_labels(spoken.phones, num_frames).tobytes())
        labels = letter_labels(spoken.words, spoken.phones, num_frames)
        self._files["letter"].write(labels.tobytes())
        self._files["tsv"].write(index.encode())
        self.offset += len(samples)
        self.count += 1
        if self.count % 20 == 0:
            for file in self._files.values():  # writes the index last
                file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_clips(folder: Path) -> list[tuple[Path, list[Clip]]]:
    """Return every shard and its clips that are completely on disk."""
    shards = []
    for index in sorted(folder.glob("[0-9]*.tsv")):
        pcm = index.with_suffix(".pcm")
        sizes = [index.with_suffix(f".{name}").stat().st_size for name in ("phone", "letter")]
        available = min(pcm.stat().st_size // 2, *(size * FRAME for size in sizes))
        clips = []
        for line in index.read_text().split("\n")[:-1]:
            parts = line.split("\t")
            if len(parts) != 5:
                continue
            clip = Clip(int(parts[0]), int(parts[1]), int(parts[2]), int(parts[3]), parts[4])
            if clip.offset + clip.length <= available:
                clips.append(clip)
        shards.append((pcm, clips))
    return shards


def hours(folder: Path) -> float:
    """Return the hours of speech on disk."""
    return sum(p.stat().st_size for p in folder.glob("[0-9]*.pcm")) / 2 / SAMPLE_RATE / 3600
