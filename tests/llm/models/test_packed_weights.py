"""Four-bit checkpoints (GPTQ, AWQ, compressed-tensors) against their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from llm.errors import CheckpointError, ConfigError
from llm.models.hf_config import HuggingFaceConfig
from llm.models.packed_weights import Packing, expand, pack, read_packing
from llm.models.pickle_weights import find_weights
from tests.llm.llama_checkpoints import MAX_ERROR, all_logits, reference, write_llama

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
GROUPED = {"weights": {"num_bits": 4, "type": "int", "group_size": 16}, "input_activations": None}
FLOAT = {
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    "gptq_v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
    "packed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": GROUPED},
    },
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": FLOAT},
    },
}
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with a sign


def word(numbers: list[int]) -> int:
    """Return a signed 32-bit word of eight numbers, the first in the lowest bits."""
    value = sum(number << 4 * place for place, number in enumerate(numbers))
    return value - 2**32 if value >= 2**31 else value


def pack_columns(values: np.ndarray, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight neighbours of a row into each word; place i holds number `places[i]`."""
    rows = [
        [word([int(line[at + p]) for p in places]) for at in range(0, len(line), 8)]
        for line in values
    ]
    return torch.tensor(rows, dtype=torch.int32)


class Matrix:
    """A random matrix of four bits, [in, out], and its value."""

    def __init__(
        self, rng: np.random.Generator, num_in: int, num_out: int, method: str, size: int = 16
    ) -> None:
        num_groups = num_in // size
        self.q = rng.integers(0, 16, (num_in, num_out))
        self.z = rng.integers(0, 16, (num_groups, num_out))
        self.s = rng.uniform(0.01, 0.1, (num_groups, num_out)).astype(np.float16)
        self.group = np.arange(num_in) // size
        if method == "gptq":
            self.group = rng.permutation(self.group)
        self.method = method
        if method == "nvfp4":
            rounded = torch.from_numpy(rng.uniform(20, 400, self.s.shape)).to(torch.float8_e4m3fn)
            self.float8, self.largest = rounded, np.float32(3000.7)
            self.s = rounded.float().numpy() / self.largest

    @property
    def value(self) -> Tensor:
        """Return (q - z) × s, [out, in], or the number of code q × s."""
        if self.method == "nvfp4":
            numbers = np.array([*FLOAT4, *(-number for number in FLOAT4)], np.float32)[self.q]
            return torch.from_numpy((numbers * self.s[self.group]).T.copy())
        rows = [
            (self.q[i] - self.z[g]).astype(np.float32) * self.s[g].astype(np.float32)
            for i, g in enumerate(self.group)
        ]
        return torch.from_numpy(np.stack(rows).T.copy())

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint."""
        scales = torch.from_numpy(self.s)
        if self.method == "nvfp4":
            codes = torch.from_numpy(self.q.T.astype(np.uint8))
            return {
                "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).contiguous(),
                "weight_scale": self.float8.t().contiguous(),
                "weight_global_scale": torch.tensor([self.largest]),
                "input_global_scale": torch.tensor([12.0]),
            }
        if self.method == "packed":
            return {
                "weight_packed": pack_columns(self.q.T),
                "weight_scale": scales.t().contiguous(),
                "weight_zero_point": pack_columns(self.z).t().contiguous(),
                "weight_shape": torch.tensor(self.q.T.shape),
            }
        if self.method == "awq":
            packed = {n: pack_columns(v, AWQ_PLACES) for n, v in (("q", self.q), ("z", self.z))}
            return {"qweight": packed["q"], "qzeros": packed["z"], "scales": scales}
        stored = (self.z - 1) % 16 if self.method == "gptq" else self.z
        found = {
            "qweight": pack_columns(self.q.T).t().contiguous(),
            "qzeros": pack_columns(stored),
            "scales": scales,
        }
        if self.method == "gptq":
            found["g_idx"] = torch.from_numpy(self.group).int()
        return found


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_matrices_are_expanded_exactly(method: str, groups: int, outputs: int, seed: int) -> None:
    matrix = Matrix(np.random.default_rng(seed), 16 * groups, 8 * outputs, method)
    packing = read_packing(HuggingFaceConfig(Path("c"), {"quantization_config": CONFIGS[method]}))
    assert packing is not None
    assert torch.equal(expand(packing, matrix.parts()), matrix.value)


def test_without_zero_points_they_are_eight() -> None:
    matrix = Matrix(np.random.default_rng(0), 32, 8, "packed")
    matrix.z[:] = 8
    parts = matrix.parts()
    del parts["weight_zero_point"]
    assert torch.equal(expand(Packing("packed", 0, 16), parts), matrix.value)


def write_packed(folder: Path, method: str) -> tuple[Path, Path]:
    """Write a checkpoint with packed layers, and the same one in floating point."""
    plain, packed = write_llama(folder / "plain"), write_llama(folder / "packed")
    tensors = load_file(plain / "model.safetensors")
    rng, stored = np.random.default_rng(1), {}
    for name, value in list(tensors.items()):
        if value.ndim == 2 and ".layers." in name:
            matrix = Matrix(rng, value.shape[1], value.shape[0], method)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": tensor for part, tensor in matrix.parts().items()}
            tensors[name] = matrix.value
        else:
            stored[name] = value
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = CONFIGS[method]
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["gptq_v2", "awq", "packed", "nvfp4"]),
    st.sampled_from([16, 32, 64, 128, -1]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_matrices_are_held_exactly(method: str, size: int, groups: int, seed: int) -> None:
    """A group of all inputs, too."""
    size = 16 if method == "nvfp4" else size
    num_in = 96 if size == -1 else size * groups
    matrix = Matrix(np.random.default_rng(seed), num_in, 16, method, num_in if size == -1 else size)
    found = pack(Packing(method.removesuffix("_v2"), 0, size), matrix.parts())
    assert found is not None
    assert found.has_pairs == (size != 16)
    assert torch.equal(found.expand(), matrix.value)


def test_a_matrix_without_zero_points_has_no_minimums() -> None:
    matrix = Matrix(np.random.default_rng(0), 256, 8, "gptq_v2", 128)
    matrix.z[:] = 8
    found = pack(Packing("gptq", 0, 128), matrix.parts())
    assert found is not None
    assert found.minimums is None
    assert torch.equal(found.expand(), matrix.value)


def test_inputs_in_another_order_are_expanded() -> None:
    matrix = Matrix(np.random.default_rng(0), 64, 8, "gptq")
    assert pack(Packing("gptq", 1, 16), matrix.parts()) is None


@pytest.mark.parametrize("method", sorted(CONFIGS))
def test_the_memory_is_known_from_the_headers(tmp_path: Path, method: str) -> None:
    _, packed = write_packed(tmp_path, method)
    weights = find_weights(packed)
    found = {name: weights.groups(name) for name in weights.info()}
    held = {name: groups.nbytes for name, groups in found.items() if groups is not None}
    assert weights.packed_bytes() == held
    assert len(held) == (0 if method == "gptq" else 21)


@pytest.mark.parametrize(
    ("method", "name"), [("gptq", "gptq"), ("gptq_v2", "gptq"), ("nvfp4", "float4_e2m1fnx2")]
)
def test_the_format_can_be_named(tmp_path: Path, method: str, name: str) -> None:
    _, packed = write_packed(tmp_path, method)
    ids = [5, 9, 2, 40, 7]
    assert torch.equal(all_logits(packed, ids, encoding=name), all_logits(packed, ids))
    with pytest.raises(ConfigError, match=rf"q4_0 is for .* stored as {name}"):
        all_logits(packed, ids, encoding="q4_0")


@pytest.mark.parametrize("method", sorted(CONFIGS))
def test_a_packed_checkpoint_has_the_logits_of_its_value(tmp_path: Path, method: str) -> None:
    plain, packed = write_packed(tmp_path, method)
    info = find_weights(packed).info()
    assert info.keys() == find_weights(plain).info().keys()
    assert info["model.layers.0.mlp.down_proj.weight"].shape == (64, 112)
    ids = [5, 9, 2, 40, 7]
    found = all_logits(packed, ids)
    assert torch.equal(found, all_logits(plain, ids))
    assert torch.equal(found, all_logits(packed, ids, encoding="float32"))
    with torch.inference_mode():
        expected = reference(plain)(torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() <= MAX_ERROR * expected.abs().max()


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("gptq", {"bits": 3}, "bits=3"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format=marlin"),
        ("awq", {"version": "gemv"}, "version=gemv"),
        ("gptq", {"group_size": 0}, "group_size=0"),
        ("packed", {"config_groups": {}}, "config_groups"),
        ("nvfp4", {"config_groups": {"group_0": GROUPED}}, "type=int"),
    ],
)
def test_other_variants_are_refused(method: str, change: dict[str, Any], message: str) -> None:
    keys = {"quantization_config": CONFIGS[method] | change}
    with pytest.raises(CheckpointError, match=message):
        read_packing(HuggingFaceConfig(Path("config.json"), keys))


@pytest.mark.parametrize("value", [["gptq"], "gptq", 4])
def test_a_quantisation_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="quantization_config must be an object"):
        _ = HuggingFaceConfig(Path("config.json"), {"quantization_config": value}).is_int8


def test_a_missing_part_and_sizes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    _, packed = write_packed(tmp_path, "gptq")
    path, name = packed / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(path)
    scales = tensors.pop(f"{name}.scales")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{name}\.scales' is missing"):
        find_weights(packed)
    save_file(tensors | {f"{name}.scales": scales[:1].clone()}, path)
    with pytest.raises(CheckpointError, match=f"'{name}': its packed tensors do not fit"):
        find_weights(packed).tensor(f"{name}.weight")
