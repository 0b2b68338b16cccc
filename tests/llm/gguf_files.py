"""Small GGUF files of Llama, written with the package `gguf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file, save_file

from llm.models.gguf import GGUFWeights
from tests.llm.llama_checkpoints import write_llama

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
    values = METADATA | keys
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
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


def paired_of(name: str, value: np.ndarray) -> np.ndarray:
    heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
    return paired(value, heads) if heads else value


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def quantised(folder: Path, kinds: Callable[[str], str], **keys: Any) -> tuple[Path, Path]:
    """Write a Llama's GGUF file with matrices in these formats and its configuration to a folder,
    and the folder of its values in float32.
    """
    plain, packed = write_llama(folder / "plain", **keys), folder / "packed"
    packed.mkdir()
    stored: dict[str, Any] = {}
    for name, value in load_file(plain / "model.safetensors").items():
        matrix = paired_of(name, value.numpy())
        form = gguf.GGMLQuantizationType[kinds(name) if value.ndim == 2 else "F32"]
        data = matrix if form.name == "F32" else quantise(matrix, form)
        stored[gguf_name(name)] = (data, form)
    weights = GGUFWeights(write_gguf(packed / "m.gguf", stored, {}))
    tensors = {name: weights.tensor(name) for name in weights.info()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    (packed / "config.json").write_text((plain / "config.json").read_text())
    return plain, packed


def quantise(matrix: np.ndarray, form: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantise with the package; blocks of 256, which it only reads, get random numbers."""
    if not form.name.endswith("_K"):
        return gguf.quants.quantize(matrix, form)
    block, size = gguf.GGML_QUANT_SIZES[form]
    data = np.random.default_rng(5).integers(0, 256, (matrix.size // block, size), dtype=np.uint8)
    for at in (208,) if form.name == "Q6_K" else (0, 2):
        data[:, at : at + 2] = np.array([0.0003], np.float16).view(np.uint8)
    return data.reshape(len(matrix), -1)
