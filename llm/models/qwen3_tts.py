"""Qwen3-TTS (Qwen team 2026) at 12.5 frames a second: a talker and a code predictor.

    text id             projected text embedding                      ─┐  talker ─> head ─> code 0
    text id + code      the same plus the embedding of a first code   ─┤     └ code predictor
    frame of K codes    sum of their embeddings and its text id's     ─┘        ─> codes 1 …
    vector              a speaker's, plus the text embedding of tts_pad

The talker is a Qwen3, the code predictor a small one. The first codebook has more codes than the
others: names of speakers and languages, and marks, one of which ends a sequence. The text stands in
the prompt, or in the frames, a text id in each; frames without text have the id of `tts_pad`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import NO_CODE
from llm.errors import CheckpointError
from llm.layers.decoder import LogitsHead, Rotary
from llm.layers.depth import DepthTransformer
from llm.layers.weight import LinearWeight
from llm.models.frame_model import MAX_CODEBOOKS, DepthModel, nested_config
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LayerLoader
from llm.models.llama_config import LlamaConfig
from llm.models.qwen3 import Qwen3Model
from llm.models.weight_names import WeightNames
from llm.models.weights import WeightReader
from llm.request import FrameShape

PREDICTOR = "talker.code_predictor."
TABLES = PREDICTOR + "model.codec_embedding.{}.weight"  # of code n + 1
HEADS = PREDICTOR + "lm_head.{}"
PROJECTION = PREDICTOR + "small_to_mtp_projection"
TEXT_TABLE = "talker.model.text_embedding.weight"
TEXT_PROJECTION = "talker.text_projection.linear_fc{}"
SPEAKER_ENCODER = "speaker_encoder."
TOKENIZER = "qwen3_tts_tokenizer_12hz"
TEXT_BLOCK = 4096  # text embeddings projected at once
MAX_TEXT_IDS = 2**31  # pairs of text ids and codes are ids, too


class TalkerEmbedding:
    """Maps ids [T, K + 1], of frames K codes and a text id, to [T, hidden]: see the module."""

    def __init__(self, text: Tensor, codes: Tensor, shape: FrameShape, pad_id: int) -> None:
        """`text` [ids, hidden], projected; `codes` [codes of all codebooks, hidden]."""
        self._table = torch.cat([text, codes, text.new_zeros(1, text.shape[1])])
        self._num_text, self._pad_id = len(text), pad_id
        self._nothing = len(self._table) - 1
        later = range(shape.num_codebooks - 1)
        first = len(text) + shape.codebook_size
        starts = [len(text), *(first + index * shape.later_size for index in later)]
        self._starts = torch.tensor(starts, device=text.device)
        self.codes = self._table[len(text) : self._nothing]

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the sums; of a vector those of the rest of its position."""
        first, codes = ids[:, 0], ids[:, :-1]
        rows = torch.where(codes == NO_CODE, self._nothing, codes + self._starts)
        is_frame = ids[:, -1] != NO_CODE
        pair = first // self._num_text  # 0: no code
        paired = torch.where(pair > 0, self._num_text - 1 + pair, self._nothing)
        rows[:, 0] = torch.where(is_frame, rows[:, 0], paired)
        alone = torch.where(first != NO_CODE, first % self._num_text, self._pad_id)
        text = torch.where(is_frame, ids[:, -1], alone)
        return F.embedding_bag(torch.cat([text[:, None], rows], 1), self._table, mode="sum")


