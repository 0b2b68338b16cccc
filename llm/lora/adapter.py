"""`LoRAAdapter`: one adapter in PEFT's format (adapter_config.json, adapter_model.safetensors).

A module with weight W gets W + s·B·A (Hu et al. 2021): A is [r, in], B is [out, r], and s is
lora_alpha / r, or lora_alpha / √r with use_rslora. Other variants are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR_NAME = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

# Keys of adapter_config.json and the values with which the module is W + s·B·A.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
}
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")  # values of init_lora_weights that change W


@dataclass(frozen=True, slots=True)
class LoRAFactors:
    """Factors of one module, on the CPU; the scale is part of `up`."""

    down: Tensor  # A [r, in]
    up: Tensor  # s·B [out, r]


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """Factors by the checkpoint's name of each module, such as model.layers.0.self_attn.q_proj."""

    name: str
    factors: Mapping[str, LoRAFactors]

    @property
    def rank(self) -> int:
        """Largest rank of its modules."""
        return max((len(factors.down) for factors in self.factors.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors in float32."""
        return sum(4 * (f.down.numel() + f.up.numel()) for f in self.factors.values())

    @classmethod
    def read(cls, name: str, folder: Path, max_rank: int) -> LoRAAdapter:
        """Read an adapter.

        Raises `CheckpointError` for unsupported files, and `ConfigError` for a rank above
        `max_rank`.
        """
        config = _read_config(folder / CONFIG_NAME)
        pairs = _read_pairs(folder / WEIGHTS_NAME)
        factors = {}
        for module, (down, up) in pairs.items():
            rank = len(down)
            if rank > max_rank:
                raise ConfigError(
                    f"lora.max_lora_rank={max_rank}: adapter '{name}' has rank {rank}"
                )
            if up.shape[1] != rank:
                raise CheckpointError(f"{folder}: {module} has factors of ranks {rank}, {up.shape}")
            factors[module] = LoRAFactors(down, up.float() * _scale(config, module, rank))
        return cls(name, factors)


def adapter_bytes(folder: Path) -> int:
    """Return the maximum size of an adapter in float32."""
    path = folder / WEIGHTS_NAME
    return 2 * path.stat().st_size if path.is_file() else 0


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = values["r"], values["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no adapter's configuration: {error!r}") from error
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
        raise CheckpointError(f"{path}: r={rank} and lora_alpha={alpha} must be numbers")
    for key, accepted in PLAIN.items():
        if values.get(key) not in accepted:
            raise CheckpointError(f"{path}: {key}={values.get(key)} is not supported")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_THE_BASE):
        raise CheckpointError(f"{path}: init_lora_weights={start} changes the base model")
    return dict(values)


def _read_pairs(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    sides: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for key, tensor in tensors.items():
        match = TENSOR_NAME.fullmatch(key)
        if match is None or tensor.ndim != 2:
            raise CheckpointError(f"{path}: tensor '{key}' {list(tensor.shape)} is not supported")
        sides[match["side"]][match["module"]] = tensor
    down, up = sides["A"], sides["B"]
    if not down or down.keys() != up.keys():
        lonely = ", ".join(sorted(down.keys() ^ up.keys())) or "no module at all"
        raise CheckpointError(f"{path}: lora_A and lora_B do not pair up: {lonely}")
    return {module: (down[module], up[module]) for module in sorted(down)}


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = own
            break
    divisor = rank**0.5 if config.get("use_rslora") else rank
    return float(alpha) / divisor
