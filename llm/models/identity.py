"""The identity of a model's weights, for engines that exchange keys and values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from llm.models.encoding import choose_encoding
from llm.models.hf_config import HuggingFaceConfig
from llm.models.pickle_weights import gguf_file, pickle_files
from llm.models.weights import weight_files

if TYPE_CHECKING:
    from llm.config import ModelConfig, PipelineConfig

PAGE_LAYOUT = 1  # of keys and values in a page
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096  # of each weights file


def weights_identity(config: PipelineConfig) -> str:
    """Return a digest, 16 hexadecimal digits, of a model's configuration, of how its weights are
    held, and of its weights' sizes and of samples of them: files of any size take milliseconds.
    Of safetensors files the beginning of every tensor is a sample.

    It is the same in every folder and on every machine. Raises `CheckpointError`.
    """
    model = config.model
    described = HuggingFaceConfig.read(model.model_path)
    encoding = choose_encoding(model, described).name
    values = [PAGE_LAYOUT, described.keys, encoding, model.rope_type]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode())
    for path in _files(model):
        _add_samples(digest, path)
    return digest.hexdigest()[:16]


def _files(model: ModelConfig) -> list[Path]:
    """Return the weight files; none for random weights."""
    folder, given = Path(model.model_path), model.weight_path
    packed = gguf_file(folder, given)
    if packed is not None:
        return [packed]
    if given:
        return given
    return weight_files(folder) if any(folder.glob("*.safetensors")) else pickle_files(folder)


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    places = [number * size // NUM_SAMPLES for number in range(NUM_SAMPLES)]
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            places += sorted(8 + header_size + one["data_offsets"][0] for one in header.values())
        for place in places:
            file.seek(place)
            digest.update(file.read(SAMPLE_BYTES))
