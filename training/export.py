"""Files of a checkpoint that its weights determine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from training.vocabulary import END_OF_SPEECH, END_OF_TEXT, PAD

MAX_POSITIONS = 2048


def llama_config(state: dict[str, Tensor], head_dim: int) -> dict[str, Any]:
    """Return Hugging Face's LlamaConfig, derived from the weights."""
    layer = "model.layers.0."
    vocab_size, hidden = state["model.embed_tokens.weight"].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": state[f"{layer}mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": sum(k.endswith("mlp.gate_proj.weight") for k in state),
        "num_attention_heads": state[f"{layer}self_attn.q_proj.weight"].shape[0] // head_dim,
        "num_key_value_heads": state[f"{layer}self_attn.k_proj.weight"].shape[0] // head_dim,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": [END_OF_SPEECH, END_OF_TEXT],
        "pad_token_id": PAD,
        "torch_dtype": "float32",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear", "Embedding"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel",
                                "symmetric": True},
                }
            },
            "quantization_status": "compressed",
        },
    }  # fmt: skip


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
