"""Embedding models: vectors equal an independent forward's, in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from llm import Engine, FinishReason, Request, RequestError, TokenChunk, is_embedding_model
from llm.engine.engine import create_engine
from llm.errors import CheckpointError
from llm.models.pooling import Pooling, PoolingSpec, read_pooling
from llm.runner.model_runner import ModelRunner
from tests.closeness import error
from tests.llm.llama_checkpoints import SMALL, pipeline_config, random_ids, write_llama

MAX_ERROR = 2e-5  # of the largest number; float32 sums in another order differ by 2e-6

PROMPTS = [random_ids(length, 96, seed=length) for length in (40, 3, 1, 17)]


def write_bare(folder: Path, kind: str = "llama") -> Path:
    """Write a model without a head, in the format of transformers."""
    torch.manual_seed(0)
    model: Any = LlamaModel(LlamaConfig(**SMALL))
    if kind == "qwen3":
        model = Qwen3Model(Qwen3Config(**(SMALL | {"head_dim": 16})))
    model.save_pretrained(folder)
    return folder


def write_modules(folder: Path, *modes: str, normalize: bool = False, extra: str = "") -> Path:
    """Write sentence-transformers' files next to a checkpoint."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *extra.split()]
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": f"{index}_{name}" * (index > 0)}
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = folder / "1_Pooling"
    pooling.mkdir(exist_ok=True)
    settings = {f"pooling_mode_{mode}": True for mode in modes} | {"pooling_mode_max_tokens": False}
    (pooling / "config.json").write_text(json.dumps(settings | {"word_embedding_dimension": 64}))
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bare(tmp_path_factory.mktemp("bare"))


def vectors(chunk: TokenChunk) -> np.ndarray:
    return np.stack([np.frombuffer(vector, dtype="<f4") for vector in chunk.embeddings])


def embed(engine: Engine, prompts: list[list[int]]) -> list[np.ndarray]:
    streams = [
        engine.submit(Request(f"e{index}", tuple(prompt), embeds=True))
        for index, prompt in enumerate(prompts)
    ]
    if not engine.is_running:
        engine.start()
    found = []
    for stream in streams:
        (chunk,) = stream
        assert chunk.finish_reason is FinishReason.STOP
        assert (chunk.token_ids, chunk.output_tokens) == ((), 0)
        found.append(vectors(chunk))
    return found


def expected(folder: Path, prompt: list[int], model: Any = LlamaModel) -> np.ndarray:
    """Return the last layer's outputs of every token, after the final norm."""
    counterpart = model.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden: np.ndarray = counterpart(torch.tensor([prompt])).last_hidden_state[0].numpy()
    return hidden


@pytest.mark.parametrize(("kind", "counterpart"), [("llama", LlamaModel), ("qwen3", Qwen3Model)])
def test_a_bare_decoder_gives_its_last_vector_at_length_one(
    kind: str, counterpart: Any, tmp_path: Path
) -> None:
    folder = write_bare(tmp_path, kind)
    engine = create_engine(pipeline_config(folder))
    for prompt, found in zip(PROMPTS, embed(engine, PROMPTS), strict=True):
        last = expected(folder, prompt, counterpart)[-1]
        assert found.shape == (1, 64)
        assert error(found[0], last / np.linalg.norm(last)) < MAX_ERROR
    assert engine.stats().used_pages == 0
    engine.shutdown()


def test_one_vector_for_each_token(bare: Path) -> None:
    engine = create_engine(pipeline_config(bare, pool_embeddings=False))
    for prompt, found in zip(PROMPTS, embed(engine, PROMPTS), strict=True):
        hidden = expected(bare, prompt)
        hidden /= np.linalg.norm(hidden, axis=1, keepdims=True)
        assert found.shape == (len(prompt), 64)
        assert error(found, hidden) < MAX_ERROR
    engine.shutdown()


@pytest.mark.parametrize("mode", ["mean_tokens", "lasttoken", "cls_token"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_of_sentence_transformers(mode: str, normalize: bool, tmp_path: Path) -> None:
    folder = write_modules(write_bare(tmp_path), mode, normalize=normalize)
    engine = create_engine(pipeline_config(folder))
    (found,) = embed(engine, PROMPTS[:1])
    hidden = expected(folder, PROMPTS[0])
    pooled = {"mean_tokens": hidden.mean(0), "lasttoken": hidden[-1], "cls_token": hidden[0]}[mode]
    pooled = pooled / np.linalg.norm(pooled) if normalize else pooled
    assert error(found[0], pooled) < MAX_ERROR
    engine.shutdown()


def test_no_schedule_changes_a_bit(bare: Path) -> None:
    """Alone, together, in chunks, short of pages, twice (without the prefix cache)."""
    folder = write_modules(bare, "mean_tokens")
    try:
        engine = create_engine(pipeline_config(folder))
        together = embed(engine, PROMPTS)
        for prompt, vector in zip(PROMPTS, together, strict=True):
            assert np.array_equal(embed(engine, [prompt])[0], vector)
        engine.shutdown()
        small = pipeline_config(folder, num_pages=8, page_size=8, max_batch_input_tokens=32)
        engine = create_engine(small)
        for _ in range(2):
            for found, vector in zip(embed(engine, PROMPTS), together, strict=True):
                assert np.array_equal(found, vector)
        assert engine.stats().prefix_hit_tokens == 0
        engine.shutdown()
    finally:
        (bare / "modules.json").unlink()


def test_models_do_one_thing(bare: Path, tmp_path: Path) -> None:
    engine = create_engine(pipeline_config(bare))
    with pytest.raises(RequestError, match="does not generate"):
        engine.submit(Request("a", (1, 2)))
    engine.shutdown()
    causal = write_llama(tmp_path)
    assert (is_embedding_model(bare), is_embedding_model(causal)) == (True, False)
    engine = create_engine(pipeline_config(causal))
    with pytest.raises(RequestError, match="does not embed"):
        engine.submit(Request("a", (1, 2), embeds=True))
    engine.shutdown()
    assert ModelRunner(pipeline_config(causal)).is_generation
    assert not ModelRunner(pipeline_config(bare)).is_generation


def test_a_causal_checkpoint_with_modules_embeds(tmp_path: Path) -> None:
    """Like Qwen3-Embedding: its architecture has a head, but its layout is that of an embedding
    model.
    """
    folder = write_modules(write_llama(tmp_path), "lasttoken", normalize=True)
    assert is_embedding_model(folder)
    engine = create_engine(pipeline_config(folder))
    (found,) = embed(engine, PROMPTS[:1])
    last = expected(folder, PROMPTS[0])[-1]
    assert error(found[0], last / np.linalg.norm(last)) < MAX_ERROR
    engine.shutdown()


def test_layouts_that_are_not_understood(tmp_path: Path) -> None:
    folder = write_modules(tmp_path, "mean_tokens", extra="Dense")
    with pytest.raises(CheckpointError, match="Dense"):
        read_pooling(folder)
    for modes in ((), ("mean_tokens", "cls_token"), ("weightedmean_tokens",)):
        with pytest.raises(CheckpointError, match="pooling"):
            read_pooling(write_modules(tmp_path, *modes))
    assert read_pooling(write_modules(tmp_path, "cls_token")) == PoolingSpec(
        Pooling.FIRST, normalizes=False
    )
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no Pooling"):
        read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_pooling(tmp_path)
