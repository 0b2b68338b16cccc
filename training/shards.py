"""Speech on disk while it is being synthesised: raw int16 samples and one index line a clip.

    NNN.pcm   int16 little-endian, clips one after another, each a whole number of codes long
    NNN.tsv   offset <TAB> samples <TAB> line number <TAB> voice <TAB> phones as text

Writers append and flush; readers take what is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16_000


@dataclass(frozen=True, slots=True)
class Clip:
    """One line spoken by one voice; offset and length in samples within its shard."""

    offset: int
    length: int
    line: int
    voice: int
    phones: str


class ShardWriter:
    """Appends clips, padded to whole codes of `hop` samples."""

    def __init__(self, folder: Path, index: int, hop: int) -> None:
        self.hop, self.offset, self.count = hop, 0, 0
        self._pcm = open(folder / f"{index:03d}.pcm", "wb")  # noqa: SIM115 (closed in close)
        self._index = open(folder / f"{index:03d}.tsv", "w")  # noqa: SIM115

    def add(self, samples: np.ndarray, line: int, voice: int, phones: str) -> None:
        padded = np.pad(samples, (0, -len(samples) % self.hop))
        self._pcm.write(padded.tobytes())
        self._index.write(f"{self.offset}\t{len(padded)}\t{line}\t{voice}\t{phones}\n")
        self.offset += len(padded)
        self.count += 1
        if self.count % 20 == 0:
            self._pcm.flush()
            self._index.flush()

    def close(self) -> None:
        self._pcm.close()
        self._index.close()


def read_clips(folder: Path) -> list[tuple[Path, list[Clip]]]:
    """Every shard and its clips that are wholly on disk."""
    shards = []
    for index in sorted(folder.glob("[0-9]*.tsv")):
        pcm = index.with_suffix(".pcm")
        available = pcm.stat().st_size // 2
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
    """Hours of speech on disk."""
    return sum(p.stat().st_size for p in folder.glob("[0-9]*.pcm")) / 2 / SAMPLE_RATE / 3600
