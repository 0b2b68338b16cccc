"""Mimi: K residual codebooks at 12.5 frames a second, causal throughout.

No block waits for later codes. A frame depends on a long past (the transformer attends to ten
seconds per layer), so that with `stateful` (audio_decoder_config) a stream keeps its layers' state
and every code is computed once: streamed audio then equals the whole. Without it each block is
rendered from its window, whose past is the `buffer`. `num_codebooks` is the number of codebooks of
a stream.

Folder: config.json and model.safetensors in Hugging Face's layout ("model_type": "mimi").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from decoder.base import (
    AttentionKind,
    CodecSpec,
    DecoderConfigError,
    DecodeWindow,
    StreamingOptions,
)
from decoder.codec_config import must_be, scalar, sizes
from decoder.codecs.common import (
    chosen_codebooks,
    codes_tensor,
    finish_spec,
    load_or_random,
)
from decoder.codecs.mimi.modules import (
    ROTARY_BASE,
    Memory,
    MimiConfig,
    MimiNetwork,
    Prepared,
    state_width,
)
from decoder.encoders import TransformersEncoder
from decoder.kept_states import StatefulNetwork
from decoder.registry import CodecSource
from decoder.window_inputs import WindowInputs

CHUNK_FRAMES = (2, 4, 8)
BUFFER_FRAMES = 25

_ONLY = {
    "use_causal_conv": True,
    "pad_mode": "constant",
    "trim_right_ratio": 1.0,
    "use_conv_shortcut": False,
    "audio_channels": 1,
    "attention_bias": False,
    "hidden_act": "gelu",
}


class CausalNetwork(Protocol):
    """Network of causal layers."""

    def __call__(self, codes: Tensor, memory: Memory, skipped: int = 0) -> Tensor:
        """Return samples [B, S] of codes [B, F, K] behind the states of `memory`.

        The first `skipped` samples are undefined. States are exact only if none are skipped.
        """

    def modules(self) -> Iterator[nn.Module]:
        """Return all parts."""


class CausalDecoder(StatefulNetwork):
    """Decoder of frames whose network can continue streams from the states of its layers."""

    def __init__(self, spec: CodecSpec, network: CausalNetwork, source: CodecSource) -> None:
        self.spec = spec
        self.options = source.options
        self._network = network
        self.device = source.device
        self.state_width = state_width(network.modules())
        for part in network.modules():
            if isinstance(part, Prepared):
                part.prepare()

    def advance(self, codes: Tensor, num_frames: Tensor, rows: Tensor) -> Tensor:
        """See StatefulNetwork.advance."""
        return self._network(codes, Memory(num_frames, rows))

    def inputs(self, windows: Sequence[DecodeWindow]) -> WindowInputs:
        """Return codes [B, F, K]."""
        return WindowInputs((codes_tensor(self.spec, windows),), windows[0].skip_samples)

    def run(self, inputs: WindowInputs) -> Tensor:
        """See WindowNetwork.run."""
        (codes,) = inputs.tensors
        return self._network(codes, Memory(), inputs.key)[:, inputs.key :]


class MimiDecoder(CausalDecoder):
    """Mimi decoder: causal attention and convolutions; masks have no effect, state can be kept."""

    supported_options = frozenset(
        {"token_rate_hz", "max_batch", "pcm_format", "stateful", "num_codebooks"}
    )

    def __init__(self, spec: CodecSpec, network: MimiNetwork, source: CodecSource) -> None:
        super().__init__(spec, network, source)
        self._clips = TransformersEncoder(source, spec, spec.sample_rate)

    @classmethod
    def create(cls, source: CodecSource) -> MimiDecoder:
        """Create from a source; raises DecoderConfigError for an invalid file, size or option."""
        in_all = scalar(source.config, "mimi", "num_quantizers", 32)
        config = mimi_config(source.config, chosen_codebooks("mimi", in_all, source.options))
        rate = scalar(source.config, "mimi", "sampling_rate", 24_000)
        spec = finish_spec(mimi_spec(config, rate), source)
        names = mimi_names(config)
        network = load_or_random(lambda: MimiNetwork(config), names, source, without_training_flags)
        return cls(spec, network, source)

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """See TransformersEncoder.encode."""
        return self._clips.encode(samples)


def without_training_flags(name: str) -> tuple[str, ...]:
    """Drop tensors that only training uses: whether a codebook has been initialised."""
    return () if name.endswith(".codebook.initialized") else (name,)


def mimi_config(values: Mapping[str, Any], num_codebooks: int) -> MimiConfig:
    """Read sizes from config.json; defaults are those of the published checkpoint."""
    for key, only in _ONLY.items():
        must_be(values, "mimi", key, only)
    hidden = scalar(values, "mimi", "hidden_size", 512)
    heads = scalar(values, "mimi", "num_attention_heads", 8)
    must_be(values, "mimi", "num_key_value_heads", heads)
    must_be(values, "mimi", "upsample_groups", hidden)
    must_be(values.get("rope_parameters") or values, "mimi", "rope_theta", ROTARY_BASE)
    num_semantic = scalar(values, "mimi", "num_semantic_quantizers", 1)
    if num_codebooks < num_semantic:
        raise DecoderConfigError(f"mimi config: num_codebooks must be at least {num_semantic}")
    ratios = sizes(values, "mimi", "upsampling_ratios", (8, 6, 5, 4))
    return MimiConfig(
        hidden_size=hidden,
        num_filters=scalar(values, "mimi", "num_filters", 64),
        ratios=ratios,
        num_residual_layers=scalar(values, "mimi", "num_residual_layers", 1),
        kernel_size=scalar(values, "mimi", "kernel_size", 7),
        last_kernel_size=scalar(values, "mimi", "last_kernel_size", 3),
        residual_kernel_size=scalar(values, "mimi", "residual_kernel_size", 3),
        dilation_growth=scalar(values, "mimi", "dilation_growth_rate", 2),
        compress=scalar(values, "mimi", "compress", 2),
        codebook_size=scalar(values, "mimi", "codebook_size", 2048),
        codebook_dim=scalar(values, "mimi", "codebook_dim", 256),
        num_semantic=num_semantic,
        num_codebooks=num_codebooks,
        upsampling=_upsampling(values, ratios),
        num_layers=scalar(values, "mimi", "num_hidden_layers", 8),
        intermediate_size=scalar(values, "mimi", "intermediate_size", 2048),
        num_heads=heads,
        head_dim=scalar(values, "mimi", "head_dim", hidden // heads),
        sliding_window=scalar(values, "mimi", "sliding_window", 250),
        norm_eps=scalar(values, "mimi", "norm_eps", 1e-5),
    )


def _upsampling(values: Mapping[str, Any], ratios: tuple[int, ...]) -> int:
    """Return the transformer's positions per frame: 2 unless a frame rate is given."""
    given = values.get("frame_rate") or values.get("_frame_rate")
    if given is None:
        return 2
    rate = scalar(values, "mimi", "sampling_rate", 24_000)
    return round(math.ceil(rate / math.prod(ratios)) / given)


