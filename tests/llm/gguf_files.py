"""Small GGUF files of Llama, written with the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAMES = (
    ("model.layers.", "blk."),
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)
METADATA: dict[str, Any] = {
    "llama.block_count": 3,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 112,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
}


def write_gguf(path: Path, tensors: Mapping[str, Any], keys: Mapping[str, Any]) -> Path:
    """Write (data, type) by name with METADATA, of which `keys` are changed (None: left out)."""
    from gguf import GGUFWriter

    values = METADATA | keys
    writer = GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def paired(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of queries or keys with the pairs of a rotation as neighbours."""
    half = rows.shape[0] // num_heads // 2
    order = [
        head * 2 * half + part * half + i
        for head in range(num_heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return np.ascontiguousarray(rows[order])