class Qwen3TTSModel(DepthModel):
    """Implements `Qwen3TTSForConditionalGeneration` with the codec of 12.5 Hz."""

    _frame_embedding: TalkerEmbedding
    names: ClassVar[WeightNames] = replace(
        WeightNames.under("talker.model."),
        embedding="talker.model.codec_embedding",
        head="talker.codec_head",
    )

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`. Also checks the code predictor's configuration."""
        talker = nested_config(config, "talker_config")
        kind = config.get("tokenizer_type", TOKENIZER)
        if kind != TOKENIZER:
            raise CheckpointError(
                f"{config.path}: tokenizer_type={kind!r} is not supported; {TOKENIZER!r} is"
            )
        read = replace(Qwen3Model.read_config(talker), is_head_tied=False)
        if talker.get("use_sliding_window", False):  # of all layers
            windows = (talker.size("sliding_window"),) * read.shape.num_layers
            read = replace(read, windows=windows)
        wanted, found = cls.read_frames(config).num_codebooks, predictor_config(config)
        if found.size("num_code_groups") != wanted:
            raise CheckpointError(
                f"{config.path}: code_predictor_config.num_code_groups="
                f"{found.size('num_code_groups')} does not fit the talker's {wanted}"
            )
        return read

    @classmethod
    def read_depth(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `DepthModel`. Raises `CheckpointError` for a window shorter than a frame."""
        count = cls.read_frames(config).num_codebooks
        read = Qwen3Model.read_config(predictor_config(config))
        if any(window is not None and window < count for window in read.windows):
            raise CheckpointError(
                f"{config.path}: code_predictor_config.sliding_window is below {count} codebooks"
            )
        return read

    @classmethod
    def read_frames(cls, config: HuggingFaceConfig) -> FrameShape:
        """See `FrameModel`."""
        talker, path = nested_config(config, "talker_config"), config.path
        count, size = talker.size("num_code_groups"), talker.size("vocab_size")
        later = predictor_config(config).size("vocab_size")
        num_text = talker.size("text_vocab_size") * (size + 1)
        end = talker.require("codec_eos_token_id")
        pad = config.require("tts_pad_token_id")
        checks = (
            (2 <= count <= MAX_CODEBOOKS, f"num_code_groups={count} is not in 2..{MAX_CODEBOOKS}"),
            (later <= size, f"vocab_size={size} is below the code predictor's {later}"),
            (num_text <= MAX_TEXT_IDS, "text_vocab_size × vocab_size exceeds 31 bits"),
            (type(end) is int and 0 <= end < size, f"codec_eos_token_id={end!r} is no code"),
            (
                type(pad) is int and 0 <= pad < talker.size("text_vocab_size"),
                f"tts_pad_token_id={pad!r} is no text id",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise CheckpointError(f"{path}: {message}")
        return FrameShape(
            count,
            size,
            num_text,
            (end, *(0 for _ in range(count))),
            later,
            ends_at_first_code=True,
            vector_size=talker.size("hidden_size"),
            text_size=talker.size("text_vocab_size"),
            text_pad=pad,
        )

    def load_weights(self) -> None:
        """See `PipelineModel`. Codebooks are counted before any weight is read."""
        self._frames = self.read_frames(self.huggingface_config)
        found, last = self.weights.info(), self._frames.num_codebooks - 2
        for name in (TABLES, HEADS + ".weight"):
            if found and (name.format(last) not in found or name.format(last + 1) in found):
                raise CheckpointError(
                    f"the weights do not have {last + 2} codebooks: '{name.format(last)}' must be "
                    "the last of its kind"
                )
        super().load_weights()

    def _load_embedding(self, reader: WeightReader) -> LinearWeight:
        hidden, frames = self.config.shape.hidden_size, self._frames
        first = reader.matrix(self.names.embedding, frames.codebook_size, hidden)
        later = [
            reader.tensor(TABLES.format(index), frames.later_size, hidden)
            for index in range(frames.num_codebooks - 1)
        ]
        tables = (first.to_float(torch.float32), *later)
        codes = torch.cat([self._factory.vector(table) for table in tables])
        pad_id = self.huggingface_config.require("tts_pad_token_id")
        text = self._projected_text(reader)
        self._frame_embedding = TalkerEmbedding(text, codes, frames, pad_id)
        return first

    def _projected_text(self, reader: WeightReader) -> Tensor:
        """Return [text ids, hidden]: the projection depends on nothing but the id."""
        talker = nested_config(self.huggingface_config, "talker_config")
        inner, hidden = talker.size("text_hidden_size"), self.config.shape.hidden_size
        rows = reader.tensor(TEXT_TABLE, talker.size("text_vocab_size"), inner)
        device = self.devices[0]

        def projected(x: Tensor, number: int, size: int) -> Tensor:
            name = TEXT_PROJECTION.format(number)
            matrix = reader.matrix(name, size, inner, has_bias=True)
            assert matrix.bias is not None
            weight = matrix.to_float(torch.float32).to(device)
            return F.linear(x, weight, matrix.bias.to(device).float())

        blocks = [
            projected(F.silu(projected(block.to(device).float(), 1, inner)), 2, hidden)
            for block in rows.split(TEXT_BLOCK)
        ]
        return torch.cat([self._factory.vector(block) for block in blocks])

    def _load_rest(self, reader: WeightReader) -> None:
        own, frames = self.read_depth(self.huggingface_config), self._frames
        # Its rows are those that sample, while an adapter's layers expect all tokens.
        factory = self._factory.without_adapters()
        names = WeightNames.under(PREDICTOR + "model.")
        loader = LayerLoader(reader, own, names, factory, self._rope_type, self.group)
        shape, hidden = own.shape, self.config.shape.hidden_size
        projection = None
        if shape.hidden_size != hidden:
            projection = factory.linear(
                reader.matrix(PROJECTION, shape.hidden_size, hidden, has_bias=True)
            )
        norm = loader.norm(names.final_norm)
        heads = (
            reader.matrix(HEADS.format(index), frames.later_size, shape.hidden_size)
            for index in range(frames.num_codebooks - 1)
        )
        self.frame_decoder = DepthTransformer(
            shape=frames,
            embedding=self._frame_embedding.codes,
            projection=projection,
            layers=loader.layers(),
            rotary=Rotary(own.rotary, frames.num_codebooks, self.devices[0]),
            heads=[LogitsHead(norm, factory.head(head)) for head in heads],
            kernels=self.session.kernels(),
        )
        # Voices are cloned outside of the language model.
        reader.skip(*(name for name in self.weights.info() if name.startswith(SPEAKER_ENCODER)))


def predictor_config(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the code predictor's part of a config.json."""
    return nested_config(nested_config(config, "talker_config"), "code_predictor_config")
