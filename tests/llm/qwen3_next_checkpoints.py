"""Random checkpoints of Qwen3-Next as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

DELTA_NET, ATTENTION = "linear_attention", "full_attention"
QWEN3_NEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "num_experts": 0,
    "max_position_embeddings": 512,
    "layer_types": [DELTA_NET, DELTA_NET, ATTENTION, DELTA_NET, ATTENTION],
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 3,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}
"""Sparse MLPs in all layers but one."""


def write_qwen3_next(folder: Path, *, seed: int = 0, **keys: Any) -> Path:
    """Write a checkpoint: `QWEN3_NEXT` with `keys` of its config changed."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN3_NEXT | keys))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "linear_attn.norm" in name:
            weight.data.uniform_(0.5, 1.5, generator=generator)
        elif "norm" in name or name.endswith("bias"):  # of most norms minus one
            weight.data.uniform_(-0.5, 0.5, generator=generator)
        elif ".conv1d." in name:
            weight.data.uniform_(-1.0, 1.0, generator=generator)
        elif name.endswith("A_log"):
            weight.data.uniform_(-4.0, 1.0, generator=generator)
    model.save_pretrained(folder)
    return folder
