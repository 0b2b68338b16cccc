"""Prompts of one checkpoint: by its speech family for speech, plain or by chat template for text.

User text is always encoded as text and never becomes a control token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

from decoder import CodecSpec
from llm import Token
from tts.checkpoint.chat import ChatMessage, encode_chat
from tts.errors import InvalidRequestError, Precondition, PreconditionError
from tts.families.base import Checkpoint, SpeechFamily, SpeechVocabulary
from tts.families.registry import find_family
from tts.text.lexicon.alphabets import arpabet_to_ipa, bare_ipa, respelled
from tts.text.lexicon.entries import Alphabet, Pronunciation
from tts.voices.types import Voice

MAX_IPA_SIGNS = 100  # of a word: less than a segment, so that none is cut inside a word
LONG_CHARACTERS = 10_000  # shorter texts are encoded within a few milliseconds

Given = ParamSpec("Given")


async def encoded(
    length: int, work: Callable[Given, tuple[int, ...]], *args: Given.args, **values: Given.kwargs
) -> tuple[int, ...]:
    """Return the prompt ids that `work` computes for a text of `length` characters.

    Long texts are encoded on a thread: they may take a second, which would block the event loop.
    """
    if length > LONG_CHARACTERS:
        return await asyncio.to_thread(work, *args, **values)
    return work(*args, **values)


class PromptBuilder:
    """Builder of one checkpoint's prompts, for speech and for text.

    Without a family, or without a codec's `spec`, it builds text prompts only. Raises
    CheckpointError when the codec's codes are not those of the language model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: SpeechFamily | None = None,
        spec: CodecSpec | None = None,
    ) -> None:
        self.tokenizer = checkpoint.tokenizer
        self.family = family
        self.vocabulary: SpeechVocabulary | None = None
        if family is not None and spec is not None:
            self.vocabulary = family.vocabulary(spec)
        self._chat = checkpoint.chat

    @classmethod
    def load(
        cls, folder: Path, spec: CodecSpec | None = None, chat_template: str | None = None
    ) -> PromptBuilder:
        """Create a builder from a checkpoint folder and its codec's specification."""
        checkpoint = Checkpoint(folder, chat_template)
        return cls(checkpoint, find_family(checkpoint), spec)

    @property
    def can_chat(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._chat is not None

    def check_chat(self) -> None:
        """Raise CheckpointError for a broken chat template, before the first request."""
        if self._chat is not None:
            self._chat.compiled()

    def speech_prompt(self, text: str, voice: Voice) -> tuple[Token, ...]:
        """Return the prompt's tokens for normalised `text` in `voice`."""
        if self.family is None or self.vocabulary is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        return self.family.prompt(self.vocabulary, text, voice)

    def pronounced(self, entry: Pronunciation) -> Pronunciation:
        """Return a pronunciation as the model reads it: in IPA, else in letters.

        Raises ValueError, which names the sign, for one that the alphabet or the model lacks.
        """
        if entry.alphabet is Alphabet.LETTERS:
            return entry
        spoken = entry.spoken
        ipa = arpabet_to_ipa(spoken) if entry.alphabet is Alphabet.ARPABET else bare_ipa(spoken)
        if max(map(len, ipa.split()), default=0) > MAX_IPA_SIGNS:
            raise ValueError(f"a word in IPA may have {MAX_IPA_SIGNS} signs")
        if self.family is not None and self.family.reads_ipa(ipa):
            return Pronunciation(entry.phrase, ipa, Alphabet.IPA)
        return Pronunciation(entry.phrase, respelled(ipa))

    def text_prompt(self, prompt: str) -> tuple[int, ...]:
        """Return the prompt ids of plain text to continue."""
        if not prompt:
            raise InvalidRequestError.of("input.prompt", "the prompt is empty")
        return tuple(self.tokenizer.encode(prompt, with_template=True))

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the prompt ids of a conversation, up to the assistant's turn."""
        if self._chat is None:
            raise PreconditionError(
                Precondition.CHAT_TEMPLATE, "this model has no chat template; send a prompt"
            )
        if not messages:
            raise InvalidRequestError.of("input.chat", "there are no messages")
        ids = encode_chat(self._chat, self.tokenizer, [(m.role, (m.content,)) for m in messages])
        if not ids:
            raise InvalidRequestError.of("input.chat", "the conversation is empty")
        return ids
