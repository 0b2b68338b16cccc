"""Random checkpoints of Qwen3-MoE as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.llm.llama_checkpoints import SMALL, write_random

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig

EXPERTS: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}


def qwen3_moe(**keys: Any) -> Qwen3MoeConfig:
    """Return a small configuration, with experts in all layers unless `keys` change it."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SMALL | EXPERTS | keys)


def write_qwen3_moe(folder: Path, *, seed: int = 0, **keys: Any) -> Path:
    """Write a checkpoint with the configuration `qwen3_moe(**keys)`."""
    return write_random(folder, qwen3_moe(**keys), seed=seed)
