"""Llama (Touvron et al. 2023): pre-norm decoder, grouped-query attention, rotary, SwiGLU.

Related architectures (Qwen, Mistral) differ in a few parts. They override `read_config`, which
selects the parts, and `names`, the names in checkpoints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from llm.batch import ForwardBatch, KVCacheInputs
from llm.config import PipelineConfig, RopeType
from llm.layers.decoder import (
    MLP,
    AttentionShape,
    AttentionWeights,
    DecoderLayer,
    Embedding,
    GatedMLP,
    HeadNorm,
    LogitsHead,
    RMSNorm,
    Rotary,
    SelfAttention,
    interleaved_rows,
)
from llm.layers.factory import BUILT_IN_KERNELS, PACKED, TORCH_BLAS, LinearFactory
from llm.layers.sharded import ShardedHead, sharded_embedding
from llm.layers.stack import Stack, create_stack
from llm.layers.weight import LinearWeight
from llm.models.base import expands, product_bytes, upper_bounded_default
from llm.models.causal import CausalModel
from llm.models.encoding import Encoding, choose_encoding
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama_config import LlamaConfig
from llm.models.random_weights import open_weights
from llm.models.weight_names import WeightNames, original_adapter
from llm.models.weights import WeightReader
from llm.parallel.group import Group
from llm.parallel.shard import Part, Shard, check_divisible


class LlamaModel(CausalModel):
    """Implements `LlamaForCausalLM`: attention and MLP may have biases."""

    can_shard: ClassVar[bool] = True
    names: ClassVar[WeightNames] = WeightNames()

    @classmethod
    def check_shards(
        cls, huggingface_config: HuggingFaceConfig, num_ranks: int, ep_size: int = 1
    ) -> None:
        """See `PipelineModel`."""
        super().check_shards(huggingface_config, num_ranks)
        check_divisible(num_ranks, **cls.divided_sizes(huggingface_config, ep_size))

    @classmethod
    def divided_sizes(cls, huggingface_config: HuggingFaceConfig, ep_size: int) -> dict[str, int]:
        """Return the sizes by their keys that ranks divide: heads, the MLP and the vocabulary."""
        config = cls.read_config(huggingface_config)
        return {
            "num_attention_heads": config.shape.num_heads,
            "num_key_value_heads": config.shape.num_kv_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.shape.vocab_size,
        }

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """Return the architecture's configuration from a config.json; overridden by related
        architectures.
        """
        has_bias = bool(config.text_config.get("attention_bias", False))
        return replace(
            LlamaConfig.read(config),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=bool(config.text_config.get("mlp_bias", False)),
        )

    @classmethod
    def attention_windows(cls, huggingface_config: HuggingFaceConfig) -> tuple[int | None, ...]:
        """See `PipelineModel`."""
        return cls.read_config(huggingface_config).windows

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return `max_length`, at most the checkpoint's max_position_embeddings, after scaling."""
        limit = cls.read_config(huggingface_config).max_positions
        wanted = pipeline_config.max_length
        try:
            return upper_bounded_default(upper_bound=limit, default=wanted)
        except ValueError as error:
            raise ValueError(
                f"max_length={wanted} exceeds the model's max_position_embeddings={limit}"
            ) from error

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """See `PipelineModel`. An int8 head is packed, so that a tied embedding is stored
        separately. With float8 layers the embedding and the head are wider. Packed matrices are
        counted as they are stored, and a packed embedding as the wide table of a GPU, too.

        Without files the weights are random, and the sizes of the matrices are counted.
        """
        size = super().estimate_weights_size(pipeline_config)
        huggingface_config = HuggingFaceConfig.read(pipeline_config.model.model_path)
        config = cls.read_config(huggingface_config)
        encoding = choose_encoding(pipeline_config.model, huggingface_config)
        size = size or config.num_matrix_weights * product_bytes(encoding, pipeline_config)
        width, shape = product_bytes(encoding, pipeline_config), config.shape
        if config.is_head_tied and encoding.int8:
            size += shape.vocab_size * shape.hidden_size * width
        if encoding.float8:
            tables = 1 if config.is_head_tied else 2
            more = encoding.dtype.itemsize - width
            size += tables * shape.vocab_size * shape.hidden_size * more
        if cls._widens_embedding(pipeline_config, encoding):
            size += shape.vocab_size * shape.hidden_size * encoding.dtype.itemsize
        num_ranks = len(pipeline_config.model.device_specs)
        if num_ranks == 1:
            return size
        # Every rank has all norms, and at least one head of keys and values.
        num_heads = 2 * (max(shape.num_kv_heads, num_ranks) - shape.num_kv_heads)
        replicated = (2 * shape.num_layers + 1) * encoding.dtype.itemsize
        copies = shape.num_layers * num_heads * shape.head_dim * width
        return (size + copies * shape.hidden_size) // num_ranks + replicated * shape.hidden_size

    @classmethod
    def _widens_embedding(cls, pipeline_config: PipelineConfig, encoding: Encoding) -> bool:
        """Return whether a GPU holds the table of a packed embedding in a wide format."""
        if not encoding.packed or expands(pipeline_config) or pipeline_config.model.on_cpu:
            return False
        return f"{cls.names.embedding}.weight" in open_weights(pipeline_config).packed_bytes()

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the peak of the MLP or the attention of one full batch, its logits, and all
        rotations.
        """
        shape = cls.read_config(huggingface_config).shape
        tokens = pipeline_config.max_batch_input_tokens
        rows = pipeline_config.max_batch_size or tokens
        if pipeline_config.sampling.enable_variable_logits:
            rows = tokens
        positions = cls.calculate_max_seq_len(pipeline_config, huggingface_config)
        rotations = 4 * positions * shape.head_dim
        per_token = cls.estimate_token_memory(pipeline_config, huggingface_config)
        return tokens * per_token + 3 * rows * shape.vocab_size * 4 + rotations

    @classmethod
    def estimate_token_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `PipelineModel`."""
        config = cls.read_config(huggingface_config)
        width = choose_encoding(pipeline_config.model, huggingface_config).dtype.itemsize
        shape = config.shape
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        attention = 2 * (heads + shape.num_heads * shape.head_dim)  # also rotated, and joined
        mlp = 4 * config.intermediate_size
        return (3 * shape.hidden_size + max(attention, mlp)) * width

    def embed(self, ids: Tensor) -> Tensor:
        """Return new embeddings [T, hidden] of the fed tokens, which the layers overwrite."""
        if self.group.size == 1:
            return self._embedding(ids)
        return sharded_embedding(self._embedding, ids, self.group)

    def layer_inputs(self, batch: ForwardBatch) -> Tensor:
        """Return the inputs [T, hidden] of the layers, which these overwrite."""
        return self.embed(batch.input_ids)

    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        """See `CausalModel`."""
        x = self.layer_inputs(batch)
        rotations = self._rotary.at(batch.positions)
        may_run = self.session.may_run
        for layer in self._layers:
            if not may_run.is_set():
                self.session.wait_if_held()
            layer(x, rotations, cache)
        return x

    def load_weights(self) -> None:
        """See `PipelineModel`."""
        ep_size = self.pipeline_config.ep_size
        self.check_shards(self.huggingface_config, self.group.size, ep_size)
        self.config = self.read_config(self.huggingface_config)
        self._factory = LinearFactory(
            dtype=self.dtype,
            device=self.devices[0],
            int8=self.encoding.int8,
            float8=self.encoding.float8,
            vendor_blas=self.session.use_vendor_blas,
            batch_invariant=self.pipeline_config.model.batch_invariant,
            lora=self.lora_manager,
        )
        original = original_adapter(self.weights.info()) if self.adapter is None else None
        self._rope_type = self.pipeline_config.model.rope_type or (
            RopeType.NORMAL if original else RopeType.NEOX
        )
        is_packed = self.encoding.packed and not self.session.use_vendor_blas
        reader = WeightReader(self.weights, self.adapter or original, is_packed=is_packed)
        shape, names = self.config.shape, self.names
        self.vocab_size = shape.vocab_size
        self._rotary = Rotary(self.config.rotary, self.max_seq_len, self.devices[0])
        embedding = self._load_embedding(reader)
        loader = self._loader(reader)
        self._decoder_layers = layers = loader.layers()  # computed by torch
        self.final_norm = loader.norm(names.final_norm)
        needs_no_head = self.config.is_head_tied or self.pooling is not None
        head = None
        if self.pooling is None:
            weight = self._tied(embedding) if needs_no_head else self._load_head(reader)
            # Computed for some tokens only, while an adapter's layers expect all.
            head = LogitsHead(self.final_norm, self._factory.head(weight))
        self._load_rest(reader)
        # Old checkpoints store values that can be computed, and a copy of the tied head.
        reader.skip(*names.ignored, *([f"{names.head}.weight"] if needs_no_head else []))
        reader.finish()
        is_compiled = not self.session.use_legacy_module
        self._use(create_stack(layers, head, self.session.kernels(), is_compiled=is_compiled))

    def _loader(self, reader: WeightReader) -> LayerLoader:
        config, names = self.config, self.names
        return LayerLoader(reader, config, names, self._factory, self._rope_type, self.group)

    def _load_embedding(self, reader: WeightReader) -> LinearWeight:
        """Create the embedding; return its table, which the head may share."""
        shape = self.config.shape
        part = self._shard.part(0, shape.vocab_size)
        weight = reader.matrix(self.names.embedding, shape.vocab_size, shape.hidden_size, part=part)
        self._embedding = Embedding(
            weight, dtype=self.dtype, device=self.devices[0], int8=self.encoding.int8
        )
        return weight

    def _load_head(self, reader: WeightReader) -> LinearWeight:
        """Return the matrix of a head that is not tied."""
        shape = self.config.shape
        part = self._shard.part(0, shape.vocab_size)
        return reader.matrix(self.names.head, shape.vocab_size, shape.hidden_size, part=part)

    @property
    def _shard(self) -> Shard:
        return Shard(self.group.rank, self.group.size)

    def _load_rest(self, reader: WeightReader) -> None:
        """Load what a related architecture has in addition to its layers and its head."""
        return

    def _use(self, stack: Stack) -> None:
        self._layers = stack.layers
        if stack.head is not None:
            size = self.group.size
            self.logits_of = stack.head
            if size > 1:
                self.logits_of = ShardedHead(stack.head, self.vocab_size // size, self.group)
        counts = self._factory.counts
        own = max(0, stack.num_kernel_products - counts[PACKED])
        self.linear_backends = (
            counts - Counter({TORCH_BLAS: own}) + Counter({BUILT_IN_KERNELS: own})
        )

    def _tied(self, embedding: LinearWeight) -> LinearWeight:
        """Return the head's matrix: shared with the embedding on the device, if possible."""
        is_shared = self.encoding.int8 or embedding.groups is not None
        return embedding if is_shared else LinearWeight(self._embedding.table)


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """Creates the layers of one stack from its part of a checkpoint."""

    reader: WeightReader
    config: LlamaConfig
    names: WeightNames
    factory: LinearFactory
    rope_type: RopeType
    group: Group

    def layers(self) -> list[DecoderLayer]:
        """Return all layers that have attention."""
        numbers = self.config.attention_layers or range(self.config.shape.num_layers)
        return [self._layer(index, place) for place, index in enumerate(numbers)]

    def norm(self, name: str) -> RMSNorm:
        """Return the norm of this name."""
        return RMSNorm(self.gain(name, self.config.shape.hidden_size), self.config.norm_epsilon)

    def gain(self, name: str, size: int) -> Tensor:
        """Return the weight [size] of the norm of this name, on the device."""
        return self.factory.vector(self.reader.tensor(f"{name}.weight", size))

    def _layer(self, index: int, place: int) -> DecoderLayer:
        """`index`: number in the checkpoint; `place`: number among the layers with attention."""
        return DecoderLayer(
            self.norm(self.names.attention_norm.format(index)),
            self._attention(index, place),
            self.norm(self.names.mlp_norm.format(index)),
            self.mlp(index),
        )

    @property
    def _shard(self) -> Shard:
        return Shard(self.group.rank, self.group.size)

    @property
    def heads(self) -> AttentionShape:
        """Return this rank's heads."""
        shape, shard = self.config.shape, self._shard
        return AttentionShape(
            shard.num_heads(shape.num_heads), shard.num_heads(shape.num_kv_heads), shape.head_dim
        )

    def _attention(self, index: int, place: int) -> SelfAttention:
        names, shape, heads = self.names, self.config.shape, self.heads
        query = self._projection(names.query.format(index), shape.num_heads)
        key = self._projection(names.key.format(index), shape.num_kv_heads)
        value = self._projection(names.value.format(index), shape.num_kv_heads)
        output = self.reader.matrix(
            names.output.format(index),
            shape.hidden_size,
            shape.num_heads * shape.head_dim,
            has_bias=self.config.has_output_bias,
            part=self._heads_part(1, shape.num_heads),
        )
        query = query.rows(self._paired_rows(heads.num_heads))
        key = key.rows(self._paired_rows(heads.num_kv_heads))
        weights = AttentionWeights(
            self.factory.linear(LinearWeight.stack([query, key, value])),
            self.factory.linear(output),
            self._head_norm(index, heads) if self.config.has_head_norm else None,
        )
        return SelfAttention(place, heads, weights, self.group)

    def _projection(self, name: str, num_heads: int) -> LinearWeight:
        """Return this rank's heads of a projection with `num_heads` heads in all."""
        return self.reader.matrix(
            name,
            num_heads * self.config.shape.head_dim,
            self.config.shape.hidden_size,
            has_bias=self.config.has_qkv_bias,
            part=self._heads_part(0, num_heads),
        )

    def _heads_part(self, dim: int, num_heads: int) -> Part | None:
        shard = self._shard
        return shard.head_part(dim, shard.heads(num_heads), self.config.shape.head_dim)

    def _paired_rows(self, num_heads: int) -> Tensor:
        """Return the order of these heads' rows in which the pairs of a rotation are neighbours."""
        head_dim = self.config.shape.head_dim
        if self.rope_type is RopeType.NORMAL:
            return torch.arange(num_heads * head_dim)
        return interleaved_rows(num_heads, head_dim, self.config.rotary.rotated_dim)

    def _head_norm(self, index: int, heads: AttentionShape) -> HeadNorm:
        """Return the norm of queries and keys, with weights in the order of the rotated pairs."""
        shape, names = self.config.shape, self.names
        order = self._paired_rows(1).to(self.factory.device)
        by_head = [
            self.gain(name.format(index), shape.head_dim)[order].expand(count, -1)
            for name, count in (
                (names.query_norm, heads.num_heads),
                (names.key_norm, heads.num_kv_heads),
            )
        ]
        return HeadNorm(torch.cat(by_head), self.config.norm_epsilon)

    def mlp(self, index: int) -> MLP:
        """Return the MLP of a layer."""
        hidden, inner = self.config.shape.hidden_size, self.config.intermediate_size
        names, has_bias = self.names, self.config.has_mlp_bias
        by_out, by_in = self._shard.part(0, inner), self._shard.part(1, inner)

        def matrix(name: str, *shape: int, part: Part | None) -> LinearWeight:
            return self.reader.matrix(name.format(index), *shape, has_bias=has_bias, part=part)

        gate = matrix(names.gate, inner, hidden, part=by_out)
        up = matrix(names.up, inner, hidden, part=by_out)
        down = matrix(names.down, hidden, inner, part=by_in)
        return GatedMLP(
            self.factory.linear(LinearWeight.stack([gate, up])),
            self.factory.linear(down),
            self.group,
        )
