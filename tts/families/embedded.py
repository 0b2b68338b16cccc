"""Voices with a token each, described by speech.json.

built-in voice   [voice] text [start of speech]                            → codes [end]
cloned voice     [any voice] transcript [start] prompt codes [end] text [start]
"""

from __future__ import annotations

from dataclasses import fields

from decoder import CodecSpec
from llm import CheckpointError, Token
from tts.checkpoint.files import SPEECH_FILE, SpeechDescription
from tts.families.base import Checkpoint, FamilyTraits, SpeechFamily, SpeechTokens, SpeechVocabulary
from tts.voices.files import load_voices
from tts.voices.types import Voice, VoiceSet


class EmbeddedFamily(SpeechFamily):
    """Family with one control token per voice and one per code, named in speech.json."""

    name = "embedded"
    overrides = frozenset(field.name for field in fields(SpeechDescription))

    def __init__(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.speech:
            raise CheckpointError(f"{checkpoint.folder / SPEECH_FILE} is missing")
        self._description = SpeechDescription.read(
            checkpoint.folder / SPEECH_FILE, checkpoint.speech
        )
        super().__init__(checkpoint)
        self._any_voice_id = self.tokenizer.control_id(self._description.any_voice)

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        return False  # its speech.json, which is required, names the family

    def voices(self) -> VoiceSet:
        return load_voices(self.checkpoint.folder / self.traits.voices_file)

    def own_traits(self) -> FamilyTraits:
        return FamilyTraits(ascii_only=True)

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        described = self._description
        tokens = SpeechTokens(
            described.code_token, described.start_of_speech, described.end_of_speech
        )
        self.check_codec(spec, spec.codebook_size)
        return SpeechVocabulary.from_tokenizer(self.tokenizer, tokens, spec.codebook_size)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        opening = self._opening(vocabulary, voice)
        return (*opening, *self.tokenizer.encode(text), vocabulary.start_id)

    def _opening(self, vocabulary: SpeechVocabulary, voice: Voice) -> tuple[Token, ...]:
        """Return the prompt ids that select a voice: its token, or a first turn with its clip."""
        prompt = voice.prompt
        if prompt is None:
            if not voice.control_token:
                raise CheckpointError(f"voice '{voice.name}' has no control_token")
            return (self.tokenizer.control_id(voice.control_token),)
        return (
            self._any_voice_id,
            *self.tokenizer.encode(prompt.transcript),
            vocabulary.start_id,
            *vocabulary.token_ids(prompt.codes),
            vocabulary.end_id,
        )
