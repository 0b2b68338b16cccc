"""GGUF files that the package `gguf` writes: tensors, configuration, logits, and errors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llm.errors import CheckpointError
from llm.models.gguf import GGUFFile, GGUFWeights, halves, read_tensor
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.pickle_weights import find_weights
from llm.runner.model_runner import ModelRunner
from tests.llm.gguf_files import gguf_name, paired, paired_of, quantised, write_gguf
from tests.llm.llama_checkpoints import (
    MAX_ERROR,
    all_logits,
    pipeline_config,
    reference,
    write_llama,
)

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_what_the_package_makes_of_it(tmp_path: Path, kind: str) -> None:
    """Random bytes, of which the scales are made finite by expanding them first."""
    form = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[form]
    rng = np.random.default_rng(3)
    data = rng.integers(0, 60, (5, 2 * max(block, 32) // block * size), dtype=np.uint8)
    expected = gguf.quants.dequantize(data, form)
    path = write_gguf(tmp_path / "x.gguf", {"token_embd.weight": (data, form)}, {})
    found = GGUFWeights(path).tensor("model.embed_tokens.weight")
    assert found.dtype is torch.float32
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


BITS = {"Q4_0": 5, "Q4_1": 6, "Q5_0": 9, "Q5_1": 10, "Q8_0": 9, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10}
"""Bits of a weight in memory, with its share of scales and minimums."""
GPU_BITS = BITS | {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5}
GPU_BITS |= {"Q4_K": 4.75, "Q5_K": 9, "Q6_K": 8.75}


@pytest.mark.parametrize("kind", BITS)
def test_blocks_are_held_as_they_are(tmp_path: Path, kind: str) -> None:
    """Random bytes with finite scales: every bit of what the package makes of them."""
    form = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[form]
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (6, 1024 // block, size), dtype=np.uint8)
    halves_at = {"Q6_K": (208,)}.get(kind, (0,) if kind in ("Q4_0", "Q5_0", "Q8_0") else (0, 2))
    for at in halves_at:
        numbers = rng.normal(size=data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = numbers[..., None].view(np.uint8)
    data = data.reshape(6, -1)
    path = write_gguf(tmp_path / "x.gguf", {"output.weight": (data, form)}, {})
    weights = GGUFWeights(path)
    groups = weights.groups("lm_head.weight")
    assert groups is not None
    assert np.array_equal(groups.expand().numpy(), gguf.quants.dequantize(data, form))
    assert groups.nbytes == 6 * 1024 * BITS[kind] // 8
    assert weights.packed_bytes() == {"lm_head.weight": groups.nbytes}
    words = groups.to_words(torch.device("cpu"))
    assert words.nbytes == 16 * 1024 * GPU_BITS[kind] / 8  # six rows fill a tile of 16
    assert torch.equal(words.expand(), groups.expand())


def test_scales_that_are_not_finite_and_other_formats_are_expanded(tmp_path: Path) -> None:
    form = gguf.GGMLQuantizationType
    data = np.zeros((2, 18), np.uint8)
    data[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    tensors = {
        "output.weight": (data, form.Q4_0),
        "token_embd.weight": (np.ones((4, 8), "f"), None),
    }
    weights = GGUFWeights(write_gguf(tmp_path / "x.gguf", tensors, {}))
    assert weights.groups("lm_head.weight") is None
    assert weights.groups("model.embed_tokens.weight") is None
    assert weights.groups("other") is None


MIXED = {"v_proj": "Q6_K", "k_proj": "Q4_0", "embed_tokens": "Q8_0", "down_proj": "F32"}


@pytest.mark.parametrize(
    ("kinds", "hidden"),
    [
        (lambda name: "Q4_0", 64),
        (lambda name: "Q4_1", 64),
        (lambda name: "Q4_K", 256),
        (lambda name: next((k for part, k in MIXED.items() if part in name), "Q4_K"), 256),
    ],
    ids=["Q4_0", "Q4_1", "Q4_K", "mixed"],
)
def test_a_packed_model_has_the_bits_of_the_expanded_one(
    tmp_path: Path, kinds: Callable[[str], str], hidden: int
) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    plain, packed = quantised(tmp_path, kinds, **sizes)
    ids = [5, 9, 2, 40, 7]
    found = all_logits(packed, ids)
    assert torch.equal(found, all_logits(plain, ids))
    assert torch.equal(found, all_logits(packed, ids, encoding="float32"))
    with torch.inference_mode():
        expected = reference(plain)(torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() <= MAX_ERROR * expected.abs().max()


def test_memory_is_that_of_the_packed_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
    _, packed = quantised(tmp_path, lambda name: "Q4_0", **sizes)
    runner = ModelRunner(pipeline_config(packed))
    plan, before = runner.plan_memory(), tensor_bytes()
    runner.load_model()
    held, rotations = tensor_bytes() - before, 4 * 512 * 64
    matrices = sum(GGUFWeights(packed / "m.gguf").packed_bytes().values())
    assert matrices < plan.weights_bytes < 1.02 * matrices, "norms are float32"
    assert plan.weights_bytes <= held <= plan.weights_bytes + rotations + 4096
    for keys in ({"encoding": "float32"}, {"use_vendor_blas": "true"}):
        expanded = ModelRunner(pipeline_config(packed, **keys))
        assert expanded.plan_memory().weights_bytes > 6 * plan.weights_bytes


def test_a_gpu_has_a_wide_table_besides_a_packed_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
    _, packed = quantised(tmp_path, lambda name: "Q4_0", **sizes)
    on_cpu, on_gpu = (
        LlamaModel.estimate_weights_size(pipeline_config(packed, device=device, encoding="q4_0"))
        for device in ("cpu", "cuda:0")
    )
    table, norms = 2 * 1024 * 256, 7 * 256
    assert on_gpu == on_cpu + table - 2 * norms, "norms are bfloat16"


def test_matrices_are_read_ahead_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    _, packed = quantised(tmp_path, lambda name: "Q4_0", **sizes)
    path = packed / "m.gguf"
    weights = GGUFWeights(path)
    names = list(weights.packed_bytes())
    assert len(names) > 3
    found = {name: weights.groups(name) for name in names}
    weights.close()
    for order in (names[::-1], [names[2], names[2], *names]):
        again = GGUFWeights(path)
        for name in order:
            one, other = found[name], again.groups(name)
            assert one is not None
            assert other is not None
            assert torch.equal(one.values, other.values)
            assert torch.equal(one.scales, other.scales)
        again.close()
    broken, entries = GGUFWeights(path), GGUFFile.read(path).entries
    last = max(names, key=lambda name: entries[gguf_name(name)].start)
    os.truncate(path, entries[gguf_name(last)].start)
    for name in names:
        if name != last:
            broken.groups(name)
    with pytest.raises(CheckpointError, match="cannot read"):
        broken.groups(last)
    broken.close()


def test_matrices_that_are_passed_over_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    form, count = gguf.GGMLQuantizationType.Q4_0, 64
    data = np.zeros((64, 64 // 32 * 18), np.uint8)
    tensors = {f"blk.{layer}.attn_q.weight": (data, form) for layer in range(count)}
    weights = GGUFWeights(write_gguf(tmp_path / "x.gguf", tensors, {}))
    names = list(weights.packed_bytes())
    one = weights.groups(names[0])
    assert one is not None
    size, before = one.values.nbytes + one.scales.nbytes, tensor_bytes()
    assert all(weights.groups(name) is not None for name in names[3::4])
    assert tensor_bytes() < before + 16 * size  # 6 that wait, 3 that are being read
    found = weights.groups(names[1])
    assert found is not None
    assert torch.equal(found.values, one.values)
    weights.close()


def tensor_bytes() -> int:
    """Return the memory of all tensors."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_pairs_of_rows_become_halves() -> None:
    rows = torch.arange(24.0).view(24, 1)
    assert torch.equal(halves(torch.from_numpy(paired(rows.numpy(), 3)), 3), rows)
    with pytest.raises(CheckpointError, match="are not 5 heads"):
        halves(rows, 5)


