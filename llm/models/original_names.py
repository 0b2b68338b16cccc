"""The layout in which Meta and Mistral publish weights themselves (consolidated.safetensors).

Names differ from transformers', and the pairs of a rotation are neighbours, not halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from llm.models.weights import WeightsAdapter

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
    """How to rename such weights; None for others."""
    return to_transformers if MARK in names else None


def to_transformers(name: str) -> str:
    """One name; what is not known stays as it is, and is then told to be surplus."""
    match = _LAYER_NAME.fullmatch(name)
    if match:
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else name
