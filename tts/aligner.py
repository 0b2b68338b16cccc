"""`Aligner`: which letter is being spoken in every few milliseconds, from the codes alone.

    codes [T] ─ table ─> [T, table_width] ─ convolutions over codes ─> [T × frames, labels]

Label 0 is silence, 1 … 26 are a to z, 27 is the apostrophe. The letters of a word are spread evenly
over its time, so only where words begin and end is exact; `tts.word_times` finds that. It is small
enough for numpy: a front end needs no torch for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from llm import CheckpointError
from tts.checkpoint import read_json

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
SILENCE = 0
NUM_LABELS = 1 + len(LETTERS)
FOLDER = "aligner"

_LABELS = {letter: label for label, letter in enumerate(LETTERS, start=1)}


def letter_labels(word: str) -> list[int]:
    """Labels of a word's letters; what is neither a letter nor an apostrophe is skipped."""
    return [_LABELS[c] for c in word.lower() if c in _LABELS]


@dataclass(frozen=True, slots=True)
class AlignerConfig:
    """Sizes. A frame is 1 / `frames_per_code` of a code."""

    codebook_size: int
    frames_per_code: int = 4
    table_width: int = 64
    width: int = 192
    layers: int = 3
    kernel: int = 5

    @property
    def widths(self) -> tuple[int, ...]:
        """In and out of every convolution."""
        return (self.table_width, *(self.width,) * self.layers)

    @property
    def reach(self) -> int:
        """How many codes to either side a frame depends on."""
        return self.layers * (self.kernel // 2)

    @classmethod
    def read(cls, path: Path) -> AlignerConfig:
        """From a JSON file. CheckpointError for anything but whole numbers under these names."""
        values = read_json(path)
        known = {field.name for field in fields(cls)}
        if values.keys() != known or any(type(v) is not int or v < 1 for v in values.values()):
            raise CheckpointError(f"{path} must hold whole numbers: {', '.join(sorted(known))}")
        return cls(**values)


class Aligner:
    """The network's weights, float32. Nothing is kept between calls."""

    def __init__(self, config: AlignerConfig, weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self._table = weights["table.weight"]
        # Convolution weights [out, in, kernel] as matrices [kernel × in, out].
        self._layers = [
            (
                weights[f"layers.{i}.weight"].transpose(2, 1, 0).reshape(-1, config.width),
                weights[f"layers.{i}.bias"],
            )
            for i in range(config.layers)
        ]
        self._output = weights["output.weight"].T.copy(), weights["output.bias"]

    @classmethod
    def load(cls, folder: Path) -> Aligner:
        """From `folder`/config.json and model.safetensors. Raises CheckpointError."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        config = AlignerConfig.read(folder / "config.json")
        try:
            weights = load_file(folder / "model.safetensors")
            return cls(config, {name: w.astype(np.float32) for name, w in weights.items()})
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"the aligner in {folder} cannot be read: {error}") from error

    def log_probabilities(self, codes: np.ndarray) -> np.ndarray:
        """int [T] to float32 [T × frames_per_code, NUM_LABELS]; codes beyond the ends are zero."""
        x = self._table[codes]
        for number, (weight, bias) in enumerate(self._layers):
            y = _gelu(self._windows(x) @ weight + bias)
            x = y if number == 0 else x + y
        weight, bias = self._output
        logits = (x @ weight + bias).reshape(-1, NUM_LABELS)
        logits -= logits.max(1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    def _windows(self, x: np.ndarray) -> np.ndarray:
        """[T, C] to [T, kernel × C]: every row with its neighbours."""
        kernel = self.config.kernel
        padded = np.pad(x, ((kernel // 2, kernel // 2), (0, 0)))
        rows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=0)  # [T, C, kernel]
        return rows.transpose(0, 2, 1).reshape(len(x), -1)


def _gelu(x: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, the tanh form."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


class LetterStream:
    """Frames of one segment as its codes come, each computed once its context is there."""

    def __init__(self, aligner: Aligner) -> None:
        self._aligner = aligner
        self._codes: list[int] = []
        self._done = 0  # codes whose frames have been given

    def push(self, codes: tuple[int, ...], *, is_last: bool = False) -> np.ndarray:
        """More codes in; float32 [n, NUM_LABELS] frames out, possibly none."""
        self._codes += codes
        config = self._aligner.config
        ready = len(self._codes) - (0 if is_last else config.reach)
        if ready <= self._done:
            return np.zeros((0, NUM_LABELS), np.float32)
        start = max(0, self._done - config.reach)
        frames = self._aligner.log_probabilities(np.array(self._codes[start:]))
        first, last = ((n - start) * config.frames_per_code for n in (self._done, ready))
        self._done = ready
        return frames[first:last]
