"""A language model of a plug-in that has only the four required methods."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llm.config import PipelineConfig, architectures
from llm.engine.engine import Engine, create_engine
from llm.errors import ConfigError, RequestError
from llm.models.base import PipelineModel
from llm.request import FinishReason, Request, SamplingParams, Token

DOCUMENT = Path(__file__).parents[3] / "docs" / "own_models.md"


def documented(name: str) -> str:
    """Return the module of this name that the documentation shows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    found = re.search(rf'```python title="{name}.py"\n(.*?)```', text, re.DOTALL)
    assert found
    return found[1]


PLUGIN = documented("sonant_counting")
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
    for name in ("sonant_counting", "sonant_frames"):
        sys.modules.pop(name, None)


def configured(
    folder: Path, plugin: str = PLUGIN, name: str = "counting", **values: Any
) -> PipelineConfig:
    """Return a checkpoint of the plug-in's architecture, with one unused weight."""
    (folder / "sonant_counting.py").write_text(plugin)
    config = {"architectures": [f"{name.capitalize()}ForCausalLM"]} | SIZES
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return PipelineConfig(
        custom_architectures=[f"{folder}:sonant_{name}"],
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


def test_a_depth_transformer_decodes_frames(tmp_path: Path) -> None:
    """Alone and in a batch, with a prompt that has a frame among its text."""
    (tmp_path / "sonant_frames.py").write_text(documented("sonant_frames"))
    engine = create_engine(configured(tmp_path, name="frames", max_batch_size=4))
    engine.start()
    plugin = import_module("sonant_frames")
    prompts: list[tuple[Token, ...]] = [(1,), (7, 9, 20), (3, (4, 5, 6)), (49,) * 9]
    expected = [decoded(plugin, engine, prompt, 6) for prompt in prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for group in (*([number] for number in range(4)), range(4)):
        streams = [engine.submit(Request(f"r{n}", prompts[n], sampling)) for n in group]
        found = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
        assert found == [expected[n] for n in group]
    assert len({code for frames in expected for frame in frames for code in frame[1:]}) > 4
    assert engine.stats().failed_steps == 0
    engine.shutdown()


def decoded(plugin: Any, engine: Engine, prompt: tuple[Token, ...], count: int) -> list[Token]:
    """Return the frames that the model's rules give."""
    depth = engine.pipeline.runner.loaded_model.frame_decoder
    assert depth is not None
    last, frames = prompt[-1], []
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        first = last if isinstance(last, int) else last[0]
        codes = [(first + position + 1) % plugin.FRAMES.codebook_size]
        hidden = torch.eye(plugin.HIDDEN)[codes[0] % plugin.HIDDEN]
        with torch.inference_mode():
            frame = depth.begin(hidden[None])
            for _ in range(2):
                codes.append(int(frame.next_logits(torch.tensor(codes[-1:])).argmax()))
        last = tuple(codes)
        frames.append(last)
    return [frame for frame in frames if frame != plugin.FRAMES.end]
