"""Checkpoint tensors by name: safetensors files, and a check that a model reads all names.

Format of a file: 8 bytes little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.errors import CheckpointError
from llm.layers.groups import Groups
from llm.layers.weight import LinearWeight, WeightSource
from llm.models.hf_config import HuggingFaceConfig
from llm.parallel.shard import Part

if TYPE_CHECKING:
    from torch import Tensor

INDEX_SUFFIX = ".index.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # limit of the format


class WeightsFormat(Enum):
    """File format of weights."""

    SAFETENSORS = "safetensors"
    PICKLE = "pickle"  # of torch.save
    GGUF = "gguf"


WeightsAdapter = Callable[[str], str]
"""Function from the name in the checkpoint to the name that the model uses."""

_NO_HEADER = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)

_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header entry of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.num_values * _DTYPE_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


class Weights(ABC):
    """A source of tensors by name."""

    format: WeightsFormat

    @abstractmethod
    def info(self) -> Mapping[str, TensorInfo]:
        """Return the entries of all tensors, without their data."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Return one tensor, on the CPU. Raises `CheckpointError` naming it when there is none."""

    def shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Like `tensor`, with the expected shape, which the caller checks."""
        return self.tensor(name)

    def part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """Return a part of a tensor of this shape, which the caller has checked.

        Formats that cannot be read in parts are read whole.
        """
        return self.shaped(name, shape)[part.slices].clone()

    def packed_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the matrices that `groups` can return, in memory, by name."""
        return {}

    def groups(self, name: str) -> Groups | None:
        """Return a matrix as it is stored, in groups; None if it must be expanded (`tensor`)."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close the files; tensors read before stay valid."""


