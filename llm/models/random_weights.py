"""`RandomWeights`: weights of a model without files, for tests: every tensor depends on its name
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from llm.config import PipelineConfig
from llm.errors import CheckpointError
from llm.models.encoding import choose_encoding
from llm.models.hf_config import HuggingFaceConfig
from llm.models.pickle_weights import find_weights, pickle_files
from llm.models.weights import TensorInfo, Weights, WeightsFormat

GAIN = 2.0  # of matrices: next-token distributions are neither flat nor repeat the last token
PART = 1 << 22  # numbers that are generated at once on a GPU


class RandomWeights(Weights):
    """Returns any tensor of a requested shape; the same name gives the same values.

    Values are generated on `device`, which is fast for large models; another kind of device gives
    other values. A GPU's matrices are `dtype`: wider ones would leave unused memory behind.
    """

    format = WeightsFormat.SAFETENSORS

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self._device = torch.device(device)
        self._dtype = dtype

    def info(self) -> Mapping[str, TensorInfo]:
        """Return no names: tensors do not exist before they are requested."""
        return {}

    def tensor(self, name: str) -> Tensor:
        """See `Weights`."""
        raise CheckpointError(f"tensor '{name}' has no shape of its own")

    def shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return random matrices, 1 for scales and 0 for biases."""
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, device=self._device)
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        scale = GAIN * shape[-1] ** -0.5
        if self._device.type == "cpu":
            return torch.randn(shape, generator=generator).mul_(scale)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part in values.view(-1).split(PART):
            made = torch.randn(part.shape, generator=generator, device=self._device)
            part.copy_(made.mul_(scale))
        return values

    def close(self) -> None:
        """See `Weights`."""


def open_weights(config: PipelineConfig) -> Weights:
    """Open the weights of a configuration's model; random ones in the test mode without files.

    Raises the errors of `find_weights`.
    """
    model = config.model
    folder = Path(model.model_path)
    if config.is_test_mode and not (
        model.weight_path
        or any(folder.glob("*.safetensors"))
        or any(folder.glob("*.gguf"))
        or pickle_files(folder)
    ):
        encoding = choose_encoding(model, HuggingFaceConfig.read(folder))
        is_plain = encoding.matrix_bytes == encoding.dtype.itemsize
        return RandomWeights(model.device_specs[0], encoding.dtype if is_plain else torch.float32)
    return find_weights(model.model_path, model.weight_path, allow_pickle=config.allow_pickle)
