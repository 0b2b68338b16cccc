"""The language model of Qwen2-VL and Qwen2.5-VL (Bai et al. 2025): a Qwen2 with sectioned rotation.

The pairs of a head are rotated in three sections: by time, by height and by width (M-RoPE). A text
has the same position in all three, so that prompts of text rotate as in Qwen2. The parts that see
images are not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama_config import LlamaConfig
from llm.models.qwen2 import Qwen2Model
from llm.models.weights import WeightReader

NESTED = "model.language_model."  # prefix of the names that transformers writes since 4.52
MEDIA_KEYS = ("image_token_id", "video_token_id")


class Qwen2VLModel(Qwen2Model):
    """Implements the text of `Qwen2VLForConditionalGeneration` and its successor of 2.5."""

    unread: ClassVar[tuple[str, ...]] = ("visual.", "model.visual.")

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`. A nested configuration may leave the tied head to the outer one."""
        read = super().read_config(config)
        return replace(
            read, is_head_tied=read.is_head_tied or bool(config.get("tie_word_embeddings", False))
        )

    def load_weights(self) -> None:
        """See `PipelineModel`."""
        if self.adapter is None and any(name.startswith(NESTED) for name in self.weights.info()):
            self.adapter = _plain_name
        config = self.huggingface_config
        ids = (config.get(key, config.text_config.get(key)) for key in MEDIA_KEYS)
        self.media_ids = frozenset(token for token in ids if token is not None)
        super().load_weights()

    def _load_rest(self, reader: WeightReader) -> None:
        for prefix in self.unread:
            reader.skip_under(prefix)


def _plain_name(name: str) -> str:
    """Return the name as it was published first."""
    return "model." + name.removeprefix(NESTED) if name.startswith(NESTED) else name