def test_a_file_has_the_logits_of_its_folder(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain")
    path = plain / "model.safetensors"
    tensors = load_file(path)
    stored: dict[str, Any] = {}
    for name, value in tensors.items():
        matrix = paired_of(name, value.numpy())
        form = gguf.GGMLQuantizationType.Q8_0 if can_shrink(value) else None
        data = matrix if form is None else gguf.quants.quantize(matrix, form)
        stored[gguf_name(name)] = (data, form or gguf.GGMLQuantizationType.F32)
    file = write_gguf(tmp_path / "m.gguf", stored, {})
    weights = GGUFWeights(file)
    assert weights.info().keys() == tensors.keys()
    save_file({name: weights.tensor(name) for name in tensors}, path, metadata={"format": "pt"})
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "model.gguf").symlink_to(file)
    (folder / "config.json").write_text((plain / "config.json").read_text())
    ids = [5, 9, 2, 40, 7]
    found = all_logits(folder, ids)
    assert torch.equal(found, all_logits(plain, ids))
    with torch.inference_mode():
        expected = reference(plain)(torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() <= MAX_ERROR * expected.abs().max()
    ours = LlamaModel.read_config(HuggingFaceConfig(file, GGUFFile.read(file).config()))
    theirs = LlamaModel.read_config(HuggingFaceConfig.read(plain))
    assert replace(ours, norm_epsilon=theirs.norm_epsilon) == theirs
    assert ours.norm_epsilon == np.float32(theirs.norm_epsilon), "files hold float32"


def can_shrink(value: torch.Tensor) -> bool:
    return value.ndim == 2 and value.shape[1] % 32 == 0


def test_the_scaling_of_llama_3_is_recognised(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    frequencies = 1 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    turns = 8192 * frequencies / (2 * np.pi)
    keep = np.clip((turns - 1) / 3, 0, 1)
    divisors = (1 / ((1 - keep) / 8 + keep)).astype(np.float32)
    form = gguf.GGMLQuantizationType.F32
    table = np.zeros((96, 64), np.float32)
    keys = {"llama.attention.key_length": 128, "llama.rope.freq_base": 500000.0}
    both = {"token_embd.weight": (table, form), "rope_freqs.weight": (divisors, form)}
    file = GGUFFile.read(write_gguf(tmp_path / "a.gguf", both, keys))
    assert file.config()["rope_parameters"] == rope
    both["rope_freqs.weight"] = (divisors * 2, form)
    with pytest.raises(CheckpointError, match="not the scaling of Llama 3"):
        GGUFFile.read(write_gguf(tmp_path / "b.gguf", both, keys)).config()


def test_a_head_without_end_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    form = gguf.GGMLQuantizationType.F32
    keys = {"llama.attention.key_length": 2**32 - 2, "llama.rope.dimension_count": 2**32 - 2}
    tensors = {
        "token_embd.weight": (np.zeros((96, 64), np.float32), form),
        "rope_freqs.weight": (np.ones(64, np.float32), form),
    }
    with pytest.raises(CheckpointError, match="not the scaling of Llama 3"):
        GGUFFile.read(write_gguf(tmp_path / "a.gguf", tensors, keys)).config()


def test_an_architecture_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = GGUFFile(tmp_path / "a.gguf", {"general.architecture": ["llama"]}, {})
    with pytest.raises(CheckpointError, match=r"architecture \['llama'\] is not read"):
        file.config()


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    form = gguf.GGMLQuantizationType.F32
    whole = write_gguf(tmp_path / "a.gguf", {"token_embd.weight": (np.ones((4, 8), "f"), form)}, {})
    data, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    assert read_tensor(GGUFFile.read(whole), "token_embd.weight").shape == (4, 8)
    for length in range(0, len(data) - 1, 7):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: "):
            GGUFFile.read(cut)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    form, path = gguf.GGMLQuantizationType, tmp_path / "x.gguf"
    table = {"token_embd.weight": (np.ones((4, 8), "f"), form.F32)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"general.architecture": "mamba"}, "architecture mamba is not read"),
        ({"llama.expert_count": 8}, "experts are not supported"),
        ({"llama.rope.dimension_count": 4}, "4 of 16 dimensions"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
    ]
    for keys, message in cases:
        with pytest.raises(CheckpointError, match=message):
            GGUFFile.read(write_gguf(path, table, keys)).config()
    integers = {"token_embd.weight": (np.ones((4, 8), np.int32), form.I32)}
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' is stored as I32"):
        GGUFFile.read(write_gguf(path, integers, {}))


def test_one_file_for_a_model(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="2 GGUF files"):
        find_weights(tmp_path)
