"""Llama (Touvron et al. 2023): pre-norm decoder, grouped-query attention, rotary, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llm.batch import ForwardBatch, KVCacheInputs
from llm.config import PipelineConfig
from llm.layers.activation import GatedMLP
from llm.layers.attention import AttentionShape, SelfAttention
from llm.layers.embedding import Embedding
from llm.layers.linear import LinearFactory
from llm.layers.norm import RMSNorm
from llm.layers.rotary import Rotary, interleaved_rows
from llm.layers.weight import LinearWeight
from llm.models.base import upper_bounded_default
from llm.models.causal import CausalModel
from llm.models.encoding import choose_encoding
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama_config import LlamaConfig
from llm.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x + attention(norm x), then x + mlp(norm x)."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """Changes x [T, hidden] in place."""
        x.add_(self.attention(self.attention_norm(x), rotations, cache))
        x.add_(self.mlp(self.mlp_norm(x)))


class LlamaModel(CausalModel):
    """`LlamaForCausalLM`."""

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """`max_length`, at most the checkpoint's max_position_embeddings."""
        limit = LlamaConfig.read(huggingface_config).shape.max_positions
        wanted = pipeline_config.max_length
        try:
            return upper_bounded_default(upper_bound=limit, default=wanted)
        except ValueError as error:
            raise ValueError(
                f"max_length={wanted} exceeds the model's max_position_embeddings={limit}"
            ) from error

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """See `PipelineModel`. An int8 head is packed, so a tied embedding is held beside it."""
        size = super().estimate_weights_size(pipeline_config)
        huggingface_config = HuggingFaceConfig.read(pipeline_config.model.model_path)
        config = LlamaConfig.read(huggingface_config)
        if config.is_head_tied and choose_encoding(pipeline_config.model, huggingface_config).int8:
            size += config.shape.vocab_size * config.shape.hidden_size
        return size

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Peak of the MLP or the attention of one full batch, and the logits of its rows."""
        config = LlamaConfig.read(huggingface_config)
        width = choose_encoding(pipeline_config.model, huggingface_config).dtype.itemsize
        shape = config.shape
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        attention = 2 * heads + shape.num_heads * shape.head_dim
        mlp = 4 * config.intermediate_size
        per_token = 3 * shape.hidden_size + max(attention, mlp)
        tokens = pipeline_config.max_batch_input_tokens
        rows = pipeline_config.max_batch_size or tokens
        return tokens * per_token * width + 3 * rows * shape.vocab_size * 4

    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        """See `CausalModel`."""
        x = self._embedding(batch.input_ids)
        rotations = self._rotary.at(batch.positions)
        for layer in self._layers:
            layer(x, rotations, cache)
        return x

    def load_weights(self) -> None:
        """See `PipelineModel`."""
        self.config = LlamaConfig.read(self.huggingface_config)
        self._factory = LinearFactory(
            dtype=self.dtype, device=self.devices[0], int8=self.encoding.int8
        )
        reader = WeightReader(self.weights, self.adapter)
        shape = self.config.shape
        self.vocab_size = shape.vocab_size
        self._rotary = Rotary(self.config.rotary, self.max_seq_len, self.devices[0])
        table = (shape.vocab_size, shape.hidden_size)
        embedding = reader.matrix("model.embed_tokens", *table)
        self._embedding = Embedding(
            embedding, dtype=self.dtype, device=self.devices[0], int8=self.encoding.int8
        )
        self._layers = [self._load_layer(reader, index) for index in range(shape.num_layers)]
        self.final_norm = self._load_norm(reader, "model.norm")
        is_tied = self.config.is_head_tied
        self.head = self._factory.linear(embedding if is_tied else reader.matrix("lm_head", *table))
        # Old checkpoints store what can be computed, and a copy of the tied head.
        reader.skip("rotary_emb.inv_freq", *(["lm_head.weight"] if is_tied else []))
        reader.finish()

    def _load_layer(self, reader: WeightReader, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        return DecoderLayer(
            self._load_norm(reader, f"{prefix}.input_layernorm"),
            self._load_attention(reader, index, f"{prefix}.self_attn"),
            self._load_norm(reader, f"{prefix}.post_attention_layernorm"),
            self._load_mlp(reader, f"{prefix}.mlp"),
        )

    def _load_norm(self, reader: WeightReader, name: str) -> RMSNorm:
        weight = reader.tensor(f"{name}.weight", self.config.shape.hidden_size)
        return RMSNorm(self._factory.vector(weight), self.config.norm_epsilon)

    def _load_attention(self, reader: WeightReader, index: int, prefix: str) -> SelfAttention:
        shape = self.config.shape
        hidden, head_dim = shape.hidden_size, shape.head_dim

        def projection(name: str, num_heads: int) -> LinearWeight:
            return reader.matrix(f"{prefix}.{name}", num_heads * head_dim, hidden)

        query = projection("q_proj", shape.num_heads)
        key = projection("k_proj", shape.num_kv_heads)
        value = projection("v_proj", shape.num_kv_heads)
        output = reader.matrix(f"{prefix}.o_proj", hidden, shape.num_heads * head_dim)
        query = query.rows(interleaved_rows(shape.num_heads, head_dim))
        key = key.rows(interleaved_rows(shape.num_kv_heads, head_dim))
        return SelfAttention(
            index,
            AttentionShape(shape.num_heads, shape.num_kv_heads, head_dim),
            self._factory.linear(LinearWeight.stack([query, key, value])),
            self._factory.linear(output),
            self.group,
        )

    def _load_mlp(self, reader: WeightReader, prefix: str) -> GatedMLP:
        hidden, inner = self.config.shape.hidden_size, self.config.intermediate_size
        gate = reader.matrix(f"{prefix}.gate_proj", inner, hidden)
        up = reader.matrix(f"{prefix}.up_proj", inner, hidden)
        down = reader.matrix(f"{prefix}.down_proj", hidden, inner)
        return GatedMLP(
            self._factory.linear(LinearWeight.stack([gate, up])),
            self._factory.linear(down),
            self.group,
        )