class SafetensorsWeights(Weights):
    """The tensors of safetensors files; each is read when it is requested."""

    format = WeightsFormat.SAFETENSORS

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the headers. Raises `CheckpointError` naming the file and the problem."""
        self._home: dict[str, Path] = {}
        self._info: dict[str, TensorInfo] = {}
        self._open: dict[Path, Any] = {}
        for path in paths:
            for name, info in read_header(path).items():
                if name in self._home:
                    raise CheckpointError(f"{name} is in {self._home[name]} and in {path}")
                self._home[name] = path
                self._info[name] = info

    @classmethod
    def find(cls, folder: Path | str, files: Sequence[Path] = ()) -> SafetensorsWeights:
        """Open `files`; without any, the folder's (see `weight_files`)."""
        return cls(files or weight_files(Path(folder)))

    def info(self) -> Mapping[str, TensorInfo]:
        """See `Weights`."""
        return self._info

    def close(self) -> None:
        """See `Weights`."""
        self._open.clear()

    def tensor(self, name: str) -> Tensor:
        """See `Weights`."""
        return self._read(name, lambda file: file.get_tensor(name))

    def part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """See `Weights`: only the part's bytes are read."""
        return self._read(name, lambda file: file.get_slice(name)[part.slices])

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._home.get(name)
        if path is None:
            raise CheckpointError(f"tensor '{name}' is missing from the checkpoint")
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return read(self._open[path])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read '{name}' of {path}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    They are those that config.json names (`transformers_weights`), those of its index,
    model.safetensors, or the only one. Raises `CheckpointError` when there are none.
    """
    named = _named_in_config(folder)
    if named is not None:
        return index_files(named) if named.name.endswith(INDEX_SUFFIX) else [named]
    index = folder / INDEX_NAME
    if index.is_file():
        return index_files(index)
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}, "
            f"and {len(found)} other *.safetensors files instead of one"
        )
    return found


def _named_in_config(folder: Path) -> Path | None:
    """Return the weights file or index that config.json names, in repositories with other weights
    under the usual names.
    """
    if not (folder / "config.json").is_file():
        return None
    name = HuggingFaceConfig.read(folder).get("transformers_weights")
    if name is None:
        return None
    path = folder / str(name)
    if path.parent != folder or not path.is_file():
        raise CheckpointError(f"{folder}/config.json: there is no transformers_weights={name!r}")
    return path


def index_files(index: Path) -> list[Path]:
    """Return the files that an index names. Raises `CheckpointError` for a missing file, and for
    one that is not in the index's folder.
    """
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        other = next((name for name in names if Path(name).name != name), None)
        if other is not None:
            raise ValueError(f"{other!r} is not the name of a file in its folder")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {index}: {error!r}") from error
    paths = [index.parent / name for name in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, which {index.name} names")
    return paths


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return names, types and shapes of one file, without its data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        return {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except _NO_HEADER as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def _other_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> CheckpointError:
    return CheckpointError(f"tensor '{name}' is {list(found)}, not {list(expected)}")


class WeightReader:
    """Returns tensors to a model by the names it uses, and checks that none is left over."""

    def __init__(
        self, weights: Weights, adapter: WeightsAdapter | None = None, *, is_packed: bool = False
    ) -> None:
        """With `is_packed` matrices stay in groups if they are stored so."""
        rename = adapter or (lambda name: name)
        self._weights = weights
        self._is_packed = is_packed
        self._sources = {rename(name): name for name in weights.info()}
        self._unread = set(self._sources)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._sources

    def tensor(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        """Return a tensor of this shape, or a part of it. Raises `CheckpointError` naming it when
        missing or different.
        """
        self._unread.discard(name)
        source, expected = self._sources.get(name, name), shape
        if part is None:
            tensor = self._weights.shaped(source, shape)
        else:
            info = self._weights.info().get(source)
            if info is not None and info.shape != shape:
                raise _other_shape(name, info.shape, shape)
            tensor, expected = self._weights.part(source, shape, part), part.shape(shape)
        if tuple(tensor.shape) != expected:
            raise _other_shape(name, tensor.shape, expected)
        return tensor

    def matrix(
        self, name: str, *shape: int, has_bias: bool = False, part: Part | None = None
    ) -> LinearWeight:
        """Return `NAME.weight`, with `NAME.weight_scale` [out, 1] if the tensor is int8 or float8,
        and `NAME.bias` [out] if the architecture has one.

        With a part of the rows, scales and bias are those of the rows. With a part of the columns,
        the first part has the bias, which is added once when the parts' products are summed.
        """
        groups = self._groups(f"{name}.weight", shape, part) if self._is_packed else None
        if groups is None:
            values = self.tensor(f"{name}.weight", *shape, part=part)
        else:
            values = groups.values
        by_row = part if part is not None and part.dim == 0 else None
        scales = bias = None
        if values.dtype.itemsize == 1 and groups is None:
            stored = self.tensor(f"{name}.weight_scale", shape[0], 1, part=by_row)
            scales = stored.flatten().float()
        if has_bias:
            bias = self.tensor(f"{name}.bias", shape[0], part=by_row)
            if part is not None and part.dim == 1 and part.start > 0:
                bias = None
        return LinearWeight(values, scales, bias, (WeightSource(name, len(values)),), groups)

    def _groups(self, name: str, shape: tuple[int, ...], part: Part | None) -> Groups | None:
        """Return a matrix in groups, or a part of it; None where it must be expanded."""
        groups = self._weights.groups(self._sources.get(name, name))
        if groups is None:
            return None
        if groups.shape != shape:
            raise _other_shape(name, groups.shape, shape)
        if part is not None and part.dim == 0:
            groups = groups.rows(slice(part.start, part.stop))
        elif part is not None:
            groups = groups.columns(part.start, part.stop)
        if groups is not None:
            self._unread.discard(name)
        return groups

    def skip(self, *suffixes: str) -> None:
        """Mark names with these endings as not needed."""
        self._unread = {name for name in self._unread if not name.endswith(suffixes)}

    def skip_matrix(self, name: str) -> None:
        """Mark a matrix as not needed: another rank has it."""
        self._unread.difference_update((f"{name}.weight", f"{name}.weight_scale"))

    def skip_under(self, prefix: str) -> None:
        """Mark names with this prefix as not needed."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def finish(self) -> None:
        """Raise `CheckpointError` naming tensors that were not read."""
        if self._unread:
            names = ", ".join(sorted(self._unread)[:5])
            more = f" and {len(self._unread) - 5} more" if len(self._unread) > 5 else ""
            raise CheckpointError(f"the checkpoint has tensors the model does not: {names}{more}")
