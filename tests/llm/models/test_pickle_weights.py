"""Weights in pickles: refused, allowed, and never executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llm.batch import ReturnLogits
from llm.errors import CheckpointError
from llm.models.pickle_weights import PickleWeights, find_weights
from llm.models.weights import SafetensorsWeights
from tests.llm.llama_checkpoints import (
    batch,
    create_runner,
    pipeline_config,
    random_ids,
    row,
    write_llama,
)


def as_pickle(folder: Path, *, num_files: int = 1, old_format: bool = False) -> Path:
    """Convert the checkpoint to pickles, as transformers wrote it before; return the first file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    shards = [names[k::num_files] for k in range(num_files)]
    files = [f"pytorch_model-{k + 1:05}-of-{num_files:05}.bin" for k in range(num_files)]
    if num_files == 1:
        files = ["pytorch_model.bin"]
    else:
        weight_map = {name: files[names.index(name) % num_files] for name in names}
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    for file, shard in zip(files, shards, strict=True):
        values = {name: tensors[name] for name in shard}
        torch.save(values, folder / file, _use_new_zipfile_serialization=not old_format)
    return folder / files[0]


def logits(folder: Path) -> torch.Tensor:
    config = pipeline_config(folder, allow_pickle=True)
    runner = create_runner(config, ReturnLogits.ALL)
    return runner.forward(runner.prepare(batch(row(random_ids(9, 96), [3])))).logits


@pytest.mark.parametrize(("num_files", "old_format"), [(1, False), (1, True), (3, False)])
def test_pickles_are_read_only_when_allowed(
    tmp_path: Path, num_files: int, old_format: bool
) -> None:
    expected = logits(write_llama(tmp_path))
    size = create_runner(pipeline_config(tmp_path)).plan_memory().weights_bytes
    path = as_pickle(tmp_path, num_files=num_files, old_format=old_format)
    with pytest.raises(CheckpointError, match=rf"{path.name} is a pickle.*--allow-pickle"):
        create_runner(pipeline_config(tmp_path))
    assert torch.equal(logits(tmp_path), expected)
    allowed = create_runner(pipeline_config(tmp_path, allow_pickle=True))
    assert allowed.plan_memory().weights_bytes == size


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    write_llama(tmp_path)
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert isinstance(find_weights(tmp_path, allow_pickle=True), SafetensorsWeights)
    named = find_weights(tmp_path, [tmp_path / "pytorch_model.bin"], allow_pickle=True)
    assert isinstance(named, PickleWeights)
    assert set(named.info()) == {"other"}


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.victim,))


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "pytorch_model.bin"
    torch.save({"a": Attack(victim)}, path)
    with pytest.raises(CheckpointError, match=r"cannot read .*pytorch_model\.bin"):
        find_weights(tmp_path, allow_pickle=True)
    path.write_bytes(pickle.dumps(Attack(victim), protocol=2))
    with pytest.raises(CheckpointError, match=r"cannot read .*pytorch_model\.bin"):
        find_weights(tmp_path, allow_pickle=True)
    assert not victim.exists()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        find_weights(tmp_path, allow_pickle=True)
    torch.save(torch.ones(3), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds no table of tensors"):
        find_weights(tmp_path, allow_pickle=True)
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    weights = find_weights(tmp_path, allow_pickle=True)
    with pytest.raises(CheckpointError, match="'b' is missing"):
        weights.tensor("b")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.bin"}}))
    with pytest.raises(CheckpointError, match=r"gone\.bin is missing, which pytorch_model"):
        find_weights(tmp_path, allow_pickle=True)
