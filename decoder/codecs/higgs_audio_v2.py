"""The tokenizer of Higgs Audio v2 (Boson AI 2025): DAC's decoder behind wider residual codebooks.

    code k ─ vector ─ project_out ─┐
                                   + ─ fc2 ─ DAC's decoder, without tanh ─> samples
    code l ─ vector ─ project_out ─┘

`fc2` is folded into each codebook's projection when the weights are read, so that the network is
that of DAC. Odd upsampling rates give all their samples.

Folder: config.json and model.safetensors in Hugging Face's layout ("model_type":
"higgs_audio_v2_tokenizer").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from decoder.base import AttentionKind, CodecSpec, DecoderConfigError
from decoder.codec_config import scalar, sizes
from decoder.codecs.common import (
    CONVOLUTION_OPTIONS,
    finish_spec,
    frame_streaming,
    load_or_random,
)
from decoder.codecs.snake.decoder import SnakeConfig, SnakeDecoder
from decoder.codecs.snake.names import dac_names
from decoder.encoders import TransformersEncoder
from decoder.registry import CodecSource
from decoder.streaming import crossfade_samples
from decoder.window_inputs import PaddedNetwork, PaddedRows

NAME = "higgs_audio_v2_tokenizer"
CHUNK_FRAMES = (6, 12, 25)
JOINT = "fc2"
OUTPUT = "quantizer.quantizers.{}.project_out"


class HiggsAudioV2Decoder(PaddedNetwork):
    """Decoder of the tokenizer. Convolutions only: no masks, no voice prompt in the window."""

    supported_options = CONVOLUTION_OPTIONS

    def __init__(self, spec: CodecSpec, network: SnakeDecoder, source: CodecSource) -> None:
        self.spec = spec
        self.options = source.options
        self.fade = crossfade_samples(spec, source.options)
        self._network = network
        self.device = source.device
        self._clips = TransformersEncoder(source, spec, spec.sample_rate)

    @classmethod
    def create(cls, source: CodecSource) -> HiggsAudioV2Decoder:
        """Create from a source; raises DecoderConfigError for an invalid file, size or option."""
        config, rate = read_config(source.config)
        spec = CodecSpec(
            name=NAME,
            sample_rate=rate,
            samples_per_code=Fraction(config.hop, len(config.vq_strides)),
            codebook_size=config.codebook_size,
            layout=tuple(range(len(config.vq_strides))),
            attention=AttentionKind.NONE,
        )
        spec = finish_spec(frame_streaming(spec, CHUNK_FRAMES, *config.reach()), source)
        names = layer_names(config)
        network = load_or_random(lambda: SnakeDecoder(config), names, source, own_name, folded)
        return cls(spec, network, source)

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """See TransformersEncoder.encode."""
        return self._clips.encode(samples)

    def render(self, rows: PaddedRows) -> Tensor:
        """See PaddedNetwork.render."""
        samples: Tensor = self._network(rows.codes.unbind(-1), rows.shape, rows.own)
        return samples


def read_config(values: Mapping[str, Any]) -> tuple[SnakeConfig, int]:
    """Read sizes and the sample rate from config.json; defaults are those of transformers."""
    acoustic = values.get("acoustic_model_config") or {}
    if not isinstance(acoustic, dict):
        raise DecoderConfigError(f"{NAME} config: acoustic_model_config must be an object")
    rate = scalar(values, NAME, "sample_rate", 24_000)
    down = sizes(acoustic, NAME, "downsampling_ratios", (8, 5, 4, 2))
    up = sizes(acoustic, NAME, "upsampling_ratios", (8, 5, 4, 2))
    if math.prod(up) != math.prod(down):
        raise DecoderConfigError(
            f"{NAME} config: upsampling_ratios give {math.prod(up)} samples for a frame of "
            f"{math.prod(down)}"
        )
    size = scalar(values, NAME, "codebook_size", 1024)
    bits = math.ceil(math.log2(size)) * math.ceil(rate / math.prod(down))  # of a codebook
    widths = values.get("target_bandwidths", [0.5, 1, 1.5, 2, 4])  # kbit/s
    largest = widths[-1] if isinstance(widths, list) and widths else None
    count = int(1000 * largest // max(bits, 1)) if isinstance(largest, int | float) else 0
    if count < 1:
        raise DecoderConfigError(
            f"{NAME} config: target_bandwidths {widths!r} give no codebook of {bits} bit/s"
        )
    config = SnakeConfig(
        latent_dim=scalar(acoustic, NAME, "hidden_size", 256),
        decoder_dim=scalar(acoustic, NAME, "decoder_hidden_size", 1024),
        rates=up,
        vq_strides=(1,) * count,
        codebook_size=size,
        codebook_dim=scalar(values, NAME, "codebook_dim", 64),
        is_bounded=False,
    )
    return config, rate


def layer_names(config: SnakeConfig) -> dict[str, str]:
    """Return the mapping from our layers' names to the checkpoint's."""
    names = {
        ours: f"acoustic_{theirs}" if theirs.startswith("decoder.") else theirs
        for ours, theirs in dac_names(config).items()
    }
    for book in range(len(config.vq_strides)):
        names[f"codebooks.{book}.projection"] = OUTPUT.format(book)
    return names | {"joint": JOINT}


def own_name(name: str) -> tuple[str, ...]:
    """Return a tensor's name; of the codebooks only the vectors are read."""
    layer, _, kind = name.rpartition(".")
    if not layer.endswith(".codebook"):
        return (name,)
    return (f"{layer}.weight",) if kind == "embed" else ()


def folded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with `fc2` as a part of each codebook's projection.

    Raises DecoderConfigError for sizes that do not fit together.
    """
    joint, offset = (tensors.pop(f"{JOINT}.{kind}", None) for kind in ("weight", "bias"))
    if joint is None or offset is None:
        raise DecoderConfigError(f"codec weights lack '{JOINT}.weight' or '{JOINT}.bias'")
    joint, book = joint.float(), 0
    while (name := f"{OUTPUT.format(book)}.weight") in tensors:
        weight, bias = tensors[name].float(), tensors[f"{OUTPUT.format(book)}.bias"].float()
        if joint.shape[1:] != weight.shape[:1]:
            raise DecoderConfigError(
                f"codec weights: '{name}' has shape {tuple(weight.shape)}, but '{JOINT}.weight' "
                f"{tuple(joint.shape)}"
            )
        tensors[name] = (joint @ weight)[:, :, None]
        own = joint @ bias
        tensors[f"{OUTPUT.format(book)}.bias"] = own if book else own + offset.float()
        book += 1
    return tensors
