"""Higgs Audio v2 (Boson AI 2025): a Llama over text and frames, with a head for each codebook.

    text token   its embedding                       ─┐ layers ─> K heads ─> K codes
    frame        sum of the embeddings of its codes   ─┘

Attention is the same for both, while frames have norms and an MLP of their own in every layer.
Codebook k is delayed by k + 1 positions, so that speech begins with a frame of begin codes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from llm.batch import NO_CODE, ForwardBatch, KVCacheInputs, LayerCache
from llm.config import PipelineConfig
from llm.delays import FrameDelays
from llm.errors import CheckpointError
from llm.layers.codebook_heads import CodebookHeads
from llm.layers.decoder import DecoderLayer
from llm.layers.weight import LinearWeight
from llm.models.encoding import choose_encoding
from llm.models.frame_model import FrameEmbedding, FrameModel, codebook_count
from llm.models.hf_config import HuggingFaceConfig, ModelShape
from llm.models.llama_config import LlamaConfig
from llm.models.weight_names import WeightNames
from llm.models.weights import WeightReader
from llm.request import FrameShape

AUDIO_TABLE = "model.embed_audio_tokens.embed_audio_tokens.weight"
TEXT_HEAD = "text_lm_head."  # for training


@dataclass(frozen=True, slots=True)
class DualLayer:
    """The layer of frames and that of text tokens, which have their attention in common."""

    frames: DecoderLayer
    text: DecoderLayer

    def __call__(self, x: Tensor, is_frame: Tensor, rotations: Tensor, cache: LayerCache) -> None:
        """Update x [T, hidden] in place; `is_frame` bool [T, 1]."""
        frames, text = self.frames, self.text
        normed = torch.where(is_frame, frames.attention_norm(x), text.attention_norm(x))
        x.add_(frames.attention(normed, rotations, cache))
        x.add_(torch.where(is_frame, frames.mlp(frames.mlp_norm(x)), text.mlp(text.mlp_norm(x))))


class HiggsAudioV2Model(FrameModel):
    """Implements `HiggsAudioV2ForConditionalGeneration`."""

    _frame_embedding: FrameEmbedding
    unread: ClassVar[tuple[str, ...]] = (TEXT_HEAD,)
    names: ClassVar[WeightNames] = WeightNames(
        head="audio_lm_head",
        attention_norm="model.layers.{}.audio_input_layernorm",
        mlp_norm="model.layers.{}.audio_post_attention_layernorm",
        gate="model.layers.{}.audio_mlp.gate_proj",
        up="model.layers.{}.audio_mlp.up_proj",
        down="model.layers.{}.audio_mlp.down_proj",
        ignored=("rotary_emb.inv_freq", "audio_tokens_offsets"),
    )

    @classmethod
    def shape(cls, huggingface_config: HuggingFaceConfig) -> ModelShape:
        """See `PipelineModel`: the vocabulary is that of a codebook."""
        size = cls.read_frames(huggingface_config).codebook_size
        return replace(ModelShape.read(huggingface_config), vocab_size=size)

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`."""
        return replace(super().read_config(config), shape=cls.shape(config), is_head_tied=False)

    @classmethod
    def read_frames(cls, config: HuggingFaceConfig) -> FrameShape:
        """See `FrameModel`."""
        count, size = codebook_count(config), config.size("codebook_size")
        marks = []
        for key in ("audio_stream_bos_id", "audio_stream_eos_id"):
            code = config.require(key)
            if type(code) is not int or not 0 <= code < size:
                raise CheckpointError(
                    f"{config.path}: {key}={code!r} is no code below codebook_size={size}"
                )
            marks.append(code)
        begin, end = marks
        delays = FrameDelays(tuple(range(1, count + 1)), begin, end)
        return FrameShape(count, size, config.size("vocab_size"), (end,) * count, delays=delays)

    @classmethod
    def frame_bytes(cls, pipeline_config: PipelineConfig, config: HuggingFaceConfig) -> int:
        """See `FrameModel`: logits, before and after they are float32."""
        frames = cls.read_frames(config)
        return 8 * (frames.num_codebooks - 1) * frames.codebook_size

    @classmethod
    def estimate_token_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `PipelineModel`. A layer of a prompt has the results of two MLPs."""
        own = super().estimate_token_memory(pipeline_config, huggingface_config)
        width = choose_encoding(pipeline_config.model, huggingface_config).dtype.itemsize
        return own + 2 * width * cls.shape(huggingface_config).hidden_size

    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        """See `CausalModel`. Rows that decode feed frames, which need the layers of frames only."""
        if batch.mode.is_decode:
            return super().hidden_states(batch, cache)
        ids = batch.input_ids
        is_frame = (ids[:, 1] != NO_CODE)[:, None]
        x = self.embed(ids)
        rotations = self._rotary.at(batch.positions)
        for layer in self._dual_layers:
            layer(x, is_frame, rotations, cache)
        return x

    def load_weights(self) -> None:
        """See `PipelineModel`. Codebooks are counted before any weight is read."""
        self._frames = frames = self.read_frames(self.huggingface_config)
        found, rows = self.weights.info(), frames.num_codebooks * frames.codebook_size
        for name in (AUDIO_TABLE, f"{self.names.head}.weight"):
            if name in found and found[name].shape[0] != rows:
                raise CheckpointError(
                    f"tensor '{name}' has {found[name].shape[0]} rows, {frames.num_codebooks} "
                    f"codebooks of {frames.codebook_size} codes have {rows}"
                )
        super().load_weights()

    def _load_embedding(self, reader: WeightReader) -> LinearWeight:
        frames, hidden = self._frames, self.config.shape.hidden_size
        text = reader.tensor(f"{self.names.embedding}.weight", frames.num_text_ids, hidden)
        audio = reader.tensor(AUDIO_TABLE, frames.num_codebooks * frames.codebook_size, hidden)
        vector = self._factory.vector
        self._frame_embedding = FrameEmbedding(vector(text), vector(audio), frames)
        return LinearWeight(text)

    def _load_head(self, reader: WeightReader) -> LinearWeight:
        """See `LlamaModel`: that of the first codebook. The frame decoder has the others."""
        frames, hidden = self._frames, self.config.shape.hidden_size
        count, size = frames.num_codebooks, frames.codebook_size
        heads = reader.matrix(self.names.head, count * size, hidden)
        later = self._factory.head(heads.rows(torch.arange(size, count * size)))
        self.frame_decoder = CodebookHeads(frames, later)
        return heads.rows(torch.arange(size))

    def _load_rest(self, reader: WeightReader) -> None:
        names = WeightNames()
        loader = replace(self._loader(reader), names=names)
        self._dual_layers = [
            DualLayer(
                layer,
                DecoderLayer(
                    loader.norm(names.attention_norm.format(index)),
                    layer.attention,
                    loader.norm(names.mlp_norm.format(index)),
                    loader.mlp(index),
                ),
            )
            for index, layer in enumerate(self._decoder_layers)
        ]
        reader.skip_under(TEXT_HEAD)
