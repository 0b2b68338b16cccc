"""A language model of a plug-in that has only the four required methods."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llm.config import PipelineConfig, architectures
from llm.engine.engine import Engine, create_engine
from llm.errors import ConfigError, RequestError
from llm.models.base import PipelineModel
from llm.request import FinishReason, Request, SamplingParams

PLUGIN = '''
"""Counts: the token after t at position p is t + p + 1."""

import torch

from llm import Architecture
from llm.batch import ModelInputs, ModelOutputs
from llm.models.base import PipelineModel


class CountingModel(PipelineModel):
    @classmethod
    def calculate_max_seq_len(cls, pipeline_config, huggingface_config):
        return pipeline_config.max_length or 64

    def prepare_initial_token_inputs(
        self, replica_batches, kv_cache_inputs=None, return_n_logits=1
    ):
        rows = [row for batch in replica_batches for row in batch]
        batch = kv_cache_inputs.forward_batch
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + row.generates)
        return ModelInputs(
            forward_batch=batch,
            kv_cache_inputs=kv_cache_inputs,
            sampling_rows=tuple(n for n, row in enumerate(rows) if row.generates),
            logit_offsets=tuple(offsets),
        )

    def prepare_next_token_inputs(self, next_tokens, prev_model_inputs):
        cache = prev_model_inputs.kv_cache_inputs.advanced(next_tokens)
        return ModelInputs(
            forward_batch=cache.forward_batch,
            kv_cache_inputs=cache,
            sampling_rows=prev_model_inputs.sampling_rows,
            logit_offsets=prev_model_inputs.logit_offsets,
        )

    def execute(self, model_inputs):
        batch = model_inputs.forward_batch
        last = [end - 1 for end in batch.row_offsets[1:]]
        ends = torch.tensor([last[row] for row in model_inputs.sampling_rows], dtype=torch.int64)
        chosen = (batch.input_ids[ends] + batch.positions[ends] + 1) % 50
        logits = torch.nn.functional.one_hot(chosen, 50).float() * 40
        return ModelOutputs(logits, logits, model_inputs.logit_offsets)


ARCHITECTURES = [Architecture("CountingForCausalLM", "sonant_counting:CountingModel")]
'''
SIZES = {
    "vocab_size": 50,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "eos_token_id": 49,
}
METHODS = sorted(PipelineModel.__abstractmethods__)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the registrations and imports of a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(architectures, "_architectures", dict(architectures._architectures))
    yield
    sys.modules.pop("sonant_counting", None)


def configured(folder: Path, plugin: str = PLUGIN, **values: Any) -> PipelineConfig:
    """Return a checkpoint of the plug-in's architecture, with one unused weight."""
    (folder / "sonant_counting.py").write_text(plugin)
    config = {"architectures": ["CountingForCausalLM"]} | SIZES
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return PipelineConfig(
        custom_architectures=[f"{folder}:sonant_counting"],
        model={"model_path": str(folder), "device_specs": ["cpu"], "kv_cache": {"num_pages": 40}},
        **values,
    )


def counted(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Return the model's output."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append((tokens[-1] + len(tokens)) % 50)
    return tokens[len(prompt) :]


def answers(engine: Engine, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    streams = [engine.submit(Request(f"r{n}", p, sampling)) for n, p in enumerate(prompts)]
    chunks = [list(stream) for stream in streams]
    assert {c[-1].finish_reason for c in chunks} == {FinishReason.LENGTH}
    return [[token for chunk in c for token in chunk.token_ids] for c in chunks]


def test_four_methods_are_enough(tmp_path: Path) -> None:
    """Prompts in chunks, several steps a turn, more requests than rows."""
    config = configured(tmp_path, max_batch_size=4, max_batch_input_tokens=8, max_num_steps=3)
    engine = create_engine(config)
    engine.start()
    prompts = [(n + 1,) * (3 + 5 * n) for n in range(6)]
    expected = [[t for t in counted(p, 9) if t != SIZES["eos_token_id"]] for p in prompts]
    assert answers(engine, prompts) == expected
    with pytest.raises(RequestError, match="CountingModel does not compute log-probabilities"):
        engine.submit(Request("scored", (1,), SamplingParams(top_logprobs=2)))
    assert engine.stats().failed_steps == 0
    engine.shutdown()


def test_there_are_four_of_them() -> None:
    assert METHODS == [
        "calculate_max_seq_len",
        "execute",
        "prepare_initial_token_inputs",
        "prepare_next_token_inputs",
    ]
    with pytest.raises(TypeError, match="abstract"):
        PipelineModel()  # type: ignore[abstract,call-arg]


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_lacks_one_of_them_is_refused(tmp_path: Path, method: str) -> None:
    plugin = PLUGIN.replace(f"def {method}(", f"def not_{method}(")
    with pytest.raises(ConfigError, match=f"sonant_counting:CountingModel lacks {method}"):
        create_engine(configured(tmp_path, plugin))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("sonant_counting:Nothing", "sonant_counting has no Nothing"),
        ("sonant_counting:torch", "sonant_counting:torch is no PipelineModel"),
        ("sonant_counting:Architecture", "sonant_counting:Architecture is no PipelineModel"),
        ("sonant_no_such:Model", "cannot import sonant_no_such"),
    ],
)
def test_classes_that_are_no_model_are_refused(tmp_path: Path, model: str, message: str) -> None:
    plugin = PLUGIN.replace('"sonant_counting:CountingModel"', f'"{model}"')
    with pytest.raises(ConfigError, match=f"architecture CountingForCausalLM: {message}"):
        create_engine(configured(tmp_path, plugin))


def test_the_required_sizes_of_a_checkpoint(tmp_path: Path) -> None:
    config = configured(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["CountingForCausalLM"]}))
    with pytest.raises(ValueError, match="hidden_size"):
        create_engine(config)
