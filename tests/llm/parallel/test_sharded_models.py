"""Logits and tokens of a model that is split over ranks are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from llm.config import ModelConfig, PipelineConfig
from llm.parallel.group import Group
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import (
    PAGES,
    SMALL,
    batch,
    pipeline_config,
    random_ids,
    row,
    write_random,
)
from tests.llm.parallel.rank_threads import on_ranks

MAX_DIFFERENCE = 1e-4

EIGHT_HEADS = SMALL | {"num_attention_heads": 8, "num_key_value_heads": 4}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**EIGHT_HEADS),
    "llama biased, replicated heads, own head": LlamaConfig(
        **SMALL | {"tie_word_embeddings": False}, attention_bias=True, mlp_bias=True
    ),
    "one head of keys": LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "mistral": MistralConfig(**EIGHT_HEADS | {"sliding_window": 16}),
    "qwen2": Qwen2Config(**EIGHT_HEADS),
    "qwen3": Qwen3Config(**EIGHT_HEADS, head_dim=16),
}


def split_config(folder: Path, num_ranks: int, **keys: Any) -> PipelineConfig:
    """Return the configuration of a model on several CPU ranks."""
    plain = pipeline_config(folder, **keys)
    fields = plain.model.model_dump(exclude_unset=True) | {"device_specs": ["cpu"] * num_ranks}
    kept = plain.model_dump(exclude_unset=True, exclude={"model"})
    return PipelineConfig(model=ModelConfig(**fields), **kept)


def run(folder: Path, group: Group | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits of a mixed batch after a prompt, and of the step after it."""
    config = split_config(folder, 1 if group is None else group.size)
    runner = ModelRunner(config, group=group)
    runner.initialize()
    first, second = random_ids(40, 96), random_ids(21, 96, seed=1)
    runner.forward(runner.prepare(batch(row(first[:30], PAGES[:3]))))
    rows = (
        row(first[30:31], PAGES[:3], 30),
        row(second, PAGES[3:5], request_id="b"),
    )
    mixed = runner.forward(runner.prepare(batch(*rows))).logits
    last = batch(row([5], PAGES[3:5], 21, request_id="b"))
    return mixed, runner.forward(runner.prepare(last)).logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_logits_of_ranks_are_those_of_one(tmp_path: Path, name: str, num_ranks: int) -> None:
    folder = write_random(tmp_path, CONFIGS[name])
    expected = run(folder)
    for logits in on_ranks(num_ranks, tmp_path, lambda group: run(folder, group)):
        for own, reference in zip(logits, expected, strict=True):
            assert torch.allclose(own, reference, rtol=0, atol=MAX_DIFFERENCE)
            assert own.shape == reference.shape
