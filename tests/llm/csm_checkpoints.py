"""Random checkpoints of CSM as transformers writes them, and greedy frames of its model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CsmConfig, CsmForConditionalGeneration

from llm.request import Token

TEXT_IDS = 40
CODES = 19  # per codebook
CODEBOOKS = 4

BACKBONE: dict[str, Any] = {
    "num_codebooks": CODEBOOKS,
    "vocab_size": CODES,
    "text_vocab_size": TEXT_IDS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "pad_token_id": 38,
    "audio_token_id": 38,
    "audio_eos_token_id": 39,
    "codebook_pad_token_id": 18,
    "codebook_eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 0.5,
        "low_freq_factor": 0.125,
        "original_max_position_embeddings": 64,
    },
}
DEPTH: dict[str, Any] = {
    "num_codebooks": CODEBOOKS,
    "vocab_size": CODES,
    "backbone_hidden_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CODEBOOKS + 1,
    "initializer_range": 0.3,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 0.0078125,
        "low_freq_factor": 0.001953125,
        "original_max_position_embeddings": 16,
    },
}
MIMI: dict[str, Any] = {
    "model_type": "mimi",
    "num_filters": 4,
    "hidden_size": 16,
    "codebook_size": 16,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": CODEBOOKS,
    "num_semantic_quantizers": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "upsample_groups": 16,
    "sliding_window": 20,
}


def write_csm(folder: Path, *, seed: int = 0, **keys: Any) -> Path:
    """Write a checkpoint; `keys` change the backbone's config, `depth` and `codec` theirs."""
    depth, codec = DEPTH | keys.pop("depth", {}), MIMI | keys.pop("codec", {})
    config = CsmConfig(**BACKBONE | keys, depth_decoder_config=depth, codec_config=codec)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CsmForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if name.startswith("codec_model."):
            continue
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5, generator=generator)
        elif "codebooks_head" in name:
            weight.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> CsmForConditionalGeneration:
    """Load the same checkpoint in transformers, float32."""
    model: CsmForConditionalGeneration = CsmForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )
    return model.eval()


def edit_config(folder: Path, **keys: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def embedded(model: CsmForConditionalGeneration, tokens: Sequence[Token]) -> Tensor:
    """Return [1, T, hidden] of text tokens and frames, by the modules of transformers."""
    rows = []
    for token in tokens:
        if isinstance(token, int):
            rows.append(model.embed_text_tokens(torch.tensor([token])))
        else:
            rows.append(model.backbone_model.embed_tokens(torch.tensor([[token]]))[0])
    return torch.cat(rows)[None]


def reference_logits(
    model: CsmForConditionalGeneration, tokens: Sequence[Token], frame: Sequence[int]
) -> Tensor:
    """Return [K, V] logits of the codes of the frame that follows `tokens`, given its codes."""
    with torch.no_grad():
        answer = model.backbone_model(inputs_embeds=embedded(model, tokens))
        state = answer.last_hidden_state[:, -1]
        first = model.lm_head(state)
        ids = torch.tensor([[0, *frame[:-1]]])
        rest = model.depth_decoder(ids, backbone_last_hidden_state=state).logits[0]
    return torch.cat([first, rest])


def reference_frames(
    model: CsmForConditionalGeneration,
    prompt: Sequence[Token],
    count: int,
    suppressed: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Return greedy frames of `CsmForConditionalGeneration.generate`, up to a frame of zeros."""
    options: dict[str, Any] = {"do_sample": False, "depth_decoder_do_sample": False}
    if suppressed:
        options |= {
            "suppress_tokens": [*suppressed],
            "depth_decoder_suppress_tokens": [*suppressed],
        }
    if any(not isinstance(token, int) for token in prompt):
        options["inputs_embeds"] = embedded(model, prompt)
    else:
        options["input_ids"] = torch.tensor([list(prompt)])
    found = model.generate(max_new_tokens=count, **options)[0]
    frames = [tuple(frame) for frame in found.tolist()]
    end = (0,) * len(frames[0])
    return frames[: frames.index(end)] if end in frames else frames
