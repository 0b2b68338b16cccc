"""Checkpoints whose weights are PyTorch pickles: read only if the configuration allows it.

PyTorch's restricted unpickler only returns tensors and runs no code from the file.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llm.errors import CheckpointError
from llm.models.gguf import SUFFIX, GGUFWeights
from llm.models.packed_weights import unpacked
from llm.models.weights import (
    SafetensorsWeights,
    TensorInfo,
    Weights,
    WeightsFormat,
    index_files,
    weight_files,
)

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLE_NAME = "pytorch_model.bin"

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def find_weights(
    folder: Path | str, files: Sequence[Path] = (), *, allow_pickle: bool = False
) -> Weights:
    """Return the weights in `files`; without any, the folder's safetensors, else its only GGUF
    file, else its pickles. Four-bit matrices are as `packed_weights` reads them.

    Raises `CheckpointError` when there are none, or pickles only and they are not allowed.
    """
    folder = Path(folder)
    path = gguf_file(folder, files)
    if path is not None:
        return GGUFWeights(path)
    return unpacked(_find_tensors(folder, files, allow_pickle=allow_pickle), folder)


def gguf_file(folder: Path, files: Sequence[Path] = ()) -> Path | None:
    """Return the GGUF file among `files`; without any, the folder's, if it has no safetensors.

    Raises `CheckpointError` for several.
    """
    has_tensors = not files and any(folder.glob("*.safetensors"))
    found = [] if has_tensors else [p for p in files or folder.glob("*.gguf") if p.suffix == SUFFIX]
    if found and (len(found) != 1 or len(files) > 1):
        raise CheckpointError(f"{len(found)} GGUF files for one model: {folder}; one is read")
    return found[0] if found else None


def _find_tensors(folder: Path, files: Sequence[Path], *, allow_pickle: bool) -> Weights:
    pickles = [path for path in files or pickle_files(folder) if path.suffix in PICKLE_SUFFIXES]
    if not pickles or (not files and any(folder.glob("*.safetensors"))):
        return SafetensorsWeights(files or weight_files(folder))
    if not allow_pickle:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which may hold code; use safetensors, or allow it with "
            "allow_pickle (--allow-pickle)"
        )
    return PickleWeights(pickles)


def pickle_files(folder: Path) -> list[Path]:
    """Return the pickles that transformers would read; [] when there are none."""
    index = folder / PICKLE_INDEX_NAME
    if index.is_file():
        return index_files(index)
    return [folder / PICKLE_NAME] if (folder / PICKLE_NAME).is_file() else []


class PickleWeights(Weights):
    """The tensors of `torch.save` files, mapped into memory."""

    format = WeightsFormat.PICKLE

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open the files. Raises `CheckpointError` naming the file and the problem."""
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            self._tensors |= _read(path)

    def info(self) -> Mapping[str, TensorInfo]:
        """See `Weights`."""
        return {
            name: TensorInfo(_DTYPE_NAMES.get(tensor.dtype, "U8"), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        """See `Weights`."""
        if name not in self._tensors:
            raise CheckpointError(f"tensor '{name}' is missing from the checkpoint")
        return self._tensors[name]

    def close(self) -> None:
        """See `Weights`."""
        self._tensors.clear()


def _read(path: Path) -> dict[str, Tensor]:
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before 1.6 cannot be mapped
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"cannot read {path}: {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no table of tensors")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
