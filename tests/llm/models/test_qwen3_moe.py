"""Qwen3-MoE: experts in place of MLPs; logits and tokens of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from llm.batch import ReturnLogits
from llm.engine.engine import Engine, create_engine
from llm.errors import CheckpointError, ConfigError
from llm.models.hf_config import HuggingFaceConfig
from llm.models.qwen3_moe import Qwen3MoeModel
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from llm.runner.model_runner import ModelRunner
from tests.llm.engine.running import running
from tests.llm.llama_checkpoints import (
    PAGES,
    batch,
    create_runner,
    pipeline_config,
    quantize_checkpoint,
    random_ids,
    reference,
    row,
)
from tests.llm.lora.adapters import merge, write_adapter
from tests.llm.models import engine_kinds
from tests.llm.models.engine_kinds import tokens_of
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe

NUM_TOKENS = 12
END = 3  # counted, but not delivered
PROMPTS = [tuple(random_ids(length, 96, seed=length)) for length in (5, 1, 40, 2, 17, 33)]
SOME_LAYERS = {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised": {"norm_topk_prob": True, "tie_word_embeddings": True},
    "biases and windows": {
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 24,
    },
    "some layers": SOME_LAYERS,
    "dense layers only": {"mlp_only_layers": [0, 1, 2]},
    "no experts": {"num_experts": 0},
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("qwen3_moe") / "model", initializer_range=0.4)


def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return what transformers generates with its own cache, without the ids that end a text."""
    ids = torch.tensor([list(prompt)])
    options: Any = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    return [token for token in found[0, len(prompt) :].tolist() if token != END]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = reference(folder)
    found = [greedy(model, prompt) for prompt in PROMPTS]
    assert len(set(itertools.chain(*found))) > 30
    return found


