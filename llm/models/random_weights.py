"""`RandomWeights`: weights of a model without files, for tests: every tensor depends on its name
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from llm.config import PipelineConfig
from llm.errors import CheckpointError
from llm.models.pickle_weights import find_weights, pickle_files
from llm.models.weights import TensorInfo, Weights, WeightsFormat

if TYPE_CHECKING:
    from torch import Tensor

GAIN = 2.0  # of matrices: next-token distributions are neither flat nor repeat the last token


class RandomWeights(Weights):
    """Returns any tensor of a requested shape; the same name gives the same values.

    Values are generated on `device`, which is fast for large models; another kind of device gives
    other values.
    """

    format = WeightsFormat.SAFETENSORS

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def info(self) -> Mapping[str, TensorInfo]:
        """Return no names: tensors do not exist before they are requested."""
        return {}

    def tensor(self, name: str) -> Tensor:
        """See `Weights`."""
        raise CheckpointError(f"tensor '{name}' has no shape of its own")

    def shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return random matrices, 1 for scales and 0 for biases."""
        import torch

        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, device=self._device)
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=self._device)
        return values.mul_(GAIN * shape[-1] ** -0.5)

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
        return RandomWeights(model.device_specs[0])
    return find_weights(model.model_path, model.weight_path, allow_pickle=config.allow_pickle)
