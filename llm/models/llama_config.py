"""`LlamaConfig`: the keys of a Llama config.json that change what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm.errors import CheckpointError
from llm.layers.rotary import Llama3Scaling, RotaryConfig
from llm.models.hf_config import HuggingFaceConfig, ModelShape


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one checkpoint."""

    shape: ModelShape
    intermediate_size: int
    norm_epsilon: float
    is_head_tied: bool
    rotary: RotaryConfig

    @classmethod
    def read(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """Raises `CheckpointError` naming a key that is missing or asks for something else."""
        text = config.text_config
        _refuse_other_variants(text)
        shape = ModelShape.read(config)
        return cls(
            shape=shape,
            intermediate_size=text.require("intermediate_size"),
            norm_epsilon=text.get("rms_norm_eps", 1e-6),
            is_head_tied=bool(text.get("tie_word_embeddings", False)),
            rotary=_read_rotary(text, shape.head_dim),
        )


def _refuse_other_variants(config: HuggingFaceConfig) -> None:
    plain: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1, 1.0),
    }
    for key, accepted in plain.items():
        value = config.get(key, accepted[0])
        if value not in accepted:
            raise CheckpointError(f"{config.path}: {key}={value} is not supported")


def _read_rotary(config: HuggingFaceConfig, head_dim: int) -> RotaryConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        if kind == "default":
            return RotaryConfig(head_dim, theta)
        if kind == "linear":
            return RotaryConfig(head_dim, theta, linear_factor=float(scaling["factor"]))
        if kind == "llama3":
            return RotaryConfig(head_dim, theta, llama3=_read_llama3(scaling))
    except KeyError as error:
        raise CheckpointError(f"{config.path}: rotary scaling '{kind}' has no {error}") from error
    raise CheckpointError(
        f"{config.path}: rotary scaling '{kind}' is not supported; default, linear and llama3 are"
    )


def _read_llama3(scaling: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_positions=int(scaling["original_max_position_embeddings"]),
    )
