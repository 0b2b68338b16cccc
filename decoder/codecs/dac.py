"""DAC: K residual codebooks at one rate and a plain convolutional decoder.

Codes of a frame are in the order of the codebooks; `num_codebooks` (audio_decoder_config) is the
number of them that a stream has, in order of importance. An odd upsampling rate drops the last
samples of an utterance: they are zeros, so that every frame has the same length.

Folder: config.json and model.safetensors in Hugging Face's layout ("model_type": "dac").
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from decoder.base import AttentionKind, CodecSpec
from decoder.codec_config import scalar, sizes
from decoder.codecs.common import (
    CONVOLUTION_OPTIONS,
    chosen_codebooks,
    finish_spec,
    frame_streaming,
    load_or_random,
)
from decoder.codecs.snake.decoder import SnakeConfig, SnakeDecoder
from decoder.codecs.snake.encoder import SnakeClipEncoder, SnakeEncoderConfig
from decoder.codecs.snake.names import dac_encoder_names, dac_names
from decoder.registry import CodecSource
from decoder.streaming import crossfade_samples
from decoder.window_inputs import PaddedNetwork, PaddedRows

CHUNK_FRAMES = (12, 25, 50)


class DacDecoder(PaddedNetwork):
    """DAC decoder. Convolutions only: no masks, no voice prompt in the window."""

    supported_options = CONVOLUTION_OPTIONS | {"num_codebooks"}

    def __init__(self, spec: CodecSpec, network: SnakeDecoder, source: CodecSource) -> None:
        self.spec = spec
        self.options = source.options
        self.fade = crossfade_samples(spec, source.options)
        self._network = network
        self.device = source.device
        config = dac_encoder_config(source.config, network.config)
        self._clips = SnakeClipEncoder(source, spec, config, dac_encoder_names(config))

    @classmethod
    def create(cls, source: CodecSource) -> DacDecoder:
        """Create from a source; raises DecoderConfigError for an invalid file, size or option."""
        in_all = scalar(source.config, "dac", "n_codebooks", 9)
        config = dac_config(source.config, chosen_codebooks("dac", in_all, source.options))
        rate = scalar(source.config, "dac", "sampling_rate", 16_000)
        spec = finish_spec(dac_spec(config, rate), source)
        network = load_or_random(lambda: SnakeDecoder(config), dac_names(config), source)
        return cls(spec, network, source)

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """See SnakeClipEncoder.encode."""
        return self._clips.encode(samples)

    def render(self, rows: PaddedRows) -> Tensor:
        """See PaddedNetwork.render."""
        samples: Tensor = self._network(rows.codes.unbind(-1), rows.shape, rows.own)
        return samples


def dac_config(values: Mapping[str, Any], num_codebooks: int) -> SnakeConfig:
    """Read sizes from config.json; defaults are those of the 16 kHz checkpoint."""
    down = sizes(values, "dac", "downsampling_ratios", (2, 4, 8, 8))
    up = sizes(values, "dac", "upsampling_ratios", down[::-1])
    encoder_dim = scalar(values, "dac", "encoder_hidden_size", 64)
    return SnakeConfig(
        latent_dim=scalar(values, "dac", "hidden_size", encoder_dim * 2 ** len(down)),
        decoder_dim=scalar(values, "dac", "decoder_hidden_size", 1536),
        rates=up,
        vq_strides=(1,) * num_codebooks,
        codebook_size=scalar(values, "dac", "codebook_size", 1024),
        codebook_dim=scalar(values, "dac", "codebook_dim", 8),
        is_padded=False,
    )


def dac_encoder_config(values: Mapping[str, Any], decoder: SnakeConfig) -> SnakeEncoderConfig:
    """Read the encoder's sizes from the same file."""
    dim = scalar(values, "dac", "encoder_hidden_size", 64)
    rates = sizes(values, "dac", "downsampling_ratios", (2, 4, 8, 8))
    return SnakeEncoderConfig(decoder, dim, rates, exit_kernel=3, has_exit_snake=True)


def dac_spec(config: SnakeConfig, sample_rate: int) -> CodecSpec:
    """Return the spec of a DAC codec."""
    num_codebooks = len(config.vq_strides)
    spec = CodecSpec(
        name="dac",
        sample_rate=sample_rate,
        samples_per_code=Fraction(config.hop, num_codebooks),
        codebook_size=config.codebook_size,
        layout=tuple(range(num_codebooks)),
        attention=AttentionKind.NONE,
    )
    return frame_streaming(spec, CHUNK_FRAMES, *config.reach())
