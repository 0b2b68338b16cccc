"""Token ids of the built-in voice's language model, and its tokenizer with another codebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_TOKENIZER = Path(__file__).parents[1] / "tts" / "embedded" / "tokenizer.json"
_SHIPPED: dict[str, Any] = json.loads(_TOKENIZER.read_text(encoding="utf-8"))
_IDS: dict[str, int] = {token["content"]: token["id"] for token in _SHIPPED["added_tokens"]}

PAD = _IDS["<|pad|>"]
START_OF_SPEECH = _IDS["<|start_of_speech|>"]
END_OF_SPEECH = _IDS["<|end_of_speech|>"]
END_OF_TEXT = _IDS["<|end_of_text|>"]
ANY_VOICE = _IDS["<|voice_any|>"]
FIRST_VOICE = _IDS["<|voice_0|>"]
MAX_VOICES = sum(name.startswith("<|voice_") for name in _IDS) - 1  # without ANY_VOICE
FIRST_CODE = _IDS["<|s_0|>"]  # the codes are the last tokens


def build_tokenizer(codebook_size: int) -> Tokenizer:
    """Return the shipped tokenizer with so many codes, at most as many as it has."""
    num_tokens = FIRST_CODE + codebook_size
    kept = [token for token in _SHIPPED["added_tokens"] if token["id"] < num_tokens]
    return Tokenizer.from_str(json.dumps(_SHIPPED | {"added_tokens": kept}))
