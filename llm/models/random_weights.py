"""`RandomWeights`: a model without weight files, for tests: every tensor follows from its name."""

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

GAIN = 2.0  # of matrices: next-token distributions neither flat nor an echo of the last token


class RandomWeights(Weights):
    """Any tensor that is asked for with a shape; the same name has the same values.

    They are made on `device`, where billions take no time; another kind of device makes others.
    """

    format = WeightsFormat.SAFETENSORS

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def info(self) -> Mapping[str, TensorInfo]:
        """Nothing is there before it is asked for."""
        return {}

    def tensor(self, name: str) -> Tensor:
        """See `Weights`."""
        raise CheckpointError(f"tensor '{name}' has no shape of its own")

    def shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Matrices are normal, what scales is 1 and what is added 0."""
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
    """The weights of a configuration's model; random ones where the test mode finds none.

    Raises what `find_weights` does.
    """
    model = config.model
    folder = Path(model.model_path)
    if config.is_test_mode and not (
        model.weight_path or any(folder.glob("*.safetensors")) or pickle_files(folder)
    ):
        return RandomWeights(model.device_specs[0])
    return find_weights(model.model_path, model.weight_path, allow_pickle=config.allow_pickle)
