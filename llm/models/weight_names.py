"""`WeightNames`: what a checkpoint calls each part of a model. One value for each architecture."""

from __future__ import annotations

from dataclasses import dataclass


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
    gate: str = "model.layers.{}.mlp.gate_proj"
    up: str = "model.layers.{}.mlp.up_proj"
    down: str = "model.layers.{}.mlp.down_proj"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # endings: stored, but can be computed
