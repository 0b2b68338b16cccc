"""GGUF files: the header, the tensors in floating point or in groups, and config.json's keys.

A file is the magic `GGUF`, a version, metadata by key, the tensors' entries, and their aligned data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The package `gguf` (extra `gguf`)
defines the quantised formats and expands them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from llm.errors import CheckpointError
from llm.layers.groups import Groups
from llm.layers.rotary import Llama3Scaling, plain_frequencies
from llm.models.gguf_blocks import PACKED, num_bytes, read_groups
from llm.models.weights import TensorInfo, Weights, WeightsFormat

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    from torch import Tensor

SUFFIX = ".gguf"
MAX_AHEAD = 8  # matrices that are read at once
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 24  # of an array, and of a file
MAX_TEXT_BYTES = 1 << 24
READABLE = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
"""Formats of tensors, as the package names them."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_PAIRED = ("llama",)  # stores the pairs of a rotation as neighbours
_FREQUENCIES = "rope_freqs.weight"  # what each frequency is divided by

_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def require_package() -> ModuleType:
    """Return the package `gguf`. Raises `CheckpointError` with the extra when it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("to read GGUF files: pip install 'sonant[gguf]'") from error
    return gguf


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place in the file."""

    kind: str  # one of READABLE
    shape: tuple[int, ...]  # in torch's order
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a file: all of it but the tensors' data."""

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]

    @classmethod
    def read(cls, path: Path | str) -> GGUFFile:
        """Read a header. Raises `CheckpointError` with the file and its problem: another format, a
        file that ends early, or a tensor whose format cannot be read.
        """
        path = Path(path)
        try:
            with path.open("rb") as stream:
                return _Header(path, stream).read()
        except (OSError, ValueError, KeyError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error

    @property
    def architecture(self) -> str:
        """Return the family of models, in GGUF's words. Raises `CheckpointError` for others."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(
                f"{self.path}: the architecture {name} is not read from GGUF; {known} are"
            )
        return name

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return metadata of the architecture; with no default it is required.

        Raises `CheckpointError` with the key when it is missing or of another type.
        """
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, kind):
            problem = "is missing" if value is None else f"is {value!r}"
            raise CheckpointError(f"{self.path}: {name} {problem}")
        return value

    def config(self) -> dict[str, Any]:
        """Return the keys of a config.json. Raises `CheckpointError` for a model that is not
        supported.
        """
        name = self.architecture
        if self.metadata.get(f"{name}.expert_count"):
            raise CheckpointError(f"{self.path}: models with experts are not supported")
        heads, width = self.get("attention.head_count", int), self.get("embedding_length", int)
        if "token_embd.weight" not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor token_embd.weight")
        head_dim = self.get("attention.key_length", int, width // max(heads, 1))
        theta = float(self.get("rope.freq_base", float, 10000.0))
        has_bias = name == "llama" and "blk.0.attn_q.bias" in self.entries
        keys = {
            "architectures": [ARCHITECTURES[name]],
            "model_type": name,
            "vocab_size": self.entries["token_embd.weight"].shape[0],
            "hidden_size": width,
            "intermediate_size": self.get("feed_forward_length", int),
            "num_hidden_layers": self.get("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.get("context_length", int),
            "rms_norm_eps": float(self.get("attention.layer_norm_rms_epsilon", float)),
            "rope_parameters": self._rotary(head_dim, theta),
            "tie_word_embeddings": "output.weight" not in self.entries,
            "attention_bias": has_bias,
        }
        window = self.metadata.get(f"{name}.attention.sliding_window")
        if window and name == "llama":
            keys |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        return keys

    def _rotary(self, head_dim: int, theta: float) -> dict[str, Any]:
        """Return rotary parameters. Llama 3's scaling is stored as its effect."""
        rotated = self.get("rope.dimension_count", int, head_dim)
        if rotated != head_dim:
            raise CheckpointError(
                f"{self.path}: {rotated} of {head_dim} dimensions of a head are rotated; "
                "all must be"
            )
        plain = {"rope_type": "default", "rope_theta": theta}
        if _FREQUENCIES in self.entries:
            return plain | self._llama3(head_dim, theta)
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return plain
        if kind not in ("linear", "yarn"):
            raise CheckpointError(f"{self.path}: rotary scaling '{kind}' is not supported")
        scaled = {"rope_type": kind, "factor": float(self.get("rope.scaling.factor", float))}
        original = self.metadata.get(f"{self.architecture}.rope.scaling.original_context_length")
        if original:
            scaled["original_max_position_embeddings"] = original
        return plain | scaled

    def _llama3(self, head_dim: int, theta: float) -> dict[str, Any]:
        """Return the parameters of Llama 3 (1, 4 and 8,192) if the stored divisors are theirs."""
        other = CheckpointError(f"{self.path}: {_FREQUENCIES} is not the scaling of Llama 3")
        if self.entries[_FREQUENCIES].shape != (head_dim // 2,) or head_dim < 2:
            raise other  # before a head of any size is computed
        stored = read_tensor(self, _FREQUENCIES)
        factor = float(stored.max())
        scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
        expected = plain_frequencies(head_dim, theta) / scaling.frequencies(head_dim, theta, 1)
        if not torch.allclose(stored, expected, rtol=1e-3):
            raise other
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


class _Header:
    """Reader of one header; every length is checked before it is used."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._size = path.stat().st_size

    def read(self) -> GGUFFile:
        if self._stream.read(4) != b"GGUF":
            raise ValueError("it is not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"GGUF's version {version} is not known; 2 and 3 are")
        num_tensors, num_keys = self._count(), self._count()
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        listed = [self._listed() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data = -(-self._stream.tell() // alignment) * alignment
        entries: dict[str, Entry] = {}
        for name, kind, shape, offset in listed:
            if name in entries:
                raise ValueError(f"there are two tensors '{name}'")
            entries[name] = self._entry(name, kind, shape, data + offset)
        return GGUFFile(self._path, metadata, entries)

    def _entry(self, name: str, number: int, shape: tuple[int, ...], start: int) -> Entry:
        gguf = require_package()
        known = {int(kind): kind for kind in gguf.GGMLQuantizationType}
        kind = known.get(number)
        if kind is None or kind.name not in READABLE:
            found = number if kind is None else kind.name
            raise ValueError(f"'{name}' is stored as {found}; readable are {', '.join(READABLE)}")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"'{name}' has the shape {list(shape)}, no multiple of {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        if start + num_bytes > self._size:
            raise ValueError(f"the file ends inside the tensor '{name}'; it was cut off")
        return Entry(kind.name, shape, start, num_bytes)

    def _listed(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dims = self._text(), self._number("I")
        if num_dims > 4:
            raise ValueError(f"'{name}' has {num_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dims))
        return name, self._number("I"), shape[::-1], self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"metadata of an unknown type {kind}")
        item, count = self._number("I"), self._count()
        if item in _NUMBERS:
            form = f"<{count}{_NUMBERS[item]}"
            return list(struct.unpack(form, self._take(struct.calcsize(form))))
        return [self._value(item) for _ in range(count)]

    def _count(self) -> int:
        count = self._number("Q")
        if count > MAX_ENTRIES:
            raise ValueError(f"a list of {count} entries")
        return count

    def _text(self) -> str:
        length = self._number("Q")
        if length > MAX_TEXT_BYTES:
            raise ValueError(f"a text of {length} bytes")
        return self._take(length).decode()

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))
        return value

    def _take(self, num_bytes: int) -> bytes:
        data = self._stream.read(num_bytes)
        if len(data) != num_bytes:
            raise ValueError("the file ends inside the header; it was cut off")
        return data


def read_tensor(file: GGUFFile, name: str) -> Tensor:
    """Return a tensor as stored, expanded to float32. Raises `CheckpointError` naming it."""
    import numpy as np

    gguf, entry = require_package(), file.entries[name]
    rows = _read_rows(file, name)
    try:
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[entry.kind])
    except ValueError as error:
        raise CheckpointError(f"cannot read '{name}' of {file.path}: {error}") from error
    return torch.from_numpy(values.reshape(entry.shape).astype(np.float32, copy=False))


def _read_rows(file: GGUFFile, name: str) -> np.ndarray:
    """Return a tensor's bytes [..., bytes of a row]. Raises `CheckpointError` naming it."""
    import numpy as np

    entry = file.entries[name]
    try:
        data = np.fromfile(file.path, np.uint8, entry.num_bytes, offset=entry.start)
        if len(data) != entry.num_bytes:
            raise ValueError("the file was cut off")
        return data.reshape(*entry.shape[:-1], -1)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read '{name}' of {file.path}: {error}") from error


class _ReadAhead:
    """Reads the matrices of some names in threads, a few before they are asked for in order.

    Those that are passed over may be asked for later, in another order than the file's. Only the
    last few are kept.
    """

    def __init__(self, names: Sequence[str], read: Callable[[str], Groups | None]) -> None:
        self._names, self._read = names, read
        self._places = {name: place for place, name in enumerate(names)}
        self._begun: dict[str, Future[Groups | None]] = {}
        self._next = 0
        self._count = min(MAX_AHEAD, torch.get_num_threads())
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="gguf")

    def take(self, name: str) -> Groups | None:
        """Return one of the matrices. Raises the error of its reading."""
        place = self._places[name]
        end = place + self._count
        for other in self._names[max(place, self._next) : end]:
            self._begun[other] = self._threads.submit(self._read, other)
        self._next = max(self._next, end)
        begun = self._begun.pop(name, None)
        while len(self._begun) > 2 * self._count:
            self._begun.pop(next(iter(self._begun))).cancel()
        return self._read(name) if begun is None else begun.result()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)
        self._begun.clear()


class GGUFWeights(Weights):
    """The tensors of a GGUF file in float32 or in groups, by transformers' names and in its order
    of rows.
    """

    format = WeightsFormat.GGUF

    def __init__(self, path: Path) -> None:
        """Read the header. Raises `CheckpointError` naming the file and the problem."""
        self._file = GGUFFile.read(path)
        self._is_paired = self._file.architecture in _PAIRED
        self._stored = {
            transformers_name(name): name for name in self._file.entries if name != _FREQUENCIES
        }
        packed = [name for name, stored in self._stored.items() if self._holds_groups(stored)]
        self._ahead = _ReadAhead(packed, self._read_groups)

    def _holds_groups(self, stored: str) -> bool:
        return _is_packed(self._file.entries[stored])

    def info(self) -> Mapping[str, TensorInfo]:
        """See `Weights`."""
        entries = self._file.entries
        return {
            name: TensorInfo("F32", entries[stored].shape) for name, stored in self._stored.items()
        }

    def tensor(self, name: str) -> Tensor:
        """See `Weights`."""
        if name not in self._stored:
            raise CheckpointError(f"tensor '{name}' is missing from the checkpoint")
        values = read_tensor(self._file, self._stored[name])
        num_heads = self._num_paired_heads(name)
        return values if num_heads is None else halves(values, num_heads)

    def packed_bytes(self) -> Mapping[str, int]:
        """See `Weights`."""
        entries = ((name, self._file.entries[stored]) for name, stored in self._stored.items())
        return {
            name: num_bytes(entry.kind, entry.shape) for name, entry in entries if _is_packed(entry)
        }

    def groups(self, name: str) -> Groups | None:
        """See `Weights`."""
        stored = self._stored.get(name)
        return None if stored is None or not self._holds_groups(stored) else self._ahead.take(name)

    def _read_groups(self, name: str) -> Groups | None:
        stored = self._stored[name]
        kind = self._file.entries[stored].kind
        found, num_heads = (
            read_groups(kind, _read_rows(self._file, stored)),
            self._num_paired_heads(name),
        )
        if found is None or num_heads is None:
            return found
        return found.rows(halves(torch.arange(found.shape[0]), num_heads))

    def _num_paired_heads(self, name: str) -> int | None:
        """Return the number of heads whose rows are in another order in the file."""
        if not self._is_paired or not (".q_proj." in name or ".k_proj." in name):
            return None
        heads: int = self._file.get("attention.head_count", int)
        if ".q_proj." in name:
            return heads
        of_keys: int = self._file.get("attention.head_count_kv", int, heads)
        return of_keys

    def close(self) -> None:
        """See `Weights`."""
        self._ahead.close()


def packed_kinds(file: GGUFFile) -> frozenset[str]:
    """Return the formats of a file's matrices that can be held as they are stored."""
    return frozenset(entry.kind.lower() for entry in file.entries.values() if _is_packed(entry))


def _is_packed(entry: Entry) -> bool:
    return entry.kind in PACKED and len(entry.shape) == 2


def halves(values: Tensor, num_heads: int) -> Tensor:
    """Return the rows of queries or keys with the pairs of a rotation as halves of each head."""
    if num_heads < 1 or len(values) % (2 * num_heads):
        raise CheckpointError(f"{len(values)} rows of queries or keys are not {num_heads} heads")
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def transformers_name(name: str) -> str:
    """Convert a name; an unknown one is unchanged, and is reported as surplus later."""
    part, _, kind = name.rpartition(".")
    if part in _TOP:
        return f"{_TOP[part]}.{kind}"
    block, _, rest = part.removeprefix("blk.").partition(".")
    if part.startswith("blk.") and rest in _LAYER:
        return f"model.layers.{block}.{_LAYER[rest]}.{kind}"
    return name
