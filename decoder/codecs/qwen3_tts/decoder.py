"""Qwen3-TTS' codec: 16 residual codebooks at 12.5 frames a second, causal throughout.

No block waits for later codes. With `stateful` (audio_decoder_config) a stream keeps its layers'
state: streamed audio then equals the whole. Without it each block is rendered from its window,
whose past is the `buffer`; the published decoder renders long audio in parts with as much. A voice
prompt's codes stand in front of the first block, as in the published program.

Folder: config.json ("model_type": "qwen3_tts_tokenizer_12hz") and model.safetensors, which also
have the encoder, a Mimi.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from decoder.base import (
    AttentionKind,
    CodecSpec,
    DecoderConfigError,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from decoder.codec_config import must_be, scalar, sizes
from decoder.codecs.common import finish_spec, load_or_random
from decoder.codecs.mimi.decoder import BUFFER_FRAMES, CHUNK_FRAMES, CausalDecoder
from decoder.codecs.mimi.modules import ROTARY_BASE
from decoder.codecs.qwen3_tts.modules import (
    DILATIONS,
    Qwen3TTSConfig,
    Qwen3TTSNetwork,
)
from decoder.encoders import TransformersEncoder
from decoder.registry import CodecSource

NAME = "qwen3_tts_tokenizer_12hz"
_ONLY = {"attention_bias": False, "hidden_act": "silu", "rope_theta": ROTARY_BASE}


class Qwen3TTSDecoder(CausalDecoder):
    """Decoder of Qwen3-TTS; masks have no effect, state can be kept."""

    supported_options = frozenset({"token_rate_hz", "max_batch", "pcm_format", "stateful"})

    def __init__(self, spec: CodecSpec, network: Qwen3TTSNetwork, source: CodecSource) -> None:
        super().__init__(spec, network, source)
        encoder = source.config.get("encoder_config") or {}
        mimi = replace(source, name="mimi", config=encoder, prefix="encoder.")
        self._clips = TransformersEncoder(mimi, spec, spec.sample_rate)

    @classmethod
    def create(cls, source: CodecSource) -> Qwen3TTSDecoder:
        """Create from a source; raises DecoderConfigError for an invalid file, size or option."""
        config = read_config(source.config)
        rate = scalar(source.config, NAME, "output_sample_rate", 24_000)
        must_be(source.config, NAME, "decode_upsample_rate", config.hop)
        spec = finish_spec(codec_spec(config, rate), source)
        if spec.can_encode:
            must_be(source.config, NAME, "input_sample_rate", rate)
            must_be(source.config, NAME, "encode_downsample_rate", config.hop)
            _check_encoder(source.config, config.num_codebooks)
        network = load_or_random(
            lambda: Qwen3TTSNetwork(config), published_names(config), source, _own_name
        )
        return cls(spec, network, source)

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """See TransformersEncoder.encode."""
        return self._clips.encode(samples)


def read_config(config: Mapping[str, Any]) -> Qwen3TTSConfig:
    """Read sizes from config.json; defaults are those of the published checkpoint."""
    values = config.get("decoder_config") or {}
    if not isinstance(values, Mapping):
        raise DecoderConfigError(f"{NAME} config: decoder_config must be an object")
    for key, only in _ONLY.items():
        must_be(values, NAME, key, only)
    hidden = scalar(values, NAME, "hidden_size", 1024)
    heads = scalar(values, NAME, "num_attention_heads", 16)
    must_be(values, NAME, "num_key_value_heads", heads)
    count = scalar(values, NAME, "num_quantizers", 16)
    if count < 2:
        raise DecoderConfigError(f"{NAME} config: num_quantizers must be at least 2")
    return Qwen3TTSConfig(
        num_codebooks=count,
        codebook_size=scalar(values, NAME, "codebook_size", 2048),
        codebook_dim=scalar(values, NAME, "codebook_dim", 512),
        latent_dim=scalar(values, NAME, "latent_dim", 1024),
        hidden_size=hidden,
        intermediate_size=scalar(values, NAME, "intermediate_size", 3072),
        num_layers=scalar(values, NAME, "num_hidden_layers", 8),
        num_heads=heads,
        head_dim=scalar(values, NAME, "head_dim", hidden // heads),
        sliding_window=scalar(values, NAME, "sliding_window", 72),
        norm_eps=scalar(values, NAME, "rms_norm_eps", 1e-5),
        upsampling_ratios=sizes(values, NAME, "upsampling_ratios", (2, 2)),
        decoder_dim=scalar(values, NAME, "decoder_dim", 1536),
        rates=sizes(values, NAME, "upsample_rates", (8, 5, 4, 3)),
    )


def _check_encoder(config: Mapping[str, Any], wanted: int) -> None:
    """Raise DecoderConfigError for an encoder with fewer codebooks than the decoder."""
    encoder = config.get("encoder_config") or {}
    found = min(
        scalar(encoder, NAME, "num_quantizers", 32),
        scalar(config, NAME, "encoder_valid_num_quantizers", 16),
    )
    if found < wanted:
        raise DecoderConfigError(
            f"{NAME} config: the encoder has {found} codebooks, the decoder {wanted}"
        )


def codec_spec(config: Qwen3TTSConfig, sample_rate: int) -> CodecSpec:
    """Return the spec of a codec."""
    count = config.num_codebooks
    return CodecSpec(
        name=NAME,
        sample_rate=sample_rate,
        samples_per_code=Fraction(config.hop, count),
        codebook_size=config.codebook_size,
        layout=tuple(range(count)),
        receptive_field=config.receptive_frames() * count,
        attention=AttentionKind.CAUSAL,
        recommended=StreamingOptions(
            chunk_sizes=tuple(frames * count for frames in CHUNK_FRAMES),
            buffer=BUFFER_FRAMES * count,
            prepend=PrependPromptSpeechTokens.ONCE,
        ),
    )


def _own_name(name: str) -> tuple[str, ...]:
    """Return Mimi's name of a codebook's sums."""
    return (name.replace("._codebook.embedding_sum", "._codebook.embed_sum"),)


def published_names(config: Qwen3TTSConfig) -> dict[str, str]:
    """Return the mapping from our layers' names to those of the published checkpoint."""
    names: dict[str, str] = {}
    for kind, theirs, count in (
        ("semantic", "first", 1),
        ("acoustic", "rest", config.num_codebooks - 1),
    ):
        names[f"{kind}.projection"] = f"quantizer.rvq_{theirs}.output_proj"
        for k in range(count):
            names[f"{kind}.books.{k}"] = f"quantizer.rvq_{theirs}.vq.layers.{k}._codebook"
    names |= {
        "latent.conv": "pre_conv.conv",
        "into": "pre_transformer.input_proj",
        "norm": "pre_transformer.norm",
        "out": "pre_transformer.output_proj",
    }
    inner = {
        "attention_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_out": "self_attn.o_proj",
        "attention_scale": "self_attn_layer_scale",
        "ff_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "ff_scale": "mlp_layer_scale",
    }
    for index in range(config.num_layers):
        for own, other in inner.items():
            names[f"layers.{index}.{own}"] = f"pre_transformer.layers.{index}.{other}"
    names |= _convolution_names(config)
    return {own: f"decoder.{other}" for own, other in names.items()}


