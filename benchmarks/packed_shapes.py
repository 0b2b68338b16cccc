"""GGUF files of random four-bit matrices, of the sizes of a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llm.models.gguf_blocks import LAYOUTS

KINDS = ("Q4_0", "Q4_K")
TABLE_KIND = "Q6_K"  # of the embedding, as published files have it
SPREAD = {"Q4_0": 4.6, "Q4_K": 160.0, "Q6_K": 1330.0}
"""Standard deviation of a weight whose block has the scale 1, about."""


def write_packed(path: Path, values: Mapping[str, Any], kind: str) -> None:
    """Write the weights of a Llama with these keys of config.json; norms are 1."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", values["num_attention_heads"])
    writer.add_uint32("llama.attention.head_count_kv", values["num_key_value_heads"])
    rng = np.random.default_rng(0)
    for name, (num_out, num_in) in _matrices(values):
        own = TABLE_KIND if name == "token_embd" else kind
        data = _blocks(rng, own, num_out, num_in)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[own])
    for name in _norms(values["num_hidden_layers"]):
        writer.add_tensor(f"{name}.weight", np.ones(values["hidden_size"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    query, kv = (
        values[key] * values["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    yield "token_embd", (values["vocab_size"], hidden)
    for layer in range(values["num_hidden_layers"]):
        sizes = {"attn_q": (query, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
        sizes |= {"attn_output": (hidden, query), "ffn_gate": (inner, hidden)}
        sizes |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in sizes.items())


def _norms(num_layers: int) -> Iterator[str]:
    yield "output_norm"
    for layer in range(num_layers):
        yield from (f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm")


def _blocks(rng: np.random.Generator, kind: str, num_out: int, num_in: int) -> np.ndarray:
    """Return uint8 [out, bytes]; the bytes of a mebibyte are repeated."""
    layout = np.dtype(LAYOUTS[kind])
    size = 256 if kind.endswith("_K") else 32
    count = num_out * num_in // size
    octets = np.resize(np.frombuffer(rng.bytes(2**20), np.uint8), count * layout.itemsize)
    blocks = octets.view(layout)
    blocks["d"] = 2 * num_in**-0.5 / SPREAD[kind]
    if "m" in (layout.names or ()):
        blocks["m"] = 7.5 * blocks["d"]
    return blocks.view(np.uint8).reshape(num_out, -1)
