"""Architectures that only transformers supports: run alone, and refused otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, GPT2Config, Lfm2MoeConfig

from llm import Engine, FinishReason, Request, SamplingParams, create_engine
from llm.batch import ReturnHiddenStates, ReturnLogits
from llm.config import PipelineConfig
from llm.errors import CheckpointError
from llm.models.auto import AutoModel
from llm.models.weights import SafetensorsWeights
from llm.runner.model_runner import ModelRunner
from tests.closeness import error
from tests.llm.llama_checkpoints import (
    batch,
    create_runner,
    pipeline_config,
    random_ids,
    reference,
    row,
    write_random,
)

MAX_ERROR = 3e-5  # of the largest logit; float32 sums in another order differ by 4e-6

NEW_TOKENS = 12
SMALL: dict[str, Any] = {"vocab_size": 96, "initializer_range": 0.3, "eos_token_id": 3}
CONFIGS = {
    "gpt2": GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=200, bos_token_id=3),
    "gemma2": Gemma2Config(
        **SMALL,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        max_position_embeddings=200,
        final_logit_softcapping=20.0,
    ),
    "lfm2_moe": Lfm2MoeConfig(  # its state consists of more than keys and values
        **SMALL,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        max_position_embeddings=200,
        num_dense_layers=1,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=24,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


def alone(folder: Path, **values: Any) -> PipelineConfig:
    """Return the configuration that the fallback requires."""
    model = {
        "model_path": str(folder),
        "kv_cache": {"enable_prefix_caching": False, "kv_cache_page_size": 16},
    }
    return PipelineConfig(**PipelineConfig.merged({"model": model, "max_batch_size": 1}, values))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = create_engine(alone(folder))
    engine.start()
    yield engine
    engine.shutdown()


def expected(folder: Path, ids: list[int]) -> list[int]:
    with torch.no_grad():
        answer = reference(folder).generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return answer[0, len(ids) :].tolist()


def test_logits_are_those_of_transformers(folder: Path) -> None:
    """A prompt in one piece, then token by token; another request in between."""
    runner = create_runner(alone(folder), ReturnLogits.ALL)
    assert isinstance(runner.model, AutoModel)
    ids, other = random_ids(40, 96), random_ids(7, 96, seed=1)
    with torch.no_grad():
        counterpart = reference(folder)(torch.tensor([ids])).logits[0]
    parts = []
    for start, end in ((0, 30), *((n, n + 1) for n in range(30, 40))):
        parts.append(
            runner.forward(runner.prepare(batch(row(ids[start:end], [1, 2, 3], start)))).logits
        )
        inputs = runner.prepare(batch(row([other[len(parts) % 7]], [4], request_id="b")))
        runner.forward(inputs)
    assert error(torch.cat(parts), counterpart) < MAX_ERROR
    runner.release("a")
    runner.release("a")
    with pytest.raises(ValueError, match="request a continues at 40, but its cache holds 0"):
        runner.forward(runner.prepare(batch(row([1], [1, 2, 3], 40))))
    with pytest.raises(ValueError, match="one request at a time, not 2"):
        runner.forward(runner.prepare(batch(row([1], [1]), row([1], [2], request_id="b"))))


def test_requests_take_turns(folder: Path, engine: Engine) -> None:
    prompts = [random_ids(length, 96, seed=length) for length in (5, 30, 11)]
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    streams = [engine.submit(Request(str(k), tuple(ids), greedy)) for k, ids in enumerate(prompts)]
    for stream, ids in zip(streams, prompts, strict=True):
        chunks = list(stream)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected(folder, ids)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
    model = engine.pipeline.runner.model
    assert isinstance(model, AutoModel)
    assert model._caches == {}


def test_no_page_is_allocated(engine: Engine) -> None:
    pool = engine.pipeline.runner.token_to_kv_pool
    assert pool is not None
    assert pool.nbytes == 0
    assert not engine.pipeline.pipeline_config.enable_chunked_prefill


@pytest.mark.parametrize(
    "values",
    [
        {"max_batch_size": 2},
        {"max_batch_size": None},
        {"model": {"kv_cache": {"enable_prefix_caching": True}}},
    ],
)
def test_without_its_conditions_it_is_refused(folder: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is not supported; these are: Llama.*max_batch_size=1"):
        alone(folder, **values)


def test_built_in_architectures_take_precedence(tmp_path: Path) -> None:
    from llm.models.llama import LlamaModel
    from tests.llm.llama_checkpoints import write_llama

    runner = ModelRunner(alone(write_llama(tmp_path)))
    runner.initialize()
    assert isinstance(runner.model, LlamaModel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "transformer.h.1.mlp.c_fc.bias"}, r"missing keys: .*h\.1\.mlp\.c_fc\.bias"),
        ({"add": "transformer.h.7.surplus"}, r"unexpected keys: .*h\.7\.surplus"),
    ],
)
def test_missing_and_unknown_tensors_are_named(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    write_random(tmp_path, CONFIGS["gpt2"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(change.get("drop", ""), None)
    tensors |= {change["add"]: torch.ones(2)} if "add" in change else {}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        create_runner(alone(tmp_path))


def test_an_unknown_architecture(tmp_path: Path) -> None:
    text = '{"architectures": ["UnknownForCausalLM"], "model_type": "unknown"}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="transformers does not support it either"):
        ModelRunner(alone(tmp_path))


def test_code_in_a_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w').close()")
    auto = '"auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}'
    text = f'{{"architectures": ["M"], "model_type": "unknown", {auto}}}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="transformers does not support it either"):
        ModelRunner(alone(tmp_path))
    assert not ran.exists()


def test_the_error_without_the_package_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'sonant\[hub\]'"):
        ModelRunner(alone(folder))


def test_unsupported_requests_are_refused(folder: Path) -> None:
    config = alone(folder)
    runner = ModelRunner(config)
    with pytest.raises(CheckpointError, match="cannot embed"):
        AutoModel(
            config,
            runner.session,
            [runner.device],
            config.model.kv_cache,
            SafetensorsWeights.find(folder),
            return_hidden_states=ReturnHiddenStates.LAST,
        )
    with pytest.raises(ValueError, match=r"201.*200"):
        ModelRunner(alone(folder, max_length=201))


def test_the_configuration_of_other_tests_is_no_fallback(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is not supported"):
        pipeline_config(folder)
