"""Llama: the logits of transformers, encodings, and input and output options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llm.batch import ModelInputs, ReturnHiddenStates, ReturnLogits
from llm.config import PipelineConfig, supported_architectures
from llm.errors import CheckpointError
from llm.layers.rotary import Llama3Scaling
from llm.models.base import PipelineModel
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.llama_config import LlamaConfig
from llm.models.registry import model_class
from llm.models.weights import SafetensorsWeights
from llm.runner.model_runner import ModelRunner
from tests.closeness import error
from tests.llm.llama_checkpoints import (
    LLAMA3_ROPE,
    MAX_ERROR,
    PAGES,
    batch,
    create_runner,
    pipeline_config,
    quantize_checkpoint,
    random_ids,
    reference,
    row,
    write_llama,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "one kv head": {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "all heads own": {"num_key_value_heads": 4, "rope_theta": 500000.0},
    "wide heads": {"head_dim": 32},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def run_all(runner: ModelRunner, token_ids: list[int], start: int = 0) -> Tensor:
    return runner.forward(runner.prepare(batch(row(token_ids, PAGES, start)))).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    """Prefill whole, in chunks, and token by token from the cache."""
    folder = write_llama(tmp_path, seed=len(variant), **VARIANTS[variant])
    ids = random_ids(150, 96)
    with torch.no_grad():
        expected = reference(folder)(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3
    runner = create_runner(pipeline_config(folder), ReturnLogits.ALL)
    whole = run_all(runner, ids)
    assert error(whole, expected) < MAX_ERROR
    parts = [run_all(runner, ids[a:b], a) for a, b in ((0, 40), (40, 41), (41, 120))]
    parts += [run_all(runner, [ids[n]], n) for n in range(120, 150)]
    assert error(torch.cat(parts), expected) < MAX_ERROR


def test_old_rope_keys_mean_the_same(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, rope_parameters=LLAMA3_ROPE)
    new = LlamaConfig.read(HuggingFaceConfig.read(folder))
    keys = json.loads((folder / "config.json").read_text())
    scaling = keys.pop("rope_parameters")
    keys |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(keys))
    assert LlamaConfig.read(HuggingFaceConfig.read(folder)) == new
    assert isinstance(new.rotary.scaling, Llama3Scaling)


@pytest.mark.parametrize("encoding", ["int8", "bfloat16"])
def test_other_encodings_stay_close_to_float32(tmp_path: Path, encoding: str) -> None:
    folder = write_llama(tmp_path, hidden_size=128, initializer_range=0.08)
    ids = random_ids(60, 96)
    exact = run_all(create_runner(pipeline_config(folder), ReturnLogits.ALL), ids)
    config = pipeline_config(folder, encoding=encoding)
    close = run_all(create_runner(config, ReturnLogits.ALL), ids)
    assert close.dtype == torch.float32
    error = (close - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.05


def test_an_int8_checkpoint_runs_as_it_is_or_expanded(tmp_path: Path) -> None:
    """Quantising when loading and loading quantised weights give the same model."""
    folder = write_llama(tmp_path / "plain")
    stored = quantize_checkpoint(folder, tmp_path / "int8")
    ids = random_ids(40, 96)

    def logits(path: Path, encoding: str | None) -> Tensor:
        config = pipeline_config(path, encoding=encoding)
        return run_all(create_runner(config, ReturnLogits.ALL), ids)

    by_default = logits(stored, None)
    assert torch.equal(by_default, logits(stored, "int8"))
    assert torch.equal(by_default, logits(folder, "int8"))
    expanded = logits(stored, "float32")
    assert not torch.equal(by_default, expanded)
    assert (by_default - expanded).norm() / expanded.norm() < 0.03


def test_a_vendors_blas_multiplies_where_that_is_asked_for(tmp_path: Path) -> None:
    """The same weights, so nearly the same logits, with another implementation of linear layers."""
    stored = quantize_checkpoint(write_llama(tmp_path / "plain"), tmp_path / "int8")
    ids = random_ids(40, 96)
    own, vendors = (pipeline_config(stored, use_vendor_blas=text) for text in ("false", "true"))
    models = [create_runner(config, ReturnLogits.ALL) for config in (own, vendors)]
    ours, theirs = (run_all(runner, ids) for runner in models)
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).norm() / theirs.norm() < 0.01
    counts = [dict(runner.loaded_model.linear_backends) for runner in models]
    num_layers = sum(counts[0].values())
    assert num_layers > 8
    assert counts[1] == {"torch BLAS": num_layers}
    assert "torch BLAS" not in counts[0]
    sizes = [LlamaModel.estimate_weights_size(config) for config in (own, vendors)]
    assert sizes[1] > 2 * sizes[0]


def test_the_default_encoding_follows_the_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    stored = quantize_checkpoint(checkpoint, tmp_path / "int8")
    assert not create_runner(pipeline_config(checkpoint)).loaded_model.encoding.int8
    model = create_runner(pipeline_config(stored)).loaded_model
    assert model.encoding.int8
    assert model.dtype == torch.float32
    half = create_runner(pipeline_config(checkpoint, encoding="bfloat16"))
    assert half.dtype == half.loaded_model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 must be a multiple"),
        ({"rope_scaling": {"type": "su"}}, "'su' is not supported; default, linear, dynamic,"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' has no 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'llama3' has no 'factor'"),
    ],
)
def test_unsupported_keys_are_named(
    checkpoint: Path, keys: dict[str, object], message: str
) -> None:
    config = HuggingFaceConfig.read(checkpoint)
    changed = {k: v for k, v in config.keys.items() if k != "rope_parameters"} | keys
    with pytest.raises(CheckpointError, match=message):
        LlamaConfig.read(HuggingFaceConfig(config.path, changed))


def test_the_length_limit(checkpoint: Path) -> None:
    config = HuggingFaceConfig.read(checkpoint)
    limits = {None: 512, 100: 100, 512: 512}
    for wanted, expected in limits.items():
        given = pipeline_config(checkpoint, max_length=wanted)
        assert LlamaModel.calculate_max_seq_len(given, config) == expected
    with pytest.raises(ValueError, match=r"max_length=513.*512"):
        LlamaModel.calculate_max_seq_len(pipeline_config(checkpoint, max_length=513), config)


def test_activation_memory_grows_with_the_batch(checkpoint: Path) -> None:
    config = HuggingFaceConfig.read(checkpoint)
    small, large = (
        LlamaModel.estimate_activation_memory(
            pipeline_config(checkpoint, max_batch_input_tokens=tokens), config
        )
        for tokens in (512, 8192)
    )
    assert 0 < small < large
    assert PipelineModel.estimate_activation_memory(pipeline_config(checkpoint), config) == 0


def test_rows_of_logits(checkpoint: Path) -> None:
    """LAST_TOKEN: one of each row that samples; VARIABLE: the last n; ALL: all."""
    first, second = random_ids(9, 96), random_ids(5, 96, seed=1)
    rows = [
        row(first, [1], request_id="a"),
        row(second, [2], request_id="b", samples=False),
        row(second, [3], request_id="c"),
    ]
    runner = create_runner(pipeline_config(checkpoint), ReturnLogits.ALL)
    everything = runner.forward(runner.prepare(batch(*rows)))
    assert everything.logit_offsets == (0, 9, 14, 19)
    assert torch.equal(everything.next_token_logits, everything.logits[[8, 18]])
    runner = create_runner(pipeline_config(checkpoint))
    last = runner.forward(runner.prepare(batch(*rows)))
    assert last.logit_offsets == (0, 1, 1, 2)
    assert torch.equal(last.logits, everything.logits[[8, 18]])
    assert torch.equal(last.next_token_logits, last.logits)
    runner = create_runner(pipeline_config(checkpoint), ReturnLogits.VARIABLE)
    cache = runner.prepare(batch(*rows)).kv_cache_inputs
    inputs = runner.loaded_model.prepare_initial_token_inputs([rows], cache, 3)
    variable = runner.forward(inputs)
    assert variable.logit_offsets == (0, 3, 3, 6)
    assert torch.equal(variable.logits, everything.logits[[6, 7, 8, 16, 17, 18]])
    with pytest.raises(ValueError, match="6 logits wanted of 5 tokens"):
        runner.loaded_model.prepare_initial_token_inputs([rows], cache, 6)


def test_hidden_states(checkpoint: Path) -> None:
    rows = [row(random_ids(6, 96), [1]), row(random_ids(3, 96), [2], request_id="b")]

    def states(wanted: ReturnHiddenStates) -> Tensor | None:
        runner = create_runner(pipeline_config(checkpoint), return_hidden_states=wanted)
        return runner.forward(runner.prepare(batch(*rows))).hidden_states

    assert states(ReturnHiddenStates.NONE) is None
    everything, last = states(ReturnHiddenStates.ALL), states(ReturnHiddenStates.LAST)
    normalized = states(ReturnHiddenStates.ALL_NORMALIZED)
    assert everything is not None
    assert last is not None
    assert normalized is not None
    assert everything.shape == (9, 64)
    assert torch.equal(last, everything[[5, 8]])
    assert not torch.allclose(normalized, everything)
    runner = create_runner(pipeline_config(checkpoint), ReturnLogits.ALL)
    logits = runner.forward(runner.prepare(batch(*rows))).logits
    table = SafetensorsWeights.find(checkpoint).tensor("model.embed_tokens.weight")
    assert error(normalized @ table.T, logits) < MAX_ERROR


def test_wrong_inputs_are_errors(checkpoint: Path) -> None:
    runner = create_runner(pipeline_config(checkpoint))
    model = runner.loaded_model
    rows = [row([1, 2], [1]), row([3], [2], request_id="b", samples=False)]
    inputs = runner.prepare(batch(*rows))
    cache = inputs.kv_cache_inputs
    with pytest.raises(ValueError, match="2 replica batches for 1 replicas"):
        model.prepare_initial_token_inputs([rows, rows], cache)
    with pytest.raises(ValueError, match="LlamaModel needs kv_cache_inputs"):
        model.prepare_initial_token_inputs([rows])
    with pytest.raises(ValueError, match="return_n_logits=0"):
        model.prepare_initial_token_inputs([rows], cache, 0)
    with pytest.raises(ValueError, match="the rows feed"):
        model.prepare_initial_token_inputs([rows[:1]], cache)
    with pytest.raises(ValueError, match="every row samples"):
        model.prepare_next_token_inputs(torch.tensor([1]), inputs)
    with pytest.raises(ValueError, match="2 next tokens for 1 rows"):
        model.prepare_next_token_inputs(
            torch.tensor([1, 2]), runner.prepare(batch(row([1, 2], [1])))
        )
    with pytest.raises(ValueError, match="needs kv_cache_inputs"):
        model.execute(ModelInputs(forward_batch=inputs.forward_batch))


def test_inputs_update_only_what_they_have(checkpoint: Path) -> None:
    inputs = create_runner(pipeline_config(checkpoint)).prepare(batch(row([1, 2], [1])))
    before = inputs.forward_batch
    inputs.update(logit_offsets=(0, 5), forward_batch=None, unknown=1)
    assert inputs.logit_offsets == (0, 5)
    assert inputs.forward_batch is before
    assert not hasattr(inputs, "unknown")


def test_inputs_are_ragged_over_replicas_rows_and_tokens(checkpoint: Path) -> None:
    runner = create_runner(pipeline_config(checkpoint))
    rows = [row([5, 6, 7], [4], 2), row([8], [9], 0, request_id="b")]
    forward_batch = runner.prepare(batch(*rows)).forward_batch
    assert forward_batch.row_offsets == (0, 3, 4)
    assert forward_batch.context_lens == (5, 1)
    assert forward_batch.input_ids.tolist() == [5, 6, 7, 8]
    assert forward_batch.positions.tolist() == [2, 3, 4, 0]
    assert forward_batch.slot_mapping.tolist() == [66, 67, 68, 144]


def test_an_unresolved_configuration_is_refused(checkpoint: Path) -> None:
    config = pipeline_config(checkpoint, defer_resolve=True)
    with pytest.raises(RuntimeError, match="resolve"):
        ModelRunner(config)


def test_a_model_that_is_not_named_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"model\.model_path is not set"):
        ModelRunner(PipelineConfig())


def test_the_interface_lists_the_required_methods() -> None:
    with pytest.raises(TypeError, match="abstract"):
        PipelineModel()  # type: ignore[abstract, call-arg]


def test_models_are_found_by_architecture(checkpoint: Path) -> None:
    config = HuggingFaceConfig.read(checkpoint)
    assert model_class(config) is LlamaModel
    assert "LlamaForCausalLM" in supported_architectures()
    other = HuggingFaceConfig(config.path, {"architectures": ["BertModel"]})
    with pytest.raises(CheckpointError, match=r"'BertModel' is not supported.*LlamaForCausalLM"):
        model_class(other)


def test_one_device_exchanges_nothing(checkpoint: Path) -> None:
    model = create_runner(pipeline_config(checkpoint)).loaded_model
    assert model.signal_buffers == []
    assert model.lora_manager is None
    shard = torch.ones(2)
    assert model.group.all_reduce(shard) is shard
    assert model.group.all_gather(shard) is shard
    assert (model.group.rank, model.group.size) == (0, 1)
    assert model.huggingface_config.path == checkpoint / "config.json"
