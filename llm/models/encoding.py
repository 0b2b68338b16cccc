"""How a model's weights and activations are held: the choice when the configuration makes none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm.config import ModelConfig, QuantizationEncoding
from llm.errors import ConfigError
from llm.models.hf_config import HuggingFaceConfig

AMPERE = (8, 0)  # the first compute capability that has bfloat16
PLAIN = {
    QuantizationEncoding.FLOAT32: torch.float32,
    QuantizationEncoding.FLOAT16: torch.float16,
    QuantizationEncoding.BFLOAT16: torch.bfloat16,
}


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
    """The encoding of a model on its device: see `encoding_of`."""
    setting, capability = config.quantization_encoding, None
    if setting is None and not config.on_cpu:
        capability = torch.cuda.get_device_capability(torch.device(config.device_specs[0]))
    return encoding_of(setting, capability, is_int8=huggingface_config.is_int8)


def encoding_of(
    setting: QuantizationEncoding | None,
    capability: tuple[int, int] | None,
    *,
    is_int8: bool = False,
) -> Encoding:
    """What is set; where nothing is, bfloat16 on a GPU (float16 before Ampere), on the CPU int8
    for a checkpoint that is stored so, and float32 for any other.

    `capability` is the GPU's: None on the CPU, and where something is set. An int8 checkpoint
    (`is_int8`) is expanded wherever another encoding is asked for. Raises `ConfigError` for one
    that nothing computes with.
    """
    if setting is QuantizationEncoding.INT8:
        return Encoding(torch.float32, int8=True)
    if setting in PLAIN:
        return Encoding(PLAIN[setting])
    if setting is not None:
        raise ConfigError(f"quantization_encoding={setting} has no kernels")
    if capability is None:
        return Encoding(torch.float32, int8=is_int8)
    return Encoding(torch.bfloat16 if capability >= AMPERE else torch.float16)
