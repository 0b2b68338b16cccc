"""Names of a model's weights in checkpoints: one `WeightNames` for each architecture.

`original_adapter` is for the layout in which Meta and Mistral publish weights
(consolidated.safetensors): its names differ from those of transformers, and the pairs of a rotation
are neighbours, not halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from llm.models.weights import WeightsAdapter


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names without `.weight` and `.bias`; `{}` is the layer's number. The defaults are Llama's."""

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "model.layers.{}.input_layernorm"
    query: str = "model.layers.{}.self_attn.q_proj"
    key: str = "model.layers.{}.self_attn.k_proj"
    value: str = "model.layers.{}.self_attn.v_proj"
    output: str = "model.layers.{}.self_attn.o_proj"
    query_norm: str = "model.layers.{}.self_attn.q_norm"
    key_norm: str = "model.layers.{}.self_attn.k_norm"
    mlp_norm: str = "model.layers.{}.post_attention_layernorm"
    mlp: str = "model.layers.{}.mlp"
    gate: str = "model.layers.{}.mlp.gate_proj"
    up: str = "model.layers.{}.mlp.up_proj"
    down: str = "model.layers.{}.mlp.down_proj"
    # endings of names that are stored, but can be computed
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @classmethod
    def under(cls, prefix: str) -> WeightNames:
        """Return Llama's names with another prefix than `model.`; a head has none."""
        names: dict[str, Any] = {
            item.name: prefix + item.default.removeprefix("model.")
            for item in fields(cls)
            if isinstance(item.default, str) and item.name != "head"
        }
        return cls(**names)


MARK = "tok_embeddings.weight"
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")


def original_adapter(names: Collection[str]) -> WeightsAdapter | None:
    """Return a function that renames such weights; None for other layouts."""
    return to_transformers if MARK in names else None


def to_transformers(name: str) -> str:
    """Convert one name; an unknown name is unchanged, and is reported as surplus later."""
    match = _LAYER_NAME.fullmatch(name)
    if match:
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else name
