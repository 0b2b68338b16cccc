"""Language models of published sizes with random weights, with config.json only; and checkpoint
folders.

With random weights a step takes as long as with trained ones, and tokens have no meaning: lengths
must be fixed by the request. `run_model_test_mode` creates the weights, on the device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.packed_shapes import GPTQ, GPTQ_CONFIG, write_packed

ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One language model: `values` are those of its config.json. Groups of heads share keys.

    `checkpoint` is the folder of one with weights; None: they are random, and with `packed` those
    of a checkpoint in this format.
    """

    name: str
    values: Mapping[str, Any]
    checkpoint: Path | None = None
    packed: str = ""

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Read the model in a checkpoint folder. Raises `OSError` without its config.json."""
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(folder.resolve().name, values, folder)

    def with_vocabulary(self, name: str, vocab_size: int) -> Shape:
        """Return the same layers with another vocabulary size in the embedding and the head."""
        return Shape(name, {**self.values, "vocab_size": vocab_size})

    def in_format(self, kind: str) -> Shape:
        """Return the same model as a checkpoint of this format (see `packed_shapes`)."""
        values = (
            {**self.values, "quantization_config": GPTQ_CONFIG} if kind == GPTQ else self.values
        )
        return Shape(f"{self.name} {kind}", values, packed=kind)

    def write(self, folder: Path) -> Path:
        """Write a folder that the test mode can serve; no token ends a text.

        The folder of a checkpoint is returned unchanged.
        """
        if self.checkpoint is not None:
            return self.checkpoint
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(self.values), indent=1)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        if self.packed:
            write_packed(folder, self.values, self.packed)
        return folder

    @property
    def num_weights(self) -> int:
        """Number of weights of all layers and the head, which a decode step of many rows reads."""
        return self._num_weights(self.num_experts)

    def num_weights_read(self, rows: int) -> int:
        """Return the largest number of weights that a decode step of so many rows reads."""
        chosen = rows * self.values.get("num_experts_per_tok", 0)
        return self._num_weights(min(self.num_experts, chosen))

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer of Qwen3-MoE; 0 for other models."""
        v = self.values
        return int(v.get("num_experts") or v.get("num_local_experts") or 0)

    def _num_weights(self, num_experts: int) -> int:
        """Return the number of weights with so many experts in each sparse layer."""
        v = self.values
        hidden, head_dim = v["hidden_size"], self.head_dim
        query, kv = (v[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
        attention = hidden * (query + 2 * kv) + query * hidden
        head_norms = 2 * head_dim if v["model_type"].startswith("qwen3") else 0
        mlp = 3 * hidden * v["intermediate_size"]
        if self.num_experts:
            router = hidden * self.num_experts
            mlp = router + 3 * hidden * num_experts * v["moe_intermediate_size"]
        layer = attention + head_norms + mlp + 2 * hidden
        return int(v["num_hidden_layers"] * layer + (v["vocab_size"] + 1) * hidden)

    @property
    def num_head_weights(self) -> int:
        """Number of weights of the head."""
        return int(self.values["vocab_size"] * self.values["hidden_size"])

    @property
    def kv_values(self) -> int:
        """Number of keys and values of one token in all layers."""
        v = self.values
        return 2 * v["num_hidden_layers"] * v["num_key_value_heads"] * self.head_dim

    @property
    def head_dim(self) -> int:
        """Number of values of one head."""
        v = self.values
        return int(v.get("head_dim") or v["hidden_size"] // v["num_attention_heads"])


def llama(
    *, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, Any]:
    """Return Llama 3.2's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": ROPE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


LLAMA_1B = Shape(
    "llama-1b",
    llama(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128_256),
)
LLAMA_3B = Shape(
    "llama-3b",
    llama(hidden=3072, inner=8192, layers=28, heads=24, kv_heads=8, head_dim=128, vocab=128_256),
)
LLAMA_8B = Shape(  # the widths of Llama 3.1 8B; its head is a matrix of its own, which takes 1 GB
    "llama-8b",
    llama(hidden=4096, inner=14_336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128_256),
)
QWEN3_600M = Shape(
    "qwen3-0.6b",
    {
        **llama(
            hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8, head_dim=128, vocab=151_936
        ),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
    },
)
QWEN3_30B_A3B = Shape(  # 60 GB in bfloat16, of which a token needs 6; its head is tied here, too
    "qwen3-30b-a3b",
    {
        **QWEN3_600M.values,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
)
LLASA_1B = LLAMA_1B.with_vocabulary("llasa-1b", 193_800)
ORPHEUS_3B = LLAMA_3B.with_vocabulary("orpheus-3b", 156_940)
TOY = Shape(
    "toy",
    llama(hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=512),
)

SHAPES = {
    shape.name: shape
    for shape in (
        *(LLAMA_1B, LLASA_1B, LLAMA_3B, ORPHEUS_3B, LLAMA_8B, QWEN3_600M, QWEN3_30B_A3B),
        TOY,
    )
}
