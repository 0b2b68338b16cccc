"""Float8 checkpoints: which are read, their scales, and models that are made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llm.errors import CheckpointError
from llm.kernels.rounding import FLOAT8
from llm.models.float8_weights import read_block
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.pickle_weights import find_weights
from llm.models.weights import WeightReader
from llm.parallel.shard import Part
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import (
    PAGES,
    batch,
    float8_checkpoint,
    pipeline_config,
    random_ids,
    row,
    write_llama,
)

KINDS = [("channel", ""), ("tensor", ""), ("block", ""), ("tensor", "fp8"), ("block", "fp8")]
NAME, SHAPE = "model.layers.0.mlp.down_proj", (64, 112)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source"), initializer_range=0.1)


def stored_matrix(folder: Path) -> Tensor:
    """Return the matrix by the format's definition."""
    tensors = load_file(folder / "model.safetensors")
    scales = next(
        tensors[f"{NAME}.{part}"].double()
        for part in ("weight_scale", "weight_scale_inv")
        if f"{NAME}.{part}" in tensors
    )
    matrix = tensors[f"{NAME}.weight"].double()
    if scales.ndim == 0 or scales.shape[1] == 1:
        return matrix * scales
    for i, line in enumerate(scales):
        for j, scale in enumerate(line):
            matrix[32 * i : 32 * (i + 1), 48 * j : 48 * (j + 1)] *= scale
    return matrix


@pytest.mark.parametrize(("strategy", "method"), KINDS)
def test_matrices_are_those_of_the_files(
    source: Path, tmp_path: Path, strategy: str, method: str
) -> None:
    folder = float8_checkpoint(source, tmp_path / "float8", strategy, method)
    expected = stored_matrix(folder)
    reader = WeightReader(find_weights(folder))
    read = reader.matrix(NAME, *SHAPE)
    assert read.values.dtype is (torch.float32 if strategy == "block" else FLOAT8)
    assert torch.allclose(read.to_float(torch.float64), expected, rtol=1e-6, atol=0)
    for part in (Part(0, 16, 48), Part(1, 56, 112)):
        own = reader.matrix(NAME, *SHAPE, part=part).to_float(torch.float32)
        assert torch.equal(own, read.to_float(torch.float32)[part.slices])


def logits(folder: Path, **keys: Any) -> Tensor:
    runner = ModelRunner(pipeline_config(folder, **keys))
    runner.initialize()
    fed = row(random_ids(40, 96), PAGES)
    return runner.forward(runner.prepare(batch(fed))).next_token_logits.float().clone()


@pytest.mark.parametrize(("strategy", "method"), KINDS)
def test_a_model_of_a_float8_checkpoint(
    source: Path, tmp_path: Path, strategy: str, method: str
) -> None:
    """It is float8 by default, and may be expanded to any other format."""
    folder = float8_checkpoint(source, tmp_path / "float8", strategy, method)
    exact = logits(source, encoding="float32")
    errors = {
        encoding: ((logits(folder, encoding=encoding) - exact).norm() / exact.norm()).item()
        for encoding in (None, "float8_e4m3fn", "float32", "int8")
    }
    assert errors[None] == errors["float8_e4m3fn"]
    assert all(0.01 < error < 0.35 for error in errors.values())
    assert len(set(errors.values())) == 3


def test_the_size_in_memory(source: Path, tmp_path: Path) -> None:
    """A byte for each weight of a layer, and two for the others; scales have four."""
    folder = float8_checkpoint(source, tmp_path / "float8", "channel")
    layers = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 112)
    others = 96 * 64 + (2 * 3 + 1) * 64
    estimates = [
        LlamaModel.estimate_weights_size(pipeline_config(made, encoding="float8_e4m3fn"))
        for made in (source, folder)
    ]
    num_scales = 3 * (2 * 64 + 2 * 32 + 2 * 112 + 64)
    assert estimates == [layers + 2 * others, layers + 2 * others + 2 * num_scales]


def test_a_matrix_needs_its_scales(source: Path, tmp_path: Path) -> None:
    folder = float8_checkpoint(source, tmp_path / "float8", "channel")
    tensors = load_file(folder / "model.safetensors")
    file = folder / "model.safetensors"
    scales = tensors.pop(f"{NAME}.weight_scale")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"'{NAME}.weight' needs one tensor '{NAME}.weight_s"):
        find_weights(folder)
    save_file(tensors | {f"{NAME}.weight_scale": scales[:5].clone()}, file)
    with pytest.raises(CheckpointError, match=f"'{NAME}.weight' needs 1 or 64 scales, not 5"):
        WeightReader(find_weights(folder)).matrix(NAME, *SHAPE)


def test_blocks_need_as_many_scales(source: Path, tmp_path: Path) -> None:
    folder = float8_checkpoint(source, tmp_path / "float8", "block")
    tensors = load_file(folder / "model.safetensors")
    scales = tensors[f"{NAME}.weight_scale"][:, :2].clone()
    save_file(tensors | {f"{NAME}.weight_scale": scales}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"needs scales \[2, 3\], not \[2, 2\]"):
        WeightReader(find_weights(folder)).matrix(NAME, *SHAPE)


def test_scales_of_activations_are_not_read(source: Path, tmp_path: Path) -> None:
    """A checkpoint may have one for all tokens; here each token gets its own."""
    folder = float8_checkpoint(source, tmp_path / "float8", "tensor", "fp8")
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        name.replace(".weight", ".input_scale"): torch.tensor(0.5)
        for name, tensor in tensors.items()
        if tensor.dtype is FLOAT8
    }
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(folder), expected)


GROUP = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


def changed(part: str, **values: Any) -> dict[str, Any]:
    groups = {"group_0": GROUP | {part: GROUP[part] | values}}
    return {"config_groups": groups}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"config_groups": {}}, "needs one of config_groups"),
        ({"config_groups": {"a": GROUP, "b": GROUP}}, "needs one of config_groups"),
        (changed("weights", num_bits=4), "weights.num_bits=4"),
        (changed("weights", type="int"), "weights.type=int"),
        (changed("weights", strategy="group"), "weights.strategy=group"),
        (changed("weights", symmetric=False), "weights.symmetric=False"),
        (changed("weights", strategy="block", block_structure=[128]), r"block_structure=\[128\]"),
        (changed("input_activations", num_bits=16), "input_activations.num_bits=16"),
        ({"config_groups": {"a": {"weights": GROUP["weights"]}}}, "input_activations.num_bits=N"),
        ({"config_groups": {"a": GROUP}, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt=e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size="),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    found = {"quant_method": "compressed-tensors", "format": "float-quantized"} | keys
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": found}))
    config = HuggingFaceConfig.read(tmp_path)
    assert config.is_float8
    assert not config.is_int8
    with pytest.raises(CheckpointError, match=message):
        read_block(config)


def test_blocks_are_those_of_the_config(tmp_path: Path) -> None:
    for keys, block in (
        (changed("weights", strategy="block", block_structure=[128, 64]), (128, 64)),
        (changed("weights"), None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, None),
    ):
        found = {"quant_method": "compressed-tensors", "format": "float-quantized"} | keys
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": found}))
        assert read_block(HuggingFaceConfig.read(tmp_path)) == block


def test_float8_pages_with_float8_matrices(source: Path) -> None:
    plain = logits(source, encoding="float8_e4m3fn")
    both = logits(source, encoding="float8_e4m3fn", kv_format="float8_e4m3fn")
    assert 0.001 < (both - plain).norm() / plain.norm() < 0.35
