"""CSM: frames of Mimi's codebooks, one for each position of the language model.

    turn      [begin of text] "[0]hello" [end of text]  frames  [end frame]
    prompt    turns of the context, then [begin of text] "[0]hello" [end of text]  → frames [end]

A voice prompt is a turn of the context: its transcript and its frames. Speakers are numbers; they
tell the turns of a conversation apart, and without context the voice of a number is random. Mimi is
in the language model's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder import CodecSpec
from llm import CheckpointError, SamplingParams, Token
from tts.families.base import (
    Checkpoint,
    FamilyTraits,
    FrameVocabulary,
    SpeechFamily,
    SpeechVocabulary,
)
from tts.voices.types import Voice

ARCHITECTURE = "CsmForConditionalGeneration"
BEGIN_OF_TEXT, END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
FRAMES_PER_SECOND = 12.5
LONGEST_S = 30
SPEAKERS = ("0", "1", "2", "3")
VOICES = tuple(
    Voice(speaker, f"Speaker {speaker}", ("en-US",), speaker=speaker, is_builtin=True)
    for speaker in SPEAKERS
)


class CsmFamily(SpeechFamily):
    """CSM-1B and its finetunes in the layout of transformers."""

    name = "csm"
    contains_codec = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._num_codebooks = self._size(checkpoint.config, "num_codebooks")
        self._end = self._size(checkpoint.config, "codebook_eos_token_id", least=0)
        codec = checkpoint.config.get("codec_config")
        if not isinstance(codec, dict):
            raise CheckpointError(f"{checkpoint.folder}/config.json has no codec_config")
        self._codebook_size = self._size({"codebook_size": 2048} | codec, "codebook_size")
        if self._codebook_size > checkpoint.vocab_size:
            raise CheckpointError(
                f"{checkpoint.folder}/config.json: codec_config.codebook_size="
                f"{self._codebook_size} is above vocab_size={checkpoint.vocab_size}"
            )
        super().__init__(checkpoint)
        self._begin, self._close = map(self.tokenizer.control_id, (BEGIN_OF_TEXT, END_OF_TEXT))

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        if not (checkpoint.folder / "config.json").is_file():
            return False  # only a tokenizer
        return ARCHITECTURE in (checkpoint.config.get("architectures") or ())

    def own_traits(self) -> FamilyTraits:
        return FamilyTraits(
            voices=VOICES,
            max_codes=int(LONGEST_S * FRAMES_PER_SECOND) * self._num_codebooks,
            sampling=SamplingParams(temperature=0.9, top_k=50),
            later_prefix="depth_decoder_",
            invents_voices=True,
            steady_loudness=True,
        )

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, self._codebook_size, self._num_codebooks)
        return FrameVocabulary(self._codebook_size, (self._end,) * self._num_codebooks)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        speaker = voice.speaker or SPEAKERS[0]
        asked = self._text(speaker, text)
        if voice.prompt is None:
            return asked
        return (
            *self._text(speaker, voice.prompt.transcript),
            *vocabulary.token_ids(voice.prompt.codes),
            (self._end,) * self._num_codebooks,
            *asked,
        )

    def _text(self, speaker: str, text: str) -> tuple[int, ...]:
        return (self._begin, *self.tokenizer.encode(f"[{speaker}]{text}"), self._close)

    def _size(self, values: Mapping[str, Any], key: str, least: int = 1) -> int:
        value = values.get(key, 0)
        if type(value) is not int or value < least:
            raise CheckpointError(f"csm: {key}={value!r} in config.json must be a whole number")
        return value
