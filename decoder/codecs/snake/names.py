"""Names of SNAC's and DAC's published tensors, of decoder and encoder."""

from __future__ import annotations

from collections.abc import Sequence

from decoder.codecs.snake.decoder import DILATIONS, SnakeConfig
from decoder.codecs.snake.encoder import SnakeEncoderConfig

_UNIT_PARTS = ("snake_in", "dilated", "snake_out", "mix")
_DAC_UNIT_PARTS = ("snake1", "conv1", "snake2", "conv2")


def _books(count: int, parts: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {
        f"codebooks.{k}.{ours}": f"quantizer.quantizers.{k}.{theirs}"
        for k in range(count)
        for ours, theirs in parts
    }


_OUT = (("vectors", "codebook"), ("projection", "out_proj"))
_IN_AND_OUT = (*_OUT, ("into", "in_proj"))


def _snac_units(ours: str, theirs: str, first: int) -> dict[str, str]:
    """Return names of three residual units of a numbered block, from its index `first` on."""
    return {
        f"{ours}.units.{unit}.{part}": f"{theirs}.{first + unit}.block.{place}"
        for unit in range(len(DILATIONS))
        for place, part in enumerate(_UNIT_PARTS)
    }


def _dac_units(ours: str, theirs: str) -> dict[str, str]:
    return {
        f"{ours}.units.{unit}.{part}": f"{theirs}.res_unit{unit + 1}.{name}"
        for unit in range(len(DILATIONS))
        for part, name in zip(_UNIT_PARTS, _DAC_UNIT_PARTS, strict=True)
    }


def snac_names(config: SnakeConfig) -> dict[str, str]:
    """Return the decoder's mapping from our layers' names to the checkpoint's."""
    names = _books(len(config.vq_strides), _OUT)
    num_entry = 2 if config.depthwise else 1
    names |= {f"entry.{index}": f"decoder.model.{index}" for index in range(num_entry)}
    for index in range(len(config.rates)):
        ours, theirs = f"stages.{index}", f"decoder.model.{num_entry + index}.block"
        names |= {f"{ours}.snake": f"{theirs}.0", f"{ours}.up": f"{theirs}.1"}
        if config.has_noise:
            names[f"{ours}.noise"] = f"{theirs}.2.linear"
        names |= _snac_units(ours, theirs, first=3 if config.has_noise else 2)
    end = num_entry + len(config.rates)
    return names | {"exit_snake": f"decoder.model.{end}", "exit": f"decoder.model.{end + 1}"}


def snac_encoder_names(config: SnakeEncoderConfig) -> dict[str, str]:
    """Return the encoder's mapping from our layers' names to the checkpoint's."""
    names = _books(len(config.decoder.vq_strides), _IN_AND_OUT) | {"entry": "encoder.block.0"}
    for index in range(len(config.rates)):
        ours, theirs = f"stages.{index}", f"encoder.block.{1 + index}.block"
        names |= _snac_units(ours, theirs, first=0)
        names |= {f"{ours}.snake": f"{theirs}.3", f"{ours}.down": f"{theirs}.4"}
    return names | {"exit": f"encoder.block.{1 + len(config.rates)}"}


def dac_names(config: SnakeConfig) -> dict[str, str]:
    """Return the decoder's mapping from our layers' names to the checkpoint's."""
    names = _books(len(config.vq_strides), _OUT)
    names |= {"entry.0": "decoder.conv1", "exit_snake": "decoder.snake1", "exit": "decoder.conv2"}
    for index in range(len(config.rates)):
        ours, theirs = f"stages.{index}", f"decoder.block.{index}"
        names |= {f"{ours}.snake": f"{theirs}.snake1", f"{ours}.up": f"{theirs}.conv_t1"}
        names |= _dac_units(ours, theirs)
    return names


def dac_encoder_names(config: SnakeEncoderConfig) -> dict[str, str]:
    """Return the encoder's mapping from our layers' names to the checkpoint's."""
    names = _books(len(config.decoder.vq_strides), _IN_AND_OUT)
    names |= {"entry": "encoder.conv1", "exit_snake": "encoder.snake1", "exit": "encoder.conv2"}
    for index in range(len(config.rates)):
        ours, theirs = f"stages.{index}", f"encoder.block.{index}"
        names |= {f"{ours}.snake": f"{theirs}.snake1", f"{ours}.down": f"{theirs}.conv1"}
        names |= _dac_units(ours, theirs)
    return names
