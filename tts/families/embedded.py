"""The embedded voice's own family, described by speech.json.

built-in voice   [voice] text [start of speech]                            → codes [end]
cloned voice     [any voice] transcript [start] prompt codes [end] text [start]
"""

from __future__ import annotations

from dataclasses import fields

from decoder import CodecSpec
from llm import CheckpointError
from tts.checkpoint import SPEECH_FILE, SpeechDescription
from tts.families.base import Checkpoint, FamilyTraits, SpeechFamily
from tts.vocabulary import SpeechTokens, SpeechVocabulary
from tts.voices import Voice, VoiceSet, load_voices


class EmbeddedFamily(SpeechFamily):
    """One control token for each voice, one for each code; the token names are data."""

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
        return False  # speech.json, which it cannot do without, names it

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

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[int, ...]:
        opening = self._opening(vocabulary, voice)
        return (*opening, *self.tokenizer.encode(text), vocabulary.start_id)

    def _opening(self, vocabulary: SpeechVocabulary, voice: Voice) -> tuple[int, ...]:
        """What makes the model speak in this voice: its token, or a first turn of it."""
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
