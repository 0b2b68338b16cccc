"""Higgs Audio v2: delayed codebooks of its tokenizer, in a conversation of Llama 3's layout.

    system      [begin of text] header "system" task and scene [end of turn]
    user        header "user" text [end of turn]
    assistant   header "assistant" [begin of audio]                   → frames [end frame]

A voice prompt is a turn of the user with its transcript, and one of the assistant with its frames.
Without one the model makes up a voice; what the scene says of the speaker decides on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder import CodecSpec
from llm import CheckpointError, FrameDelays, SamplingParams, Token
from tts.families.base import (
    Checkpoint,
    DelayedVocabulary,
    FamilyTraits,
    SpeechFamily,
    SpeechVocabulary,
)
from tts.voices.types import Voice

ARCHITECTURE = "HiggsAudioV2ForConditionalGeneration"
BEGIN_OF_TEXT, END_OF_TURN = "<|begin_of_text|>", "<|eot_id|>"
HEADER, END_OF_HEADER = "<|start_header_id|>", "<|end_header_id|>"
BEGIN_OF_AUDIO, END_OF_AUDIO = "<|audio_out_bos|>", "<|audio_eos|>"
BEGIN_OF_SCENE, END_OF_SCENE = "<|scene_desc_start|>", "<|scene_desc_end|>"
TASK = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."
SPEAKER = "SPEAKER0"
FRAMES_PER_SECOND = 25
LONGEST_S = 30


class HiggsAudioV2Family(SpeechFamily):
    """Higgs Audio v2 in the layout of transformers."""

    name = "higgs_audio_v2"

    def __init__(self, checkpoint: Checkpoint) -> None:
        count, begin, end = (
            self._number(checkpoint.config, key, least)
            for key, least in (
                ("num_codebooks", 2),
                ("audio_stream_bos_id", 1),
                ("audio_stream_eos_id", 1),
            )
        )
        self._delays = FrameDelays(tuple(range(1, count + 1)), begin, end)
        self._num_codes = min(begin, end)  # those behind are marks
        super().__init__(checkpoint)
        names = (BEGIN_OF_TEXT, END_OF_TURN, HEADER, END_OF_HEADER, BEGIN_OF_AUDIO, END_OF_AUDIO)
        self._ids = {name: self.tokenizer.control_id(name) for name in names}

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        if not (checkpoint.folder / "config.json").is_file():
            return False  # only a tokenizer
        return ARCHITECTURE in (checkpoint.config.get("architectures") or ())

    def own_traits(self) -> FamilyTraits:
        default = Voice("default", "Default", ("en-US",), is_builtin=True)
        return FamilyTraits(
            codec_repository="bosonai/higgs-audio-v2-tokenizer",
            voices=(default,),
            max_codes=LONGEST_S * FRAMES_PER_SECOND * len(self._delays.table),
            sampling=SamplingParams(temperature=0.3, top_k=50, top_p=0.95),
            invents_voices=True,
            takes_instructions=True,
            steady_loudness=True,
        )

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, self._num_codes, len(self._delays.table))
        return DelayedVocabulary(self._num_codes, self._delays)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        ids = self._ids
        opening = (ids[BEGIN_OF_TEXT], *self._system(voice.instructions))
        if voice.prompt is None:
            return (*opening, *self._asked(text))
        return (
            *opening,
            *self._asked(voice.prompt.transcript),
            *vocabulary.token_ids(voice.prompt.codes),
            ids[END_OF_AUDIO],
            ids[END_OF_TURN],
            *self._asked(text),
        )

    def _system(self, instructions: str) -> tuple[int, ...]:
        """Return the turn that describes the task, the scene and, if wanted, the speaker."""
        scene = f"{SCENE}\n\n{SPEAKER}: {instructions}" if instructions else SCENE
        task, scene = f"\n\n{TASK}\n\n", f"\n{scene}\n"
        begin, end = map(self.tokenizer.find, (BEGIN_OF_SCENE, END_OF_SCENE))
        encode = self.tokenizer.encode
        if begin is None or end is None:
            content = encode(f"{task}{BEGIN_OF_SCENE}{scene}{END_OF_SCENE}")
        else:
            content = [*encode(task), begin, *encode(scene), end]
        return (*self._header("system"), *content, self._ids[END_OF_TURN])

    def _asked(self, text: str) -> tuple[int, ...]:
        """Return the user's turn, and the beginning of the assistant's, up to its frames."""
        encode = self.tokenizer.encode
        user = (*self._header("user"), *encode(f"\n\n{text}"), self._ids[END_OF_TURN])
        return (*user, *self._header("assistant"), *encode("\n\n"), self._ids[BEGIN_OF_AUDIO])

    def _header(self, role: str) -> tuple[int, ...]:
        return (self._ids[HEADER], *self.tokenizer.encode(role), self._ids[END_OF_HEADER])

    def _number(self, values: Mapping[str, Any], key: str, least: int) -> int:
        value = values.get(key)
        if type(value) is not int or value < least:
            raise CheckpointError(f"{self.name}: {key}={value!r} in config.json must be {least} up")
        return value
