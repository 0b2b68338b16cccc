"""Text to speech with a trained language model and codec, one text at a time, on the CPU.

The model is run by transformers, whose Llama has the same weights. Voice tokens are a named voice's
row of voices.json, or those of a reference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from training.export import llama_config
from training.speech_codec.checkpoint import load
from training.speech_codec.render import heard_voice
from training.speech_lm.documents import spelled
from training.speech_lm.texts import written
from training.speech_lm.vocabulary import Symbols
from training.vocabulary import END_OF_SPEECH, FIRST_CODE, START_OF_SPEECH

HEAD_DIM = 64
TEMPERATURE, TOP_K = 0.6, 50
MAX_CODES = 500


class Speaker:
    """A language model, a codec and the named voices."""

    def __init__(
        self, weights: Path, codec: Path, config: Path, voice_encoder: Path | None = None
    ) -> None:
        """`weights`: lm.safetensors, voices.json next to it; `codec`, `config`: of the codec;
        `voice_encoder`: weights, to follow clips."""
        import transformers

        state = {name: value.float() for name, value in load_file(weights).items()}
        values = llama_config(state, HEAD_DIM)
        values.pop("quantization_config")
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.model.load_state_dict(state)
        rows = weights.with_name("voices.json").read_text(encoding="utf-8")
        self.voices: dict[str, list[int]] = json.loads(rows)
        self.codec, self._hears = load(codec, config, voice_encoder), voice_encoder is not None

    def voice_of(self, samples: np.ndarray) -> list[int]:
        """Return the voice tokens of a reference, float32 [S] at the codec's rate.

        Raises ValueError without an encoder of voices.
        """
        if not self._hears:
            raise ValueError("a clip's voice needs the weights of the encoder of voices")
        return heard_voice(self.codec, samples)

    @torch.inference_mode()
    def codes(self, voice: Sequence[int], text: Sequence[int], seed: int = 0) -> list[int]:
        """Codes of a text's tokens; another seed draws others."""
        ids = [*(FIRST_CODE + token for token in voice), *text, START_OF_SPEECH]
        silent = [token for token in range(FIRST_CODE) if token != END_OF_SPEECH]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            row = torch.tensor([ids])
            said = self.model.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=MAX_CODES, do_sample=True,
                temperature=TEMPERATURE, top_k=TOP_K, suppress_tokens=silent,
                eos_token_id=END_OF_SPEECH, pad_token_id=END_OF_SPEECH,
            )[0, len(ids) :]  # fmt: skip
        return (said[said >= FIRST_CODE] - FIRST_CODE).tolist()

    @torch.inference_mode()
    def say(self, voice: Sequence[int], text: Sequence[int], seed: int = 0) -> np.ndarray:
        """Samples float32 [S] of a text's tokens; none where nothing is said."""
        codes = self.codes(voice, text, seed)
        if not codes:
            return np.zeros(0, np.float32)
        tokens = torch.tensor([voice])
        return self.codec.decode(torch.tensor(codes)[None], tokens)[0].clamp(-1, 1).numpy()


def tokens_of(text: str) -> list[int]:
    """A text's bytes."""
    return list(written(text))


def tokens_of_phonemes(phonemes: str, symbols: Symbols) -> list[int]:
    """The teacher's symbols behind their marker."""
    return spelled(symbols.places(phonemes)).tolist()
