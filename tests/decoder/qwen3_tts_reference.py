"""Qwen3-TTS' codec, small and random, of parts that transformers has for Mimi and Qwen3-Omni.

Modules are named as in the published checkpoint. The transposed convolutions are ours: Qwen3-Omni
cuts both ends of them, this codec only the last one.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)

DECODER: dict[str, Any] = {
    "codebook_size": 16,
    "codebook_dim": 12,
    "latent_dim": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "num_quantizers": 4,
    "upsampling_ratios": [2],
    "decoder_dim": 32,
    "upsample_rates": [5, 4, 2],
    "max_position_embeddings": 256,
    "rope_theta": 10000,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_filters": 4,
    "upsampling_ratios": [5, 4, 2],
    "codebook_size": 16,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": 8,
    "upsample_groups": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 6,
}


def write_reference(folder: Path, **changes: Any) -> Qwen3TTSCodec:
    """Write a folder in the published layout; return its codec. Every part is audible."""
    sizes = DECODER | changes
    config = {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_config": ENCODER,
        "decoder_config": sizes,
        "input_sample_rate": 24_000,
        "output_sample_rate": 24_000,
        "decode_upsample_rate": 80,
        "encode_downsample_rate": 80,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        codec = Qwen3TTSCodec(sizes).eval().requires_grad_(requires_grad=False)
        for name, parameter in codec.named_parameters():
            _fill(name, parameter)
        for name, buffer in codec.encoder.named_buffers():
            if name.endswith("embed_sum"):
                nn.init.normal_(buffer)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with tempfile.TemporaryDirectory() as encoder:  # under the published names
        codec.encoder.save_pretrained(encoder)
        saved = load_file(Path(encoder) / "model.safetensors")
    kept = {f"decoder.{name}": t.contiguous() for name, t in codec.decoder.state_dict().items()}
    kept |= {f"encoder.{n}": t for n, t in saved.items() if not n.startswith(NOT_PUBLISHED)}
    save_file(kept, folder / "model.safetensors")
    return codec


def _fill(name: str, parameter: Tensor) -> None:
    """Fill with values that neither vanish nor reach the limits of samples."""
    if name.endswith(("cluster_usage", "norm.weight", "scale", "gamma")):
        nn.init.uniform_(parameter, 0.5, 1.5)
    elif parameter.dim() < 2:
        nn.init.normal_(parameter, std=0.1)
    elif name.endswith("embedding_sum"):
        nn.init.normal_(parameter)
    else:
        nn.init.normal_(parameter, std=0.5 * (parameter.numel() / len(parameter)) ** -0.5)


class Qwen3TTSCodec(nn.Module):
    """Encoder and decoder."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.encoder = MimiModel(MimiConfig(**ENCODER))
        self.decoder = Decoder(sizes)

    def encode(self, samples: Tensor) -> Any:
        """Return Mimi's output for samples [1, 1, S], with the decoder's codebooks."""
        output = self.encoder.encode(samples)
        rest: Any = self.decoder.quantizer["rvq_rest"]
        output.audio_codes = output.audio_codes[:, : len(rest.vq.layers) + 1]
        return output


class Decoder(nn.Module):
    """The published decoder."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        known = {key: value for key, value in sizes.items() if key not in NOT_IN_OMNI}
        config = Qwen3OmniMoeCode2WavConfig(**known)
        config.head_dim = sizes["head_dim"]
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        config._attn_implementation = "eager"
        latent, dim = sizes["latent_dim"], sizes["decoder_dim"]
        convolution = omni.Qwen3OmniMoeCausalConvNet
        self.quantizer = nn.ModuleDict(
            {
                "rvq_first": ResidualBooks(sizes, 1),
                "rvq_rest": ResidualBooks(sizes, sizes["num_quantizers"] - 1),
            }
        )
        self.pre_conv = convolution(sizes["codebook_dim"], latent, 3)
        self.pre_transformer = omni.Qwen3OmniMoeCode2WavTransformerModel(config)
        self.pre_transformer.input_proj = nn.Linear(latent, sizes["hidden_size"])
        self.pre_transformer.output_proj = nn.Linear(sizes["hidden_size"], latent)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    CutAtTheEnd(latent, latent, ratio, ratio),
                    omni.Qwen3OmniMoeConvNeXtBlock(latent),
                ]
            )
            for ratio in sizes["upsampling_ratios"]
        )
        parts: list[nn.Module] = [convolution(latent, dim, 7)]
        for index, rate in enumerate(sizes["upsample_rates"]):
            block = omni.Qwen3OmniMoeCode2WavDecoderBlock(config, index)
            block.block[1] = CutAtTheEnd(dim, dim // 2, 2 * rate, rate)
            parts.append(block)
            dim //= 2
        parts += [omni.Qwen3OmniMoeSnakeBeta(dim), convolution(dim, 1, 7)]
        self.decoder = nn.ModuleList(parts)

    def forward(self, codes: Tensor) -> Tensor:
        """Return samples [B, S] of codes [B, K, F]."""
        books = self.quantizer
        x = books["rvq_first"](codes[:, :1]) + books["rvq_rest"](codes[:, 1:])
        x = self.pre_conv(x).transpose(1, 2)
        transformer: Any = self.pre_transformer
        x = transformer(inputs_embeds=transformer.input_proj(x)).last_hidden_state
        x = transformer.output_proj(x).transpose(1, 2)
        pairs: Any = self.upsample
        for part in (part for pair in pairs for part in pair):
            x = part(x)
        for part in self.decoder:
            x = part(x)
        return x.squeeze(1).clamp(-1, 1)


NOT_PUBLISHED = ("decoder", "upsample")
NOT_IN_OMNI = {"codebook_dim", "latent_dim", "head_dim", "rope_theta"}


class CutAtTheEnd(nn.Module):
    """A transposed convolution without what it adds at the end."""

    def __init__(self, into: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(into, out, kernel, stride)
        self.rate = stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : x.shape[-1] * self.rate]


class ResidualBooks(nn.Module):
    """Codebooks whose vectors are added and projected."""

    def __init__(self, sizes: dict[str, Any], count: int) -> None:
        super().__init__()
        dim = sizes["codebook_dim"] // 2
        self.vq: Any = nn.Module()
        self.vq.layers = nn.ModuleList(Book(sizes["codebook_size"], dim) for _ in range(count))
        self.output_proj = nn.Conv1d(dim, 2 * dim, 1, bias=False)
        self.input_proj = nn.Conv1d(2 * dim, dim, 1, bias=False)  # published, and not used

    def forward(self, codes: Tensor) -> Tensor:
        x: Any = sum(layer(codes[:, k]) for k, layer in enumerate(self.vq.layers))
        return self.output_proj(x.transpose(1, 2))


class Book(nn.Module):
    """One codebook: sums of vectors, and their numbers."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self._codebook: Any = nn.Module()
        self._codebook.embedding_sum = nn.Parameter(torch.zeros(size, dim))
        self._codebook.cluster_usage = nn.Parameter(torch.ones(size))

    def forward(self, codes: Tensor) -> Tensor:
        own = self._codebook
        return F.embedding(codes, own.embedding_sum / own.cluster_usage[:, None])