def ask(
    engine: Engine, name: str, prompt: Sequence[int], lora: str = "", **values: Any
) -> Iterator[TokenChunk]:
    defaults = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return engine.submit(
        Request(name, tuple(prompt), SamplingParams(**defaults | values), lora=lora)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_qwen3_moe(tmp_path, seed=1, **VARIANTS[name])
    runner = create_runner(pipeline_config(folder), ReturnLogits.ALL)
    ids = random_ids(60, 96)
    found = runner.forward(runner.prepare(batch(row(ids, PAGES)))).logits
    with torch.inference_mode():
        wanted = reference(folder)(torch.tensor([ids])).logits[0]
    assert float(wanted.abs().max()) > 3
    assert float((found - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_logits_do_not_change_a_bit(folder: Path, encoding: str) -> None:
    """Prompt whole, in chunks, token by token; alone and with neighbours."""
    runner = ModelRunner(pipeline_config(folder, encoding=encoding))
    runner.initialize()
    ids = random_ids(40, 96, seed=9)

    def logits(cuts: list[int], neighbours: int = 0) -> torch.Tensor:
        beside = [row([5 + n], [30 + n], request_id=str(n)) for n in range(neighbours)]
        for start, end in itertools.pairwise(cuts):
            rows = [*beside, row(ids[start:end], PAGES[:3], start)]
            outputs = runner.forward(runner.prepare(batch(*rows)))
        return outputs.logits[-1]

    whole = logits([0, 40])
    assert torch.equal(logits([0, 1, 2, 17, 18, 40]), whole)
    assert torch.equal(logits(list(range(41)), neighbours=7), whole)
    assert torch.equal(logits([0, 33, 40], neighbours=20), whole)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    **engine_kinds.ENGINES,
    "prompts in chunks": lambda f: create_engine(
        pipeline_config(f, max_batch_size=3, max_batch_input_tokens=7)
    ),
    "few pages": lambda f: create_engine(
        pipeline_config(f, num_pages=18, page_size=4, max_length=64, kvcache_ce_watermark=1.0)
    ),
    "compiled": lambda f: create_engine(pipeline_config(f, use_legacy_module=False)),
    "idle forwards": lambda f: create_engine(pipeline_config(f, execute_empty_batches=True)),
    "drafted": lambda f: create_engine(
        pipeline_config(f, draft_model={"model_path": str(f), "device_specs": ["cpu"]})
    ),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_greedy_tokens_in_a_batch(folder: Path, expected: list[list[int]], kind: str) -> None:
    with running(ENGINES[kind](folder)) as engine:
        for turn in range(2):  # the second time from cached prefixes
            streams = [ask(engine, f"{turn}.{n}", prompt) for n, prompt in enumerate(PROMPTS)]
            assert [tokens_of(stream) for stream in streams] == expected
        assert engine.drain(60)
        stats = engine.stats()
        assert (stats.used_pages, stats.failed_steps) == (0, 0)
        assert stats.prefix_hit_tokens > 0
        assert stats.preemptions > 0 or kind != "few pages"
        if kind.startswith("replayed"):
            assert stats.graphs is not None
            assert stats.graphs.replays > NUM_TOKENS
            assert stats.graphs.eager_decodes == 0
        engine.pipeline.kv_manager.check_integrity()


def test_a_cancelled_request_leaves_the_others_alone(
    folder: Path, expected: list[list[int]]
) -> None:
    with running(create_engine(pipeline_config(folder, max_batch_size=4))) as engine:
        doomed = ask(engine, "doomed", PROMPTS[2], max_tokens=300)
        others = [ask(engine, f"kept{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        assert next(doomed).finish_reason is None
        doomed.cancel()  # type: ignore[attr-defined]
        assert [tokens_of(stream) for stream in others] == expected
        assert list(doomed)[-1].finish_reason is FinishReason.CANCELLED


def test_adapters_of_attention(tmp_path: Path, folder: Path, expected: list[list[int]]) -> None:
    """Experts have none, which is an error."""
    adapter = write_adapter(tmp_path / "adapter", folder, modules=ATTENTION, gain=0.2)
    model = reference(merge(folder, adapter, tmp_path / "merged"))
    lora = {"enable_lora": True, "lora_paths": [f"mine={adapter}"]}
    with running(create_engine(pipeline_config(folder, lora=lora))) as engine:
        plain = [ask(engine, f"plain{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        adapted = [ask(engine, f"mine{n}", prompt, "mine") for n, prompt in enumerate(PROMPTS)]
        assert [tokens_of(stream) for stream in plain] == expected
        assert [tokens_of(stream) for stream in adapted] == [greedy(model, p) for p in PROMPTS]
    wrong = write_adapter(tmp_path / "wrong", folder, modules=("experts.0.up_proj",))
    lora = {"enable_lora": True, "lora_paths": [f"mine={wrong}"]}
    with pytest.raises(CheckpointError, match="cannot be adapted"):
        create_engine(pipeline_config(folder, lora=lora))


def test_int8_weights_are_read_and_made(folder: Path, tmp_path: Path) -> None:
    """A checkpoint of int8 weights, and one quantised when it is read, give the same tokens.

    Routers stay as they are.
    """
    stored = quantize_checkpoint(folder, tmp_path / "int8")
    tensors = load_file(stored / "model.safetensors")
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = weight
            del tensors[f"{name}_scale"]
    save_file(tensors, stored / "model.safetensors")
    found = []
    for config in (pipeline_config(stored), pipeline_config(folder, encoding="int8")):
        with running(create_engine(config)) as engine:
            found.append([tokens_of(ask(engine, str(n), p)) for n, p in enumerate(PROMPTS)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["plain", "some layers"])
def test_sizes_are_those_of_the_weights(tmp_path: Path, name: str) -> None:
    """Sizes from the configuration, and from the headers of files."""
    folder = write_qwen3_moe(tmp_path, **VARIANTS[name])
    tensors = load_file(folder / "model.safetensors")
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2)
    config = Qwen3MoeModel.read_config(HuggingFaceConfig.read(folder))
    assert config.num_matrix_weights == matrices
    size = Qwen3MoeModel.estimate_weights_size(pipeline_config(folder))
    assert size == 4 * sum(tensor.numel() for tensor in tensors.values())


def test_published_files_name_experts_differently(folder: Path) -> None:
    """`num_experts`, where transformers 5 writes `num_local_experts`."""
    read = HuggingFaceConfig.read(folder)
    keys = dict(read.keys)
    keys["num_experts"] = keys.pop("num_local_experts")
    config = HuggingFaceConfig(read.path, keys)
    assert Qwen3MoeModel.read_config(config) == Qwen3MoeModel.read_config(read)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most num_local_experts=8"),
        ({"num_local_experts": -1}, "num_local_experts=-1 must be a positive whole number"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a positive whole number"),
        ({"moe_intermediate_size": 1.5}, "moe_intermediate_size=1.5 must be a positive"),
    ],
)
def test_bad_configurations_are_errors(folder: Path, keys: dict[str, Any], message: str) -> None:
    read = HuggingFaceConfig.read(folder)
    with pytest.raises(CheckpointError, match=message):
        Qwen3MoeModel.read_config(HuggingFaceConfig(read.path, {**read.keys, **keys}))


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape"])
def test_experts_that_do_not_match_are_named(folder: Path, tmp_path: Path, fault: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "surplus":
        name = "model.layers.1.mlp.experts.8.up_proj.weight"
        tensors[name] = torch.zeros(24, 48)
    else:
        tensors[name] = torch.zeros(23, 48)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        ModelRunner(pipeline_config(tmp_path)).initialize()


def test_experts_on_one_device_are_not_spread(folder: Path) -> None:
    with pytest.raises(ConfigError, match="ep_size=2 must be 1 or the number of devices of one"):
        pipeline_config(folder, ep_size=2)
