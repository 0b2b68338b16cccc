"""Random checkpoints of LFM2 as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LFM2: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 90,
    "block_multiple_of": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "initializer_range": 0.3,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 3,
}


def write_lfm2(folder: Path, *, seed: int = 0, **keys: Any) -> Path:
    """Write a checkpoint: `LFM2` with `keys` of its config changed."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Lfm2ForCausalLM(Lfm2Config(**LFM2 | keys))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5, generator=generator)
        elif ".conv.conv." in name or name.endswith("bias"):
            weight.data.uniform_(-1.0, 1.0, generator=generator)
    model.save_pretrained(folder)
    return folder
