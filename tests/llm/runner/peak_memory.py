"""Small models and the peak of their largest prefill, on any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import pipeline_config, write_llama
from tests.llm.runner.largest_prefill import Peak, largest_prefill

TOKENS, MAX_ROWS, PAGE_SIZE = 2048, 64, 16
SLACK = 1.1
MODELS: dict[str, dict[str, Any]] = {
    "wide": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512},
    "large vocabulary": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32_000},
    "many heads": {"hidden_size": 64, "num_attention_heads": 32},
}
NUMS_OF_ROWS = (1, 16, MAX_ROWS)


def create_runner(folder: Path, model: str, **keys: Any) -> ModelRunner:
    """Create a runner of a model with heads of 64, which every attention backend supports."""
    write_llama(folder, max_position_embeddings=TOKENS, head_dim=64, **MODELS[model])
    config = pipeline_config(
        folder,
        num_pages=1 + 2 * TOKENS // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_batch_input_tokens=TOKENS,
        max_batch_size=MAX_ROWS,
        **keys,
    )
    return ModelRunner(config)


def measured(folder: Path, model: str, num_rows: int, **keys: Any) -> Peak:
    """Return the peak of so many prompts, with sampling."""
    runner = create_runner(folder, model, **keys)
    runner.initialize()
    return largest_prefill(runner, num_rows)
