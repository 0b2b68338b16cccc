"""The identity of weights: the same in any folder, another one for any other tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from llm.models.identity import weights_identity
from tests.llm.llama_checkpoints import pipeline_config, write_llama


def identity(folder: Path) -> str:
    return weights_identity(pipeline_config(folder))


def test_it_is_that_of_every_tensor(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "one")
    found = identity(folder)
    copied = Path(shutil.copytree(folder, tmp_path / "two"))
    assert identity(copied) == found
    file = copied / "model.safetensors"
    tensors = load_file(file)
    others = set()
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1)[0] += 1
        save_file({**tensors, name: changed}, file, {"format": "pt"})
        others.add(identity(copied))
    assert len(others) == len(tensors)
    assert found not in others
