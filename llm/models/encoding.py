"""How a model's weights and activations are held: the choice when the configuration makes none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm.config import ModelConfig, QuantizationEncoding
from llm.errors import ConfigError
from llm.models.hf_config import HuggingFaceConfig


@dataclass(frozen=True, slots=True)
class Encoding:
    """`dtype` of activations, norms and unquantised weights; whether matrices are int8."""

    dtype: torch.dtype
    int8: bool = False

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix element."""
        return 1 if self.int8 else self.dtype.itemsize


def choose_encoding(config: ModelConfig, huggingface_config: HuggingFaceConfig) -> Encoding:
    """The configured encoding; by default bfloat16 on a GPU (float16 before Ampere), on the CPU
    int8 for a checkpoint that is stored so, and float32 for any other.

    An int8 checkpoint is expanded wherever another encoding is asked for.
    """
    device = torch.device(config.device_specs[0])
    match config.quantization_encoding:
        case QuantizationEncoding.FLOAT32:
            return Encoding(torch.float32)
        case QuantizationEncoding.BFLOAT16:
            return Encoding(torch.bfloat16)
        case QuantizationEncoding.INT8:
            return Encoding(torch.float32, int8=True)
        case None if device.type == "cpu":
            return Encoding(torch.float32, int8=huggingface_config.is_int8)
        case None:
            has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
            return Encoding(torch.bfloat16 if has_bfloat16 else torch.float16)
    raise ConfigError(f"quantization_encoding={config.quantization_encoding} has no kernels")
