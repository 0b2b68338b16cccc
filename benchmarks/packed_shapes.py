"""Checkpoints of random four-bit matrices, of a language model's sizes: GGUF files and GPTQ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from llm.models.gguf import transformers_name
from llm.models.gguf_blocks import LAYOUTS

GPTQ = "GPTQ"
KINDS = ("Q4_0", "Q4_K", GPTQ)
TABLE_KIND = "Q6_K"  # of the embedding, as published files have it
SPREAD = {"Q4_0": 4.6, "Q4_K": 160.0, "Q6_K": 1330.0}
"""Standard deviation of a weight whose block has the scale 1, about."""
GPU_BITS = {"Q4_0": (4.5, 8.75), "Q4_K": (4.75, 8.75), GPTQ: (4.125, 16.0)}
"""Bits of a weight of the layers and of the head on a GPU, with its share of scales."""
GROUP = 128  # of GPTQ
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}


def write_packed(folder: Path, values: Mapping[str, Any], kind: str) -> None:
    """Write the weights of a Llama with these keys of config.json; norms are 1."""
    if kind == GPTQ:
        save_file(_gptq_tensors(values), folder / "model.safetensors")
    else:
        _write_gguf(folder / "model.gguf", values, kind)


def _gptq_tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    made, found = torch.Generator().manual_seed(0), {}
    for name, (num_out, num_in) in _matrices(values):
        path = transformers_name(f"{name}.weight").removesuffix(".weight")
        if name == "token_embd":
            table = torch.randn(num_out, num_in, generator=made).mul_(2 * num_in**-0.5)
            found[f"{path}.weight"] = table.bfloat16()
            continue
        bounds, shape = (-(2**31), 2**31), (num_in // 8, num_out)
        words = torch.randint(*bounds, shape, generator=made, dtype=torch.int32)
        scale = 2 * num_in**-0.5 / SPREAD["Q4_0"]
        found[f"{path}.qweight"] = words
        found[f"{path}.qzeros"] = torch.full((num_in // GROUP, num_out // 8), 0x77777777).int()
        found[f"{path}.scales"] = torch.full((num_in // GROUP, num_out), scale).half()
    for name in _norms(values["num_hidden_layers"]):
        found[transformers_name(f"{name}.weight")] = torch.ones(values["hidden_size"])
    return found


def _write_gguf(path: Path, values: Mapping[str, Any], kind: str) -> None:
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