def _convolution_names(config: Qwen3TTSConfig) -> dict[str, str]:
    block = {
        "": "",
        ".depthwise": ".dwconv.conv",
        ".norm": ".norm",
        ".widen": ".pwconv1",
        ".narrow": ".pwconv2",
    }
    names = {"entry.conv": "decoder.0.conv"}
    for index in range(len(config.upsampling_ratios)):
        names[f"upsampling.{index}.conv"] = f"upsample.{index}.0.conv"
        for own, other in block.items():
            names[f"upsampling.{index}.block{own}"] = f"upsample.{index}.1{other}"
    for index in range(len(config.rates)):
        theirs = f"decoder.{index + 1}.block"
        names[f"stages.{index}.snake"] = f"{theirs}.0"
        names[f"stages.{index}.up.conv"] = f"{theirs}.1.conv"
        for place in range(len(DILATIONS)):
            own, unit = f"stages.{index}.units.{place}", f"{theirs}.{place + 2}"
            names |= {
                f"{own}.first_snake": f"{unit}.act1",
                f"{own}.first.conv": f"{unit}.conv1.conv",
                f"{own}.second_snake": f"{unit}.act2",
                f"{own}.second": f"{unit}.conv2.conv",
            }
    last = len(config.rates) + 1
    return names | {"snake": f"decoder.{last}", "exit.conv": f"decoder.{last + 1}.conv"}
