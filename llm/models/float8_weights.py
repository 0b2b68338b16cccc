"""Float8 checkpoints: compressed-tensors (float-quantized) and the method fp8.

A matrix NAME.weight is float8_e4m3fn [out, in] times its scale, which is NAME.weight_scale or
NAME.weight_scale_inv (both are factors):

    one number                                 of the whole matrix
    [out] or [out, 1]                          of each output
    [⌈out / rows⌉, ⌈in / columns⌉]             of each block of rows × columns

A model reads them as float8 with a scale of each output; matrices with blocks are expanded, and a
model rounds them again. Scales of activations are not read: they are computed for every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from llm.errors import CheckpointError
from llm.models.hf_config import HuggingFaceConfig
from llm.models.weights import TensorInfo, Weights
from llm.parallel.shard import Part

FLOAT8 = "F8_E4M3"
SCALES = ("weight_scale", "weight_scale_inv")
UNUSED = ("input_scale", "activation_scale")

Block = tuple[int, int]


def read_block(config: HuggingFaceConfig) -> Block | None:
    """Return the rows and columns of a block; None where a scale is that of an output or a matrix.

    Raises `CheckpointError` naming the file and the value that is not supported.
    """
    keys = config.keys.get("quantization_config")
    found = keys if isinstance(keys, dict) else {}
    if found.get("quant_method") == "fp8":
        require(config, found.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"), "fmt")
        return _block(config, found.get("weight_block_size"), "weight_block_size")
    require(config, found.get("kv_cache_scheme"), (None,), "kv_cache_scheme")
    groups = found.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, dict) else []
    if len(listed) != 1 or not isinstance(listed[0], dict):
        raise CheckpointError(f"{config.path}: quantization_config needs one of config_groups")
    weights, activations = (listed[0].get(key) or {} for key in ("weights", "input_activations"))
    for values, part in ((weights, "weights"), (activations, "input_activations")):
        require(config, values.get("num_bits"), (8,), f"{part}.num_bits")
        require(config, values.get("type"), ("float",), f"{part}.type")
    kinds = ("tensor", "channel", "block")
    require(config, weights.get("strategy"), kinds, "weights.strategy")
    require(config, weights.get("symmetric", True), (True,), "weights.symmetric")
    if weights.get("strategy") != "block":
        return None
    return _block(config, weights.get("block_structure"), "block_structure")


def _block(config: HuggingFaceConfig, value: Any, key: str) -> Block | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(type(size) is not int or size < 1 for size in value):
        raise refusal(config, key, value, "two positive whole numbers")
    return value[0], value[1]


def require(
    config: HuggingFaceConfig, value: object, expected: tuple[object, ...], key: str
) -> None:
    """Raise `CheckpointError` for another value of a key of quantization_config."""
    if value not in expected:
        raise refusal(config, key, value, ", ".join(map(str, expected)))


def refusal(config: HuggingFaceConfig, key: str, value: object, known: str) -> CheckpointError:
    """Return the error for a value of quantization_config that is not known."""
    return CheckpointError(
        f"{config.path}: quantization_config has {key}={value}, which cannot be read; {known} can"
    )


class Float8Weights(Weights):
    """Another source's tensors. Float8 matrices have `NAME.weight_scale` float32 [out, 1], or are
    expanded to float32 if their scales are those of blocks.
    """

    def __init__(self, weights: Weights, block: Block | None) -> None:
        """Find the float8 matrices. Raises `CheckpointError` for one without scales."""
        self._weights = weights
        self._block = block
        self.format = weights.format
        self._stored = weights.info()
        self._scale_of: dict[str, str] = {}  # by module
        for name, info in self._stored.items():
            module = name.removesuffix(".weight")
            if info.dtype == FLOAT8 and module != name:
                scales = [
                    f"{module}.{part}" for part in SCALES if f"{module}.{part}" in self._stored
                ]
                if len(scales) != 1:
                    raise CheckpointError(f"'{name}' needs one tensor '{module}.weight_scale'")
                self._scale_of[module] = scales[0]

    def info(self) -> Mapping[str, TensorInfo]:
        """See `Weights`."""
        hidden = set(self._scale_of.values())
        found = {
            name: info
            for name, info in self._stored.items()
            if name not in hidden and not name.endswith(UNUSED)
        }
        for module in self._scale_of:
            shape = self._stored[f"{module}.weight"].shape
            if self._block is not None:
                found[f"{module}.weight"] = TensorInfo("F32", shape)
            else:
                found[f"{module}.weight_scale"] = TensorInfo("F32", (shape[0], 1))
        return found

    def tensor(self, name: str) -> Tensor:
        """See `Weights`. Raises `CheckpointError` for scales that do not fit."""
        module, _, part = name.rpartition(".")
        if module not in self._scale_of:
            return self._weights.tensor(name)
        if part == "weight_scale" and self._block is None:
            return self._scales(module)
        if part == "weight" and self._block is not None:
            return self._expanded(module, self._block)
        return self._weights.tensor(name)

    def part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """See `Weights`."""
        module, _, ending = name.rpartition(".")
        is_own = module in self._scale_of and (ending != "weight" or self._block is not None)
        return super().part(name, shape, part) if is_own else self._weights.part(name, shape, part)

    def _scales(self, module: str) -> Tensor:
        """Return a scale of each output [out, 1]."""
        num_out = self._stored[f"{module}.weight"].shape[0]
        scales = self._weights.tensor(self._scale_of[module]).float().reshape(-1, 1)
        if len(scales) not in (1, num_out):
            raise self._misfit(module, f"1 or {num_out} scales, not {len(scales)}")
        return scales.expand(num_out, 1).clone()

    def _expanded(self, module: str, block: Block) -> Tensor:
        """Return the matrix in float32."""
        values = self._weights.tensor(f"{module}.weight").float()
        scales = self._weights.tensor(self._scale_of[module]).float()
        sizes = tuple(-(-size // each) for size, each in zip(values.shape, block, strict=True))
        if tuple(scales.shape) != sizes:
            raise self._misfit(module, f"scales {list(sizes)}, not {list(scales.shape)}")
        for dim, each in enumerate(block):
            scales = scales.repeat_interleave(each, dim)
        return values * scales[: values.shape[0], : values.shape[1]]

    def _misfit(self, module: str, text: str) -> CheckpointError:
        return CheckpointError(f"'{module}.weight' needs {text}")

    def close(self) -> None:
        """See `Weights`."""
        self._weights.close()
