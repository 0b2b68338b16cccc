"""Llasa 1B, 3B and 8B: XCodec2's single codebook behind the chat template of Llama 3.

    user         Convert the text to speech:<|TEXT_UNDERSTANDING_START|>text<|…_END|>
    assistant    <|SPEECH_GENERATION_START|><|s_…|> of the voice prompt  → <|s_…|> [end]

To imitate a clip, its transcript precedes the text, and its codes begin the assistant's turn.
"""

from __future__ import annotations

from functools import cached_property

from decoder import CodecSpec
from llm import CheckpointError, SamplingParams, Token
from tts.checkpoint.chat import ChatRole, ControlToken, encode_chat
from tts.families.base import Checkpoint, FamilyTraits, SpeechFamily, SpeechTokens, SpeechVocabulary
from tts.voices.types import Voice, VoicePrompt

CODEBOOK_SIZE = 65_536
INSTRUCTION = "Convert the text to speech:"
TEXT_START = ControlToken("<|TEXT_UNDERSTANDING_START|>")
TEXT_END = ControlToken("<|TEXT_UNDERSTANDING_END|>")
TOKENS = SpeechTokens("<|s_{}|>", "<|SPEECH_GENERATION_START|>", "<|SPEECH_GENERATION_END|>")
DATE = "26 Jul 2024"
"""Date in the prompt: Llama's template inserts the current day; its fallback value keeps results
reproducible."""

TRAITS = FamilyTraits(
    codec_repository="HKUSTAudio/xcodec2-hf",
    voices=(Voice("default", "Default", is_builtin=True),),
    max_codes=1000,  # 20 s
    max_seq_len=2048,  # as in training
    sampling=SamplingParams(temperature=0.8, repetition_penalty=1.1),
    language="",
    invents_voices=True,
    steady_loudness=True,
)


class LlasaFamily(SpeechFamily):
    """Llasa family. Without a voice prompt the speaker is random, and later segments imitate it."""

    name = "llasa"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        if checkpoint.chat is None:
            raise CheckpointError(f"{checkpoint.folder}: llasa needs the chat template of Llama 3")
        self._chat = checkpoint.chat
        for token in (TEXT_START, TEXT_END):
            self.tokenizer.control_id(token.name)

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        names = (TEXT_START.name, TOKENS.start, TOKENS.end, TOKENS.code.format(0))
        return all(checkpoint.tokenizer.find(name) is not None for name in names)

    def own_traits(self) -> FamilyTraits:
        return TRAITS

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, CODEBOOK_SIZE)
        return SpeechVocabulary.from_tokenizer(self.tokenizer, TOKENS, CODEBOOK_SIZE)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        prompt = voice.prompt or VoicePrompt(())
        spoken = f"{prompt.transcript} {text}" if prompt.transcript else text
        before, after = self._turn
        asked = (*before, *self.tokenizer.encode(spoken), *after)
        return (*asked, vocabulary.start_id, *vocabulary.token_ids(prompt.codes))

    @cached_property
    def _turn(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt ids in front of a text and behind it, which are the same for all: the template is
        not rendered for each text.
        """
        parts = (INSTRUCTION, TEXT_START, "text", TEXT_END)
        ids = encode_chat(self._chat, self.tokenizer, [(ChatRole.USER, parts)], date_string=DATE)
        start, end = (self.tokenizer.control_id(token.name) for token in (TEXT_START, TEXT_END))
        return ids[: ids.index(start) + 1], ids[ids.index(end) :]