def mimi_spec(config: MimiConfig, sample_rate: int) -> CodecSpec:
    """Return the spec of a Mimi codec."""
    count = config.num_codebooks
    return CodecSpec(
        name="mimi",
        sample_rate=sample_rate,
        samples_per_code=Fraction(config.hop, count),
        codebook_size=config.codebook_size,
        layout=tuple(range(count)),
        receptive_field=config.receptive_frames() * count,
        attention=AttentionKind.CAUSAL,
        recommended=StreamingOptions(
            chunk_sizes=tuple(frames * count for frames in CHUNK_FRAMES),
            buffer=BUFFER_FRAMES * count,
        ),
    )


def mimi_names(config: MimiConfig) -> dict[str, str]:
    """Return the mapping from our layers' names to those of the published checkpoint."""
    names = {"upsample.conv": "upsample.conv"}
    acoustic = config.num_codebooks - config.num_semantic
    for kind, count in (("semantic", config.num_semantic), ("acoustic", acoustic)):
        theirs = f"quantizer.{kind}_residual_vector_quantizer"
        if count:
            names[f"{kind}.projection"] = f"{theirs}.output_proj"
        for k in range(count):
            names[f"{kind}.books.{k}"] = f"{theirs}.layers.{k}.codebook"
    inner = {
        "attention_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_out": "self_attn.o_proj",
        "attention_scale": "self_attn_layer_scale",
        "ff_norm": "post_attention_layernorm",
        "ff_in": "mlp.fc1",
        "ff_out": "mlp.fc2",
        "ff_scale": "mlp_layer_scale",
    }
    for index in range(config.num_layers):
        for own, other in inner.items():
            names[f"layers.{index}.{own}"] = f"decoder_transformer.layers.{index}.{other}"
    return names | _convolution_names(config)


def _convolution_names(config: MimiConfig) -> dict[str, str]:
    """Return names of convolutions; the published checkpoint numbers activations too."""
    names = {"entry.conv": "decoder.layers.0.conv"}
    place = 1
    for index in range(len(config.ratios)):
        names[f"stages.{index}.up.conv"] = f"decoder.layers.{place + 1}.conv"
        for j in range(config.num_residual_layers):
            block = f"decoder.layers.{place + 2 + j}.block"
            names[f"stages.{index}.blocks.{j}.first.conv"] = f"{block}.1.conv"
            names[f"stages.{index}.blocks.{j}.second.conv"] = f"{block}.3.conv"
        place += 2 + config.num_residual_layers
    return names | {"exit.conv": f"decoder.layers.{place + 1}.conv"}
