"""`LlamaConfig`: the keys of a config.json that affect Llama and related architectures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm.errors import CheckpointError
from llm.layers.rotary import RotaryConfig
from llm.models.hf_config import HuggingFaceConfig, ModelShape
from llm.models.rotary_config import read_rotary


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one checkpoint. Features of related architectures have defaults."""

    shape: ModelShape
    intermediate_size: int
    norm_epsilon: float
    is_head_tied: bool
    rotary: RotaryConfig
    max_positions: int  # of one sequence, after rotary scaling
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norm: bool = False  # normalise queries and keys before rotation
    windows: tuple[int | None, ...] = ()  # by layer, as in `PipelineModel.attention_windows`
    # numbers of the layers with attention among `shape.num_layers`; (): all
    attention_layers: tuple[int, ...] = ()
    num_mixer_weights: int = 0  # in the matrices that another layer has in place of attention
    num_mlp_weights: int | None = None  # in the matrices of all MLPs; None: all are dense
    has_output_gate: bool = False  # each head of queries has a gate of its size

    @classmethod
    def read(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """Read the keys. Raises `CheckpointError` naming a key that is missing or unsupported."""
        text = config.text_config
        _refuse_other_variants(text)
        shape = ModelShape.read(config)
        rotary = read_rotary(text, shape)
        scaling = rotary.scaling
        longest = shape.max_positions
        return cls(
            shape=shape,
            intermediate_size=text.size("intermediate_size"),
            norm_epsilon=text.number("rms_norm_eps", 1e-6),
            is_head_tied=bool(text.get("tie_word_embeddings", False)),
            rotary=rotary,
            max_positions=scaling.max_positions(longest) if scaling else longest,
        )

    @property
    def num_matrix_weights(self) -> int:
        """Return the number of weights in the layers' matrices, the embedding and an untied
        head.
        """
        shape = self.shape
        num_query_heads = (3 if self.has_output_gate else 2) * shape.num_heads
        heads = (num_query_heads + 2 * shape.num_kv_heads) * shape.head_dim
        num_attention = len(self.attention_layers) or shape.num_layers
        mixers = (shape.num_layers - num_attention) * self.num_mixer_weights
        attention = num_attention * shape.hidden_size * heads
        mlps = self.num_mlp_weights
        if mlps is None:
            mlps = shape.num_layers * shape.hidden_size * 3 * self.intermediate_size
        tables = 1 if self.is_head_tied else 2
        return attention + mixers + mlps + tables * shape.vocab_size * shape.hidden_size


def _refuse_other_variants(config: HuggingFaceConfig) -> None:
    plain: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "partial_rotary_factor": (1, 1.0),
    }
    for key, accepted in plain.items():
        value = config.get(key, accepted[0])
        if value not in accepted:
            raise CheckpointError(f"{config.path}: {key}={value} is not supported")
