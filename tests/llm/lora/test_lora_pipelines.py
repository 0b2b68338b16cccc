"""Adapters with a late device, drafted tokens, embeddings, and another architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from llm import Request, SamplingParams, SpeculativeConfig
from llm.config import ModelConfig
from llm.engine.engine import Engine, create_engine
from tests.closeness import error
from tests.llm.engine.test_overlap_engine import overlapping
from tests.llm.llama_checkpoints import SMALL, pipeline_config, random_ids, write_llama
from tests.llm.lora.adapters import merge, write_adapter
from tests.llm.lora.test_lora import lora, run, tokens
from tests.llm.models.test_embeddings import vectors, write_modules

ASKED = [
    Request(
        f"{name or 'base'}{seed}",
        tuple(random_ids(20 + seed, 96, seed=seed)),
        SamplingParams(seed=seed, max_tokens=16, ignore_eos=True),
        lora=name,
    )
    for seed, name in enumerate(("", "red", "green", "red", "", "green"))
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def paths(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        str(write_adapter(root / name, base, seed=seed))
        for seed, name in enumerate(("red", "green"))
    ]


def finish(engine: Engine) -> dict[str, list[int]]:
    found = {name: tokens(chunks) for name, chunks in run(engine, *ASKED).items()}
    engine.shutdown()
    return found


@pytest.fixture(scope="module")
def expected(base: Path, paths: list[str]) -> dict[str, list[int]]:
    return finish(create_engine(pipeline_config(base, lora=lora(paths))))


@pytest.mark.parametrize("slots", [1, 2])
def test_on_a_late_device(
    base: Path, paths: list[str], expected: dict[str, list[int]], slots: int
) -> None:
    """With one slot adapters are swapped while the previous step may still read them."""
    engine, _ = overlapping(pipeline_config(base, lora=lora(paths, max_num_loras=slots)))
    assert finish(engine) == expected


def test_with_a_draft_model(base: Path, paths: list[str], expected: dict[str, list[int]]) -> None:
    """The draft model has no adapters; its wrong tokens are rejected."""
    config = pipeline_config(
        base,
        lora=lora(paths),
        draft_model=ModelConfig(model_path=str(base)),
        speculative=SpeculativeConfig(num_speculative_tokens=3),
    )
    assert finish(create_engine(config)) == expected


def test_embeddings(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "red", base)
    merged = write_modules(merge(base, folder, tmp_path / "merged"), "mean_tokens")
    embedding = write_modules(write_llama(tmp_path / "embedding"), "mean_tokens")

    def embed(model: Path, name: str, **values: Any) -> np.ndarray:
        engine = create_engine(pipeline_config(model, **values))
        stream = engine.submit(Request("e", (1, 2, 3, 4, 5), embeds=True, lora=name))
        engine.start()
        (chunk,) = stream
        engine.shutdown()
        return vectors(chunk)

    found = embed(embedding, "red", lora=lora([str(folder)]))
    # float32 rounds the sums of merged weights differently.
    assert error(found, embed(merged, "")) < 1e-5


def test_a_base_with_biases_and_head_norms(tmp_path: Path) -> None:
    """Queries and keys are reordered for the rotation, and so are an adapter's rows."""
    keys = SMALL | {"head_dim": 32, "attention_bias": False}
    Qwen3ForCausalLM(Qwen3Config(**keys)).save_pretrained(tmp_path / "base")
    folder = write_adapter(tmp_path / "red", tmp_path / "base", rank=3)
    adapted = create_engine(pipeline_config(tmp_path / "base", lora=lora([str(folder)])))
    merged = create_engine(pipeline_config(merge(tmp_path / "base", folder, tmp_path / "merged")))
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompt = tuple(random_ids(30, 96))
    found = tokens(run(adapted, Request("a", prompt, sampling, lora="red"))["a"])
    assert found == tokens(run(merged, Request("a", prompt, sampling))["a"])
    assert found != tokens(run(adapted, Request("b", prompt, sampling))["b"])
    adapted.shutdown()
    merged.shutdown()
