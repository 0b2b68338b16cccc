"""NVIDIA's NanoCodec: K codes of a few levels for each frame, causal convolutions throughout.

No block waits for later codes. With `stateful` (audio_decoder_config) a stream keeps its layers'
state: streamed audio then equals the whole. Without it each block is rendered from its window,
whose past is the `buffer`.

Folder: config.json ("type": "nanocodec") with the arguments of the package nanocodec-torch that
differ from its defaults (0.6 kbit/s at 12.5 frames a second), and model.safetensors with the names
of NVIDIA's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from decoder.base import AttentionKind, CodecSpec, DecoderConfigError, StreamingOptions
from decoder.codec_config import must_be, scalar, sizes
from decoder.codecs.common import finish_spec, load_or_random
from decoder.codecs.mimi.decoder import CHUNK_FRAMES, CausalDecoder
from decoder.codecs.nanocodec.modules import (
    DILATIONS,
    KERNELS,
    NanoCodecConfig,
    NanoCodecNetwork,
)
from decoder.registry import CodecSource

NAME = "nanocodec"
_ONLY = {
    "activation": "half_snake",
    "output_activation": "clamp",
    "pad_mode": "zeros",
    "n_groups_equal_to_out_channels": True,
}
_SNAKE = "activation.snake_act"


class NanoCodecDecoder(CausalDecoder):
    """Decoder of NanoCodec; masks have no effect, state can be kept."""

    supported_options = frozenset({"token_rate_hz", "max_batch", "pcm_format", "stateful"})

    @classmethod
    def create(cls, source: CodecSource) -> NanoCodecDecoder:
        """Create from a source; raises DecoderConfigError for an invalid file, size or option."""
        config = read_config(source.config)
        rate = scalar(source.config, NAME, "sample_rate", 22_050)
        spec = finish_spec(codec_spec(config, rate), source)
        names = published_names(config)
        network = load_or_random(lambda: NanoCodecNetwork(config), names, source)
        return cls(spec, network, source)


def read_config(values: Mapping[str, Any]) -> NanoCodecConfig:
    """Read sizes from config.json; defaults are those of the published checkpoint."""
    own, books = values.get("decoder_config") or {}, values.get("quantizer_config") or {}
    if not (isinstance(own, dict) and isinstance(books, dict)):
        raise DecoderConfigError(
            f"{NAME} config: decoder_config and quantizer_config must be objects"
        )
    for key, only in _ONLY.items():
        must_be(own, NAME, key, only)
    config = NanoCodecConfig(
        num_codebooks=scalar(books, NAME, "num_groups", 4),
        levels=sizes(books, NAME, "num_levels_per_group", (9, 8, 8, 7)),
        base_channels=scalar(own, NAME, "base_channels", 864),
        rates=sizes(own, NAME, "up_sample_rates", (7, 7, 6, 3, 2)),
    )
    must_be(own, NAME, "input_dim", config.num_codebooks * len(config.levels))
    if min(config.levels) < 2:
        raise DecoderConfigError(f"{NAME} config: num_levels_per_group must be 2 or more")
    if config.base_channels % 2 ** len(config.rates):
        raise DecoderConfigError(
            f"{NAME} config: base_channels={config.base_channels} cannot be halved "
            f"{len(config.rates)} times"
        )
    return config


def codec_spec(config: NanoCodecConfig, sample_rate: int) -> CodecSpec:
    """Return the spec of a codec. Its buffer is all that a frame depends on."""
    count = config.num_codebooks
    field = -config.reach(0) * count
    return CodecSpec(
        name=NAME,
        sample_rate=sample_rate,
        samples_per_code=Fraction(config.hop, count),
        codebook_size=config.codebook_size,
        layout=tuple(range(count)),
        receptive_field=field,
        attention=AttentionKind.CAUSAL,
        recommended=StreamingOptions(
            chunk_sizes=tuple(frames * count for frames in CHUNK_FRAMES), buffer=field
        ),
    )


def published_names(config: NanoCodecConfig) -> dict[str, str]:
    """Return the mapping from our layers' names to those of the published checkpoint."""
    names = {
        "entry.conv": "pre_conv.conv",
        "activation": f"post_activation.{_SNAKE}",
        "exit.conv": "post_conv.conv",
    }
    for index in range(len(config.rates)):
        names[f"stages.{index}.activation"] = f"activations.{index}.{_SNAKE}"
        names[f"stages.{index}.up.conv"] = f"up_sample_conv_layers.{index}.conv"
        for block in range(len(KERNELS)):
            for unit in range(len(DILATIONS)):
                own = f"stages.{index}.blocks.{block}.units.{unit}"
                theirs = f"res_layers.{index}.res_blocks.{block}.res_blocks.{unit}"
                names |= {
                    f"{own}.first_activation": f"{theirs}.input_activation.{_SNAKE}",
                    f"{own}.first.conv": f"{theirs}.input_conv.conv",
                    f"{own}.second_activation": f"{theirs}.skip_activation.{_SNAKE}",
                    f"{own}.second.conv": f"{theirs}.skip_conv.conv",
                }
    return {own: f"audio_decoder.{theirs}" for own, theirs in names.items()}
