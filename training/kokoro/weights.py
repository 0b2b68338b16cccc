"""The teacher's weights in one file: int8 with scale and zero point where the graph has them so.

A tensor NAME is stored as NAME alone (float16 or float32) or as NAME (int8 or uint8), NAME:scale
and NAME:zero, both of which broadcast to it. The file is an .npz in an .xz.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Bytes of weights have no structure that a context of neighbours could use.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0, "dict_size": 1 << 22}]
HALF_FROM = 100_000  # values; smaller tensors stay float32


@dataclass(frozen=True, slots=True)
class Quantised:
    """`(values - zero) * scale` is the tensor."""

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray


def pack(tensors: Mapping[str, np.ndarray | Quantised], path: Path) -> None:
    """Write tensors to `path`."""
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Quantised):
            arrays[name] = tensor.values
            arrays[f"{name}:scale"], arrays[f"{name}:zero"] = tensor.scale, tensor.zero
        else:
            arrays[name] = tensor.astype(np.float16 if tensor.size > HALF_FROM else np.float32)
    _write(arrays, path)


def _write(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    plain = io.BytesIO()
    np.savez(plain, allow_pickle=False, **arrays)
    packed = lzma.compress(plain.getvalue(), format=lzma.FORMAT_XZ, filters=FILTERS)
    path.write_bytes(packed)


def _read(path: Path) -> np.lib.npyio.NpzFile:
    return np.load(io.BytesIO(lzma.decompress(path.read_bytes())))


def copy_without(path: Path, drop: Callable[[str], bool], out: Path) -> None:
    """Write a file's tensors but those whose names `drop` is true of."""
    with _read(path) as stored:
        kept = {name: stored[name] for name in stored.files if not drop(name)}
    _write(kept, out)


def unpack(path: Path) -> dict[str, Tensor]:
    """All tensors of a file of `pack`, float32."""
    stored, tensors = _read(path), {}
    for name in stored.files:
        if ":" in name:
            continue
        values = stored[name].astype(np.float32)
        if f"{name}:scale" in stored.files:
            zero = stored[f"{name}:zero"].astype(np.float32)
            values = (values - zero) * stored[f"{name}:scale"]
        tensors[name] = torch.from_numpy(values)
    return tensors
