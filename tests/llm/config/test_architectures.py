"""Architectures related to Llama: the logits of transformers, for every checkpoint layout."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from llm.batch import ReturnLogits
from llm.config import supported_architectures
from llm.errors import CheckpointError
from llm.models.auto import cache_name
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.registry import model_class
from llm.models.weights import SafetensorsWeights
from llm.runner.model_runner import ModelRunner
from tests.closeness import error
from tests.llm.llama_checkpoints import (
    MAX_ERROR,
    PAGES,
    SMALL,
    batch,
    create_runner,
    pipeline_config,
    random_ids,
    reference,
    row,
    write_random,
)
from tests.llm.qwen3_moe_checkpoints import EXPERTS

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SOME_LAYERS = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}

VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "qwen2 untied, half of its layers with a window": (
        Qwen2Config,
        {"tie_word_embeddings": False, **SOME_LAYERS},
    ),
    "qwen2 yarn": (Qwen2Config, {"rope_parameters": YARN}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3 with biases": (Qwen3Config, {"head_dim": 16, "attention_bias": True, **SOME_LAYERS}),
    "qwen3 moe": (Qwen3MoeConfig, EXPERTS),
    "qwen3 moe, half of its layers": (
        Qwen3MoeConfig,
        EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": True, "rope_parameters": YARN},
    ),
    "mistral": (MistralConfig, {"sliding_window": None, "tie_word_embeddings": False}),
    "mistral with a window": (MistralConfig, {"sliding_window": 70, "head_dim": 24}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama dynamic": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


def write(folder: Path, variant: str, **layout: Any) -> Path:
    kind, keys = VARIANTS[variant]
    return write_random(folder, kind(**(SMALL | keys)), seed=len(variant), **layout)


def run_all(runner: ModelRunner, token_ids: list[int], start: int = 0) -> Tensor:
    return runner.forward(runner.prepare(batch(row(token_ids, PAGES, start)))).logits


def cached_reference(folder: Path, ids: list[int], prefill: int) -> Tensor:
    """Return logits of transformers: one prefill, then token by token from its own cache."""
    counterpart, logits = reference(folder), []
    with torch.no_grad():
        name = cache_name(inspect.signature(counterpart.forward).parameters)
        answer = counterpart(torch.tensor([ids[:prefill]]), use_cache=True)
        logits.append(answer.logits[0])
        for token in ids[prefill:]:
            answer = counterpart(torch.tensor([[token]]), **{name: answer[name]})
            logits.append(answer.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    folder = write(tmp_path, variant)
    ids = random_ids(150, 96)
    with torch.no_grad():
        expected = reference(folder)(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3
    runner = create_runner(pipeline_config(folder), ReturnLogits.ALL)
    whole = run_all(runner, ids)
    assert error(whole, expected) < MAX_ERROR
    parts = [run_all(runner, ids[a:b], a) for a, b in ((0, 40), (40, 41), (41, 138))]
    parts += [run_all(runner, [ids[n]], n) for n in range(138, 150)]
    assert torch.equal(torch.cat(parts), whole)  # no bit depends on how the prompt was cut
    cached = cached_reference(folder, ids, prefill=138)
    assert error(torch.cat(parts), cached) < MAX_ERROR


def test_dynamic_scaling_equals_transformers(tmp_path: Path) -> None:
    """Beyond the trained length, token by token; independent of the chunks."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    keys = SMALL | {"max_position_embeddings": 40, "rope_parameters": rope}
    folder = write_random(tmp_path, LlamaConfig(**keys))
    ids = random_ids(150, 96)
    runner = create_runner(pipeline_config(folder), ReturnLogits.ALL)
    assert runner.context_len == 160
    whole = run_all(runner, ids)
    assert error(whole, cached_reference(folder, ids, prefill=30)) < MAX_ERROR
    parts = [run_all(runner, ids[a:b], a) for a, b in ((0, 41), (41, 100), (100, 150))]
    assert torch.equal(torch.cat(parts), whole)


def test_a_window_changes_what_is_seen(tmp_path: Path) -> None:
    """Tokens beyond the window change nothing in a model of one layer, those within do."""
    config = MistralConfig(**(SMALL | {"num_hidden_layers": 1, "sliding_window": 40}))
    runner = create_runner(pipeline_config(write_random(tmp_path, config)))
    assert runner.sliding_window_size == 40
    ids = random_ids(100, 96)
    logits = run_all(runner, ids)
    older = [(token + 1) % 96 for token in ids[:60]]
    assert torch.equal(run_all(runner, older + ids[60:]), logits)
    assert not torch.equal(run_all(runner, [*older, (ids[60] + 1) % 96, *ids[61:]]), logits)


