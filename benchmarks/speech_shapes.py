"""Speech checkpoints of published sizes with random weights, for benchmarks of a server.

    a      Llasa: Llama 1B with 193,800 rows, 50 codes a second, XCodec2
    b      Orpheus: Llama 3B, 82 codes a second, SNAC at 24 kHz
    tiny   Orpheus with a few thousand weights, for tests
    voice  the built-in voice

Tokenizers have the published ids and few words: a letter is about one token. The codecs have
the published sizes, the weights random, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shapes import LLASA_1B, ORPHEUS_3B, Shape
from tests.tts.family_checkpoints import write_llasa, write_orpheus

SNAC_24KHZ: Mapping[str, Any] = {"sampling_rate": 24_000, "vq_strides": [4, 2, 1]}
XCODEC2: Mapping[str, Any] = {"model_type": "xcodec2"}
REPLICA_SHARE = 0.9  # streams of each of several replicas, against one engine


@dataclass(frozen=True, slots=True)
class Speaker:
    """Flags of a server of one shape, and its bars on one H200."""

    name: str
    write: Callable[[Path], Path] | None = None  # writes the folder; None: the built-in voice
    max_length: int | None = None  # tokens of one sequence
    streams_bar: int | None = None
    first_audio_bar_ms: float | None = None  # for one stream

    def of_replicas(self, count: int) -> Speaker:
        """Return the shape with the bars of so many GPUs."""
        if self.streams_bar is None or count == 1:
            return self
        return replace(self, streams_bar=round(REPLICA_SHARE * count * self.streams_bar))

    def flags(self, folder: Path) -> list[str]:
        """Return flags of `tts.serve`."""
        if self.write is None:
            return []
        flags = ["--run-model-test-mode", "--model.model-path", str(self.write(folder))]
        return flags if self.max_length is None else [*flags, "--max-length", str(self.max_length)]


def _at_full_size(folder: Path, shape: Shape, codec: Mapping[str, Any]) -> Path:
    """Write a small checkpoint with the sizes of a shape, without weights."""
    path = folder / "config.json"
    settled = {"vocab_size", "eos_token_id", "bos_token_id"}  # set by its tokenizer
    sizes = {key: value for key, value in shape.values.items() if key not in settled}
    path.write_text(json.dumps({**json.loads(path.read_text()), **sizes}), encoding="utf-8")
    (folder / "codec" / "config.json").write_text(json.dumps(dict(codec)), encoding="utf-8")
    (folder / "model.safetensors").unlink()
    return folder


def _write_a(folder: Path) -> Path:
    return _at_full_size(write_llasa(folder / "llasa"), LLASA_1B, XCODEC2)


def _write_b(folder: Path) -> Path:
    return _at_full_size(write_orpheus(folder / "orpheus"), ORPHEUS_3B, SNAC_24KHZ)


def _write_tiny(folder: Path) -> Path:
    return write_orpheus(folder / "tiny")


SPEAKERS = {
    speaker.name: speaker
    for speaker in (
        Speaker("a", _write_a, max_length=1024, streams_bar=600, first_audio_bar_ms=20.0),
        Speaker("b", _write_b, max_length=1280, streams_bar=240, first_audio_bar_ms=35.0),
        Speaker("tiny", _write_tiny, max_length=1280),
        Speaker("voice"),
    )
}
