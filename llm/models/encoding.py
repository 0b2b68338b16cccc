"""Number formats of a model's weights and activations: the default when none is configured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from llm.config import ModelConfig, PipelineConfig, QuantizationEncoding
from llm.config.architectures import FALLBACK, find_architecture
from llm.errors import ConfigError
from llm.models.gguf import GGUFFile, packed_kinds
from llm.models.hf_config import HuggingFaceConfig
from llm.models.packed_weights import NVFP4, read_packing
from llm.models.pickle_weights import gguf_file
from llm.models.pooling import is_embedding_model

ConfigT = TypeVar("ConfigT", bound=PipelineConfig)

logger = logging.getLogger("llm.config")

AMPERE = (8, 0)  # the first compute capability with bfloat16, and with packed matrices
HOPPER = (9, 0)  # the first whose float8 products have been run
PLAIN = {
    QuantizationEncoding.FLOAT32: torch.float32,
    QuantizationEncoding.FLOAT16: torch.float16,
    QuantizationEncoding.BFLOAT16: torch.bfloat16,
}
PACKED = (
    QuantizationEncoding.GPTQ,
    QuantizationEncoding.Q4_0,
    QuantizationEncoding.Q4_K,
    QuantizationEncoding.Q6_K,
    QuantizationEncoding.FLOAT4_E2M1FNX2,
)
"""Formats that keep the matrices of a checkpoint that is stored so."""
LIKE_GPTQ = ("gptq", "awq", "compressed-tensors")
"""Formats of checkpoints whose matrices are held in the same form."""
DEPENDS_ON_DEVICE = (None, QuantizationEncoding.FLOAT8_E4M3FN, *PACKED)
TEXT_ON_CPU = QuantizationEncoding.FLOAT32
"""The fastest format whose text stays within the bounds of docs/cpu.md, as measured there."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """`dtype` of activations, norms and unquantised weights; whether matrices are int8, those of
    the layers float8, or those that are stored in groups of four bits and more packed.
    """

    dtype: torch.dtype
    int8: bool = False
    float8: bool = False
    packed: bool = False

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one element of a layer's matrix that is not packed."""
        return 1 if self.int8 or self.float8 else self.dtype.itemsize

    @property
    def name(self) -> str:
        """Return the formats for logs."""
        matrices = ", matrices int8" if self.int8 else ""
        matrices = ", matrices of layers float8_e4m3fn" if self.float8 else matrices
        matrices = ", matrices packed as they are stored" if self.packed else matrices
        return str(self.dtype).removeprefix("torch.") + matrices


def choose_encoding(config: ModelConfig, huggingface_config: HuggingFaceConfig) -> Encoding:
    """Return the encoding of a model on its device: see `encoding_of`. A stored format that its
    architecture does not run in is expanded.
    """
    setting, capability = config.quantization_encoding, None
    if setting in DEPENDS_ON_DEVICE and not config.on_cpu:
        capability = torch.cuda.get_device_capability(torch.device(config.device_specs[0]))
    facts = huggingface_config
    known = find_architecture(facts.architecture, facts.path, runs_alone=True).encodings
    return encoding_of(
        setting,
        capability,
        is_int8=facts.is_int8 and QuantizationEncoding.INT8 in known,
        is_float8=facts.is_float8 and QuantizationEncoding.FLOAT8_E4M3FN in known,
        packed=packed_formats(config, facts) if QuantizationEncoding.GPTQ in known else (),
    )


def packed_formats(config: ModelConfig, facts: HuggingFaceConfig) -> tuple[str, ...]:
    """Return the formats of a checkpoint's matrices that can be held as they are stored.

    They are those of a GGUF file, or gptq, awq, compressed-tensors or float4_e2m1fnx2 (NVFP4).
    """
    path = gguf_file(Path(config.model_path), config.weight_path) if config.model_path else None
    if path is not None:
        return _kinds(path, path.stat().st_mtime_ns)
    packing = read_packing(facts)
    if packing is None:
        return ()
    names = {"packed": "compressed-tensors", NVFP4: QuantizationEncoding.FLOAT4_E2M1FNX2.value}
    return (names.get(packing.method, packing.method),)


