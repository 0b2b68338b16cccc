"""`Aligner`: network that predicts the spoken letter of each frame from the speech codes.

    codes [T] ─ table ─> [T, table_width] ─ convolutions over codes ─> [T × frames, labels]

Label 0 is silence, 1 … 26 are a to z, also with an accent, 27 is the apostrophe. The letters of a
word are spread evenly over its time, so only the starts and ends of words are exact;
`tts.speech.word_times` finds them.
The network is small enough for numpy, so a front end needs no torch.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from llm import CheckpointError
from tts.checkpoint.files import read_json

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
SILENCE = 0
NUM_LABELS = 1 + len(LETTERS)
FOLDER = "aligner"

_GELU_SCALE = math.sqrt(2 / math.pi)
_LABELS = {letter: label for label, letter in enumerate(LETTERS, start=1)}


def letter_labels(word: str) -> list[int]:
    """Return the labels of a word's letters and apostrophes; other characters are skipped."""
    plain = word if word.isascii() else unicodedata.normalize("NFD", word)
    return [_LABELS[c] for c in plain.lower() if c in _LABELS]


@dataclass(frozen=True, slots=True)
class AlignerConfig:
    """Sizes of the network. A frame is 1 / `frames_per_code` of a code."""

    codebook_size: int
    frames_per_code: int = 4
    table_width: int = 64
    width: int = 192
    layers: int = 3
    kernel: int = 5

    @property
    def widths(self) -> tuple[int, ...]:
        """Input and output widths of the convolutions."""
        return (self.table_width, *(self.width,) * self.layers)

    @classmethod
    def read(cls, path: Path) -> AlignerConfig:
        """Read a JSON file. Raises CheckpointError unless it has exactly these integers."""
        values = read_json(path)
        known = {field.name for field in fields(cls)}
        if values.keys() != known or any(type(v) is not int or v < 1 for v in values.values()):
            raise CheckpointError(f"{path} must hold whole numbers: {', '.join(sorted(known))}")
        return cls(**values)


class Aligner:
    """Network with its float32 weights; stateless."""

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
        """Load `folder`/config.json and model.safetensors. Raises CheckpointError."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        config = AlignerConfig.read(folder / "config.json")
        try:
            weights = load_file(folder / "model.safetensors")
            return cls(config, {name: w.astype(np.float32) for name, w in weights.items()})
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"the aligner in {folder} cannot be read: {error}") from error

    def letters(self, codes: tuple[int, ...]) -> np.ndarray:
        """Return the log-probabilities of a whole segment, float32 [T, NUM_LABELS]."""
        stream = LetterStream(self)
        return np.concatenate([stream.push(codes), stream.push((), is_last=True)])

    @property
    def table(self) -> np.ndarray:
        """Embedding of codes [codebook_size, table_width]."""
        return self._table

    @property
    def num_layers(self) -> int:
        """Number of convolutions."""
        return len(self._layers)

    def convolve(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Map [n + kernel − 1, in] to [n, width]; later layers have a residual connection."""
        weight, bias = self._layers[layer]
        kernel = self.config.kernel
        windows = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=0).transpose(0, 2, 1)
        y = _gelu(_each_row(windows.reshape(len(windows), -1), weight) + bias)
        if layer:
            y += x[kernel // 2 : kernel // 2 + len(y)]
        return y

    def log_probabilities(self, x: np.ndarray) -> np.ndarray:
        """Map [T, width] to log-probabilities, float32 [T × frames_per_code, NUM_LABELS]."""
        weight, bias = self._output
        logits = (_each_row(x, weight) + bias).reshape(-1, NUM_LABELS)
        logits -= logits.max(1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _each_row(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Compute x @ weight row by row.

    A product of several rows may be summed in another order; word times must not depend on the
    number of codes that arrive at once.
    """
    return np.stack([row @ weight for row in x])


def _gelu(x: np.ndarray) -> np.ndarray:
    """Compute GELU in the tanh form (Hendrycks and Gimpel 2016), in place."""
    inner = x * x
    inner *= 0.044715 * _GELU_SCALE
    inner += _GELU_SCALE
    inner *= x
    np.tanh(inner, out=inner)
    inner += 1.0
    x *= 0.5
    x *= inner
    return x


class LetterStream:
    """Incremental evaluation of one segment: each frame is computed once its context has arrived.

    Each layer keeps the inputs of later outputs. The ends are padded with zeros.
    """

    def __init__(self, aligner: Aligner) -> None:
        self._aligner = aligner
        self._edge = aligner.config.kernel // 2
        widths = aligner.config.widths
        self._inputs = [np.zeros((self._edge, width), np.float32) for width in widths[:-1]]

    def push(self, codes: tuple[int, ...], *, is_last: bool = False) -> np.ndarray:
        """Add codes; return the new frames, float32 [n, NUM_LABELS], possibly none."""
        aligner = self._aligner
        x = aligner.table[np.array(codes, np.int64)]
        for layer in range(aligner.num_layers):
            end = [np.zeros((self._edge, x.shape[1]), np.float32)] if is_last else []
            inputs = np.concatenate([self._inputs[layer], x, *end])
            ready = max(0, len(inputs) - 2 * self._edge)
            self._inputs[layer] = inputs[ready:]
            if not ready:
                x = np.zeros((0, aligner.config.width), np.float32)
                continue
            x = aligner.convolve(layer, inputs)
        return aligner.log_probabilities(x) if len(x) else np.zeros((0, NUM_LABELS), np.float32)
