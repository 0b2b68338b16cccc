"""Small models and the peak of their largest prefill, on any device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm.runner.model_runner import ModelRunner
from tests.llm.lfm2_checkpoints import write_lfm2
from tests.llm.llama_checkpoints import pipeline_config, write_llama
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe
from tests.llm.qwen3_next_checkpoints import EXPERTS, write_qwen3_next

TOKENS, MAX_ROWS, PAGE_SIZE = 2048, 64, 16
SLACK = 1.1
MODELS: dict[str, dict[str, Any]] = {
    "wide": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512},
    "large vocabulary": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32_000},
    "many heads": {"hidden_size": 64, "num_attention_heads": 32},
    "short convolutions": {"hidden_size": 256, "intermediate_size": 64, "vocab_size": 512},
    "delta nets": {"linear_key_head_dim": 32, "linear_value_head_dim": 48, "vocab_size": 512},
    "experts": {**EXPERTS, "moe_intermediate_size": 512, "linear_value_head_dim": 2},
    "experts without states": {"moe_intermediate_size": 512},
}
WRITERS: dict[str, Callable[..., Path]] = {
    "short convolutions": write_lfm2,
    "delta nets": write_qwen3_next,
    "experts": write_qwen3_next,
    "experts without states": write_qwen3_moe,
}
NUMS_OF_ROWS = (1, 16, MAX_ROWS)


def create_runner(folder: Path, model: str, tokens: int = TOKENS, /, **keys: Any) -> ModelRunner:
    """Create a runner of a model with heads of 64, which every attention backend supports.

    `tokens`: maximum number of tokens of a step and of a sequence.
    """
    write = WRITERS.get(model, write_llama)
    write(folder, max_position_embeddings=tokens, head_dim=64, **MODELS[model])
    config = pipeline_config(
        folder,
        num_pages=1 + 2 * tokens // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_batch_input_tokens=tokens,
        max_batch_size=MAX_ROWS,
        **keys,
    )
    return ModelRunner(config)
