"""Codes of texts by a trained language model, many at once, on one device.

The model is run by transformers, whose Llama has the same weights. Voice tokens are a named voice's
row of voices.json, or those of a reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from training.export import llama_config
from training.llama import whole
from training.speech_lm.documents import spelled
from training.speech_lm.names import rows_of
from training.speech_lm.texts import SPANISH_LETTERS, written
from training.speech_lm.vocabulary import SPANISH, Symbols
from training.vocabulary import END_OF_SPEECH, FIRST_CODE, START_OF_SPEECH

HEAD_DIM = 64
TEMPERATURE, TOP_K = 0.6, 50
MAX_CODES = 500


class Writer:
    """A language model and the named voices."""

    def __init__(self, weights: Path, device: torch.device | None = None) -> None:
        """`weights`: lm.safetensors of a training, or model.safetensors of an exported voice;
        voices.json next to it."""
        import transformers

        state = whole(load_file(weights))
        values = llama_config(state, HEAD_DIM)
        values.pop("quantization_config")
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.model.load_state_dict(state)
        self.device = device or torch.device("cpu")
        self.model.to(self.device)
        self.voices = rows_of(weights.with_name("voices.json"))

    @torch.inference_mode()
    def codes(
        self, prompts: Sequence[Sequence[int]], seed: int = 0, temperature: float = TEMPERATURE
    ) -> list[list[int]]:
        """Codes of each of some prompts; another seed draws others."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), END_OF_SPEECH)
        read = torch.zeros_like(ids)
        for row, mask, prompt in zip(ids, read, prompts, strict=True):
            row[longest - len(prompt) :] = torch.tensor(prompt)
            mask[longest - len(prompt) :] = 1
        silent = [token for token in range(FIRST_CODE) if token != END_OF_SPEECH]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            said = self.model.generate(
                ids.to(self.device), attention_mask=read.to(self.device),
                max_new_tokens=MAX_CODES, do_sample=True, temperature=temperature, top_k=TOP_K,
                suppress_tokens=silent, eos_token_id=END_OF_SPEECH, pad_token_id=END_OF_SPEECH,
            )[:, longest:]  # fmt: skip
        return [(row[row >= FIRST_CODE] - FIRST_CODE).tolist() for row in said.cpu()]


def prompt_of(voice: Sequence[int], text: Sequence[int]) -> list[int]:
    """A voice's tokens and a text's, up to where codes begin."""
    return [*(FIRST_CODE + token for token in voice), *text, START_OF_SPEECH]


def tokens_of(text: str) -> list[int]:
    """A text's bytes."""
    return list(written(text))


def tokens_of_spanish(text: str) -> list[int]:
    """The marker and a Spanish text's bytes."""
    return [SPANISH, *written(text, SPANISH_LETTERS)]


def tokens_of_phonemes(phonemes: str, symbols: Symbols) -> list[int]:
    """The teacher's symbols behind their marker."""
    return spelled(symbols.places(phonemes)).tolist()
