"""Four-bit checkpoints: GPTQ, AWQ and compressed-tensors, as they are or expanded.

A 32-bit word holds eight 4-bit numbers q, the first in the lowest bits unless noted. A weight is
(q - z) × s with the scale s and the zero point z of its group of consecutive inputs.

    GPTQ   qweight [in/8, out]; qzeros [groups, out/8], less 1 in its first version;
           scales [groups, out]; g_idx [in], the group of each input
    AWQ    qweight [in, out/8] and qzeros [groups, out/8], outputs in the order 0 2 4 6 1 3 5 7;
           scales [groups, out]
    packed weight_packed [out, in/8]; weight_zero_point [out/8, groups], else 8;
           weight_scale [out, groups]; weight_shape

NVFP4 (nvfp4-pack-quantized) has floating-point numbers of four bits, two in a byte of weight_packed
[out, in/2], times weight_scale [out, in/16] (float8) / weight_global_scale [1]. Their doubles are
integers: they are held as those of eight bits, in groups of 16. Activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from llm.errors import CheckpointError
from llm.layers.groups import MIDDLE, Groups, group_bytes
from llm.models.float8_weights import Float8Weights, read_block, refusal, require
from llm.models.hf_config import HuggingFaceConfig
from llm.models.weights import TensorInfo, Weights

T = TypeVar("T")

BITS = 4
PER_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NVFP4, NVFP4_GROUP = "nvfp4", 16
E2M1_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the numbers of a sign, two bits of exponent and one of mantissa, without the sign."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of a checkpoint's matrices of four bits."""

    method: str  # gptq, awq, packed or nvfp4
    zero_offset: int = 0  # added to stored zero points
    group_size: int = -1  # inputs of a group; -1: all

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the endings of a matrix's tensors, the words first."""
        if self.method == NVFP4:
            return ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
        if self.method == "packed":
            return ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        return ("qweight", "scales", "qzeros", "g_idx")

    def group_of(self, num_in: int) -> int:
        """Return the number of inputs of a group, of so many in all."""
        return num_in if self.group_size == -1 else self.group_size

    def shape(self, words: tuple[int, ...]) -> tuple[int, int]:
        """Return [out, in] of a matrix with these words."""
        if len(words) != 2:
            raise CheckpointError(f"packed weights have the shape {list(words)}, not two sizes")
        rows, columns = words
        if self.method == NVFP4:
            return rows, columns * 2
        if self.method == "gptq":
            return columns, rows * PER_WORD
        return (columns * PER_WORD, rows) if self.method == "awq" else (rows, columns * PER_WORD)


def read_packing(config: HuggingFaceConfig) -> Packing | None:
    """Return the packing that `quantization_config` describes; None without four-bit weights.

    Raises `CheckpointError` naming the file and the value that is not supported.
    """
    keys = config.keys.get("quantization_config")
    if not isinstance(keys, dict):
        return None
    method = keys.get("quant_method")
    if method == "gptq":
        require(config, keys.get("bits"), (BITS,), "bits")
        form = keys.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise refusal(config, "checkpoint_format", form, "gptq and gptq_v2")
        return Packing("gptq", int(form == "gptq"), _group_size(config, keys))
    if method == "awq":
        require(config, keys.get("bits", keys.get("w_bit")), (BITS,), "bits")
        version = str(keys.get("version", "gemm")).lower()
        require(config, version, ("gemm",), "version")
        require(config, keys.get("zero_point", True), (True,), "zero_point")
        return Packing("awq", 0, _group_size(config, keys))
    if (method, keys.get("format")) == ("compressed-tensors", "pack-quantized"):
        return _read_groups(config, keys)
    if (method, keys.get("format")) == ("compressed-tensors", "nvfp4-pack-quantized"):
        weights = _weights_of_groups(config, keys)[1]
        require(config, weights.get("num_bits"), (BITS,), "num_bits")
        require(config, weights.get("type"), ("float",), "type")
        require(config, weights.get("group_size"), (NVFP4_GROUP,), "group_size")
        return Packing(NVFP4, 0, NVFP4_GROUP)
    return None


def _read_groups(config: HuggingFaceConfig, keys: Mapping[str, Any]) -> Packing:
    group, weights = _weights_of_groups(config, keys)
    require(config, weights.get("num_bits"), (BITS,), "num_bits")
    require(config, weights.get("type", "int"), ("int",), "type")
    require(config, group.get("input_activations"), (None,), "input_activations")
    return Packing("packed", 0, _group_size(config, weights))


