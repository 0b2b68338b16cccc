"""A codec's weights on disk: float16, or 8 bits where a file has to be small.

A matrix or a convolution of float16 NAME becomes int8 NAME and float16 NAME:scale, one scale per
first index, as the service reads them. Those of few rows keep their format: they are small, and
pitch needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoder.codecs.source_filter.modules import SpeechCodec
from decoder.codecs.source_filter.weights import SCALE, restored
from training.speech_codec.config import load_config

DECODER, VOICE_ENCODER = "decoder.", "voice_encoder."
FEW_ROWS = 4


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Whole or not at all: a reader never sees half a file."""
    partial = path.with_name(f"{path.name}.tmp")
    save_file({name: value.contiguous() for name, value in tensors.items()}, partial)
    partial.rename(path)


def halved(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float16 on the CPU."""
    return {name: value.detach().half().cpu() for name, value in state.items()}


def eighth_bits(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round matrices to 8 bits, as the module describes; vectors keep their format."""
    small: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.dim() < 2 or len(value) <= FEW_ROWS:
            small[name] = value
            continue
        rows = value.float().flatten(1)
        scale = (rows.abs().amax(1) / 127).clamp_min(1e-8).half().clamp_min(6e-8)
        whole = (rows / scale.float()[:, None]).round().clamp(-127, 127)
        small[name] = whole.to(torch.int8).view(value.shape)
        small[f"{name}{SCALE}"] = scale
    return small


def read(path: Path) -> dict[str, Tensor]:
    """Float32, of either kind of file."""
    return restored(load_file(path))


def load(weights: Path, config: Path, voices: Path | None = None) -> SpeechCodec:
    """Return a trained codec on the CPU, for use: the decoder of the file `weights`, the encoder of
    voices of `voices`.

    Without `voices` the encoder of voices is untrained unless `weights` has it. Raises ValueError
    for a file that lacks tensors or has others.
    """
    codec = SpeechCodec(load_config(config))
    state = read(weights) | (read(voices) if voices else {})
    missing, unknown = codec.load_state_dict(state, strict=False)
    if unknown or any(voices or name.startswith(DECODER) for name in missing):
        raise ValueError(f"{weights} is not of {config}: without {missing}, with {unknown}")
    return codec.eval()
