"""Random checkpoints of Higgs Audio v2 as transformers writes them, and frames of its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from llm.delays import FrameDelays
from llm.request import Token

TEXT_IDS = 40
CODES = 18  # of a codebook, with begin and end
BEGIN, END = 16, 17
CODEBOOKS = 3
DELAYS = FrameDelays((1, 2, 3), BEGIN, END)
AUDIO_BEGIN, AUDIO, AUDIO_DELAY, END_OF_TURN = 31, 32, 33, 34  # text ids

CONFIG: dict[str, Any] = {
    "num_codebooks": CODEBOOKS,
    "codebook_size": CODES,
    "audio_stream_bos_id": BEGIN,
    "audio_stream_eos_id": END,
    "vocab_size": TEXT_IDS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "pad_token_id": 38,
    "eos_token_id": END_OF_TURN,
    "audio_bos_token_id": AUDIO_BEGIN,
    "audio_token_id": AUDIO,
    "audio_delay_token_id": AUDIO_DELAY,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 0.5,
        "low_freq_factor": 0.125,
        "original_max_position_embeddings": 64,
    },
}


def write_higgs(folder: Path, *, seed: int = 0, ends: float = 0.0, **keys: Any) -> Path:
    """Write a checkpoint; `keys` change its config.

    No frame begins by itself, and `ends` scales the heads of the end codes.
    """
    config = HiggsAudioV2Config(**CONFIG | keys)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HiggsAudioV2ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5, generator=generator)
    heads = model.audio_lm_head.weight.data.view(config.num_codebooks, config.codebook_size, -1)
    heads[:, config.audio_stream_bos_id] = 0.0
    heads[:, config.audio_stream_eos_id] *= ends
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> HiggsAudioV2ForConditionalGeneration:
    """Load the same checkpoint in transformers, float32."""
    model: HiggsAudioV2ForConditionalGeneration = (
        HiggsAudioV2ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    )
    return model.eval()


def inputs_of(
    model: HiggsAudioV2ForConditionalGeneration, tokens: Sequence[Token]
) -> dict[str, Tensor]:
    """Return the arguments of transformers' model: text ids, and the frames in their places."""
    place = model.config.audio_token_id
    ids = [token if isinstance(token, int) else place for token in tokens]
    found = {"input_ids": torch.tensor([ids])}
    frames = [token for token in tokens if not isinstance(token, int)]
    if frames:
        found["audio_input_ids"] = torch.tensor([frames])
        found["audio_input_ids_mask"] = torch.ones(1, len(frames), dtype=torch.bool)
    return found


def reference_logits(
    model: HiggsAudioV2ForConditionalGeneration, tokens: Sequence[Token]
) -> Tensor:
    """Return [K, V] logits of the codes of the frame that follows `tokens`."""
    with torch.no_grad():
        logits = model(**inputs_of(model, tokens)).logits[0, -1]
    return logits.view(CODEBOOKS, -1)


def reference_frames(
    model: HiggsAudioV2ForConditionalGeneration, prompt: Sequence[Token], count: int
) -> list[tuple[int, ...]]:
    """Return up to `count` greedy frames of the model's `generate`, without that of end codes."""
    inputs = inputs_of(model, prompt)
    found = model.generate(**inputs, do_sample=False, max_new_tokens=count)[0].tolist()
    given = inputs["audio_input_ids"].shape[1] if "audio_input_ids" in inputs else 0
    frames = [tuple(frame) for frame in found[given:]]
    end = (END,) * len(frames[0])
    return frames[: frames.index(end)] if end in frames else frames