def _weights_of_groups(
    config: HuggingFaceConfig, keys: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the only group of modules, and what it says of weights."""
    groups = keys.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in found if isinstance(group, dict)]
    if len(weights) != 1 or not isinstance(weights[0], dict):
        raise CheckpointError(f"{config.path}: quantization_config needs one of config_groups")
    return found[0], weights[0]


def _group_size(config: HuggingFaceConfig, keys: Mapping[str, Any]) -> int:
    size = keys.get("group_size", keys.get("q_group_size"))
    if size is None:
        return -1
    if type(size) is not int or not (size == -1 or size > 0):
        raise refusal(config, "group_size", size, "-1 and positive whole numbers")
    return size


def unpacked(weights: Weights, folder: Path) -> Weights:
    """Return the weights of a folder with its four-bit matrices in floating point, and its float8
    matrices with a scale of each output.
    """
    if not (folder / "config.json").is_file():
        return weights
    config = HuggingFaceConfig.read(folder)
    if config.is_float8:
        return Float8Weights(weights, read_block(config))
    packing = read_packing(config)
    return weights if packing is None else PackedWeights(weights, packing)


class PackedWeights(Weights):
    """Another source's tensors; packed matrices appear as `NAME.weight`, in float32 or in
    groups.
    """

    def __init__(self, weights: Weights, packing: Packing) -> None:
        """Find the packed matrices. Raises `CheckpointError` when a part of one is missing."""
        self._weights = weights
        self._packing = packing
        self.format = weights.format
        self._stored = weights.info()
        words, scales, third, *_ = packing.parts
        self._names = [n.removesuffix(f".{words}") for n in self._stored if n.endswith(f".{words}")]
        needed = (scales,) if packing.method == "packed" else (scales, third)
        for name in self._names:
            for part in needed:
                if f"{name}.{part}" not in self._stored:
                    raise CheckpointError(f"tensor '{name}.{part}' is missing from the checkpoint")

    def info(self) -> Mapping[str, TensorInfo]:
        """See `Weights`."""
        words = self._packing.parts[0]
        parts = {f"{name}.{part}" for name in self._names for part in self._packing.parts}
        plain = {name: info for name, info in self._stored.items() if name not in parts}
        matrices = {
            f"{name}.weight": TensorInfo(
                "F32", self._packing.shape(self._stored[f"{name}.{words}"].shape)
            )
            for name in self._names
        }
        return plain | matrices

    def tensor(self, name: str) -> Tensor:
        """See `Weights`."""
        if not self._is_packed(name):
            return self._weights.tensor(name)
        return self._read(name, expand)

    def packed_bytes(self) -> Mapping[str, int]:
        """See `Weights`. Inputs in another order than that of their groups are read for it."""
        words, _, zeros, order = self._packing.parts
        found = {}
        for module in self._names:
            num_out, num_in = self._packing.shape(self._stored[f"{module}.{words}"].shape)
            size = self._packing.group_of(num_in)
            if self._packing.method == "gptq" and f"{module}.{order}" in self._stored:
                groups = self._weights.tensor(f"{module}.{order}")
                if not _is_in_order(groups.long(), size):
                    continue
            is_float = self._packing.method == NVFP4
            has_minimums = not is_float and f"{module}.{zeros}" in self._stored
            found[f"{module}.weight"] = group_bytes(
                (num_out, num_in), size, bits=8 if is_float else BITS, has_minimums=has_minimums
            )
        return found

    def groups(self, name: str) -> Groups | None:
        """See `Weights`."""
        return self._read(name, pack) if self._is_packed(name) else None

    def _is_packed(self, name: str) -> bool:
        module, _, ending = name.rpartition(".")
        return ending == "weight" and f"{module}.{self._packing.parts[0]}" in self._stored

    def _read(self, name: str, form: Callable[[Packing, Mapping[str, Tensor]], T]) -> T:
        module = name.removesuffix(".weight")
        found = {
            part: self._weights.tensor(f"{module}.{part}")
            for part in self._packing.parts
            if f"{module}.{part}" in self._stored
        }
        try:
            return form(self._packing, found)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CheckpointError(f"'{module}': its packed tensors do not fit: {error}") from error

    def close(self) -> None:
        """See `Weights`."""
        self._weights.close()


def expand(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [out, in] in float32. Raises `ValueError` for sizes that do not fit."""
    if packing.method == NVFP4:
        numbers, scales = _read_float4(parts)
        return numbers.float().view(*scales.shape, -1).mul_(scales[..., None]).flatten(1)
    found = _read_numbers(packing, parts)
    zero, scale = found.zero[found.group], found.scale[found.group]
    return ((found.values - zero).float() * scale).t().contiguous()


def pack(packing: Packing, parts: Mapping[str, Tensor]) -> Groups | None:
    """Return the matrix in groups; None where inputs are not in the order of their groups, and for
    groups of less than 16 inputs. Raises `ValueError` for sizes that do not fit.
    """
    if packing.method == NVFP4:
        numbers, scales = _read_float4(parts)
        return Groups.pack(numbers, scales, None, NVFP4_GROUP)
    found = _read_numbers(packing, parts)
    size = packing.group_of(len(found.values))
    if not _is_in_order(found.group, size):
        return None
    minimums = None
    if bool((found.zero != MIDDLE).any()):
        minimums = (found.zero * -found.scale).t()
    return Groups.pack(found.values.t().to(torch.uint8), found.scale.t(), minimums, size)


def _read_float4(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the doubles of NVFP4's numbers, int8 [out, in], and half their scales, float32
    [out, in / 16].
    """
    octets, scales, largest, *_ = (parts.get(part) for part in Packing(NVFP4).parts)
    assert octets is not None
    assert scales is not None
    assert largest is not None
    table = torch.tensor([*E2M1_DOUBLES, *(-number for number in E2M1_DOUBLES)], dtype=torch.int8)
    numbers = table[torch.stack([octets & 15, octets >> 4], dim=2).flatten(1).int()]
    if scales.shape != (len(numbers), numbers.shape[1] // NVFP4_GROUP) or largest.numel() != 1:
        raise ValueError(f"scales {list(scales.shape)} and {list(largest.shape)}")
    if numbers.shape[1] % NVFP4_GROUP:
        raise ValueError(f"{numbers.shape[1]} inputs are not in groups of {NVFP4_GROUP}")
    return numbers, scales.float() / largest.float() / 2


def _is_in_order(group: Tensor, size: int) -> bool:
    """Whether inputs of the same group are neighbours, `size` in each."""
    return torch.equal(group, torch.arange(len(group)) // size)


class _Numbers(NamedTuple):
    values: Tensor  # int32 [in, out]
    zero: Tensor  # int32 [groups, out]
    scale: Tensor  # float32 [groups, out]
    group: Tensor  # int64 [in]


def _read_numbers(packing: Packing, parts: Mapping[str, Tensor]) -> _Numbers:
    words, scales, zeros, order = packing.parts
    packed, scale = parts[words], parts[scales].float()
    if packing.method == "packed":
        values = _fields(packed, dim=1)
        zero = (
            torch.full(scale.shape, MIDDLE) if zeros not in parts else _fields(parts[zeros], dim=0)
        )
        values, zero, scale = values.t(), zero.t(), scale.t()
    elif packing.method == "gptq":
        values = _fields(packed, dim=0)
        zero = (_fields(parts[zeros], dim=1) + packing.zero_offset) & 15
    else:
        values, zero = _interleaved(packed), _interleaved(parts[zeros])
    num_in, num_out = values.shape
    if scale.shape != zero.shape or scale.shape[1] != num_out:
        raise ValueError(f"scales {list(scale.shape)} and zero points {list(zero.shape)}")
    group = torch.arange(num_in) // packing.group_of(num_in)
    if packing.method == "gptq" and order in parts:
        group = parts[order].long()
    if len(group) != num_in or int(group.max()) >= len(scale) or int(group.min()) < 0:
        raise ValueError(f"{num_in} inputs do not belong to {len(scale)} groups")
    return _Numbers(values, zero, scale, group)


def _fields(words: Tensor, *, dim: int) -> Tensor:
    """Return the numbers in 32-bit words, eight along `dim` for each."""
    if words.dtype is not torch.int32:
        raise ValueError(f"packed numbers are {words.dtype}, not int32")
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32)
    fields = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (1 - dim))) & 15
    return fields.flatten(dim, dim + 1)


def _interleaved(words: Tensor) -> Tensor:
    """Return the numbers in AWQ's words, by their output."""
    fields = _fields(words, dim=1).view(len(words), -1, PER_WORD)
    # Place i of a word holds output AWQ_ORDER[i].
    places = torch.tensor(AWQ_ORDER).argsort()
    return fields[:, :, places].flatten(1)