@lru_cache(maxsize=8)
def _kinds(path: Path, changed: int) -> tuple[str, ...]:
    """Read them from a GGUF file's header, once for each version of it."""
    return tuple(sorted(packed_kinds(GGUFFile.read(path))))


def encoding_of(
    setting: QuantizationEncoding | None,
    capability: tuple[int, int] | None,
    *,
    is_int8: bool = False,
    is_float8: bool = False,
    packed: Sequence[str] = (),
) -> Encoding:
    """Return the configured encoding, or the default.

    The default is that of a float8 checkpoint (`is_float8`) on the CPU and on Hopper and newer
    GPUs; otherwise bfloat16 on a GPU (float16 before Ampere), on the CPU int8 for a checkpoint that
    is stored so (`is_int8`), and float32 for any other, with the matrices that are stored in a
    format of `packed` as they are. On a GPU these are expanded, which is faster for three rows and
    more, unless their format is set; they are for any other encoding, too.
    `capability` is the GPU's: None on the CPU, and may be if an encoding is set that is neither
    float8 nor packed.
    Raises `ConfigError` for an unsupported one.
    """
    has_float8 = capability is None or capability >= HOPPER
    if setting is QuantizationEncoding.INT8:
        return Encoding(torch.float32, int8=True)
    if setting in PLAIN:
        return Encoding(PLAIN[setting])
    if setting is QuantizationEncoding.FLOAT8_E4M3FN and not has_float8:
        raise ConfigError(
            f"quantization_encoding={setting} needs a GPU of compute capability "
            f"{'.'.join(map(str, HOPPER))} or newer, and this one has "
            f"{'.'.join(map(str, capability or ()))}"
        )
    if setting is QuantizationEncoding.FLOAT8_E4M3FN or (
        setting is None and is_float8 and has_float8
    ):
        return Encoding(torch.bfloat16, float8=True)
    holds_packed = capability is None or capability >= AMPERE
    if setting in PACKED and holds_packed:
        accepted = LIKE_GPTQ if setting is QuantizationEncoding.GPTQ else (setting.value,)
        if not set(accepted) & set(packed):
            stored = ", ".join(packed) or "none of these formats"
            raise ConfigError(
                f"quantization_encoding={setting} is for checkpoints that are stored so, and this "
                f"one is stored as {stored}"
            )
        return Encoding(torch.bfloat16 if capability else torch.float32, packed=True)
    if setting is not None:
        raise ConfigError(f"quantization_encoding={setting} has no kernels")
    if capability is None:
        return Encoding(torch.float32, int8=is_int8, packed=bool(packed))
    return Encoding(torch.bfloat16 if capability >= AMPERE else torch.float16)


def with_text_encoding(config: ConfigT) -> ConfigT:
    """Return the resolved configuration with the format for models that write text on the CPU.

    The format is logged. A model is unchanged where a format is set, on a GPU, and if it is stored
    as int8, float8 or packed, computes embeddings or runs by way of the transformers package.
    """
    chosen = {}
    for name, model in (("model", config.model), ("draft_model", config.draft_model)):
        if model is not None and _is_open(model, runs_alone=config.runs_alone):
            text = "%s holds its weights as %s, the fastest format whose text stays close enough "
            text += "to that of float32; --%s.quantization-encoding float32, bfloat16 or int8 "
            logger.info(text + "chooses another", name, TEXT_ON_CPU, name.replace("_", "-"))
            chosen[name] = model.model_copy(update={"quantization_encoding": TEXT_ON_CPU})
    return config.model_copy(update=chosen) if chosen else config


def _is_open(model: ModelConfig, *, runs_alone: bool) -> bool:
    if model.quantization_encoding is not None or not model.on_cpu:
        return False
    facts = HuggingFaceConfig.read(model.model_path)
    found = find_architecture(facts.architecture, facts.path, runs_alone=runs_alone)
    is_ours = found is not FALLBACK and TEXT_ON_CPU in found.encodings
    is_stored_so = facts.is_int8 or facts.is_float8 or bool(packed_formats(model, facts))
    return is_ours and not is_stored_so and not is_embedding_model(model.model_path)
