"""SNAC (24 kHz): three codebooks at three rates, a convolutional decoder with noise.

Codes of a frame are in order of time, coarse before fine, as language models write them:

    time in the frame        |------------------------ 2048 samples ------------------------|
    codebook 0, one code     |0                                                             |
    codebook 1, two codes    |1                              |4                             |
    codebook 2, four codes   |2              |3              |5              |6             |
    index in the flat row     0 1 2 3 4 5 6

The noise that the decoder adds is keyed by `noise_seed` (0 unless given) and the absolute index
of the value it is added to, so that a code's samples do not depend on the window.

Folder: config.json and weights as published, or converted to model.safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoder.base import (
    AttentionKind,
    CodecSpec,
    DecoderConfigError,
)
from decoder.codec_config import must_be, scalar, sizes
from decoder.codecs.common import (
    CONVOLUTION_OPTIONS,
    finish_spec,
    frame_streaming,
    load_or_random,
)
from decoder.codecs.snake.decoder import SnakeConfig, SnakeDecoder
from decoder.codecs.snake.encoder import SnakeClipEncoder, SnakeEncoderConfig
from decoder.codecs.snake.names import snac_encoder_names, snac_names
from decoder.keyed_noise import keyed_noise, noise_key
from decoder.registry import CodecSource
from decoder.streaming import crossfade_samples
from decoder.window_inputs import PaddedNetwork, PaddedRows

CHUNK_FRAMES = (1, 1, 2, 3, 4, 6, 8)  # a block is finished in time at 1.5 times real time


class SnacDecoder(PaddedNetwork):
    """SNAC decoder. Convolutions only: no masks, no voice prompt in the window."""

    supported_options = CONVOLUTION_OPTIONS | {"noise_seed"}

    def __init__(self, spec: CodecSpec, network: SnakeDecoder, source: CodecSource) -> None:
        self.spec = spec
        self.options = source.options
        self._network = network
        self.device = source.device
        self.fade = crossfade_samples(spec, source.options)
        self._seed = source.options.noise_seed or 0
        layout = torch.tensor(spec.layout)
        self._places = [
            (layout == level).nonzero().flatten().to(source.device)
            for level in range(spec.num_codebooks)
        ]
        config = snac_encoder_config(source.config, network.config)
        self._clips = SnakeClipEncoder(source, spec, config, snac_encoder_names(config))

    @classmethod
    def create(cls, source: CodecSource) -> SnacDecoder:
        """Create from a source; raises DecoderConfigError for an invalid file, size or option."""
        config = snac_config(source.config)
        rate = scalar(source.config, "snac", "sampling_rate", 24_000)
        spec = finish_spec(snac_spec(config, rate), source)
        network = load_or_random(
            lambda: snac_network(config, source.device), snac_names(config), source
        )
        return cls(spec, network, source)

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """See SnakeClipEncoder.encode."""
        return self._clips.encode(samples)

    def render(self, rows: PaddedRows) -> Tensor:
        """See PaddedNetwork.render."""
        parts = [rows.codes.index_select(2, places).flatten(1) for places in self._places]
        noise = partial(self._noise, rows.positions)
        samples: Tensor = self._network(parts, rows.shape, rows.own, noise)
        return samples

    def _noise(self, frames: Tensor, stage: int, first: int, count: int) -> Tensor:
        """Return float32 [B, 1, count] for windows that begin at these frames [B, 1]."""
        config = self._network.config
        rate = config.stage_rates[stage] * config.latents_per_frame
        if not frames.is_cuda:
            return keyed_noise(self._seed, stage, frames * rate + first, count)[:, None]
        from decoder.kernels.noise import noise_of

        return noise_of(noise_key(self._seed, stage), frames, rate, first, count)[:, None]


def snac_network(config: SnakeConfig, device: str) -> SnakeDecoder:
    """Return the network of a device, without weights."""
    if device == "cpu" or not config.depthwise:
        return SnakeDecoder(config)
    from decoder.codecs.snake.rows import RowDecoder

    return RowDecoder(config)


def snac_config(values: Mapping[str, Any]) -> SnakeConfig:
    """Read sizes from a published config.json; defaults are those of the 24 kHz checkpoint."""
    must_be(values, "snac", "attn_window_size", None)
    encoder_dim, encoder_rates = _encoder_sizes(values)
    config = SnakeConfig(
        latent_dim=scalar(values, "snac", "latent_dim", encoder_dim * 2 ** len(encoder_rates)),
        decoder_dim=scalar(values, "snac", "decoder_dim", 1024),
        rates=sizes(values, "snac", "decoder_rates", (8, 8, 4, 2)),
        vq_strides=sizes(values, "snac", "vq_strides", (4, 2, 1)),
        codebook_size=scalar(values, "snac", "codebook_size", 4096),
        codebook_dim=scalar(values, "snac", "codebook_dim", 8),
        depthwise=scalar(values, "snac", "depthwise", True),
        has_noise=scalar(values, "snac", "noise", True),
    )
    if math.prod(config.rates) != math.prod(encoder_rates):
        raise DecoderConfigError("snac config: encoder_rates and decoder_rates differ in product")
    return config


def snac_encoder_config(values: Mapping[str, Any], decoder: SnakeConfig) -> SnakeEncoderConfig:
    """Read the encoder's sizes from the same file."""
    dim, rates = _encoder_sizes(values)
    return SnakeEncoderConfig(decoder, dim, rates, exit_kernel=7, has_exit_snake=False)


def _encoder_sizes(values: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    return (
        scalar(values, "snac", "encoder_dim", 48),
        sizes(values, "snac", "encoder_rates", (2, 4, 8, 8)),
    )


def snac_layout(vq_strides: Sequence[int]) -> tuple[int, ...]:
    """Return each code's codebook inside a frame: in order of time, coarse before fine."""
    span = max(vq_strides)
    starts = [(start, k) for k, step in enumerate(vq_strides) for start in range(0, span, step)]
    return tuple(level for _, level in sorted(starts))


def snac_spec(config: SnakeConfig, sample_rate: int) -> CodecSpec:
    """Return the spec of a SNAC codec."""
    layout = snac_layout(config.vq_strides)
    spec = CodecSpec(
        name="snac",
        sample_rate=sample_rate,
        samples_per_code=Fraction(config.hop, len(layout)),
        codebook_size=config.codebook_size,
        layout=layout,
        attention=AttentionKind.NONE,
    )
    return frame_streaming(spec, CHUNK_FRAMES, *config.reach())
