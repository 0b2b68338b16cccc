"""LFM2 (Liquid AI 2025): layers with a short convolution, and some with attention as in Qwen3.

A sequence keeps pages of keys and values for the layers with attention, and one state for the
others: the last inputs of each convolution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from llm.batch import ForwardBatch, KVCacheInputs
from llm.config import PipelineConfig
from llm.errors import CheckpointError
from llm.kv_cache.state_pool import StatePart, StateRows
from llm.layers.short_conv import ConvMixer, ConvWindows, ShortConv, ShortConvLayer
from llm.models.encoding import choose_encoding
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.llama_config import LlamaConfig
from llm.models.weight_names import WeightNames
from llm.models.weights import WeightReader

CONVOLUTION, ATTENTION = "conv", "full_attention"
CONV = "model.layers.{}.conv"
MAX_WIDTH = 64  # a larger convolution means a damaged file


class Lfm2Model(LlamaModel):
    """Implements `Lfm2ForCausalLM`."""

    can_shard: ClassVar[bool] = False
    names: ClassVar[WeightNames] = WeightNames(
        final_norm="model.embedding_norm",
        attention_norm="model.layers.{}.operator_norm",
        output="model.layers.{}.self_attn.out_proj",
        query_norm="model.layers.{}.self_attn.q_layernorm",
        key_norm="model.layers.{}.self_attn.k_layernorm",
        mlp_norm="model.layers.{}.ffn_norm",
        gate="model.layers.{}.feed_forward.w1",
        up="model.layers.{}.feed_forward.w3",
        down="model.layers.{}.feed_forward.w2",
    )

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`."""
        text = config.text_config
        read = LlamaConfig.read(HuggingFaceConfig(config.path, {**text.keys, **_llama_keys(text)}))
        kinds = layer_kinds(text, read.shape.num_layers)
        conv_width(text)
        attention = tuple(n for n, kind in enumerate(kinds) if kind == ATTENTION)
        return replace(
            read,
            has_head_norm=True,
            attention_layers=attention,
            num_mixer_weights=4 * read.shape.hidden_size**2,
        )

    @classmethod
    def num_kv_layers(cls, huggingface_config: HuggingFaceConfig) -> int:
        """See `PipelineModel`."""
        return len(cls.read_config(huggingface_config).attention_layers)

    @classmethod
    def recurrent_state(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> tuple[StatePart, ...]:
        """See `PipelineModel`: the last inputs of each convolution."""
        config = cls.read_config(huggingface_config)
        num_layers = config.shape.num_layers - len(config.attention_layers)
        dtype = choose_encoding(pipeline_config.model, huggingface_config).dtype
        kept = conv_width(huggingface_config.text_config) - 1
        return (StatePart(num_layers, (kept, config.shape.hidden_size), dtype),)

    @classmethod
    def estimate_token_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `PipelineModel`. A convolution has its projection, its inputs, and float32 sums."""
        own = super().estimate_token_memory(pipeline_config, huggingface_config)
        hidden = cls.read_config(huggingface_config).shape.hidden_size
        width = choose_encoding(pipeline_config.model, huggingface_config).dtype.itemsize
        num_inputs = conv_width(huggingface_config.text_config)
        return max(own, hidden * (width * (8 + num_inputs) + 4 * 2))

    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        """See `CausalModel`."""
        pool = self.states
        if pool is None:
            raise RuntimeError("a model with recurrent states needs its runner's pool of states")
        rows = StateRows.of(batch)
        windows = None
        if rows.lengths is not None:
            windows = ConvWindows.of(rows.lengths, self._conv_width, batch.positions.device)
        x = self.embed(batch.input_ids)
        rotations = self._rotary.at(batch.positions)
        attention, convolutions = iter(self._layers), iter(self._convolutions)
        for kind in self._kinds:
            if kind == ATTENTION:
                next(attention)(x, rotations, cache)
            else:
                layer = next(convolutions)
                layer(x, pool.layer(0, layer.layer), rows, windows)
        return x

    def _load_rest(self, reader: WeightReader) -> None:
        text, loader = self.huggingface_config.text_config, self._loader(reader)
        self._conv_width = conv_width(text)
        self._kinds = layer_kinds(text, self.config.shape.num_layers)
        numbers = [n for n, kind in enumerate(self._kinds) if kind == CONVOLUTION]
        self._convolutions = [
            ShortConvLayer(
                place,
                loader.norm(self.names.attention_norm.format(number)),
                self._mixer(reader, CONV.format(number)),
                loader.norm(self.names.mlp_norm.format(number)),
                loader.mlp(number),
            )
            for place, number in enumerate(numbers)
        ]

    def _mixer(self, reader: WeightReader, name: str) -> ConvMixer:
        factory, hidden = self._factory, self.config.shape.hidden_size
        has_bias = bool(self.huggingface_config.text_config.get("conv_bias", False))
        taps = reader.tensor(f"{name}.conv.weight", hidden, 1, self._conv_width)[:, 0]
        bias = reader.tensor(f"{name}.conv.bias", hidden) if has_bias else None
        into = reader.matrix(f"{name}.in_proj", 3 * hidden, hidden, has_bias=has_bias)
        out = reader.matrix(f"{name}.out_proj", hidden, hidden, has_bias=has_bias)
        conv = ShortConv(factory.vector(taps), None if bias is None else factory.vector(bias))
        return ConvMixer(factory.linear(into), conv, factory.linear(out))


def conv_width(config: HuggingFaceConfig) -> int:
    """Return the number of tokens of a convolution. Raises `CheckpointError`."""
    width = config.size("conv_L_cache", 3)
    if not 2 <= width <= MAX_WIDTH:
        raise CheckpointError(f"{config.path}: conv_L_cache={width} must be in [2, {MAX_WIDTH}]")
    return width


def layer_kinds(config: HuggingFaceConfig, num_layers: int) -> tuple[str, ...]:
    """Return the kind of each layer, of `layer_types` or `full_attn_idxs`.

    Raises `CheckpointError` for an unknown kind, another number of layers, and a model that has
    layers of one kind only.
    """
    given = config.get("layer_types")
    if given is None:
        numbers = config.require("full_attn_idxs")
        given = [ATTENTION if n in numbers else CONVOLUTION for n in range(num_layers)]
    if len(given) != num_layers or set(given) != {ATTENTION, CONVOLUTION}:
        raise CheckpointError(
            f"{config.path}: layer_types={given} must be {num_layers} of '{CONVOLUTION}' and "
            f"'{ATTENTION}', and both must occur"
        )
    return tuple(given)


def _llama_keys(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return a config.json's values under the keys that Llama has for them."""
    return {
        "rms_norm_eps": config.number("norm_eps", 1e-5),
        "intermediate_size": _intermediate_size(config),
        "tie_word_embeddings": config.get("tie_embedding", config.get("tie_word_embeddings", True)),
        "rope_theta": config.number("rope_theta", 1e6),
    }


def _intermediate_size(config: HuggingFaceConfig) -> int:
    """Return the width of the MLPs, which are adjusted as transformers does it."""
    key = "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
    size = config.size(key)
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    adjusted, factor = int(2 * size / 3), "block_ffn_dim_multiplier"
    if config.keys.get(factor, 1.0) is None:
        return adjusted
    multiple = config.size("block_multiple_of", 256)
    return -(-int(config.number(factor, 1.0) * adjusted) // multiple) * multiple
