"""Checkpoint files: headers, shards, names, int8 tensors, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm.errors import CheckpointError
from llm.layers.weight import LinearWeight
from llm.models.hf_config import HuggingFaceConfig, ModelShape, read_eos_token_ids
from llm.models.llama import LlamaModel
from llm.models.weights import SafetensorsWeights, WeightReader, read_header, weight_files
from tests.llm.llama_checkpoints import pipeline_config, quantize_checkpoint, write_llama


def test_a_header_has_types_and_shapes_without_the_data(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: (info.shape, info.nbytes) for name, info in header.items()} == {
        "a": ((3, 5), 60),
        "b": ((7,), 14),
    }
    assert header["a"].is_floating


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 40, b"pickle" * 9])
def test_a_file_of_another_format_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        SafetensorsWeights.find(tmp_path)


def test_one_file_shards_and_a_foreign_name_are_found(tmp_path: Path) -> None:
    single, sharded, other = (tmp_path / name for name in ("single", "sharded", "other"))
    write_llama(single)
    write_llama(sharded, max_shard_size="40KB")
    other.mkdir()
    (single / "model.safetensors").rename(other / "weights.safetensors")
    assert len(weight_files(sharded)) > 2
    found = [SafetensorsWeights.find(folder) for folder in (sharded, other)]
    assert found[0].info().keys() == found[1].info().keys()
    for name in found[0].info():
        assert torch.equal(found[0].tensor(name), found[1].tensor(name))


def test_files_given_by_name_win_over_the_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "other.safetensors")
    weights = SafetensorsWeights.find(tmp_path, [tmp_path / "other.safetensors"])
    assert set(weights.info()) == {"b"}


def test_errors_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        SafetensorsWeights.find(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        weight_files(tmp_path)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/model.safetensors", 3, ["x"]])
def test_an_index_names_files_of_its_folder(tmp_path: Path, file: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors\.index\.json"):
        weight_files(tmp_path)


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path in paths:
        save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"a is in .*1\.safetensors and in .*2\.safetensors"):
        SafetensorsWeights(paths)


def change_tensors(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(drop, None)
    save_file(tensors | add, path, metadata={"format": "pt"})


def load(folder: Path, **keys: object) -> LlamaModel:
    from llm.runner.model_runner import ModelRunner

    runner = ModelRunner(pipeline_config(folder, **keys))
    runner.initialize()
    assert isinstance(runner.model, LlamaModel)
    return runner.model


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(write_llama(tmp_path), drop=name)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_a_surplus_tensor_is_named(tmp_path: Path) -> None:
    surplus = {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}
    change_tensors(write_llama(tmp_path), **surplus)
    with pytest.raises(CheckpointError, match=r"self_attn\.q_norm\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    change_tensors(write_llama(tmp_path), **{"model.norm.weight": torch.ones(63)})
    with pytest.raises(CheckpointError, match=r"model.norm.weight' is \[63\], not \[64\]"):
        load(tmp_path)


def test_additional_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    surplus = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": torch.ones(96, 64),
    }
    change_tensors(write_llama(tmp_path), **surplus)
    assert load(tmp_path).config.is_head_tied


def test_an_adapter_renames(tmp_path: Path) -> None:
    save_file({"foreign.a": torch.ones(2)}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights.find(tmp_path)
    reader = WeightReader(weights, lambda name: name.removeprefix("foreign."))
    assert reader.has("a")
    assert torch.equal(reader.tensor("a", 2), torch.ones(2))
    reader.finish()
    with pytest.raises(CheckpointError, match=r"model does not: foreign\.a"):
        WeightReader(weights).finish()


def test_int8_tensors_are_read_as_they_are(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain")
    stored = quantize_checkpoint(plain, tmp_path / "int8")
    config = HuggingFaceConfig.read(stored)
    assert config.is_int8
    assert not HuggingFaceConfig.read(plain).is_int8
    name = "model.layers.0.mlp.down_proj"
    read = WeightReader(SafetensorsWeights.find(stored)).matrix(name, 64, 112)
    rounded = WeightReader(SafetensorsWeights.find(plain)).matrix(name, 64, 112).to_int8()
    assert read.values.dtype == torch.int8
    assert torch.equal(read.values, rounded[0])
    assert read.scales is not None
    assert torch.equal(read.scales, rounded[1])
    assert read.scales.shape == (64,)


@pytest.mark.parametrize("method", ["hqq", "bitsandbytes"])
def test_another_quantisation_is_refused(tmp_path: Path, method: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": method}})
    )
    with pytest.raises(CheckpointError, match=f"{method}.*compressed-tensors/int-quantized"):
        _ = HuggingFaceConfig.read(tmp_path).is_int8


def test_config_errors_name_file_and_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        HuggingFaceConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        HuggingFaceConfig.read(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 3}')
    config = HuggingFaceConfig.read(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json has no 'architectures'"):
        _ = config.architecture
    with pytest.raises(CheckpointError, match="has no 'vocab_size'"):
        ModelShape.read(config)


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 10,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": sizes}))
    shape = ModelShape.read(HuggingFaceConfig.read(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim, shape.max_positions) == (2, 4, 4096)


def test_end_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert read_eos_token_ids(tmp_path) == {5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_eos_token_ids(tmp_path) == {5, 7, 8}


def stored_bytes(folder: Path) -> int:
    return sum(info.nbytes for info in SafetensorsWeights.find(folder).info().values())


def test_the_size_of_weights_comes_from_headers(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "plain", tie_word_embeddings=False)
    full = LlamaModel.estimate_weights_size(pipeline_config(folder))
    assert full == stored_bytes(folder)
    half = LlamaModel.estimate_weights_size(pipeline_config(folder, encoding="bfloat16"))
    assert half * 2 == full
    int8 = quantize_checkpoint(folder, tmp_path / "int8")
    assert LlamaModel.estimate_weights_size(pipeline_config(int8)) == stored_bytes(int8)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)  # the data are not needed
    assert LlamaModel.estimate_weights_size(pipeline_config(folder)) == full


def test_a_mixed_stack_is_expanded() -> None:
    plain = LinearWeight(torch.randn(4, 6))
    rounded = LinearWeight(*plain.to_int8())
    stacked = LinearWeight.stack([plain, rounded])
    assert not stacked.is_quantized
    assert torch.allclose(stacked.values[4:], plain.values, atol=0.02)
    both = LinearWeight.stack([rounded, rounded])
    assert both.is_quantized
    assert torch.equal(both.rows(torch.tensor([5, 1])).values[0], rounded.values[1])