def test_a_full_context_has_no_window(tmp_path: Path) -> None:
    off = {"use_sliding_window": False, "sliding_window": 40}
    folder = write_random(tmp_path, Qwen2Config(**(SMALL | off)))
    assert ModelRunner(pipeline_config(folder)).sliding_window_size is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_any_layout_of_the_files_loads(tmp_path: Path, dtype: torch.dtype, is_tied: bool) -> None:
    """Sharded and single, narrow and wide: the same numbers as transformers reads."""
    config = Qwen3Config(**(SMALL | {"tie_word_embeddings": is_tied, "head_dim": 16}))
    single = write_random(tmp_path / "single", config, dtype=dtype)
    sharded = write_random(tmp_path / "sharded", config, dtype=dtype, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    ids = random_ids(20, 96)
    with torch.no_grad():
        expected = reference(single)(torch.tensor([ids])).logits[0]
    for folder in (single, sharded):
        config_ = pipeline_config(folder, encoding="float32")
        found = run_all(create_runner(config_, ReturnLogits.ALL), ids)
        assert error(found, expected) < MAX_ERROR
        stored = SafetensorsWeights.find(folder).info().values()
        size = sum(4 * info.num_values for info in stored)
        assert model_class(HuggingFaceConfig.read(folder)).estimate_weights_size(config_) == size


@pytest.mark.parametrize("variant", ["qwen2", "qwen3"])
@pytest.mark.parametrize("encoding", ["int8", "bfloat16"])
def test_other_encodings_stay_close_to_float32(tmp_path: Path, variant: str, encoding: str) -> None:
    folder = write(tmp_path, variant)
    ids = random_ids(40, 96)
    exact = run_all(create_runner(pipeline_config(folder), ReturnLogits.ALL), ids)
    config = pipeline_config(folder, encoding=encoding)
    close = run_all(create_runner(config, ReturnLogits.ALL), ids)
    assert 1e-5 < (close - exact).norm() / exact.norm() < 0.08


def test_rows_of_a_batch_do_not_touch(tmp_path: Path) -> None:
    """With biases and head norms: a row's logits are the same alone and in a batch."""
    runner = create_runner(pipeline_config(write(tmp_path, "qwen3 with biases")))
    prompts = [random_ids(length, 96, seed=length) for length in (3, 17, 60)]
    rows = [
        row(ids, list(range(1 + 5 * k, 6 + 5 * k)), request_id=str(k))
        for k, ids in enumerate(prompts)
    ]
    together = runner.forward(runner.prepare(batch(*rows))).logits
    for index, one in enumerate(rows):
        alone = runner.forward(runner.prepare(batch(one))).logits
        assert torch.equal(alone[0], together[index])


def change_tensors(folder: Path, drop: str = "", **add: Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(drop, None)
    save_file(tensors | add, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.2.self_attn.q_norm.weight"),
        ("mistral", "lm_head.weight"),
        ("llama with biases", "model.layers.0.mlp.up_proj.bias"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, variant: str, name: str) -> None:
    folder = write(tmp_path, variant)
    change_tensors(folder, drop=name)
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        create_runner(pipeline_config(folder))


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("mistral", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3", "model.layers.0.self_attn.o_proj.bias"),
    ],
)
def test_an_unknown_tensor_is_named(tmp_path: Path, variant: str, name: str) -> None:
    """A part of a related architecture is not silently ignored."""
    folder = write(tmp_path, variant)
    change_tensors(folder, **{name: torch.zeros(64)})
    with pytest.raises(CheckpointError, match=f"the model does not: {name}"):
        create_runner(pipeline_config(folder))


def test_stretched_positions_raise_the_limit(tmp_path: Path) -> None:
    """The file's number is the trained length; a factor multiplies it."""
    folder = write(tmp_path, "llama yarn")
    config = HuggingFaceConfig.read(folder)
    assert config.keys["max_position_embeddings"] == 512
    scaled = YARN | {"original_max_position_embeddings": 512}
    limits = {
        "default": ({"rope_theta": 1e4}, 512),
        "yarn within": (YARN, 512),
        "yarn": (scaled, 2048),
        "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        "linear": ({"rope_type": "linear", "factor": 2.0}, 1024),
    }
    for name, (rope, limit) in limits.items():
        changed = HuggingFaceConfig(config.path, {**config.keys, "rope_parameters": rope})
        assert LlamaModel.read_config(changed).max_positions == limit, name


def test_the_registry_lists_its_names() -> None:
    families = ("Llama", "Mistral", "Qwen2", "Qwen3")
    assert {f"{family}ForCausalLM" for family in families} <= set(supported_architectures())
    for name in supported_architectures():
        found = model_class(HuggingFaceConfig(Path("config.json"), {"architectures": [name]}))
        assert issubclass(found, LlamaModel)


ORIGINAL_NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "model.layers.": "layers.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def original_name(name: str) -> str:
    for theirs, ours in ORIGINAL_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def as_original(folder: Path, *, rename: bool) -> None:
    """Convert to the layout of the checkpoint's authors: adjacent rotary pairs, other names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight"))]:
        halves = tensors[name].unflatten(0, (-1, 2, 8))
        tensors[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()
    path.unlink()
    file = "consolidated.safetensors" if rename else "model.safetensors"
    named = {original_name(name) if rename else name: tensors[name] for name in tensors}
    save_file(named, folder / file, metadata={"format": "pt"})


def logits_of(folder: Path, **keys: Any) -> Tensor:
    config = pipeline_config(folder, **keys)
    return run_all(create_runner(config, ReturnLogits.ALL), random_ids(40, 96))


def test_the_authors_own_layout_is_known_by_its_names(tmp_path: Path) -> None:
    """consolidated.safetensors of Mistral and Llama: other names, and other pairs."""
    config = MistralConfig(**(SMALL | {"tie_word_embeddings": False, "head_dim": 16}))
    expected = logits_of(write_random(tmp_path, config))
    as_original(tmp_path, rename=True)
    assert torch.equal(logits_of(tmp_path), expected)
    path = tmp_path / "consolidated.safetensors"
    save_file(load_file(path) | {"layers.0.attention.surplus.weight": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"does not: layers\.0\.attention\.surplus"):
        logits_of(tmp_path)


def test_the_layout_of_pairs_can_be_configured(tmp_path: Path) -> None:
    expected = logits_of(write_random(tmp_path, LlamaConfig(**SMALL, head_dim=16)))
    assert torch.equal(logits_of(tmp_path, rope_type="neox"), expected)
    assert error(logits_of(tmp_path, rope_type="normal"), expected) > 0.02
    as_original(tmp_path, rename=False)
    assert torch.equal(logits_of(tmp_path, rope_type="normal"), expected)
    with pytest.raises(ValueError, match="rope_type"):
        logits_of(tmp_path, rope_type="sideways")
