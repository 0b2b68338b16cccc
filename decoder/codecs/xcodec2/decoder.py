"""XCodec2 (16 kHz) and NeuCodec (24 kHz): 50 codes of one codebook a second.

Both are one network; NeuCodec's frames are longer. Attention and the norms over time depend on the
whole window, so that the field is unbounded and a stream never equals the whole bit for bit: the
recommended history and look-ahead keep the difference small (benchmarks/seams.py). Masks apply to
the attention; the convolutions and norms before and after it are not masked.

Folder: config.json and model.safetensors in Hugging Face's layout ("model_type": "xcodec2" or
"neucodec"), or with the names of the first publications, which can only decode here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor, nn

from decoder.base import (
    AttentionKind,
    CodecSpec,
    DecoderConfigError,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from decoder.codec_config import must_be, scalar, sizes
from decoder.codecs.common import (
    CONVOLUTION_OPTIONS,
    crossfading,
    finish_spec,
    load_or_random,
)
from decoder.codecs.xcodec2.modules import NUM_GROUPS, Xcodec2Config, Xcodec2Network
from decoder.codecs.xcodec2.names import from_first_layout, xcodec2_names
from decoder.encoders import TransformersEncoder
from decoder.registry import CodecSource
from decoder.streaming import crossfade_samples
from decoder.window_inputs import PaddedNetwork, PaddedRows

RECOMMENDED = StreamingOptions(
    # A block is finished in time at 1.6 times real time; with `first_look_ahead` 0 at 2.75 times.
    chunk_sizes=(4, 6, 10, 15, 25),
    buffer=50,
    prepend=PrependPromptSpeechTokens.ROLLING,
    look_ahead=5,
)

CROSSFADE_MS = 20.0
"""Windows differ slightly at their borders, because each depends on its whole content."""


class Xcodec2Decoder(PaddedNetwork):
    """One FSQ codebook, convolutions and a bidirectional transformer without time positions."""

    supported_options = CONVOLUTION_OPTIONS

    def __init__(self, spec: CodecSpec, network: nn.Module, source: CodecSource) -> None:
        self.spec = spec
        self.options = source.options
        self.fade = crossfade_samples(spec, source.options)
        self._network = network
        self.device = source.device
        self._clips = TransformersEncoder(source, spec, _rates(source.name, source.config)[0])

    @classmethod
    def create(cls, source: CodecSource) -> Xcodec2Decoder:
        """Create from a source; raises DecoderConfigError for an invalid file, size or option."""
        config = xcodec2_config(source.name, source.config)
        spec = finish_spec(xcodec2_spec(source.name, source.config, config), source)
        network = load_or_random(
            lambda: Xcodec2Network(config), xcodec2_names(config), source, from_first_layout
        )
        return cls(
            spec, _for_device(network, source.device), crossfading(source, spec, CROSSFADE_MS)
        )

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """See TransformersEncoder.encode."""
        return self._clips.encode(samples)

    def render(self, rows: PaddedRows) -> Tensor:
        """See PaddedNetwork.render."""
        samples: Tensor = self._network(rows)
        return samples


def _for_device(network: Xcodec2Network, device: str) -> nn.Module:
    if device == "cpu":
        return network
    from decoder.codecs.xcodec2.fused import FusedNetwork, product_dtype

    return FusedNetwork(network, product_dtype(network))


def xcodec2_config(codec: str, values: Mapping[str, Any]) -> Xcodec2Config:
    """Read sizes from config.json; defaults are those of the published checkpoints."""
    for key, only in (("attention_bias", False), ("hidden_act", "silu")):
        must_be(values, codec, key, only)
    hidden = scalar(values, codec, "hidden_size", 1024)
    heads = scalar(values, codec, "num_attention_heads", 16)
    must_be(values, codec, "num_key_value_heads", heads)
    if hidden % NUM_GROUPS:
        raise DecoderConfigError(
            f"{codec} config: hidden_size is {hidden} but must be a multiple of {NUM_GROUPS}"
        )
    return Xcodec2Config(
        hidden_size=hidden,
        intermediate_size=scalar(values, codec, "intermediate_size", 4096),
        num_layers=scalar(values, codec, "num_hidden_layers", 12),
        num_heads=heads,
        head_dim=scalar(values, codec, "head_dim", 64),
        rms_norm_eps=scalar(values, codec, "rms_norm_eps", 1e-6),
        input_size=hidden + _semantic_size(codec, values),
        levels=sizes(values, codec, "quantization_levels", (4,) * 8),
        hop=_hop(codec, values),
    )


def _semantic_size(codec: str, values: Mapping[str, Any]) -> int:
    """Return the width of the encoder's speech model, which is part of the codebook's vectors."""
    inner = values.get("semantic_model_config") or {}
    return scalar(inner, codec, "hidden_size", 1024)


def _rates(codec: str, values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sample rates of the encoder's input and the decoder's output in Hz."""
    if codec == "xcodec2":
        rate = scalar(values, codec, "sampling_rate", 16_000)
        return rate, rate
    into = scalar(values, codec, "input_sampling_rate", 16_000)
    return into, scalar(values, codec, "output_sampling_rate", 24_000)


def _hop(codec: str, values: Mapping[str, Any]) -> int:
    into, out = _rates(codec, values)
    ratios = sizes(values, codec, "downsampling_ratios", (2, 2, 4, 4, 5))
    hop = Fraction(math.prod(ratios) * out, into)
    if hop.denominator != 1:
        raise DecoderConfigError(f"{codec} config: a code is {hop} samples, not a whole number")
    return int(hop)


def xcodec2_spec(codec: str, values: Mapping[str, Any], config: Xcodec2Config) -> CodecSpec:
    """Return the spec of one codec."""
    return CodecSpec(
        name=codec,
        sample_rate=_rates(codec, values)[1],
        samples_per_code=Fraction(config.hop),
        codebook_size=math.prod(config.levels),
        receptive_field=None,
        right_field=None,
        attention=AttentionKind.BIDIRECTIONAL,
        recommended=RECOMMENDED,
    )
