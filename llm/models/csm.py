"""CSM (Sesame 2025): a Llama over text and audio frames, with a depth transformer for each frame.

    text token   its embedding                              ─┐ backbone ─> head ─> code 0
    frame        sum of the embeddings of its K codes        ─┘     └─ depth decoder ─> codes 1 …

A prompt mixes text tokens and frames; the model generates frames. A frame of zeros ends a sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from llm.errors import CheckpointError
from llm.layers.decoder import LogitsHead, Rotary
from llm.layers.depth import DepthTransformer
from llm.layers.weight import LinearWeight
from llm.models.frame_model import DepthModel, FrameEmbedding, codebook_count, nested_config
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LayerLoader, LlamaModel
from llm.models.llama_config import LlamaConfig
from llm.models.weight_names import WeightNames
from llm.models.weights import WeightReader
from llm.request import FrameShape

TEXT_TABLE = "embed_text_tokens.weight"
AUDIO_TABLE = "backbone_model.embed_tokens.embed_audio_tokens.weight"
DEPTH_TABLE = "depth_decoder.model.embed_tokens.weight"
PROJECTION = "depth_decoder.model.inputs_embeds_projector"
HEADS = "depth_decoder.codebooks_head.weight"
CODEC = "codec_model."  # prefix of the codec's weights, which are read by the decoder


class CsmModel(DepthModel):
    """Implements `CsmForConditionalGeneration`."""

    _frame_embedding: FrameEmbedding
    names: ClassVar[WeightNames] = replace(
        WeightNames.under("backbone_model."),
        ignored=("rotary_emb.inv_freq", "audio_tokens_offsets"),
    )

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`. Also checks the depth decoder's configuration."""
        read = replace(super().read_config(config), is_head_tied=False)
        depth = depth_config(config)
        frames = read_frames(config)
        pairs = (
            ("num_codebooks", frames.num_codebooks),
            ("vocab_size", frames.codebook_size),
            ("backbone_hidden_size", read.shape.hidden_size),
        )
        for key, wanted in pairs:
            if depth.size(key) != wanted:
                raise CheckpointError(
                    f"{config.path}: depth_decoder_config.{key}={depth.size(key)} does not fit the "
                    f"backbone's {wanted}"
                )
        return read

    @classmethod
    def read_depth(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `DepthModel`."""
        return LlamaModel.read_config(depth_config(config))

    @classmethod
    def read_frames(cls, config: HuggingFaceConfig) -> FrameShape:
        """See `FrameModel`."""
        return read_frames(config)

    def load_weights(self) -> None:
        """See `PipelineModel`. Tables and heads are checked before any weight is read."""
        self._frames = read_frames(self.huggingface_config)
        self._check_sizes()
        super().load_weights()

    def _check_sizes(self) -> None:
        """Raise `CheckpointError` unless the weights have all codebooks."""
        frames, found = self._frames, self.weights.info()
        count, size = frames.num_codebooks, frames.codebook_size
        wanted = {DEPTH_TABLE: count * size, AUDIO_TABLE: count * size, HEADS: count - 1}
        for name, rows in wanted.items():
            if name in found and found[name].shape[0] != rows:
                raise CheckpointError(
                    f"tensor '{name}' has {found[name].shape[0]} rows, {count} codebooks of {size} "
                    f"codes have {rows}"
                )

    def _load_embedding(self, reader: WeightReader) -> LinearWeight:
        shape, frames = self.config.shape, self._frames
        hidden = shape.hidden_size
        text = reader.tensor(TEXT_TABLE, frames.num_text_ids, hidden)
        rows = frames.num_codebooks * frames.codebook_size
        name = AUDIO_TABLE if reader.has(AUDIO_TABLE) else DEPTH_TABLE
        audio = reader.tensor(name, rows, hidden)
        vector = self._factory.vector
        self._frame_embedding = FrameEmbedding(vector(text), vector(audio), frames)
        return LinearWeight(text)

    def _load_rest(self, reader: WeightReader) -> None:
        own, frames = self.read_depth(self.huggingface_config), self._frames
        # Its rows are those that sample, while an adapter's layers expect all tokens.
        factory = self._factory.without_adapters()
        names = replace(WeightNames.under("depth_decoder.model."), ignored=())
        loader = LayerLoader(reader, own, names, factory, self._rope_type, self.group)
        shape, hidden = own.shape, self.config.shape.hidden_size
        embedding = self._frame_embedding.audio
        if reader.has(DEPTH_TABLE):
            table = reader.tensor(DEPTH_TABLE, *embedding.shape)
            if reader.has(AUDIO_TABLE):
                embedding = factory.vector(table)
        norm = loader.norm(names.final_norm)
        heads = reader.tensor(
            HEADS, frames.num_codebooks - 1, shape.hidden_size, frames.codebook_size
        )
        self.frame_decoder = DepthTransformer(
            shape=frames,
            embedding=embedding,
            projection=factory.linear(reader.matrix(PROJECTION, shape.hidden_size, hidden)),
            layers=loader.layers(),
            rotary=Rotary(own.rotary, frames.num_codebooks, self.devices[0]),
            heads=[LogitsHead(norm, factory.head(LinearWeight(head.T))) for head in heads],
            kernels=self.session.kernels(),
        )
        reader.skip(*(name for name in self.weights.info() if name.startswith(CODEC)))


def depth_config(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the depth decoder's part of a config.json."""
    return nested_config(config, "depth_decoder_config")


def read_frames(config: HuggingFaceConfig) -> FrameShape:
    """Read the sizes of frames. Raises `CheckpointError` naming a key that is invalid."""
    count = codebook_count(config)
    size, end = config.size("vocab_size"), config.get("codebook_eos_token_id", 0)
    if type(end) is not int or not 0 <= end < size:
        raise CheckpointError(f"{config.path}: codebook_eos_token_id={end!r} is no code")
    return FrameShape(count, size, config.size("text_vocab_size"), (end,) * count)
