"""Qwen3-Next (Qwen 2025): gated delta net layers, some with gated attention, dense or sparse MLPs.

A sequence keeps pages of keys and values for the layers with attention, and for the others two
states: the last inputs of the convolution, and the matrices of the delta rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from llm.batch import ForwardBatch, KVCacheInputs
from llm.config import PipelineConfig
from llm.errors import CheckpointError
from llm.kv_cache.state_pool import StatePart
from llm.layers.decoder import AttentionWeights, DecoderLayer
from llm.layers.delta_net import DeltaGates, DeltaNet, DeltaRows, DeltaShape, GatedNorm
from llm.layers.experts import ExpertsShape
from llm.layers.hybrid import GatedAttention, HybridLayer, HybridStep
from llm.layers.short_conv import ShortConv
from llm.layers.weight import LinearWeight
from llm.models.encoding import choose_encoding
from llm.models.experts import SparseLayers, SparseLoader
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.llama_config import LlamaConfig
from llm.models.weight_names import WeightNames
from llm.models.weights import WeightReader

DELTA_NET, ATTENTION = "linear_attention", "full_attention"
MIXER = "model.layers.{}.linear_attn"
DEFAULT = ExpertsShape(512, 10, inner_size=512, shared_size=512, normalizes=True)
MAX_WIDTH = 64  # a larger convolution means a damaged file


class Qwen3NextModel(LlamaModel):
    """Implements `Qwen3NextForCausalLM`. Its layers are computed by torch, also with
    `use_legacy_module` off.
    """

    can_shard: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ("mtp.",)  # the head that predicts a second token
    names: ClassVar[WeightNames] = WeightNames()

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`."""
        text = config.text_config
        keys = {**text.keys, "partial_rotary_factor": 1.0}
        read = LlamaConfig.read(HuggingFaceConfig(config.path, keys))
        shape = read.shape
        kinds = layer_kinds(text, shape.num_layers)
        delta, sparse = read_delta_shape(text), sparse_layers(text, shape.num_layers)
        columns = delta.conv_size + 2 * delta.value_size + 2 * delta.num_value_heads
        conv_width(text)
        has_bias = bool(text.get("attention_bias", False))
        return replace(
            read,
            rotary=replace(read.rotary, rotated_dim=rotated_dim(text, shape.head_dim)),
            has_head_norm=True,
            has_output_gate=True,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            attention_layers=tuple(n for n, kind in enumerate(kinds) if kind == ATTENTION),
            num_mixer_weights=shape.hidden_size * columns,
            num_mlp_weights=sparse.num_mlp_weights(read) if sparse else None,
        )

    @classmethod
    def num_kv_layers(cls, huggingface_config: HuggingFaceConfig) -> int:
        """See `PipelineModel`."""
        return len(cls.read_config(huggingface_config).attention_layers)

    @classmethod
    def recurrent_state(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> tuple[StatePart, ...]:
        """See `PipelineModel`: inputs of the convolutions, matrices of the delta rule."""
        config, text = cls.read_config(huggingface_config), huggingface_config.text_config
        num_layers = config.shape.num_layers - len(config.attention_layers)
        dtype = choose_encoding(pipeline_config.model, huggingface_config).dtype
        delta, kept = read_delta_shape(text), conv_width(text) - 1
        return (
            StatePart(num_layers, (kept, delta.conv_size), dtype),
            StatePart(num_layers, delta.state, torch.float32),
        )

    @classmethod
    def estimate_token_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `PipelineModel`. A delta net has its projection, the convolution's inputs, and
        float32 sums, queries, keys and values, also in the order of their rows' lengths.
        """
        own = super().estimate_token_memory(pipeline_config, huggingface_config)
        config, text = cls.read_config(huggingface_config), huggingface_config.text_config
        width = choose_encoding(pipeline_config.model, huggingface_config).dtype.itemsize
        delta, hidden = read_delta_shape(text), config.shape.hidden_size
        inputs = width * (delta.conv_size * (2 + conv_width(text)) + 2 * delta.value_size)
        mixer = inputs + 4 * (4 * delta.conv_size + 3 * delta.value_size) + 3 * hidden * width
        found, sparse = sparse_layers(text, config.shape.num_layers), 0
        if found is not None:
            on_gpu = not pipeline_config.model.on_cpu
            sparse = found.shape.token_bytes(hidden, width, is_grouped=on_gpu)
        gated = own + 3 * config.shape.num_heads * config.shape.head_dim * width
        return max(gated, mixer, sparse)

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `PipelineModel`: with three matrices of the delta rule for each row."""
        own = super().estimate_activation_memory(pipeline_config, huggingface_config)
        rows = pipeline_config.max_batch_size or pipeline_config.max_batch_input_tokens
        delta = read_delta_shape(huggingface_config.text_config)
        return own + 3 * rows * StatePart(1, delta.state, torch.float32).nbytes

    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        """See `CausalModel`."""
        if self.states is None:
            raise RuntimeError("a model with recurrent states needs its runner's pool of states")
        rows = DeltaRows.of(batch, self._conv_width)
        x = self.embed(batch.input_ids)
        step = HybridStep(self._rotary.at(batch.positions), cache, self.states, rows)
        for layer in self._hybrid_layers:
            layer(x, step)
        return x

    def _loader(self, reader: WeightReader) -> HybridLoader:
        text, num_layers = self.huggingface_config.text_config, self.config.shape.num_layers
        common = (self.config, self.names, self._factory, self._rope_type, self.group)
        return HybridLoader(reader, *common, sparse_layers(text, num_layers))

    def _load_rest(self, reader: WeightReader) -> None:
        text, loader = self.huggingface_config.text_config, self._loader(reader)
        self._conv_width = conv_width(text)
        self._hybrid_layers = loader.hybrid_layers(text)
        for prefix in self.unread:
            reader.skip_under(prefix)


class HybridLoader(SparseLoader):
    """Creates layers with states, gates and experts; norms are stored minus one."""

    __slots__ = ()

    def layers(self) -> list[DecoderLayer]:
        """Return none: all are hybrid layers."""
        return []

    def hybrid_layers(self, text: HuggingFaceConfig) -> list[HybridLayer]:
        """Return all layers."""
        kinds = layer_kinds(text, self.config.shape.num_layers)
        places = {ATTENTION: 0, DELTA_NET: 0}
        made: list[HybridLayer] = []
        for index, kind in enumerate(kinds):
            mixer: GatedAttention | DeltaNet = (
                self.attention(index, places[kind])
                if kind == ATTENTION
                else self.delta_net(index, places[kind], text)
            )
            places[kind] += 1
            made.append(
                HybridLayer(
                    self.norm(self.names.attention_norm.format(index)),
                    mixer,
                    self.norm(self.names.mlp_norm.format(index)),
                    self.mlp(index),
                )
            )
        return made

    def gain(self, name: str, size: int) -> Tensor:
        """See `LayerLoader`. In float32: near one a shorter format is coarser than near zero."""
        return (1.0 + self.reader.tensor(f"{name}.weight", size).float()).to(self.factory.device)

    def attention(self, index: int, place: int) -> GatedAttention:
        """Return the attention of a layer; `place`: number among the layers with attention."""
        names, shape, heads = self.names, self.config.shape, self.heads
        size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def matrix(name: str, num_rows: int) -> LinearWeight:
            return self.reader.matrix(
                name.format(index), num_rows, shape.hidden_size, has_bias=self.config.has_qkv_bias
            )

        # Rows of a head are its query and its gate.
        rows = torch.arange(2 * size).view(shape.num_heads, 2, shape.head_dim)
        queries = rows[:, 0].reshape(-1)[self._paired_rows(shape.num_heads)]
        order = torch.cat([rows[:, 1].reshape(-1), queries])
        first = matrix(names.query, 2 * size).rows(order)
        keys = matrix(names.key, kv_size).rows(self._paired_rows(shape.num_kv_heads))
        output = self.reader.matrix(
            names.output.format(index),
            shape.hidden_size,
            size,
            has_bias=self.config.has_output_bias,
        )
        weights = AttentionWeights(
            self.factory.linear(LinearWeight.stack([first, keys, matrix(names.value, kv_size)])),
            self.factory.linear(output),
            self._head_norm(index, heads),
        )
        return GatedAttention(place, heads, weights, self.group)

    def delta_net(self, index: int, place: int, text: HuggingFaceConfig) -> DeltaNet:
        """Return the delta net of a layer; `place`: number among the layers with states."""
        name, shape = MIXER.format(index), read_delta_shape(text)
        hidden, num_heads = self.config.shape.hidden_size, shape.num_value_heads
        reader, factory, device = self.reader, self.factory, self.factory.device
        width = conv_width(text)
        taps = reader.tensor(f"{name}.conv1d.weight", shape.conv_size, 1, width)[:, 0]
        rows = shape.conv_size + shape.value_size
        project = reader.matrix(f"{name}.in_proj_qkvz", rows, hidden)
        gates = reader.matrix(f"{name}.in_proj_ba", 2 * num_heads, hidden)
        each = num_heads // shape.num_key_heads
        values = each * shape.value_dim
        sizes = [shape.key_dim, shape.key_dim, values, values]
        norm = reader.tensor(f"{name}.norm.weight", shape.value_dim).to(device)
        return DeltaNet(
            place,
            shape,
            project=factory.linear(project.rows(_joined_rows(sizes, shape.num_key_heads))),
            conv=ShortConv(factory.vector(taps), None),
            gates=DeltaGates(
                factory.exact().linear(gates.rows(_joined_rows([each] * 2, shape.num_key_heads))),
                reader.tensor(f"{name}.dt_bias", num_heads).float().to(device),
                -reader.tensor(f"{name}.A_log", num_heads).float().exp().to(device),
            ),
            norm=GatedNorm(norm, self.config.norm_epsilon),
            output=factory.linear(reader.matrix(f"{name}.out_proj", hidden, shape.value_size)),
        )


def _joined_rows(sizes: list[int], num_groups: int) -> Tensor:
    """Return the order of rows in which parts of these sizes, stored group by group, are each
    joined over all groups.
    """
    rows = torch.arange(sum(sizes) * num_groups).view(num_groups, -1)
    return torch.cat([part.reshape(-1) for part in rows.split(sizes, dim=1)])


def conv_width(config: HuggingFaceConfig) -> int:
    """Return the number of tokens of a convolution. Raises `CheckpointError`."""
    width = config.size("linear_conv_kernel_dim", 4)
    if not 2 <= width <= MAX_WIDTH:
        raise CheckpointError(
            f"{config.path}: linear_conv_kernel_dim={width} must be in [2, {MAX_WIDTH}]"
        )
    return width


def read_delta_shape(config: HuggingFaceConfig) -> DeltaShape:
    """Return the heads of the delta nets. Raises `CheckpointError`."""
    keys, values = (config.size(f"linear_num_{part}_heads", n) for part, n in _HEADS)
    if values % keys:
        raise CheckpointError(
            f"{config.path}: linear_num_value_heads={values} must be a multiple of "
            f"linear_num_key_heads={keys}"
        )
    key_dim = config.size("linear_key_head_dim", 128)
    return DeltaShape(keys, values, key_dim, config.size("linear_value_head_dim", 128))


_HEADS = (("key", 16), ("value", 32))


def rotated_dim(config: HuggingFaceConfig, head_dim: int) -> int:
    """Return how many dimensions of a head are rotated. Raises `CheckpointError`."""
    rope: Any = config.get("rope_parameters") or {}
    nested = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    factor = config.number("partial_rotary_factor", 0.25) if nested is None else nested
    size = int(head_dim * factor) if isinstance(factor, int | float) else 0
    if not 0 < size <= head_dim or size % 2:
        raise CheckpointError(
            f"{config.path}: partial_rotary_factor={factor!r} of head_dim={head_dim} must be an "
            f"even number of dimensions in [2, {head_dim}]"
        )
    return size


def layer_kinds(config: HuggingFaceConfig, num_layers: int) -> tuple[str, ...]:
    """Return the kind of each layer, of `layer_types` or `full_attention_interval`.

    Raises `CheckpointError` for an unknown kind, another number of layers, and a model that has
    layers of one kind only.
    """
    given = config.get("layer_types")
    if given is None:
        every = config.size("full_attention_interval", 4)
        given = [DELTA_NET if (n + 1) % every else ATTENTION for n in range(num_layers)]
    if len(given) != num_layers or set(given) != {ATTENTION, DELTA_NET}:
        raise CheckpointError(
            f"{config.path}: layer_types={given} must be {num_layers} of '{DELTA_NET}' and "
            f"'{ATTENTION}', and both must occur"
        )
    return tuple(given)


def sparse_layers(config: HuggingFaceConfig, num_layers: int) -> SparseLayers | None:
    """Return the layers with experts; None without any."""
    return SparseLayers.read(config, num_layers, DEFAULT)
