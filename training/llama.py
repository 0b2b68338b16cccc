"""The language model for training: Llama on whole sequences, and the exported names of its
weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.source_filter.modules import FiniteScalarQuantizer
from training.vocabulary import FIRST_CODE, PHONEMES

MAX_TOKENS = 640  # of one training sequence


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Llama sizes."""

    codebook_size: int
    hidden_size: int = 512
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 1536
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    max_tokens: int = MAX_TOKENS

    @classmethod
    def sized(
        cls, codebook_size: int, layers: int, dim: int, max_tokens: int, dropout: float = 0.0
    ) -> ModelConfig:
        """Return sizes with heads of 64, two to a key-value head, and products of three times
        `dim`.
        """
        return cls(
            codebook_size,
            dim,
            layers,
            num_heads=dim // 64,
            num_kv_heads=dim // 128,
            intermediate_size=3 * dim,
            dropout=dropout,
            max_tokens=max_tokens,
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def vocab_size(self) -> int:
        return FIRST_CODE + self.codebook_size


class DecoderLayer(nn.Module):
    """One causal Llama layer on whole sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, kv = config.hidden_size, config.num_kv_heads * config.head_dim
        self.input_layernorm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.qkv_proj = nn.Linear(dim, dim + 2 * kv, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.gate_up_proj = nn.Linear(dim, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, drop: Tensor) -> Tensor:
        """Apply to x [B, T, D]; cos, sin [T, head_dim / 2]; drop [B, 1, 1]: each row's dropout."""
        c = self.config
        batch, length, dim = x.shape
        qkv = self.qkv_proj(self.input_layernorm(x))
        qkv = qkv.view(batch, length, c.num_heads + 2 * c.num_kv_heads, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        groups = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.o_proj(mixed.transpose(1, 2).reshape(batch, length, dim)), drop)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self._drop(self.down_proj(F.silu(gate) * up), drop)

    def _drop(self, x: Tensor, drop: Tensor) -> Tensor:
        if not (self.training and self.config.dropout):
            return x
        kept = torch.rand_like(x, dtype=torch.float32) >= drop
        return (x * kept / (1 - drop)).to(x.dtype)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LanguageModel(nn.Module):
    """Llama with a tied head; a code's embedding is its own row plus one row per FSQ level."""

    def __init__(self, config: ModelConfig, levels: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, dim)
        self.level_embedding = nn.Embedding(sum(levels), dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(dim, eps=config.norm_eps)
        quantizer = FiniteScalarQuantizer(levels)
        codes = torch.arange(config.codebook_size)
        index = (codes[:, None] // quantizer.strides) % quantizer.levels
        starts = torch.tensor([sum(levels[:i]) for i in range(len(levels))])
        self.register_buffer("level_index", index + starts, persistent=False)
        steps = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(config.max_tokens)[:, None] * config.rope_theta**-steps
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        small = 0.02 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=small if branch else 0.02)

    def table(self) -> Tensor:
        """Return the embedding that is used and exported: [V, D]."""
        levels = self.level_embedding(self.level_index).sum(1)
        return self.embedding.weight + F.pad(levels, (0, 0, FIRST_CODE, 0))

    def loss(
        self, ids: Tensor, chosen: Tensor, targets: Tensor, weight: float = 1.0,
        weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mean cross-entropy of `targets` [N] at the flat positions `chosen` of ids
        [B, T], each counted as often as `weights` [N] says.

        In documents of the phoneme task a target counts `weight` times: most of them are soon
        correct, and next to the codes' noise little of their gradient would remain. There is no
        dropout for them: answers have to be exact, and the number of words is unlimited.
        """
        is_phonemes = ids[:, 0] == PHONEMES
        drop = torch.where(is_phonemes, 0.0, self.config.dropout)[:, None, None]
        table = self.table()
        x = F.embedding(ids, table)
        if torch.is_autocast_enabled(x.device.type):
            x = x.bfloat16()
        length = ids.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, drop)
        hidden = self.norm(x).reshape(-1, x.shape[-1])[chosen]
        each = F.cross_entropy(
            F.linear(hidden, table.to(hidden.dtype)).float(), targets, reduction="none"
        )
        counts = torch.where(is_phonemes, weight, 1.0)[chosen // length]
        if weights is not None:
            counts = counts * weights
        return (each * counts).sum() / counts.sum()


def checkpoint(model: LanguageModel) -> dict[str, Tensor]:
    """Return weights under the names of Hugging Face's Llama, float32."""
    c = model.config
    kv = c.num_kv_heads * c.head_dim
    state = {"model.embed_tokens.weight": model.table(), "model.norm.weight": model.norm.weight}
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}{name}.weight"] = getattr(layer, name).weight
        split = layer.qkv_proj.weight.split((c.hidden_size, kv, kv))
        for name, weight in zip("qkv", split, strict=True):
            state[f"{prefix}self_attn.{name}_proj.weight"] = weight
        state[f"{prefix}self_attn.o_proj.weight"] = layer.o_proj.weight
        gate, up = layer.gate_up_proj.weight.chunk(2)
        state[f"{prefix}mlp.gate_proj.weight"], state[f"{prefix}mlp.up_proj.weight"] = gate, up
        state[f"{prefix}mlp.down_proj.weight"] = layer.down_proj.weight
    return {name: value.detach().float().cpu().contiguous() for name, value in state.items()}


def quantise(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise matrices to int8 with one scale per row (compressed-tensors "int-quantized")."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.dim() == 2:
            scale = (value.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
            out[name] = (value / scale).round().clamp(-127, 127).to(torch.int8)
            out[f"{name}_scale"] = scale
        else:
            out[name] = value
    return out


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the output of `checkpoint` or `quantise`, float32."""
    return {
        name: value.float() * state[f"{name}_scale"] if f"{name}_scale" in state else value.float()
        for name, value in state.items()
        if not name.endswith("_scale")
    }


def restore(model: LanguageModel, state: dict[str, Tensor]) -> None:
    """Load the output of `checkpoint` or `quantise`; the level embeddings start again from zero."""
    full = whole(state)
    with torch.no_grad():
        model.level_embedding.weight.zero_()
        model.embedding.weight.copy_(full["model.embed_tokens.weight"])
        model.norm.weight.copy_(full["model.norm.weight"])
        for i, layer in enumerate(model.layers):
            get = {k.removeprefix(f"model.layers.{i}."): v for k, v in full.items()}.__getitem__
            qkv = [get(f"self_attn.{name}_proj.weight") for name in "qkv"]
            layer.qkv_proj.weight.copy_(torch.cat(qkv))
            layer.o_proj.weight.copy_(get("self_attn.o_proj.weight"))
            gate_up = [get(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
            layer.gate_up_proj.weight.copy_(torch.cat(gate_up))
            layer.down_proj.weight.copy_(get("mlp.down_proj.weight"))
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, name).weight.copy_(get(f"{name}.weight"))
